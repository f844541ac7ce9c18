from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.workers.comfyui import websocket
from tests.standins.fake_comfyui import frame

HEAD = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"


@contextlib.asynccontextmanager
async def serving(said: bytes, heard: bytearray | None = None) -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(said)
            if heard is not None:
                heard.extend(await reader.readexactly(6 + 4))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def heard_of(said: bytes) -> list[str]:
    async with serving(said) as port, asyncio.timeout(30):
        return [text async for text in websocket.texts(port, "/ws")]


async def test_texts_are_heard_whole_and_pictures_are_skipped() -> None:
    said = frame(1, b"one") + frame(2, bytes(70_000)) + frame(1, b"t", last=False) + frame(0, b"wo") + frame(10, b"")
    assert await heard_of(HEAD + said + frame(1, b"x" * 200) + frame(8, b"")) == ["one", "two", "x" * 200]


async def test_pings_are_answered_with_what_they_held() -> None:
    heard = bytearray()
    async with serving(HEAD + frame(9, b"ping"), heard) as port:
        assert [text async for text in websocket.texts(port, "/ws")] == []
    assert heard[:2] == bytes((0x8A, 0x84))
    assert bytes(byte ^ heard[2 + at % 4] for at, byte in enumerate(heard[6:])) == b"ping"


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 404 Not Found\r\n\r\n", b"x" * 100_000])
async def test_what_opens_no_websocket_is_told(said: bytes) -> None:
    with pytest.raises((OSError, ValueError)):
        await heard_of(said)


@pytest.mark.parametrize("said", [b"\x81\x7f" + b"\xff" * 8, b"\x81\x83masktxt"])
async def test_frames_that_no_server_sends_are_told(said: bytes) -> None:
    with pytest.raises(ValueError, match="frame"):
        await heard_of(HEAD + said)


@given(st.binary(max_size=300))
@settings(max_examples=50, deadline=None)
def test_any_bytes_end(said: bytes) -> None:
    with contextlib.suppress(OSError, ValueError):
        asyncio.run(heard_of(HEAD + said))
