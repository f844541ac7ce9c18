"""The way into the scheduler: events go in one at a time.

Owns their order: `post` handles the event before it returns, and events posted by effects meanwhile are handled before
the outermost post returns. No locks: everything happens on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Final

from greenroom.core.contract import Scheduler
from greenroom.core.events import Event, RequestArrived
from greenroom.core.model import RequestId
from greenroom.core.view import SchedulerView
from greenroom.runtime.record.recording import EventRecorder
from greenroom.telemetry.logs import get_logger

_log: Final = get_logger("runtime")


class SchedulerLoop:
    def __init__(self, scheduler: Scheduler, clock: Callable[[], float], recorder: EventRecorder | None = None) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self._recorder = recorder
        self._queue: deque[Event] = deque()
        self._running = False
        self._awaited: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        # When the scheduler last raised instead of deciding: a bug, most likely of a policy of another package.
        self.failed_at = -inf

    @property
    def view(self) -> SchedulerView:
        return self.scheduler.view

    def post(self, event: Event) -> None:
        """Handle this event and all that follow from it. Raises only if this event itself cannot be handled."""
        if self._recorder is not None:
            self._recorder.add(event)
        if self._running:
            self._queue.append(event)
            return
        self._running = True
        try:
            self._handle(event)
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
                self._handle(event)
            except Exception as bug:
                _log.bug("event failed", bug, event_kind=type(event).__name__)

    def _handle(self, event: Event) -> None:
        try:
            self.scheduler.handle(event)
        except Exception as bug:
            self.failed_at = event.now
            limits = self.scheduler.view.limits
            models = f" of {', '.join(event.candidates)}" if isinstance(event, RequestArrived) else ""
            bug.add_note(
                f"The scheduler failed at {type(event).__name__}{models}; "
                f"its policy is {limits.policy!r}, its swapper {limits.swapper!r}."
            )
            raise

    def outlook(self, request: str) -> tuple[int | None, float | None]:
        """Its place in the queue, and in how many seconds it should begin; None where it does not wait."""
        outlook = self.view.outlook(RequestId(request), self.clock())
        return (None, None) if outlook is None else (outlook.position, outlook.eta_s)

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
