"""Calls to a ComfyUI on this machine: run a workflow, watch it, fetch its pictures, stop it, free its memory. Owns the
shapes of ComfyUI's answers. What it says is checked before it is used; what cannot be understood raises `ComfyGone`."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlencode

import h11

from ..serving.errors import ApiError, failed
from .workflow import Workflow

# It answers small calls at once, if it does; while it loads a model, after seconds.
CALL_MAX_S = 15.0
PICTURE_MAX_S = 60.0
ANSWER_BYTES_MAX = 256 * 1024 * 1024
READ_BYTES = 64 * 1024
# How soon the events are listened to again after their connection broke.
LISTEN_AGAIN_S = 1.0
# A GPU that keeps no more than this for a program holds no model any more.
FREE_BYTES_MAX = 512 * 1024 * 1024
WORDS_MAX = 1_000
ASK_EVERY_S = 0.1

# PNG, JPEG, GIF and WebP, by how they begin.
_PICTURE = re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a|RIFF....WEBP", re.DOTALL)

Event = dict[str, Any]


class ComfyGone(Exception):
    """It does not answer, or not as ComfyUI does."""


class Comfy:
    def __init__(self, port: int, client_id: str, call_max_s: float = CALL_MAX_S) -> None:
        self._port = port
        self._call_max_s = call_max_s
        self._client_id = client_id

    async def up(self) -> None:
        """Wait until it answers."""
        await _until(self._is_up)

    async def _is_up(self) -> bool:
        try:
            return (await self._call("GET", "/system_stats"))[0] == 200
        except ComfyGone:
            return False

    async def submit(self, workflow: Workflow) -> str:
        """Queue it; its id there. Raises ApiError for a workflow that ComfyUI refuses, or ComfyGone."""
        status, body = await self._call("POST", "/prompt", {"prompt": workflow, "client_id": self._client_id})
        said = _object(body)
        if status == 400:
            raise ApiError(_refusal(said), code="workflow_refused")
        if status != 200 or not isinstance(said.get("prompt_id"), str):
            raise ComfyGone(f"it answered {status} to a workflow")
        return str(said["prompt_id"])

    async def finished(self, prompt_id: str) -> list[dict[str, str]] | None:
        """What it made, as `picture` takes it; None while it waits or runs. Raises ApiError if it failed."""
        status, body = await self._call("GET", f"/history/{prompt_id}")
        entry = _object(body).get(prompt_id)
        if status != 200 or not isinstance(entry, dict):
            return None
        state = entry.get("status")
        if isinstance(state, dict) and state.get("status_str") == "error":
            raise failed(_failure(state))
        return _made(entry.get("outputs"))

    async def picture(self, about: dict[str, str]) -> bytes:
        """Raises ApiError for anything else than a picture, or ComfyGone."""
        status, body = await self._call("GET", f"/view?{urlencode(about)}", max_s=PICTURE_MAX_S)
        if status != 200:
            raise ComfyGone(f"it answered {status} for a picture that it has made")
        if _PICTURE.match(body) is None:
            raise ApiError("ComfyUI answered with something that is no picture.", status=502, code="engine_error")
        return body

    async def forget(self, prompt_id: str) -> None:
        """Its history would grow without end."""
        with contextlib.suppress(ComfyGone):
            await self._call("POST", "/history", {"delete": [prompt_id]})

    async def cancel(self, prompt_id: str) -> None:
        """Take it out of the queue, or stop it, and return when it does not run any more. Raises ComfyGone."""
        await self._call("POST", "/queue", {"delete": [prompt_id]})
        if await self._is_running(prompt_id):
            await self._call("POST", "/interrupt", {"prompt_id": prompt_id})
        await _until(lambda: self._has_left(prompt_id))
        await self.forget(prompt_id)

    async def _has_left(self, prompt_id: str) -> bool:
        return not await self._is_running(prompt_id)

    async def _is_running(self, prompt_id: str) -> bool:
        _, body = await self._call("GET", "/queue")
        running = _object(body).get("queue_running")
        items = running if isinstance(running, list) else []
        return any(isinstance(item, list) and prompt_id in item[:2] for item in items)

    async def free(self) -> None:
        """Unload its models, and return when the GPU's memory is back. Raises ComfyGone."""
        # It only sets a flag, which its worker sees when it is idle.
        status, _ = await self._call("POST", "/free", {"unload_models": True, "free_memory": True})
        if status != 200:
            raise ComfyGone(f"it answered {status} when it was to free its memory")
        await _until(self._is_free)

    async def _is_free(self) -> bool:
        return await self._held_bytes() <= FREE_BYTES_MAX

    async def _held_bytes(self) -> int:
        """Of all its GPUs. Raises ComfyGone if it does not say."""
        _, body = await self._call("GET", "/system_stats")
        devices = _object(body).get("devices")
        if not isinstance(devices, list):
            raise ComfyGone("it does not tell its memory")
        held = 0
        for device in devices:
            size = device.get("torch_vram_total") if isinstance(device, dict) else None
            if not isinstance(size, int):
                raise ComfyGone("it does not tell its memory")
            held += 0 if device.get("type") == "cpu" else size
        return held

    async def events(self) -> AsyncIterator[Event]:
        """Its events, for ever. They are hints only: a connection that breaks is made again."""
        while True:
            with contextlib.suppress(OSError, ValueError):
                async for text in texts(self._port, f"/ws?clientId={self._client_id}"):
                    with contextlib.suppress(ValueError, RecursionError):
                        if isinstance(event := json.loads(text), dict):
                            yield event
            await asyncio.sleep(LISTEN_AGAIN_S)

    async def _call(
        self, method: str, target: str, value: object = None, *, max_s: float | None = None
    ) -> tuple[int, bytes]:
        bound_s = self._call_max_s if max_s is None else max_s
        try:
            async with asyncio.timeout(bound_s):
                return await _exchange(self._port, method, target, b"" if value is None else json.dumps(value).encode())
        except TimeoutError:
            raise ComfyGone(f"it did not answer within {bound_s:g} s") from None
        except (OSError, h11.RemoteProtocolError) as error:
            raise ComfyGone(str(error) or "it does not answer") from error


async def _until(is_so: Callable[[], Awaitable[bool]]) -> None:
    """The caller bounds the time."""
    while True:
        if await is_so():
            return
        await asyncio.sleep(ASK_EVERY_S)


async def _exchange(port: int, method: str, target: str, body: bytes) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        wire = h11.Connection(h11.CLIENT)
        headers = [("host", f"127.0.0.1:{port}"), ("connection", "close"), ("content-length", str(len(body)))]
        headers += [("content-type", "application/json")] if body else []
        for part in (h11.Request(method=method, target=target, headers=headers), h11.Data(body), h11.EndOfMessage()):
            writer.write(wire.send(part) or b"")
        status, pieces, size = 0, list[bytes](), 0
        while not isinstance(event := wire.next_event(), h11.EndOfMessage | h11.ConnectionClosed):
            if event is h11.NEED_DATA:
                wire.receive_data(await reader.read(READ_BYTES))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                pieces.append(bytes(event.data))
                size += len(event.data)
                if size > ANSWER_BYTES_MAX:
                    raise OSError(f"it answered with more than {ANSWER_BYTES_MAX:,} bytes")
        return status, b"".join(pieces)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


# --- its answers ----------------------------------------------------------------------------------------------------


def _object(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        raise ComfyGone("it answered with something that is no JSON") from None
    return said if isinstance(said, dict) else {}


def _made(outputs: object) -> list[dict[str, str]]:
    """The pictures that were saved; if none was, the previews."""
    nodes = outputs.values() if isinstance(outputs, dict) else ()
    listed = [one for node in nodes if isinstance(node, dict) for one in node.get("images") or () if _is_named(one)]
    found = [{name: str(one.get(name, "")) for name in ("filename", "subfolder", "type")} for one in listed]
    return [one for one in found if one["type"] == "output"] or found


def _is_named(one: object) -> bool:
    return isinstance(one, dict) and isinstance(one.get("filename"), str)


def _refusal(said: dict[str, Any]) -> str:
    """What is wrong with the workflow, node by node."""
    words = [_words(said.get("error"))]
    errors = said.get("node_errors")
    for node, about in errors.items() if isinstance(errors, dict) else ():
        if isinstance(about, dict) and isinstance(about.get("errors"), list):
            words += [f"node {node} ({about.get('class_type')}): {_words(error)}" for error in about["errors"]]
    return f"ComfyUI refused the workflow: {'; '.join(filter(None, words))}"[:WORDS_MAX]


def _words(error: object) -> str:
    if not isinstance(error, dict):
        return str(error or "")
    return ": ".join(str(error[name]) for name in ("message", "details") if error.get(name))


def _failure(state: dict[str, Any]) -> str:
    """Which node failed, and with what."""
    messages = state.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, list) and len(message) == 2 and message[0] == "execution_error":
            about = message[1] if isinstance(message[1], dict) else {}
            node, kind = about.get("node_id"), about.get("node_type")
            return f"ComfyUI failed in node {node} ({kind}): {about.get('exception_message')}"[:WORDS_MAX].strip()
        if isinstance(message, list) and message[:1] == ["execution_interrupted"]:
            return "ComfyUI was interrupted."
    return "ComfyUI failed."


# --- the stream of what it does ---------------------------------------------------------------------------------------


MESSAGE_BYTES_MAX = 16 * 1024 * 1024
_TEXT, _CLOSE, _PING, _PONG = 1, 8, 9, 10


async def texts(port: int, target: str) -> AsyncIterator[str]:
    """Every text message until the connection ends. Raises OSError or ValueError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        key = base64.b64encode(os.urandom(16)).decode()
        writer.write(
            f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        head = await _until_head_ends(reader)
        if not head.startswith(b"HTTP/1.1 101 "):
            raise ValueError("it opened no WebSocket")
        async for kind, message in _messages(reader, writer):
            if kind == _TEXT:
                yield message.decode("utf-8", "replace")
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _until_head_ends(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise ValueError("it did not answer like an HTTP server") from error


async def _messages(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> AsyncIterator[tuple[int, bytes]]:
    kind, parts, size = 0, list[bytes](), 0
    while (frame := await _frame(reader)) is not None:
        is_last, code, payload = frame
        if code == _CLOSE:
            return
        if code == _PING:
            writer.write(_masked(_PONG, payload[:125]))
            continue
        if code == _PONG:
            continue
        kind = code or kind
        size += len(payload)
        if size > MESSAGE_BYTES_MAX:
            raise ValueError(f"it sent a message of more than {MESSAGE_BYTES_MAX:,} bytes")
        parts.append(payload)
        if is_last:
            yield kind, b"".join(parts)
            kind, parts, size = 0, [], 0


async def _frame(reader: asyncio.StreamReader) -> tuple[bool, int, bytes] | None:
    """Whether it is the last of its message, its kind (0: as before) and its payload; None at the end."""
    try:
        first, second = await reader.readexactly(2)
        length = second & 0x7F
        if length == 126:
            (length,) = struct.unpack(">H", await reader.readexactly(2))
        elif length == 127:
            (length,) = struct.unpack(">Q", await reader.readexactly(8))
        if second & 0x80 or length > MESSAGE_BYTES_MAX:
            raise ValueError("it sent a frame that a server does not send")
        return bool(first & 0x80), first & 0x0F, await reader.readexactly(length)
    except asyncio.IncompleteReadError:
        return None


def _masked(code: int, payload: bytes) -> bytes:
    """A frame as clients send it."""
    mask = os.urandom(4)
    return bytes((0x80 | code, 0x80 | len(payload))) + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(payload))
