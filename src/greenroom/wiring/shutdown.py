"""Shutdown, once it was asked for: wait until nothing runs, then let go of everything.

Owns the order, and how long each part of it may take.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from typing import Protocol

from greenroom.telemetry.logs import get_logger
from greenroom.wiring.common import Common
from greenroom.wiring.front import Front
from greenroom.wiring.leases import Leases
from greenroom.wiring.memory import Memory
from greenroom.wiring.moves import Moves

# After the drain, engines get their own time to stop; nothing else may hold the exit up longer than this.
STOP_MAX_S = 60.0
# Those who speak to others may be kept waiting by them, but not for longer.
CLOSE_MAX_S = 10.0
# How long streams have for the events that were told last: a quick shutdown is over before they have sent them.
LAST_EVENTS_S = 0.05
# The last of all: what is still to be written to disk.
WRITE_MAX_S = 10.0

_log = get_logger("app")


class File(Protocol):
    def close(self) -> Awaitable[None]: ...


async def stopped(common: Common, moves: Moves, front: Front, drain_s: float) -> None:
    """Return when nothing runs any more, or when that takes too long."""
    state = common.state
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(drain_s + STOP_MAX_S):
            await common.loop.until(lambda: all(slot.lease is not None for slot in state.slots.values()))
            await front.inference.finished()
            await moves.mover.cleared_up()
            await moves.hosted.close()


async def let_go(common: Common, memory: Memory, leases: Leases, front: Front) -> None:
    """Close everything but the files, those who speak to others first."""
    if leases.sharing is not None:
        await _in_time(leases.sharing.close(), "the lease store")
    # Streams of events and logs end by themselves once nothing more will be said, and after what was said last.
    common.hub.close()
    await asyncio.sleep(LAST_EVENTS_S)
    front.management.close()
    await _in_time(front.edge.close(), "the listening socket")
    front.inference.vigil.close()
    front.prefetch.close()
    common.effects.close()
    await _in_time(memory.watch.close(), "the memory watch")
    # One turn of the loop for last bytes on their way out.
    await asyncio.sleep(0.05)
    front.edge.abort()


async def _in_time(closing: Awaitable[None], what: str) -> None:
    try:
        async with asyncio.timeout(CLOSE_MAX_S):
            await closing
    except TimeoutError:
        _log.warning("not closed in time and left behind", what=what)


async def write_last(files: Sequence[File | None]) -> None:
    """What was learned and what is being recorded; a disk that hangs does not keep us."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WRITE_MAX_S):
            await asyncio.gather(*(file.close() for file in files if file is not None))
