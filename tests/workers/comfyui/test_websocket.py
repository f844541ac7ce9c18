"""ComfyUI as the worker hears and asks it: its websocket, and silence, pictures and what is none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.workers.comfyui import client, websocket
from greenroom.workers.comfyui.client import Comfy, ComfyGone
from greenroom.workers.serving.errors import ApiError
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


SHORT_S = 0.2


@contextlib.asynccontextmanager
async def answering(said: bytes | None) -> AsyncIterator[Comfy]:
    """A server that answers everything with these bytes, or never."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            if said is None:
                await reader.read()
            else:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(said), said))
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield Comfy(server.sockets[0].getsockname()[1], "me", call_max_s=SHORT_S)


@pytest.mark.timeout(60)
async def test_silence_is_told_soon() -> None:
    async with answering(None) as comfy:
        for call in (comfy.submit({}), comfy.finished("x"), comfy.cancel("x"), comfy.free()):
            with pytest.raises(ComfyGone, match=r"did not answer within 0\.2 s"):
                await call
        # A picture is large, and gets more time.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3 * SHORT_S):
                await comfy.picture({"filename": "a"})
    assert client.CALL_MAX_S < client.PICTURE_MAX_S


@pytest.mark.parametrize("said", [b"", b"<html>", b"GIF8", b"RIFF1234WAVE", b"\x89PNG", b"\xff\xd8"])
async def test_what_is_no_picture_is_told(said: bytes) -> None:
    async with answering(said) as comfy:
        with pytest.raises(ApiError, match="no picture") as told:
            await comfy.picture({"filename": "a"})
    assert (told.value.status, told.value.code) == (502, "engine_error")


@pytest.mark.parametrize("said", [b"\x89PNG\r\n\x1a\nx", b"\xff\xd8\xffx", b"RIFF1234WEBPx", b"GIF89ax"])
async def test_pictures_come_as_they_are(said: bytes) -> None:
    async with answering(said) as comfy:
        assert await comfy.picture({"filename": "a"}) == said
