"""Looks at every running request from time to time: for heartbeats, and for engines that hang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

# Bounds of the sweep's period: fine enough for the shortest heartbeat, rare enough to cost nothing.
SWEEP_MIN_S: Final = 0.05
SWEEP_MAX_S: Final = 0.5


class LookedAt(Protocol):
    def look(self, now: float) -> None: ...


class RequestSweep:
    """One timer for all requests, and none while there is no request."""

    def __init__(self, period_s: Callable[[], float], clock: Callable[[], float]) -> None:
        self._period_s = period_s
        self._clock = clock
        self._running: set[LookedAt] = set()
        self._next: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._running)

    def add(self, request: LookedAt) -> None:
        self._running.add(request)
        if self._next is None:
            self._arm()

    def remove(self, request: LookedAt) -> None:
        self._running.discard(request)

    def _arm(self) -> None:
        period_s = min(max(self._period_s(), SWEEP_MIN_S), SWEEP_MAX_S)
        self._next = asyncio.get_running_loop().call_later(period_s, self._sweep)

    def _sweep(self) -> None:
        self._next = None
        now = self._clock()
        for request in list(self._running):
            request.look(now)
        if self._running:
            self._arm()

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
