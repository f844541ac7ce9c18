"""Times that are believed although this process stood still, or the wall clock was set.

`Standstill` tells how long this process has stood still: suspended, stopped, or held by one long piece of work. What
others sent meanwhile is not read yet, so a deadline for hearing of them must not count that time. `SteadyClock` decides
what is old: a wall clock that is set for a while makes nothing old. Times that people read are those of the wall clock
itself; durations are measured by the clock that is never set.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

# The loop is looked at this often. A turn longer than two of these is a standstill: a busy loop has none.
EVERY_S: Final = 0.25
TURN_MAX_S: Final = 2 * EVERY_S


class Standstill:
    def __init__(self) -> None:
        self._before_s = 0.0
        self._looked_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Look at the running loop from now on."""
        if self._timer is None:
            self._looked_at = asyncio.get_running_loop().time()
            self._look()

    @property
    def total_s(self) -> float:
        """All of it since `watch`, up to now."""
        return self._before_s + self._current_s()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _current_s(self) -> float:
        if self._timer is None:
            return 0.0
        turn_s = asyncio.get_running_loop().time() - self._looked_at
        return turn_s if turn_s > TURN_MAX_S else 0.0

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._before_s += self._current_s()
        self._looked_at = loop.time()
        self._timer = loop.call_later(EVERY_S, self._look)


@asynccontextmanager
async def running_timeout(seconds: float) -> AsyncIterator[None]:
    """As `asyncio.timeout`, but for answers of other processes: time in which this one stood still does not count."""
    loop, standstill = asyncio.get_running_loop(), Standstill()
    standstill.watch()
    began = loop.time()
    timer: asyncio.TimerHandle
    async with asyncio.timeout(None) as limit:

        def look() -> None:
            nonlocal timer
            left_s = seconds - (loop.time() - began - standstill.total_s)
            if left_s > 0:
                timer = loop.call_later(left_s, look)
            else:
                limit.reschedule(loop.time())

        timer = loop.call_later(seconds, look)
        try:
            yield
        finally:
            timer.cancel()
            standstill.close()


# A clock that was set, and one that nothing is known of yet, is believed once it has run on for so long.
BELIEVED_AFTER_S: Final = 3_600.0
# By so much the two clocks may come apart between two looks: a wall clock that is corrected bit by bit is not set.
STEP_S: Final = 30.0


class SteadyClock:
    """Ask it from time to time: that the wall clock was set is noticed when it is asked."""

    def __init__(self, wall: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is never set."""
        self._wall = wall
        self._clock = clock
        # How far the wall clock is ahead of the other one, since when, and by how much it was while it was believed.
        self._ahead_s = wall() - clock()
        self._since = clock()
        self._believed_s: float | None = None

    def now(self) -> float | None:
        """Seconds since 1970; after a jump still by the time before it. None: no time was believed since the start."""
        now = self._clock()
        ahead_s = self._wall() - now
        if abs(ahead_s - self._ahead_s) > STEP_S:
            self._since = now
        self._ahead_s = ahead_s
        if now - self._since >= BELIEVED_AFTER_S:
            self._believed_s = ahead_s
        return None if self._believed_s is None else now + self._believed_s
