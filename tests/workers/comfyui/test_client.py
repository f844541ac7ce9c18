"""A ComfyUI that takes connections and then says nothing, or nonsense, costs a bounded time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from greenroom.workers.comfyui import client
from greenroom.workers.comfyui.client import Comfy, ComfyGone
from greenroom.workers.serving.errors import ApiError

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
