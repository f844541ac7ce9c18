"""A small deterministic world for the scheduler: a clock, engines that take their time, and accounts of its own.

`Recorder` only writes effects down. `World` plays them: loads and answers take time on a virtual clock, and every
effect is judged against what the world itself knows (memory, tiers, waiters), never against the scheduler's tables.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from heapq import heappop, heappush
from itertools import count
from typing import Any

from greenroom.core import events as ev
from greenroom.core.effects import Effects, OpOutcome, Reason, RejectCode, Rejection
from greenroom.core.events import Limits, Timer
from greenroom.core.invariants import check
from greenroom.core.model import (
    ARRIVING,
    LEGAL_MOVES,
    NO_TENANT,
    Device,
    DeviceId,
    DeviceKind,
    LeaseId,
    ModelId,
    ModelSpec,
    Move,
    MoveId,
    MoveKind,
    Need,
    OpId,
    OtherLease,
    Outcome,
    RequestId,
    SlotId,
    TenantId,
    Tier,
)
from greenroom.core.policy import BUILT_IN, SWAPPERS, Swappers
from greenroom.core.policy.base import Policies
from greenroom.core.queue.waitlist import Queue
from greenroom.core.scheduler import DefaultScheduler

HOST = DeviceId("host")
# Effects that reject, cut or answer come from one event; what follows from them takes the world this long.
SOON_S = 0.01
STEPS_MAX = 100_000


def gpu(number: int, capacity_mib: int, margin_mib: int = 0) -> Device:
    return Device(DeviceId(f"gpu{number}"), DeviceKind.GPU, capacity_mib, margin_mib)


def host(capacity_mib: int) -> Device:
    return Device(HOST, DeviceKind.HOST, capacity_mib)


def model(
    name: str, gpu_mib: int = 4_000, *, host_mib: int = 0, asleep: Need | None = None, **more: object
) -> ModelSpec:
    spec = {"need": Need(gpu_mib, host_mib), "need_asleep": asleep, **more}
    return ModelSpec(ModelId(name), **spec)  # type: ignore[arg-type]


CHECKED_WITH_MANY = 10


class Recorder:
    """Effects that only write down what was asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def grant(self, request: RequestId | LeaseId, slot: SlotId, reason: Reason) -> None:
        self.calls.append(("grant", request, slot, reason))

    def reject(self, request: RequestId | LeaseId, rejection: Rejection, reason: Reason) -> None:
        self.calls.append(("reject", request, rejection, reason))

    def cut(self, request: RequestId, reason: Reason) -> None:
        self.calls.append(("cut", request, reason))

    def move(self, move: Move, reason: Reason) -> None:
        self.calls.append(("move", move, reason))

    def abort(self, move: MoveId, reason: Reason) -> None:
        self.calls.append(("abort", move, reason))

    def answer(self, op: OpId, outcome: OpOutcome, reason: Reason) -> None:
        self.calls.append(("answer", op, outcome, reason))

    def recall(self, lease: LeaseId, deadline: float, reason: Reason) -> None:
        self.calls.append(("recall", lease, deadline, reason))

    def set_timer(self, timer: Timer, at: float | None, reason: Reason) -> None:
        self.calls.append(("set_timer", timer, at, reason))


class Fate(Enum):
    WAITING = "waiting"
    GRANTED = "granted"
    SERVED = "served"
    REJECTED = "rejected"
    GONE = "gone"


@dataclass
class Call:
    """A request or a lease as the world sees it."""

    id: str
    number: int
    candidates: tuple[ModelId, ...]
    priority: int
    tenant: TenantId
    takes_s: float | None
    is_lease: bool = False
    fate: Fate = Fate.WAITING
    slot: SlotId | None = None
    was_cut: bool = False
    grants: int = 0
    arrived: float = 0.0
    granted_at: float = 0.0
    ended_at: float = 0.0
    rejection: Rejection | None = None


@dataclass
class Place:
    """A slot as the world sees it: where it is and what it really holds."""

    model: ModelId
    tier: Tier = Tier.COLD
    holds: dict[DeviceId, int] = field(default_factory=dict)
    # What it held before the move that is under way.
    held: dict[DeviceId, int] = field(default_factory=dict)
    move: Move | None = None
    fell: bool = False
    # What its copy takes while it sleeps, since it first did.
    asleep: dict[DeviceId, int] | None = None


@dataclass
class Engine:
    """How a model behaves in this world."""

    load_s: float = 5.0
    wake_s: float = 0.5
    leave_s: float = 1.0
    seen: Mapping[DeviceId, int] | None = None
    # The same when it has gone to sleep.
    seen_asleep: Mapping[DeviceId, int] | None = None
    # What it says a move takes in all, where it answers before that is over.
    took_s: float | None = None


class World(Recorder):
    """Plays the scheduler's effects and checks every one of them."""

    def __init__(
        self,
        models: Iterable[ModelSpec] = (),
        devices: Sequence[Device] = (gpu(0, 8_000),),
        limits: Limits | None = None,
        policies: Policies = BUILT_IN,
        swappers: Swappers = SWAPPERS,
        plays: bool = True,
        scheduler: Callable[[Effects], Any] | None = None,
    ) -> None:
        """Without another `scheduler` it is the default one, with these policies and swappers."""
        super().__init__()
        self.now = 0.0
        self.plays = plays
        self.events: list[ev.Event] = []
        self.calls_by_id: dict[str, Call] = {}
        # Those that may be waiting or granted, so that a long run need not look at all that ever came.
        self._open: list[Call] = []
        self.places: dict[SlotId, Place] = {}
        self.moving: dict[MoveId, Move] = {}
        self.moves: list[Move] = []
        self.reasons: dict[MoveId, Reason] = {}
        self.ops: dict[str, OpOutcome | None] = {}
        self.timers: dict[Timer, float] = {}
        self.recalled: dict[LeaseId, float] = {}
        self.aborted: set[MoveId] = set()
        self.specs: dict[ModelId, ModelSpec] = {}
        self.devices: dict[DeviceId, Device] = {}
        self.foreign: dict[DeviceId, int] = {}
        self.others: tuple[OtherLease, ...] = ()
        self.engines: dict[str, Engine] = {}
        self.outcome_of: Callable[[Move], Outcome] = lambda move: Outcome.DONE
        self.told_to_leave: set[ModelId] = set()
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count(1)
        self.scheduler = DefaultScheduler(self, policies, swappers) if scheduler is None else scheduler(self)
        self.config(*models, devices=tuple(devices), limits=limits)

    # --- what happens -------------------------------------------------------------------------------------------------

    def post(self, event: ev.Event) -> None:
        self.events.append(event)
        self.scheduler.handle(event)
        # A check decides on everything that waits: with very many models it would take nearly all of the time.
        if not self.scheduler.state.waitlist.has_many_models or len(self.events) % CHECKED_WITH_MANY == 0:
            check(self.scheduler, event.now)

    def config(
        self,
        *models: ModelSpec,
        removed: tuple[str, ...] = (),
        devices: tuple[Device, ...] | None = None,
        limits: Limits | None = None,
        learned: Mapping[ModelId, ev.Learned] | None = None,
        needs: Mapping[ModelId, Need] | None = None,
    ) -> None:
        for spec in models:
            old = self.specs.get(spec.id)
            if old is not None and old.revision != spec.revision:
                self.told_to_leave.add(spec.id)
            self.specs[spec.id] = spec
            self.engines.setdefault(spec.id, Engine())
        self.told_to_leave.update(ModelId(name) for name in removed)
        if devices is not None:
            self.devices = {device.id: device for device in devices}
        gone = tuple(ModelId(name) for name in removed)
        self.post(ev.ConfigChanged(self.now, models, gone, devices, limits, learned, needs))

    def promote(self, coming: str, spec: ModelSpec) -> None:
        """A version takes the name of its model."""
        known = self.scheduler.state.models.get(ModelId(coming))
        if known is not None and known.spec.version_of == spec.id:
            self.told_to_leave.add(spec.id)
            self.specs[spec.id] = spec
            self.engines.setdefault(spec.id, Engine())
            for place in self.places.values():
                place.model = spec.id if place.model == coming else place.model
        self.post(ev.VersionPromoted(self.now, ModelId(coming), spec))

    def arrive(
        self,
        name: str,
        *candidates: str,
        takes_s: float | None = None,
        priority: int = 1,
        tenant: str = NO_TENANT,
        within_s: float | None = None,
        patient: bool = True,
        budget_s: float | None = None,
        keep_alive_s: float | None = None,
        choice: ev.Choice | None = None,
    ) -> Call:
        """A request comes. It takes that long once granted; None: until `finish`."""
        wanted = tuple(ModelId(candidate) for candidate in candidates)
        call = Call(name, next(self._numbers), wanted, priority, TenantId(tenant), takes_s, arrived=self.now)
        assert name not in self.calls_by_id
        self.calls_by_id[name] = call
        self._open.append(call)
        give_up_at = None if within_s is None else self.now + within_s
        answer_by = None if budget_s is None else self.now + budget_s
        self.post(self.arrival(call, give_up_at, patient, answer_by, keep_alive_s, choice))
        return call

    def arrival(
        self,
        call: Call,
        give_up_at: float | None = None,
        patient: bool = True,
        answer_by: float | None = None,
        keep_alive_s: float | None = None,
        choice: ev.Choice | None = None,
    ) -> ev.RequestArrived:
        request, who = RequestId(call.id), (call.candidates, call.priority, call.tenant)
        return ev.RequestArrived(self.now, request, *who, give_up_at, patient, answer_by, keep_alive_s, choice)

    def asking(
        self,
        name: str,
        *candidates: str,
        priority: int = 1,
        tenant: str = NO_TENANT,
        budget_s: float | None = None,
        choice: ev.Choice | None = None,
    ) -> ev.RequestArrived:
        """A request that might come now, for questions about it."""
        wanted = tuple(ModelId(candidate) for candidate in candidates)
        answer_by = None if budget_s is None else self.now + budget_s
        return self.arrival(Call(name, 0, wanted, priority, TenantId(tenant), None), answer_by=answer_by, choice=choice)

    def finish(self, name: str, *, lost: bool = False, busy: bool = False) -> None:
        """A granted request ends. `busy` is why it was lost."""
        call = self.calls_by_id[name]
        assert call.fate is Fate.GRANTED and not call.is_lease
        call.fate, call.ended_at = (Fate.WAITING if lost else Fate.SERVED), self.now
        call.slot = None
        self.post(ev.ServeDone(self.now, RequestId(name), lost, busy))

    def go(self, name: str) -> None:
        """A client leaves."""
        call = self.calls_by_id[name]
        assert call.fate in (Fate.WAITING, Fate.GRANTED)
        call.fate, call.slot, call.ended_at = Fate.GONE, None, self.now
        self.post(ev.RequestGone(self.now, RequestId(name)))

    def ask(
        self,
        op: str,
        kind: MoveKind,
        name: str,
        *,
        grace_s: float | None = None,
        evict: tuple[str, ...] = (),
    ) -> None:
        self.ops[op] = None
        leaving = kind in (MoveKind.SLEEP, MoveKind.UNLOAD)
        self.told_to_leave.update(ModelId(one) for one in [*evict, *([name] if leaving else [])])
        others = tuple(ModelId(one) for one in evict)
        self.post(ev.MoveAsked(self.now, OpId(op), kind, ModelId(name), others, grace_s))

    def ask_lease(
        self,
        name: str,
        gpu_mib: int,
        *,
        priority: int = 1,
        preemptible: bool = False,
        within_s: float | None = None,
        devices: tuple[DeviceId, ...] = (),
        gpus: int = 1,
        waits_since: float | None = None,
    ) -> Call:
        call = Call(name, next(self._numbers), (), priority, NO_TENANT, None, is_lease=True)
        self.calls_by_id[name] = call
        self._open.append(call)
        give_up_at = None if within_s is None else self.now + within_s
        self.post(
            ev.LeaseAsked(
                self.now,
                LeaseId(name),
                Need(gpu_mib),
                priority,
                devices,
                preemptible,
                give_up_at=give_up_at,
                gpus=gpus,
                waits_since=waits_since,
            )
        )
        return call

    def end_lease(self, name: str) -> None:
        call = self.calls_by_id[name]
        if call.fate is Fate.GRANTED:
            assert call.slot is not None
            del self.places[call.slot]
        call.fate = Fate.SERVED if call.fate is Fate.GRANTED else Fate.GONE
        self.recalled.pop(LeaseId(name), None)
        self.post(ev.LeaseGone(self.now, LeaseId(name)))

    def end_move(self, move_id: MoveId, outcome: Outcome) -> None:
        """A move ends. Exactly one `MoveDone` for each."""
        move = self.moving.pop(move_id)
        place, engine = self.places[move.slot], self._engine(move.model)
        place.move = None
        told, fell = outcome, place.fell
        if place.fell and outcome is Outcome.DONE:
            # The process died during the move; the program that carried it out has not noticed.
            outcome = Outcome.FAILED
        place.fell = False
        if told is Outcome.NO_LEASE and move.kind not in ARRIVING and not fell:
            # The engine was not touched.
            place.holds = place.held
            self.post(ev.MoveDone(self.now, move_id, told))
            return
        # A move that failed leaves nothing behind, except that a sleeping model still sleeps.
        arrived = LEGAL_MOVES[move.kind][1] if outcome is Outcome.DONE else place.tier
        place.tier = Tier.COLD if move.kind is MoveKind.UNLOAD else arrived
        told_of = {Tier.READY: engine.seen, Tier.ASLEEP: engine.seen_asleep}.get(place.tier)
        seen = None if told_of is None or outcome is not Outcome.DONE else dict(told_of)
        if place.tier is Tier.COLD:
            del self.places[move.slot]
        elif outcome is Outcome.DONE:
            place.holds = {**move.claim, **{on: max(mib, move.claim.get(on, 0)) for on, mib in (seen or {}).items()}}
            if place.tier is Tier.ASLEEP:
                # On the host it takes what it says, also if that is less.
                less = {on: mib for on, mib in (seen or {}).items() if on == HOST and on in move.claim}
                place.holds = {**place.holds, **less}
                place.asleep = {on: min(mib, less.get(on, mib)) for on, mib in move.claim.items()}
        elif move.kind is MoveKind.WAKE:
            assert place.asleep is not None
            place.holds = dict(place.asleep)
        self.post(ev.MoveDone(self.now, move_id, told, seen, took_s=engine.took_s))

    def lose(self, *slots: SlotId, left_in: Tier = Tier.COLD) -> None:
        """A process dies and takes these slots with it."""
        for slot in slots:
            place = self.places[slot]
            if place.move is not None:
                place.fell = True
            elif left_in is Tier.ASLEEP and self.specs[place.model].need_asleep is not None:
                asleep = place.asleep or dict(self.scheduler.state.slots[slot].claim_asleep)
                place.tier, place.asleep, place.holds = Tier.ASLEEP, asleep, dict(asleep)
            else:
                del self.places[slot]
        self.post(ev.SlotsLost(self.now, slots, left_in, "crash"))

    def memory(
        self,
        foreign_mib: Mapping[DeviceId, int],
        seen: Mapping[SlotId, Mapping[DeviceId, int]] | None = None,
        leases: tuple[OtherLease, ...] | None = None,
    ) -> None:
        self.foreign.update(foreign_mib)
        if leases is not None:
            self.others = leases
        for slot, figures in (seen or {}).items():
            for device, mib in figures.items():
                holds = self.places[slot].holds
                holds[device] = max(mib, holds.get(device, 0))
        self.post(ev.MemoryChanged(self.now, foreign_mib, seen, leases))

    def shut_down(self, drain_s: float) -> None:
        self.told_to_leave.update(self.specs)
        self.post(ev.ShutdownAsked(self.now, drain_s))

    # --- time -----------------------------------------------------------------------------------------------------

    def later(self, after_s: float, action: Callable[[], object]) -> None:
        heappush(self._heap, (self.now + after_s, next(self._numbers), action))

    def keep_busy(self, name: str, takes_s: float, for_s: float) -> None:
        """Ask this model for more answers of this length than it can give one at a time, for so long."""
        ends, numbers = self.now + for_s, count()

        def ask() -> None:
            self.arrive(f"{name} busy {next(numbers)}", name, takes_s=takes_s)
            if self.now < ends:
                self.later(takes_s * 0.45, ask)

        ask()

    def run(self, for_s: float = float("inf")) -> None:
        """Let time pass: everything scheduled happens in order, timers included."""
        until = self.now + for_s
        for _ in range(STEPS_MAX):
            timer = min(self.timers, key=lambda timer: self.timers[timer], default=None)
            due = self.timers[timer] if timer is not None else float("inf")
            at = self._heap[0][0] if self._heap else float("inf")
            if min(due, at) > until or min(due, at) == float("inf"):
                break
            self.now = max(self.now, min(due, at))
            if timer is not None and due <= at:
                self.fire(timer)
            else:
                heappop(self._heap)[2]()
        else:
            raise AssertionError("the world does not come to rest")
        if until != float("inf"):
            self.now = until

    def fire(self, timer: Timer) -> None:
        del self.timers[timer]
        self.post(ev.TimerFired(self.now, timer))

    # --- effects, judged ------------------------------------------------------------------------------------------

    def grant(self, request: RequestId | LeaseId, slot: SlotId, reason: Reason) -> None:
        super().grant(request, slot, reason)
        call = self.calls_by_id[request]
        assert call.fate is Fate.WAITING, f"{request} is granted though it is {call.fate}"
        if call.is_lease:
            self._grant_lease(call, slot)
        else:
            self._judge_grant(call, slot)
        call.fate, call.slot, call.granted_at = Fate.GRANTED, slot, self.now
        call.grants += 1
        if self.plays and call.takes_s is not None:
            grants = call.grants
            self.later(call.takes_s, lambda: self._finish_if_granted(call, grants))

    def _judge_grant(self, call: Call, slot: SlotId) -> None:
        place = self.places[slot]
        assert place.tier is Tier.READY and place.move is None, f"{call.id} is granted {slot}, which is not ready"
        assert place.model in call.candidates, f"{call.id} is granted {place.model}"
        others = self.open_calls()
        running = sum(1 for other in others if other.slot == slot and other.fate is Fate.GRANTED)
        limit = self.specs[place.model].concurrency or 1
        assert running < limit, f"{slot} serves {running} and is given {call.id}"
        if call.grants == 0 and len(call.candidates) == 1:
            line = (call.tenant, call.priority, call.candidates)
            for other in others:
                if other.fate is Fate.WAITING and other.number < call.number and not other.is_lease:
                    passed = (other.tenant, other.priority, other.candidates) == line
                    assert not passed, f"{call.id} passed {other.id}"

    def _grant_lease(self, call: Call, slot: SlotId) -> None:
        claim = self.scheduler.state.slots[slot].claim
        self._judge_memory(slot, {}, claim)
        self.places[slot] = Place(ModelId(""), Tier.READY, dict(claim))

    def reject(self, request: RequestId | LeaseId, rejection: Rejection, reason: Reason) -> None:
        super().reject(request, rejection, reason)
        call = self.calls_by_id[request]
        assert call.fate is Fate.WAITING, f"{request} is rejected though it is {call.fate}"
        call.fate, call.rejection, call.ended_at = Fate.REJECTED, rejection, self.now

    def cut(self, request: RequestId, reason: Reason) -> None:
        super().cut(request, reason)
        call = self.calls_by_id[request]
        assert call.fate is Fate.GRANTED and not call.was_cut, f"{request} is cut though it is {call.fate}"
        call.was_cut = True
        if self.plays:
            grants = call.grants
            self.later(SOON_S, lambda: self._finish_if_granted(call, grants))

    def move(self, move: Move, reason: Reason) -> None:
        super().move(move, reason)
        assert move.id not in self.reasons, f"{move.id} is used twice"
        self.moves.append(move)
        self.reasons[move.id] = reason
        place = self.places.setdefault(move.slot, Place(move.model))
        assert place.move is None, f"{move.slot} moves already"
        sources, _ = LEGAL_MOVES[move.kind]
        assert place.tier in sources, f"{move.slot} is {place.tier} and is to {move.kind}"
        place.held = place.holds
        if move.kind in ARRIVING or move.kind is MoveKind.SLEEP:
            during = {on: max(place.holds.get(on, 0), move.claim.get(on, 0)) for on in {*place.holds, *move.claim}}
            self._judge_memory(move.slot, place.holds, during)
            place.holds = during
        if move.kind in (MoveKind.SLEEP, MoveKind.UNLOAD):
            self._judge_leaving(move, reason)
        place.move = move
        self.moving[move.id] = move
        if self.plays:
            engine = self._engine(move.model)
            took = {MoveKind.LOAD: engine.load_s, MoveKind.PREPARE: engine.load_s, MoveKind.WAKE: engine.wake_s}
            self.later(took.get(move.kind, engine.leave_s), lambda: self._end_if_moving(move))

    def _judge_memory(self, slot: SlotId, before: Mapping[DeviceId, int], during: Mapping[DeviceId, int]) -> None:
        for device, mib in during.items():
            if mib <= before.get(device, 0):
                continue
            others = sum(place.holds.get(device, 0) for other, place in self.places.items() if other != slot)
            usable = self.devices[device].capacity_mib - self.devices[device].margin_mib
            outside = self.foreign.get(device, 0) + sum(lease.claim.get(device, 0) for lease in self.others)
            assert others + mib + outside <= usable, f"{slot} does not fit {device}"

    def _judge_leaving(self, move: Move, reason: Reason) -> None:
        running = [call.id for call in self.open_calls() if call.slot == move.slot]
        assert not running, f"{move.slot} leaves while it serves {running}"
        spec = self.specs[move.model]
        if reason.why in ("evicted", "ttl") and spec.pinned:
            assert move.model in self.told_to_leave, f"{move.model} is pinned and leaves because of {reason}"

    def abort(self, move: MoveId, reason: Reason) -> None:
        super().abort(move, reason)
        assert move in self.moving and move not in self.aborted, f"{move} is aborted though it does not move"
        self.aborted.add(move)
        if self.plays:
            self.later(SOON_S, lambda: self.end_move(move, Outcome.ABORTED) if move in self.moving else None)

    def answer(self, op: OpId, outcome: OpOutcome, reason: Reason) -> None:
        super().answer(op, outcome, reason)
        assert self.ops[op] is None, f"{op} is answered twice"
        self.ops[op] = outcome

    def recall(self, lease: LeaseId, deadline: float, reason: Reason) -> None:
        super().recall(lease, deadline, reason)
        assert lease not in self.recalled and self.calls_by_id[lease].fate is Fate.GRANTED
        self.recalled[lease] = deadline
        if self.plays:
            self.later((deadline - self.now) / 2, lambda: self.end_lease(lease) if lease in self.recalled else None)

    def set_timer(self, timer: Timer, at: float | None, reason: Reason) -> None:
        super().set_timer(timer, at, reason)
        self.timers.pop(timer, None)
        if at is not None:
            self.timers[timer] = at

    # --- asked by tests -----------------------------------------------------------------------------------------------

    def fate(self, name: str) -> Fate:
        return self.calls_by_id[name].fate

    def code(self, name: str) -> RejectCode | None:
        rejection = self.calls_by_id[name].rejection
        return rejection.code if rejection is not None else None

    def tier(self, name: str) -> Tier:
        """The best tier this model is on."""
        tiers = {place.tier for place in self.places.values() if place.model == name}
        return next((tier for tier in Tier if tier in tiers), Tier.COLD)

    def slot_of(self, name: str) -> SlotId:
        return next(slot for slot, place in self.places.items() if place.model == name)

    def kinds(self, name: str | None = None) -> list[str]:
        """Every move so far, as `load a`, in order."""
        return [f"{move.kind.value} {move.model}" for move in self.moves if name in (None, move.model)]

    def granted(self) -> list[str]:
        """The ids that were granted, in order."""
        return [str(call[1]) for call in self.calls if call[0] == "grant"]

    def open_calls(self) -> list[Call]:
        """All that wait or are granted, in the order they came."""
        self._open = [call for call in self._open if call.fate in (Fate.WAITING, Fate.GRANTED)]
        return self._open

    def is_at_rest(self) -> bool:
        return not self.open_calls() and not self.moving and None not in self.ops.values()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _engine(self, name: ModelId) -> Engine:
        return self.engines.get(name, Engine())

    def _finish_if_granted(self, call: Call, grants: int) -> None:
        if call.fate is Fate.GRANTED and call.grants == grants:
            self.finish(call.id)

    def _end_if_moving(self, move: Move) -> None:
        if move.id in self.moving:
            self.end_move(move.id, self.outcome_of(move))


def picture(thing: object) -> object:
    """Everything inside, as plain values that compare and print; for seeing whether anything has changed."""
    if isinstance(thing, Mapping):
        return [(picture(key), picture(value)) for key, value in thing.items()]
    if isinstance(thing, (list, tuple, deque)):
        return [picture(one) for one in thing]
    if isinstance(thing, (set, frozenset)):
        return sorted(repr(picture(one)) for one in thing)
    if isinstance(thing, Enum) or thing is None or isinstance(thing, (str, int, float)):
        return repr(thing)
    if is_dataclass(thing):
        # Values kept only to answer the next question faster are no part of the comparison.
        return [(one.name, picture(getattr(thing, one.name))) for one in fields(thing) if one.compare]
    if callable(thing):
        return str(getattr(thing, "__qualname__", thing))
    if hasattr(thing, "takes_at"):
        # A policy keeps no state. What its solver remembers changes no answer.
        return type(thing).__name__
    if isinstance(thing, Queue):
        # Its times are computed again when they are read; reading them changes nothing.
        assert thing.deadline_at >= thing.oldest
    # A compiled class has neither slots nor a dictionary, but the names of its attributes.
    names = getattr(thing, "__slots__", None) or getattr(thing, "__mypyc_attrs__", None) or vars(thing)
    return [(name, picture(getattr(thing, name))) for name in names if name != "__dict__"]
