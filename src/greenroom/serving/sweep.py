"""The one timer of all running requests: for heartbeats, and for engines that hang."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.serving.request import Settings

# Bounds of the period: fine enough for the shortest heartbeat, rare enough to cost nothing.
SWEEP_MIN_S: Final = 0.05
SWEEP_MAX_S: Final = 0.5


class Watched(Protocol):
    def look(self, now: float) -> None: ...


class RequestSweep:
    """Looks at every running request from time to time. There is no timer while there is no request."""

    def __init__(self, settings: Settings, loop: SchedulerLoop) -> None:
        self._settings = settings
        self._loop = loop
        self._running: set[Watched] = set()
        self._next: asyncio.TimerHandle | None = None

    def configure(self, settings: Settings) -> None:
        self._settings = settings

    def __len__(self) -> int:
        return len(self._running)

    def add(self, request: Watched) -> None:
        self._running.add(request)
        if self._next is None:
            self._arm()

    def remove(self, request: Watched) -> None:
        self._running.discard(request)

    def _arm(self) -> None:
        settings = self._settings
        least_s = min(settings.heartbeat_after_s, settings.heartbeat_every_s, settings.answer_idle_max_s or 3600.0)
        period_s = min(max(least_s / 4, SWEEP_MIN_S), SWEEP_MAX_S)
        self._next = asyncio.get_running_loop().call_later(period_s, self._sweep)

    def _sweep(self) -> None:
        self._next = None
        if self._running:
            # First, so that one look that fails is not the last.
            self._arm()
        now = self._loop.clock()
        for request in list(self._running):
            request.look(now)

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
