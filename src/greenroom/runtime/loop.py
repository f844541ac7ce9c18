"""Around the scheduler: requests become events; effects come out and are carried out.

`AsyncEffects` owns timers and the hand-over of grants and rejections to tickets and leases. Moves, rejections, cuts,
aborts and recalls are reported to the observer with their reasons. The simulator has the other implementation.

A `Ticket` is a request that waits for the scheduler's decision, was granted a slot, or was rejected. In-flight is
counted at the grant. A ticket is closed exactly once, whatever happened to it: `ServeDone` if it holds a grant,
`RequestGone` if it still waits, nothing if it was rejected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import Final, Protocol

from greenroom.core.effects import OpOutcome, Reason, Rejection
from greenroom.core.events import RequestArrived, RequestGone, ServeDone, Timer, TimerFired
from greenroom.core.model import LeaseId, Move, MoveId, OpId, RequestId, SlotId
from greenroom.errors import GreenroomError
from greenroom.runtime.moves.mover import Mover
from greenroom.runtime.observer import Observer
from greenroom.runtime.rejections import RejectionErrors
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.runtime.slots import LiveSlot, LiveSlots
from greenroom.telemetry.logs import get_logger

_log: Final = get_logger("runtime")


class LeaseEffects(Protocol):
    """Takes the scheduler's decisions on leases."""

    def granted(self, lease: LeaseId, slot: SlotId) -> None: ...

    def rejected(self, lease: LeaseId, rejection: Rejection) -> None: ...

    def recalled(self, lease: LeaseId, deadline: float) -> None: ...


class AsyncEffects:
    """Made in two steps, because the scheduler needs its effects and they need to post back to it."""

    def __init__(self, slots: LiveSlots, observer: Observer) -> None:
        self._slots = slots
        self._observer = observer
        self._timers: dict[Timer, asyncio.TimerHandle] = {}
        self.operations: dict[OpId, asyncio.Future[OpOutcome]] = {}

    def connect(
        self,
        loop: SchedulerLoop,
        mover: Mover,
        tickets: dict[str, Ticket],
        rejections: RejectionErrors,
        leases: LeaseEffects,
    ) -> None:
        self._loop = loop
        self._mover = mover
        self._tickets = tickets
        self._rejections = rejections
        self._leases = leases

    def grant(self, request: RequestId | LeaseId, slot: SlotId, reason: Reason) -> None:
        ticket = self._tickets.get(request)
        if ticket is None:
            self._leases.granted(LeaseId(request), slot)
        else:
            ticket.grant(self._slots.live[slot], self._loop.clock())

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
        self._observer.recalled(lease, deadline - self._loop.clock(), reason)
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
        self._loop.post(TimerFired(max(self._loop.clock(), at), timer))

    def close(self) -> None:
        for handle in self._timers.values():
            handle.cancel()
        self._timers.clear()


# An engine that has not answered a request within this time works on it.
WORKS_S: Final = 1.0


class Ticket:
    __slots__ = (
        "_future",
        "_on_cut",
        "arrived",
        "cut_error",
        "give_up_at",
        "granted_at",
        "id",
        "is_open",
        "not_there_s",
        "rejection",
        "slot",
    )

    def __init__(self, request: RequestId, arrived: float, give_up_at: float | None = None) -> None:
        self.id = request
        self.arrived = arrived
        self.give_up_at = inf if give_up_at is None else give_up_at
        self.granted_at = 0.0
        # The part of its wait before its slot was ready. For the rest of it, the slot served as many as it can.
        self.not_there_s = 0.0
        self.slot: LiveSlot | None = None
        self.rejection: GreenroomError | None = None
        self.cut_error: GreenroomError | None = None
        self.is_open = True
        self._future: asyncio.Future[None] | None = None
        self._on_cut: Callable[[], None] | None = None

    @property
    def is_settled(self) -> bool:
        return self.slot is not None or self.rejection is not None

    async def wait(self, timeout_s: float | None) -> bool:
        """Wait for the decision. False if it has not come by then; raises the rejection if it was one."""
        if not self.is_settled:
            self._future = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._future,), timeout=timeout_s)
            self._future = None
        if self.rejection is not None:
            raise self.rejection
        return self.slot is not None

    async def wait_for(self, work: asyncio.Task[None], within_s: float) -> None:
        """Wait until this work has ended, the time is over, or the request is cut or gives up. The work goes on."""
        loop = asyncio.get_running_loop()
        until = min(loop.time() + within_s, self.give_up_at)
        cut: asyncio.Future[None] = loop.create_future()
        self.on_cut(lambda: None if cut.done() else cut.set_result(None))
        # Timers round to milliseconds and may be early.
        while (left_s := until - loop.time()) > 0 and not work.done() and not cut.done():
            limit_s = None if left_s == inf else left_s
            await asyncio.wait((work, cut), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        self.on_cut(None)

    def on_cut(self, callback: Callable[[], None] | None) -> None:
        """Call this when the running answer must end; at once if it was cut already."""
        self._on_cut = callback
        if callback is not None and self.cut_error is not None:
            callback()

    # --- called by the scheduler's effects --------------------------------------------------------------------------

    def grant(self, slot: LiveSlot, now: float) -> None:
        self.slot, self.granted_at = slot, now
        self.not_there_s = max(0.0, slot.ready_since - self.arrived)
        self._wake()

    def reject(self, error: GreenroomError) -> None:
        self.rejection = error
        self._wake()

    def cut(self, error: GreenroomError) -> None:
        self.cut_error = error
        if self._on_cut is not None:
            self._on_cut()

    def _wake(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class Tickets:
    """All open tickets. The server gets one by `arrive` and gives it back by `close`."""

    def __init__(self, loop: SchedulerLoop) -> None:
        self.open: dict[str, Ticket] = {}
        self.loop = loop

    def arrive(self, event: RequestArrived) -> Ticket:
        """Ask for a slot. The ticket may be decided when this returns."""
        ticket = Ticket(event.request, event.now, event.give_up_at)
        self.open[event.request] = ticket
        try:
            self.loop.post(event)
        except BaseException:
            del self.open[event.request]
            raise
        if ticket.slot is not None:
            # Granted at once: it did not wait, even if the clock has moved on since the event.
            ticket.granted_at = ticket.arrived
        return ticket

    def works_on_another(self, ticket: Ticket) -> bool:
        """True if the engine of this one has been busy with another request for a while.

        One that is unavailable says so at once. Looks at all tickets: for rare questions only.
        """
        since = self.loop.clock() - WORKS_S
        return any(
            one.slot is ticket.slot and one is not ticket and one.granted_at < since for one in self.open.values()
        )

    def lost(self, ticket: Ticket, was_busy: bool = False) -> None:
        """The engine was lost before its first byte: the request waits again, or is rejected the second time.
        `was_busy`: the model has no room for it. It does not wait for that one again, nor for one of last resort."""
        ticket.slot = None
        if ticket.cut_error is not None:
            # It was cut meanwhile, and must not wait again.
            self.loop.post(ServeDone(self.loop.clock(), ticket.id))
            ticket.reject(ticket.cut_error)
        else:
            self.loop.post(ServeDone(self.loop.clock(), ticket.id, lost_before_first_byte=True, was_busy=was_busy))

    def cancel(self, request: str, error: GreenroomError) -> None:
        """End an open request with this error: it leaves the queue, or its running answer is cut."""
        ticket = self.open[request]
        if ticket.slot is not None:
            ticket.cut(error)
        elif ticket.rejection is None:
            self.loop.post(RequestGone(self.loop.clock(), ticket.id))
            ticket.reject(error)

    def close(self, ticket: Ticket) -> None:
        """The request is over, however it ended. Only the first call counts."""
        if not ticket.is_open:
            return
        ticket.is_open = False
        del self.open[ticket.id]
        ticket.on_cut(None)
        if ticket.slot is not None:
            self.loop.post(ServeDone(self.loop.clock(), ticket.id))
        elif ticket.rejection is None:
            self.loop.post(RequestGone(self.loop.clock(), ticket.id))
