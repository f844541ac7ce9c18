"""Whether an engine answers yet."""

from __future__ import annotations

import asyncio
import contextlib

from greenroom.http.upstream import Address

# The first questions come quickly, because small models are ready in a tenth of a second; later ones are patient.
ASK_FIRST_S = 0.02


ASK_SLOWEST_S = 0.25


ASK_GROWTH = 1.3


ANSWER_MAX_S = 2.0


_STATUS_LINE_MAX = 4096


async def until_ready(address: Address, path: str) -> None:
    """Return when the path answers 200. Runs until cancelled otherwise."""
    pause_s = ASK_FIRST_S
    while not await answers(address, path):
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * ASK_GROWTH, ASK_SLOWEST_S)


async def answers(address: Address, path: str) -> bool:
    try:
        async with asyncio.timeout(ANSWER_MAX_S):
            return await _status(address, path) == 200
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return False


async def _status(address: Address, path: str) -> int:
    if address.path:
        reader, writer = await asyncio.open_unix_connection(address.path, limit=_STATUS_LINE_MAX)
    else:
        reader, writer = await asyncio.open_connection(address.host, address.port, limit=_STATUS_LINE_MAX)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        line = await reader.readuntil(b"\n")
        return int(line.split(b" ", 2)[1])
    except IndexError as error:
        raise ValueError("not HTTP") from error
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
