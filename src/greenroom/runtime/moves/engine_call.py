"""One HTTP call to an engine's own address, by which a process is put to sleep and woken.

Owns a request of the simplest kind: HTTP/1.0, so that the answer is not chunked and ends with the connection. For
control only; requests of callers go through `http/`.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from greenroom.http.upstream import EngineAddress

# Of an answer. Those of control calls have some bytes.
ANSWER_MAX_BYTES: Final = 1024 * 1024


class EngineCall:
    """Calls to one address. Raises OSError or ValueError."""

    def __init__(self, address: EngineAddress) -> None:
        self._address = address
        self.notes: dict[str, float] = {}

    async def __call__(self, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]:
        """Method, target and JSON body → status and body."""
        address = self._address
        if address.path:
            reader, writer = await asyncio.open_unix_connection(address.path)
        else:
            reader, writer = await asyncio.open_connection(address.host, address.port)
        try:
            head = f"{method} {target} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            return await _answer(reader)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    whole = b""
    while more := await reader.read(ANSWER_MAX_BYTES):
        whole += more
        head, end, body = whole.partition(b"\r\n\r\n")
        if len(whole) > ANSWER_MAX_BYTES:
            raise ValueError(f"it answered with more than {ANSWER_MAX_BYTES:,} bytes")
        # An engine may keep the connection open all the same.
        if end and (length := _length(head)) is not None and len(body) >= length:
            return _status(head), body[:length]
    head, end, body = whole.partition(b"\r\n\r\n")
    if not end:
        raise ValueError("it closed the connection without an answer")
    return _status(head), body


def _status(head: bytes) -> int:
    try:
        return int(head.split(b" ", 2)[1])
    except (IndexError, ValueError):
        raise ValueError("it did not answer like an HTTP server") from None


def _length(head: bytes) -> int | None:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip().isdigit():
            return int(value)
    return None
