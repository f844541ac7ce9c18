"""The reading half of a WebSocket (RFC 6455): a handshake, texts in, pings answered. ComfyUI tells its progress there.

Owns the frames. Binary messages, which are previews, are skipped. Only for a server on this machine that is our child.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import struct
from collections.abc import AsyncIterator

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
