"""Around the scheduler: events go in one at a time, effects come out and are carried out.

`SchedulerLoop` owns the order of events: `post` handles the event before it returns, and events posted by effects
meanwhile are handled before the outermost post returns. No locks: everything happens on the event loop's thread.

`AsyncEffects` owns timers and the hand-over of grants and rejections to tickets and leases. Moves, rejections, cuts,
aborts and recalls are reported to the observer with their reasons. The simulator has the other implementation.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from greenroom.core.effects import OpOutcome, Reason, Rejection
from greenroom.core.events import Event, Timer, TimerFired
from greenroom.core.model import LeaseId, Move, MoveId, OpId, RequestId, SlotId
from greenroom.core.scheduler import Scheduler
from greenroom.runtime.moves.mover import Mover
from greenroom.runtime.observer import Observer
from greenroom.runtime.rejections import Rejections
from greenroom.runtime.slots import LiveSlots
from greenroom.runtime.tickets import Ticket
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


class LeaseEffects(Protocol):
    """Takes the scheduler's decisions on leases."""

    def granted(self, lease: LeaseId, slot: SlotId) -> None: ...

    def rejected(self, lease: LeaseId, rejection: Rejection) -> None: ...

    def recalled(self, lease: LeaseId, deadline: float) -> None: ...


class AsyncEffects:
    """Made in two steps, because the scheduler needs its effects and they need to post back to it."""

    def __init__(self, slots: LiveSlots, observer: Observer, clock: Callable[[], float]) -> None:
        self._slots = slots
        self._observer = observer
        self._clock = clock
        self._timers: dict[Timer, asyncio.TimerHandle] = {}
        self.operations: dict[OpId, asyncio.Future[OpOutcome]] = {}

    def connect(
        self,
        post: Callable[[Event], None],
        mover: Mover,
        tickets: dict[str, Ticket],
        rejections: Rejections,
        leases: LeaseEffects,
    ) -> None:
        self._post = post
        self._mover = mover
        self._tickets = tickets
        self._rejections = rejections
        self._leases = leases

    def grant(self, request: RequestId | LeaseId, slot: SlotId, reason: Reason) -> None:
        ticket = self._tickets.get(request)
        if ticket is None:
            self._leases.granted(LeaseId(request), slot)
        else:
            ticket.grant(self._slots.live[slot], self._clock())

    def reject(self, request: RequestId | LeaseId, rejection: Rejection, reason: Reason) -> None:
        self._observer.rejected(request, rejection, reason)
        ticket = self._tickets.get(request)
        if ticket is None:
            self._leases.rejected(LeaseId(request), rejection)
        else:
            ticket.reject(self._rejections.error_for(rejection))

    def cut(self, request: RequestId, reason: Reason) -> None:
        ticket = self._tickets[request]
        self._observer.cut(request, None if ticket.slot is None else ticket.slot.entry.id, reason)
        ticket.cut(self._rejections.error_for_cut(reason))

    def move(self, move: Move, reason: Reason) -> None:
        self._observer.moving(move, reason)
        self._mover.start(move)

    def abort(self, move: MoveId, reason: Reason) -> None:
        self._observer.aborting(move, reason)
        self._mover.abort(move)

    def answer(self, op: OpId, outcome: OpOutcome, reason: Reason) -> None:
        future = self.operations.pop(op, None)
        if future is not None and not future.done():
            future.set_result(outcome)

    def recall(self, lease: LeaseId, deadline: float, reason: Reason) -> None:
        self._observer.recalled(lease, deadline - self._clock(), reason)
        self._leases.recalled(lease, deadline)

    def set_timer(self, timer: Timer, at: float | None, reason: Reason) -> None:
        if pending := self._timers.pop(timer, None):
            pending.cancel()
        if at is not None:
            loop = asyncio.get_running_loop()
            # The scheduler's clock is the loop's clock, so that the two agree on when "at" is.
            self._timers[timer] = loop.call_at(at, self._fire, timer, at)

    def _fire(self, timer: Timer, at: float) -> None:
        """Timers round to milliseconds and may be early: the event never has a time before `at`."""
        self._timers.pop(timer, None)
        self._post(TimerFired(max(self._clock(), at), timer))

    def close(self) -> None:
        for handle in self._timers.values():
            handle.cancel()
        self._timers.clear()
