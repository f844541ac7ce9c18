"""The steps of a shutdown, each in bounded time: wait until nothing runs, close what talks to others, write data."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from typing import Protocol

from greenroom.runtime.timeouts import STOP_MAX_S
from greenroom.telemetry.logs import get_logger
from greenroom.wiring.common import CommonParts, MemoryParts
from greenroom.wiring.front import FrontParts
from greenroom.wiring.moves import LeaseParts, MoveParts

_log = get_logger("app")

# The time that event streams have to send their last events.
LAST_EVENTS_S = 0.05
# The longest wait for the last writes to disk.
WRITE_MAX_S = 10.0
# The steps of these two have bounds of their own, which are shorter.
IDLE_MAX_S = STOP_MAX_S + 5.0
PARTS_MAX_S = 90.0


class File(Protocol):
    def close(self) -> Awaitable[None]: ...


async def wait_until_idle(common: CommonParts, moves: MoveParts, front: FrontParts, drain_s: float) -> None:
    """Wait until nothing runs any more, but not too long."""
    state = common.state
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(drain_s + STOP_MAX_S):
            await common.loop.until(lambda: all(slot.lease is not None for slot in state.slots.values()))
            await front.serving.inference.finished()
            await moves.mover.cleaned_up()
            await moves.workers.close()


async def close_parts(common: CommonParts, memory: MemoryParts, leases: LeaseParts, front: FrontParts) -> None:
    """Close everything but the files; parts that talk to peers first."""
    close_s = common.timeouts.close_s
    if leases.sharing is not None:
        await in_time(leases.sharing.close(), "the lease store", close_s)
    if front.access.shared_limits is not None:
        await in_time(front.access.shared_limits.close(), "the store of limits", close_s)
    # Streams of events and logs end by themselves once the hub is closed, after their last events.
    common.hub.close()
    await asyncio.sleep(LAST_EVENTS_S)
    front.management.close()
    await in_time(front.close(), "the listening sockets", close_s)
    front.serving.inference.sweep.close()
    await in_time(front.access.keys.close(), "the key file", close_s)
    front.serving.prefetch.close()
    common.effects.close()
    await in_time(memory.watch.close(), "the memory watch", close_s)
    # A moment for the last bytes to leave.
    await asyncio.sleep(0.05)
    front.abort()


async def in_time(closing: Awaitable[None], what: str, within_s: float) -> None:
    """Wait for this end, but not longer. What fails or hangs is told and left behind: the others end all the same."""
    ending = asyncio.ensure_future(closing)
    done, _ = await asyncio.wait((ending,), timeout=within_s)
    if not done:
        # Not waited for: it may hang in its cancellation, too.
        ending.cancel()
        _log.warning("not closed in time and left behind", what=what)
    elif not ending.cancelled() and isinstance(error := ending.exception(), Exception):
        _log.failed("not closed well", error, what=what)


async def write_last(files: Sequence[File | None]) -> None:
    """Close files that have data to write; a disk that hangs does not delay the exit beyond `WRITE_MAX_S`."""
    closing = (in_time(file.close(), type(file).__name__, WRITE_MAX_S) for file in files if file is not None)
    await asyncio.gather(*closing)
