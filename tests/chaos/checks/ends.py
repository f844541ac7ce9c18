"""Every arrival ends in exactly one of served, rejected, gone; a grant lost before its first byte is taken back once.

Operators' orders are answered exactly once.
"""

from __future__ import annotations

from enum import Enum

from greenroom.core import events as ev
from greenroom.core.effects import OpOutcome, Reason, Rejection
from greenroom.core.model import LeaseId, OpId, RequestId, SlotId
from greenroom.sim.records import Violation
from tests.chaos.checks.base import Check


class State(Enum):
    WAITS = "waits"
    SERVED = "is served"


class Ends(Check):
    def __init__(self) -> None:
        self._places: dict[str, State] = {}
        # How often each request was lost, and may be: once at each of its models, and twice at a single one.
        self._losses: dict[str, int] = {}
        self._losses_max: dict[str, int] = {}
        # One that was lost that often must be rejected before the event is over.
        self._must_end: str | None = None

    def request_arrived(self, event: ev.RequestArrived) -> None:
        self._places[event.request] = State.WAITS
        self._losses_max.setdefault(event.request, max(2, len(event.candidates)))

    def lease_asked(self, event: ev.LeaseAsked) -> None:
        self._places[event.lease] = State.WAITS

    def grant(self, request: RequestId | LeaseId, slot: SlotId, reason: Reason) -> None:
        if self._places.get(request) is not State.WAITS or request == self._must_end:
            raise Violation(f"{request} is granted though it {self._said_of(request)}")
        self._places[request] = State.SERVED

    def reject(self, request: RequestId | LeaseId, rejection: Rejection, reason: Reason) -> None:
        if self._places.pop(request, None) is not State.WAITS:
            raise Violation(f"{request} is rejected though it {self._said_of(request)}")
        self._forget(request)

    def cut(self, request: RequestId, reason: Reason) -> None:
        if self._places.get(request) is not State.SERVED:
            raise Violation(f"{request} is cut though it {self._said_of(request)}")

    def serve_done(self, event: ev.ServeDone) -> None:
        if event.lost_before_first_byte and event.request in self._places:
            self._places[event.request] = State.WAITS
            self._losses[event.request] = losses = self._losses.get(event.request, 0) + 1
            if losses >= self._losses_max[event.request]:
                self._must_end = event.request
        else:
            self._end(event.request)

    def request_gone(self, event: ev.RequestGone) -> None:
        self._end(event.request)

    def lease_gone(self, event: ev.LeaseGone) -> None:
        self._end(event.lease)

    def _end(self, who: str) -> None:
        self._places.pop(who, None)
        self._forget(who)

    def _forget(self, who: str) -> None:
        self._losses.pop(who, None)
        self._losses_max.pop(who, None)

    def settled(self, event: ev.Event) -> None:
        if self._must_end is not None:
            if self._must_end in self._places:
                raise Violation(f"{self._must_end} was lost at each of its models and is taken back again")
            self._must_end = None

    def at_rest(self) -> None:
        if self._places:
            raise Violation(f"{len(self._places)} have not ended: {list(self._places.items())[:5]}")

    def _said_of(self, who: str) -> str:
        place = self._places.get(who)
        return place.value if place is not None else "has ended"


class Operators(Check):
    def __init__(self) -> None:
        self._asked: set[OpId] = set()

    def move_asked(self, event: ev.MoveAsked) -> None:
        self._asked.add(event.op)

    def answer(self, op: OpId, outcome: OpOutcome, reason: Reason) -> None:
        if op not in self._asked:
            raise Violation(f"{op} is answered though no caller asks any more")
        self._asked.remove(op)

    def at_rest(self) -> None:
        if self._asked:
            raise Violation(f"{sorted(self._asked)} were never answered")
