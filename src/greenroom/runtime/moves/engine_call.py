"""Our own HTTP calls to an engine: the question whether it is ready, and orders such as to sleep or to wake.

Owns requests of the simplest kind. For control only; requests of callers go through `http/`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from greenroom.http.upstream import EngineAddress

# Of an answer. Those of control calls have some bytes.
ANSWER_MAX_BYTES: Final = 1024 * 1024


class EngineCall:
    """Calls to one address. HTTP/1.0: the answer is not chunked and ends with the connection.

    Raises OSError or ValueError.
    """

    def __init__(self, address: EngineAddress) -> None:
        self._address = address
        self.notes: dict[str, float] = {}

    async def __call__(self, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]:
        """Method, target and JSON body → status and body."""
        async with _connected(self._address) as (reader, writer):
            head = f"{method} {target} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            return await _answer(reader)


@contextlib.asynccontextmanager
async def _connected(address: EngineAddress) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    if address.path:
        reader, writer = await asyncio.open_unix_connection(address.path)
    else:
        reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        yield reader, writer
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


# --- readiness ------------------------------------------------------------------------------------------------------

# The first polls are frequent, because small models are ready in a tenth of a second; later ones are slower.
ASK_FIRST_S: Final = 0.02
ASK_SLOWEST_S: Final = 0.25
ASK_GROWTH: Final = 1.3
READY_MAX_S: Final = 2.0


async def until_ready(address: EngineAddress, path: str) -> None:
    """Return when the path answers 200. Runs until cancelled otherwise."""
    pause_s = ASK_FIRST_S
    while not await _is_ready(address, path):
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * ASK_GROWTH, ASK_SLOWEST_S)


async def _is_ready(address: EngineAddress, path: str) -> bool:
    """HTTP/1.1, as a health check of any other program would ask. Only the status line is read."""
    try:
        async with asyncio.timeout(READY_MAX_S), _connected(address) as (reader, writer):
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            return _status(await reader.readuntil(b"\n")) == 200
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return False
