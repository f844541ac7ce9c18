"""Watches every running request with one sweep: heartbeats for those who wait, an end for engines that hang.

No timer a request: a sweep several times a heartbeat costs less and is never forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

# Bounds of the sweep's period: fine enough for the shortest heartbeat, rare enough to cost nothing.
SWEEP_MIN_S: Final = 0.05
SWEEP_MAX_S: Final = 0.5


class Watched(Protocol):
    def look(self, now: float) -> None:
        """Do what is due at this moment. Must not raise."""
        ...


class Vigil:
    def __init__(self, period_s: Callable[[], float], clock: Callable[[], float]) -> None:
        self._period_s = period_s
        self._clock = clock
        self._watched: set[Watched] = set()
        self._next: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, watched: Watched) -> None:
        self._watched.add(watched)
        if self._next is None:
            self._arm()

    def remove(self, watched: Watched) -> None:
        self._watched.discard(watched)

    def _arm(self) -> None:
        period_s = min(max(self._period_s(), SWEEP_MIN_S), SWEEP_MAX_S)
        self._next = asyncio.get_running_loop().call_later(period_s, self._sweep)

    def _sweep(self) -> None:
        self._next = None
        now = self._clock()
        for watched in list(self._watched):
            watched.look(now)
        if self._watched:
            self._arm()

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
