"""Promises about waiting, held against runs without faults: the bound on waiting and the bound on overtaking.

`docs/design/waiting-bound.md` derives both. They are judged with the numbers of the run: what swaps and answers really
took at most.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import ceil, log

from greenroom.core import events as ev
from greenroom.core.effects import Reason
from greenroom.core.model import ARRIVING, LeaseId, ModelId, Move, MoveId, RequestId, SlotId
from greenroom.core.policy.default import LATE_DEADLINES
from greenroom.sim.records import Violation
from tests.chaos.checks.base import Check
from tests.chaos.scenario import Scenario

# Following every late request would cost more than the run; so many at a time are followed.
FOLLOWED_MAX = 20
# Moves of world and clock that are not the scheduler's.
ROUNDING_S = 0.1


class Late:
    """A late request: the requests before it at that time, and those that have passed it since."""

    __slots__ = ("before", "counts", "passed")

    def __init__(self, before: dict[ModelId, set[str]]) -> None:
        self.before = before
        self.counts = {name: len(members) for name, members in before.items()}
        self.passed = dict.fromkeys(before, 0)

    def granted(self, request: str, model: ModelId) -> None:
        members = self.before.get(model)
        if not members:
            return
        if request in members:
            members.discard(request)
        else:
            self.passed[model] += 1

    def turns(self, concurrency: int) -> int:
        return sum(ceil((self.counts[name] + self.passed[name]) / concurrency) for name in self.counts)


class WaitingBound(Check):
    """W ≤ late + turn · (1 + Σ ⌈(ahead + passed) / c⌉), where a turn is a swap, its residency and a drain."""

    def __init__(self, scenario: Scenario) -> None:
        self.judged = 0
        self._limits = scenario.config.limits
        self._concurrency = scenario.config.models[0].timings.concurrency
        self._arrived: dict[str, tuple[float, ModelId, float]] = {}
        self._waiting: dict[ModelId, dict[str, float]] = {}
        self._late_at: list[tuple[float, str]] = []
        self._followed: dict[str, Late] = {}
        self._results: list[tuple[float, float, int, str]] = []
        self._granted_at: dict[str, float] = {}
        self._moves: dict[MoveId, Move] = {}
        self._service_s = self._come_s = self._go_s = 0.0
        self._now = 0.0

    def tell(self, event: ev.Event) -> None:
        """Follow the requests that became late since the last event; the queue has not changed meanwhile."""
        self._now = event.now
        while self._late_at and self._late_at[0][0] <= event.now:
            at, request = heappop(self._late_at)
            if request in self._arrived and len(self._followed) < FOLLOWED_MAX:
                self._followed[request] = Late(self._before(at))

    def _before(self, late_at: float) -> dict[ModelId, set[str]]:
        found = {
            model: {request for request, at in waiting.items() if at <= late_at}
            for model, waiting in self._waiting.items()
        }
        return {model: members for model, members in found.items() if members}

    def config_changed(self, event: ev.ConfigChanged) -> None:
        for learned in (event.learned or {}).values():
            self._come_s = max(self._come_s, *learned.moves_s.values())

    def request_arrived(self, event: ev.RequestArrived) -> None:
        model, priority = event.candidates[0], min(max(event.priority, 0), 2)
        late_at = event.now + LATE_DEADLINES[priority] * self._limits.deadlines_s[priority]
        self._arrived[event.request] = (event.now, model, late_at)
        self._waiting.setdefault(model, {})[event.request] = late_at
        heappush(self._late_at, (late_at, event.request))

    def grant(self, request: RequestId | LeaseId, slot: SlotId, reason: Reason) -> None:
        arrived, model, late_at = self._arrived.pop(request)
        del self._waiting[model][request]
        self._granted_at[request] = self._now
        for late in self._followed.values():
            late.granted(request, model)
        own = self._followed.pop(request, None)
        if own is not None:
            waited_s = self._now - arrived
            self._results.append((waited_s, late_at - arrived, own.turns(self._concurrency), request))

    def serve_done(self, event: ev.ServeDone) -> None:
        self._service_s = max(self._service_s, event.now - self._granted_at.pop(event.request))

    def move(self, move: Move, reason: Reason) -> None:
        self._moves[move.id] = move

    def move_done(self, event: ev.MoveDone) -> None:
        move = self._moves.pop(event.move)
        took_s = event.now - move.started
        if move.kind in ARRIVING:
            self._come_s = max(self._come_s, took_s)
        else:
            self._go_s = max(self._go_s, took_s)

    def turn_s(self) -> float:
        """The longest a turn can be with what things took at most in this run."""
        limits = self._limits
        drain_s = self._service_s * (1.0 + log(max(1, self._concurrency)))
        stays_s = max(limits.residency_swaps * self._come_s, limits.batch_swaps * (self._come_s + drain_s))
        return self._go_s + self._come_s + stays_s + self._service_s + ROUNDING_S

    def at_rest(self) -> None:
        turn_s = self.turn_s()
        for waited_s, late_s, turns, request in self._results:
            self.judged += 1
            bound_s = late_s + turn_s * (1 + turns)
            if waited_s > bound_s:
                raise Violation(
                    f"{request} waited {waited_s:.1f} s, more than {bound_s:.1f} s = {late_s:.0f} s + turns"
                )


class Overtakes(Check):
    """Where one model is on stage at a time: after its batch it serves at most `overtakes_max` while another waits."""

    def __init__(self, scenario: Scenario) -> None:
        self.judged = 0
        self._limits = scenario.config.limits
        self._concurrency = scenario.config.models[0].timings.concurrency
        self._arrived: dict[str, tuple[float, ModelId]] = {}
        self._waiting: dict[ModelId, dict[str, float]] = {}
        self._granted_at: dict[str, float] = {}
        self._moves: dict[MoveId, Move] = {}
        self._ready_at: dict[SlotId, float] = {}
        self._overtaken: dict[SlotId, int] = {}
        self._service_s = self._come_s = self._now = 0.0

    def tell(self, event: ev.Event) -> None:
        self._now = event.now

    def config_changed(self, event: ev.ConfigChanged) -> None:
        for learned in (event.learned or {}).values():
            self._come_s = max(self._come_s, *learned.moves_s.values())

    def request_arrived(self, event: ev.RequestArrived) -> None:
        model = event.candidates[0]
        self._arrived[event.request] = (event.now, model)
        self._waiting.setdefault(model, {})[event.request] = event.now

    def serve_done(self, event: ev.ServeDone) -> None:
        self._service_s = max(self._service_s, event.now - self._granted_at.pop(event.request))

    def move(self, move: Move, reason: Reason) -> None:
        self._moves[move.id] = move

    def move_done(self, event: ev.MoveDone) -> None:
        move = self._moves.pop(event.move)
        if move.kind in ARRIVING:
            self._come_s = max(self._come_s, event.now - move.started)
            self._ready_at[move.slot] = event.now
            self._overtaken[move.slot] = 0

    def grant(self, request: RequestId | LeaseId, slot: SlotId, reason: Reason) -> None:
        _, model = self._arrived.pop(request)
        del self._waiting[model][request]
        self._granted_at[request] = self._now
        # The first of each queue arrived first, and no caller leaves here.
        others = [next(iter(waiting.values())) for name, waiting in self._waiting.items() if waiting and name != model]
        if not others:
            self._overtaken[slot] = 0
        elif self._now > max(self._batch_over_at(slot), min(others)):
            self.judged += 1
            self._overtaken[slot] += 1
            if self._overtaken[slot] > self._limits.overtakes_max:
                raise Violation(f"{request} is the {self._overtaken[slot]}th after the batch to overtake another model")

    def _batch_over_at(self, slot: SlotId) -> float:
        drain_s = self._service_s * (1.0 + log(max(1, self._concurrency)))
        return self._ready_at[slot] + self._limits.batch_swaps * (self._come_s + drain_s)
