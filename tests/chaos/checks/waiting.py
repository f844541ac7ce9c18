"""The bound on waiting, held against runs without faults. `docs/design/waiting-bound.md` derives it.

It is judged with the numbers of the run: what swaps and answers really took at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log

from greenroom.core import events as ev
from greenroom.core.effects import Reason
from greenroom.core.model import ARRIVING, LeaseId, ModelId, Move, MoveId, RequestId, SlotId, TenantId
from greenroom.sim.records import Violation
from tests.chaos.checks.base import Check
from tests.chaos.scenario import Scenario

# Moves of world and clock that are not the scheduler's.
ROUNDING_S = 0.1

Flow = tuple[ModelId, TenantId, int]


@dataclass(slots=True)
class Visit:
    """A model's stay on a device: since when, until when, and how many waited for it when it came.

    `is_cut`: some of these still waited when it left for a request that is more urgent than all of them.
    """

    model: ModelId
    ready_at: float
    waiting: int
    left_at: float = float("inf")
    is_cut: bool = False


@dataclass(slots=True)
class Away:
    """A model that was waited for and came. `since` is when its first request came, or the model left if later."""

    model: ModelId
    request: str
    priority: int
    since: float
    ready_at: float


class WaitingBound(Check):
    """A model that is waited for comes within due + visits: once it is due, each other model comes at most once more.

    Each of these visits serves as many as waited when it began, and ends. One that a higher class cut short may be
    repeated.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.judged = 0
        config = scenario.config
        self._limits = config.limits
        self._concurrency = config.models[0].timings.concurrency
        self._places = config.devices[0].capacity_mib // config.models[0].spec.need.gpu_mib
        self._lift_s = (max(scenario.traffic.priorities) - min(scenario.traffic.priorities)) * config.limits.lift_s
        self._arrived: dict[str, tuple[float, Flow]] = {}
        self._served_at: dict[Flow, float] = {}
        self._left_at: dict[ModelId, float] = {}
        self._granted_at: dict[str, float] = {}
        self._came: list[Away] = []
        self._visits: list[Visit] = []
        self._visit_of: dict[SlotId, Visit] = {}
        self._moves: dict[MoveId, Move] = {}
        self._service_s = self._come_s = self._go_s = self._now = 0.0

    def tell(self, event: ev.Event) -> None:
        self._now = event.now

    def config_changed(self, event: ev.ConfigChanged) -> None:
        for learned in (event.learned or {}).values():
            self._come_s = max(self._come_s, *learned.moves_s.values())

    def request_arrived(self, event: ev.RequestArrived) -> None:
        self._arrived[event.request] = (event.now, (event.candidates[0], event.tenant, event.priority))

    def grant(self, request: RequestId | LeaseId, slot: SlotId, reason: Reason) -> None:
        _, flow = self._arrived.pop(request)
        self._served_at[flow] = self._granted_at[request] = self._now

    def serve_done(self, event: ev.ServeDone) -> None:
        self._service_s = max(self._service_s, event.now - self._granted_at.pop(event.request))

    def move(self, move: Move, reason: Reason) -> None:
        self._moves[move.id] = move
        if move.kind not in ARRIVING and move.slot in self._visit_of:
            visit = self._visit_of.pop(move.slot)
            visit.left_at = self._left_at[visit.model] = self._now
            visit.is_cut = self._is_outranked(visit)

    def _is_outranked(self, visit: Visit) -> bool:
        owed, others = [], []
        for arrived, (model, _, priority) in self._arrived.values():
            if model != visit.model:
                others.append(priority)
            elif arrived <= visit.ready_at:
                owed.append(priority)
        return bool(owed and others) and min(others) < min(owed)

    def move_done(self, event: ev.MoveDone) -> None:
        move = self._moves.pop(event.move)
        took_s = event.now - move.started
        if move.kind not in ARRIVING:
            self._go_s = max(self._go_s, took_s)
            return
        self._come_s = max(self._come_s, took_s)
        waiting = [
            (max(arrived, self._served_at.get(flow, arrived)), request, flow[2])
            for request, (arrived, flow) in self._arrived.items()
            if flow[0] == move.model
        ]
        visit = self._visit_of[move.slot] = Visit(move.model, event.now, len(waiting))
        self._visits.append(visit)
        for since, request, priority in sorted(waiting)[:1]:
            since = max(since, self._left_at.get(move.model, since))
            self._came.append(Away(move.model, request, priority, since, event.now))

    def at_rest(self) -> None:
        for one in self._came:
            due_at = one.since + self._due_s(one.priority)
            self.judged += one.ready_at > one.since + self._limits.deadlines_s[_class(one.priority)]
            if one.ready_at > due_at:
                self._judge(one, due_at)

    def _due_s(self, priority: int) -> float:
        """After this long nothing newer goes first, whatever its class."""
        drain_s = self._service_s * (1.0 + log(max(1, self._concurrency)))
        away_s = drain_s + 2 * self._come_s + self._service_s
        should_s = max(self._limits.deadlines_s[_class(priority)], away_s / self._limits.away_share)
        return should_s + self._lift_s

    def _judge(self, one: Away, due_at: float) -> None:
        """Those that are there when it is due, each other model once more, and its own."""
        others = [
            visit
            for visit in self._visits
            if visit.model != one.model and due_at < visit.left_at and visit.ready_at < one.ready_at
        ]
        came = [visit.model for visit in others if visit.ready_at > due_at + self._turn_s(0) and not visit.is_cut]
        again = {model for model in came if came.count(model) > 1}
        bound_s = self._turn_s(0) + sum(self._turn_s(visit.waiting) for visit in others)
        if again or one.ready_at > due_at + bound_s:
            raise Violation(
                f"{one.request} waited {one.ready_at - one.since:.1f} s for {one.model}, due after "
                f"{due_at - one.since:.1f} s, {bound_s:.1f} s for {len(others)} visits; twice: {sorted(again)}"
            )

    def _turn_s(self, waiting: int) -> float:
        """The longest that a visit can take that serves so many: they come, are answered in rounds, and it leaves."""
        rounds = ceil(waiting / self._concurrency) + 2
        return self._go_s + self._come_s + rounds * (self._service_s + ROUNDING_S)


def _class(priority: int) -> int:
    return min(max(priority, 0), 2)
