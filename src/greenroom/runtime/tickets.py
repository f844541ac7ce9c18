"""Tickets: a request that waits for the scheduler's decision, was granted a slot, or was rejected.

In-flight is counted at the grant. A ticket is closed exactly once, whatever happened to it: `ServeDone` if it holds a
grant, `RequestGone` if it still waits, nothing if it was rejected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from greenroom.core.events import Event, RequestArrived, RequestGone, ServeDone
from greenroom.core.model import RequestId
from greenroom.errors import GreenroomError
from greenroom.runtime.slots import LiveSlot

Clock = Callable[[], float]
# An engine that has not answered a request within this time works on it.
WORKS_S = 1.0


class Ticket:
    __slots__ = (
        "_future",
        "_on_cut",
        "arrived",
        "cut_error",
        "granted_at",
        "id",
        "is_open",
        "not_there_s",
        "rejection",
        "slot",
    )

    def __init__(self, request: RequestId, arrived: float) -> None:
        self.id = request
        self.arrived = arrived
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

    def __init__(self, post: Callable[[Event], None], clock: Clock) -> None:
        self.open: dict[str, Ticket] = {}
        self._post = post
        self._clock = clock

    def arrive(self, event: RequestArrived) -> Ticket:
        """Ask for a slot. The ticket may be decided when this returns."""
        ticket = Ticket(event.request, event.now)
        self.open[event.request] = ticket
        try:
            self._post(event)
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
        since = self._clock() - WORKS_S
        return any(
            one.slot is ticket.slot and one is not ticket and one.granted_at < since for one in self.open.values()
        )

    def lost(self, ticket: Ticket, was_busy: bool = False) -> None:
        """The engine was lost before its first byte: the request waits again, or is rejected the second time.

        `was_busy`: the model has no room for it. It does not wait for that one again, nor for one of last resort.
        """
        ticket.slot = None
        if ticket.cut_error is not None:
            # It was cut meanwhile, and must not wait again.
            self._post(ServeDone(self._clock(), ticket.id))
            ticket.reject(ticket.cut_error)
        else:
            self._post(ServeDone(self._clock(), ticket.id, lost_before_first_byte=True, was_busy=was_busy))

    def cancel(self, request: str, error: GreenroomError) -> None:
        """End an open request with this error: it leaves the queue, or its running answer is cut."""
        ticket = self.open[request]
        if ticket.slot is not None:
            ticket.cut(error)
        elif ticket.rejection is None:
            self._post(RequestGone(self._clock(), ticket.id))
            ticket.reject(error)

    def close(self, ticket: Ticket) -> None:
        """The request is over, however it ended. Only the first call counts."""
        if not ticket.is_open:
            return
        ticket.is_open = False
        del self.open[ticket.id]
        ticket.on_cut(None)
        if ticket.slot is not None:
            self._post(ServeDone(self._clock(), ticket.id))
        elif ticket.rejection is None:
            self._post(RequestGone(self._clock(), ticket.id))
