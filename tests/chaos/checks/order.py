"""The order of requests that wait for one model: by arrival within a lane, and no class waits for ever.

A lane is (tenant, priority, model). Its age counts from the arrival of its first, or from when it was last served if
that is later. Between lanes the default policy promises that no lane is passed by one that is younger by more than the
few seconds in which shares decide and a lift, priorities made up for, within the time for which an order of many lanes
may be kept. The lift is for tenants that flood the model: they share by what they have received.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from greenroom.core import events as ev
from greenroom.core.effects import Reason, Rejection
from greenroom.core.model import LeaseId, ModelId, Move, RequestId, SlotId, TenantId
from greenroom.core.policy.default import ALIKE_S
from greenroom.core.queue.index import TURNS_FRESH_S
from greenroom.sim.records import Violation
from tests.chaos.checks.base import Check

ROUNDING_S = 1e-6
STALE_S = TURNS_FRESH_S + ROUNDING_S


@dataclass(slots=True, eq=False)
class Caller:
    number: int
    request: RequestId
    model: ModelId
    tenant: TenantId
    priority: int
    # When its age counts from: no earlier than this, and no later than that.
    aged_from: float
    aged_from_max: float


Lanes = dict[tuple[TenantId, int], list[Caller]]


class Order(Check):
    """Only requests for one model are in lanes here: the others may be served elsewhere at any time."""

    def __init__(self, by_arrival: bool = False) -> None:
        self.judged = 0
        # As the plain scheduler has it: nothing but the order of arrival counts.
        self._by_arrival = by_arrival
        self._limits = ev.Limits()
        self._now = 0.0
        self._numbers = 0
        self._lanes: dict[ModelId, Lanes] = {}
        self._callers: dict[str, Caller] = {}
        self._choosy: dict[str, ev.RequestArrived] = {}
        self._waiting: set[str] = set()
        self._model_of: dict[SlotId, ModelId] = {}

    def tell(self, event: ev.Event) -> None:
        self._now = event.now

    def config_changed(self, event: ev.ConfigChanged) -> None:
        self._limits = event.limits or self._limits

    def move(self, move: Move, reason: Reason) -> None:
        self._model_of[move.slot] = move.model

    def request_arrived(self, event: ev.RequestArrived) -> None:
        self._numbers += 1
        caller = Caller(
            self._numbers, event.request, event.candidates[0], event.tenant, event.priority, event.now, event.now
        )
        if len(event.candidates) == 1:
            self._callers[event.request] = caller
            self._wait(caller)
        else:
            self._choosy[event.request] = event

    def serve_done(self, event: ev.ServeDone) -> None:
        if not event.lost_before_first_byte:
            self._callers.pop(event.request, None)
            self._choosy.pop(event.request, None)
        elif (caller := self._callers.get(event.request)) is not None:
            self._wait(caller)

    def request_gone(self, event: ev.RequestGone) -> None:
        self._end(event.request)

    def reject(self, request: RequestId | LeaseId, rejection: Rejection, reason: Reason) -> None:
        self._end(request)

    def _end(self, request: str) -> None:
        self._choosy.pop(request, None)
        if (caller := self._callers.pop(request, None)) is not None and request in self._waiting:
            self._stop_waiting(caller)

    def grant(self, request: RequestId | LeaseId, slot: SlotId, reason: Reason) -> None:
        if (choosy := self._choosy.get(request)) is not None:
            # It may have stood before others in any of the lanes that it could choose.
            for model in choosy.candidates:
                self._served(model, choosy.tenant, choosy.priority)
        caller = self._callers.get(request)
        if caller is not None:
            self._judge(caller)
            self._stop_waiting(caller)
            self._served(caller.model, caller.tenant, caller.priority)

    def _judge(self, caller: Caller) -> None:
        lanes = self._lanes[caller.model]
        first = lanes[caller.tenant, caller.priority][0]
        if first is not caller:
            raise Violation(f"{caller.request} is granted before {first.request}, which came earlier in its lane")
        # A choosy one may stand first in a lane, and be younger than those behind it when it came from another queue.
        if len(lanes) > 1 and not any(caller.model in choosy.candidates for choosy in self._choosy.values()):
            self._judge_between(caller, lanes)

    def _served(self, model: ModelId, tenant: TenantId, priority: int) -> None:
        """The first in this lane ages from this time at the latest."""
        lane = self._lanes.get(model, {}).get((tenant, priority))
        if lane:
            lane[0].aged_from_max = max(lane[0].aged_from_max, self._now)

    def _judge_between(self, caller: Caller, lanes: Lanes) -> None:
        self.judged += 1
        for lane in lanes.values():
            other = lane[0]
            if other is not caller and self._must_go_first(other, caller):
                raise Violation(f"{caller.request} is granted though {other.request} must go first")

    def _must_go_first(self, one: Caller, other: Caller) -> bool:
        if self._by_arrival:
            return one.number < other.number
        if self._limits.policy == "fifo":
            return (one.priority, one.number) < (other.priority, other.number)
        lift_s = self._limits.lift_s
        # It may be of a tenant that floods the model: then it is as old as the youngest that came within ALIKE_S.
        aged_from = one.aged_from_max + ALIKE_S + one.priority * lift_s
        return aged_from + STALE_S < other.aged_from + other.priority * lift_s

    # --- lanes --------------------------------------------------------------------------------------------------------

    def _wait(self, caller: Caller) -> None:
        lane = self._lanes.setdefault(caller.model, {}).setdefault((caller.tenant, caller.priority), [])
        if lane and lane[-1].number > caller.number:
            insort(lane, caller, key=_number)
        else:
            lane.append(caller)
        self._waiting.add(caller.request)

    def _stop_waiting(self, caller: Caller) -> None:
        self._waiting.discard(caller.request)
        lanes = self._lanes[caller.model]
        lane = lanes[caller.tenant, caller.priority]
        del lane[0 if lane[0] is caller else bisect_left(lane, caller.number, key=_number)]
        if not lane:
            del lanes[caller.tenant, caller.priority]


def _number(caller: Caller) -> int:
    return caller.number
