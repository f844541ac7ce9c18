"""The one loop that owns the scheduler's state: events go in one at a time, effects come out.

`post` handles the event before it returns; events posted by effects meanwhile are handled before the outermost post
returns. No locks: everything happens on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from greenroom.core.events import Event
from greenroom.core.scheduler import Scheduler
from greenroom.telemetry.logs import get_logger

_log = get_logger("runtime")


class SchedulerLoop:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._queue: deque[Event] = deque()
        self._running = False
        self._awaited: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    def post(self, event: Event) -> None:
        """Handle this event and all that follow from it. Raises only if this event itself cannot be handled."""
        if self._running:
            self._queue.append(event)
            return
        self._running = True
        try:
            self.scheduler.handle(event)
        finally:
            if self._queue:
                self._handle_queued()
            self._running = False
            if self._awaited:
                self._tell_facts()

    def _handle_queued(self) -> None:
        while self._queue:
            event = self._queue.popleft()
            try:
                self.scheduler.handle(event)
            except Exception as bug:
                _log.bug("event failed", bug, event_kind=type(event).__name__)

    async def until(self, fact: Callable[[], bool]) -> None:
        """Wait until this holds after an event."""
        if not fact():
            future = asyncio.get_running_loop().create_future()
            self._awaited.append((fact, future))
            await future

    def _tell_facts(self) -> None:
        for fact, future in self._awaited:
            if not future.done() and fact():
                future.set_result(None)
        self._awaited = [pair for pair in self._awaited if not pair[1].done()]
