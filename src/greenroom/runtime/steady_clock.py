"""The wall clock by which it is decided what is old: one that is set for a while makes nothing old.

Owns which time is believed. Times that people read are those of the wall clock itself; durations are measured by the
clock that is never set.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

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
