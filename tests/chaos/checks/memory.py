"""Memory: sleepers fit into the green room, leases are whole and apart, loads are as large as measured.

Also which models the coordinator's rules let leave, while that swapper is configured.
"""

from __future__ import annotations

from greenroom.core import events as ev
from greenroom.core.effects import Reason
from greenroom.core.model import DeviceKind, LeaseId, ModelId, Move, MoveKind, Need, OpId, RequestId, SlotId, Tier
from greenroom.sim.records import SimPlace, Violation
from tests.chaos.checks.base import Check, state_of

_TO_SLEEP = (MoveKind.SLEEP, MoveKind.PREPARE)


class GreenRoom(Check):
    """Slots that stay asleep take no more host memory than allowed, as long as one of them could leave."""

    def __init__(self) -> None:
        self.judged = 0
        self._limit_mib: int | None = None
        self._pinned: dict[ModelId, bool] = {}

    def config_changed(self, event: ev.ConfigChanged) -> None:
        if event.limits is not None:
            self._limit_mib = event.limits.green_room_mib
        self._pinned |= {spec.id: spec.pinned for spec in event.models}

    def settled(self, event: ev.Event) -> None:
        if self._limit_mib is None or self.world is None:
            return
        there = [place for place in self.world.truth.places.values() if _sleeps(place)]
        # All together mostly fit; only if not does it matter which are about to leave.
        if not there or sum(map(self._host_mib, there)) <= self._limit_mib:
            return
        there = [place for place in there if not self._is_to_wake(place)]
        taken_mib = sum(map(self._host_mib, there))
        if taken_mib <= self._limit_mib:
            return
        self.judged += 1
        could_leave = [place.id for place in there if self._could_leave(place)]
        if could_leave:
            raise Violation(f"{taken_mib} MiB sleep, {self._limit_mib} may, and {could_leave} could leave")

    def _is_to_wake(self, place: SimPlace) -> bool:
        # As soon as its memory is free. It is looked up, because nothing that was said tells it.
        slot = None if self.world is None else state_of(self.world).slots.get(place.id)
        return slot is not None and (slot.planned is not None or slot.is_going)

    def _could_leave(self, place: SimPlace) -> bool:
        return place.move is None and not self._pinned.get(place.model) and self._host_mib(place) > 0

    def _host_mib(self, place: SimPlace) -> int:
        claim = place.move.claim if place.move is not None and place.move.kind in _TO_SLEEP else place.asleep_claim
        devices = {} if self.world is None else self.world.truth.devices
        return sum(mib for on, mib in claim.items() if on in devices and devices[on].kind is DeviceKind.HOST)


def _sleeps(place: SimPlace) -> bool:
    return place.tier is Tier.ASLEEP if place.move is None else place.move.kind in _TO_SLEEP


class LeasesWhole(Check):
    """A lease on several GPUs has memory on each of that many different ones, or nothing."""

    def __init__(self) -> None:
        self.judged = 0
        self._asked: dict[str, ev.LeaseAsked] = {}

    def lease_asked(self, event: ev.LeaseAsked) -> None:
        self._asked[event.lease] = event

    def lease_gone(self, event: ev.LeaseGone) -> None:
        self._asked.pop(event.lease, None)

    def grant(self, request: RequestId | LeaseId, slot: SlotId, reason: Reason) -> None:
        if (asked := self._asked.get(request)) is not None:
            self._judge(asked, slot)

    def _judge(self, asked: ev.LeaseAsked, slot: SlotId) -> None:
        """By the claim that its holder is told, the only place where it is said."""
        if self.world is None:
            return
        self.judged += 1
        devices = self.world.truth.devices
        claim = state_of(self.world).slots[slot].claim
        gpus = [mib for on, mib in claim.items() if on in devices and devices[on].kind is DeviceKind.GPU]
        if not any(device.kind is DeviceKind.GPU for device in devices.values()):
            # A machine without GPUs plans with its host's memory.
            gpus = list(claim.values())
        if gpus != [asked.need.gpu_mib] * asked.gpus:
            raise Violation(f"{asked.lease} wants {asked.need.gpu_mib} MiB on {asked.gpus} GPUs and has {dict(claim)}")
        if asked.devices and not set(claim) <= set(asked.devices):
            raise Violation(f"{asked.lease} wants {asked.devices} and has {dict(claim)}")


class Needs(Check):
    """What is planned after a need was told is planned with no less."""

    def __init__(self) -> None:
        self.judged = 0
        self._revisions: dict[ModelId, int] = {}
        self._told: dict[ModelId, tuple[int, Need]] = {}

    def config_changed(self, event: ev.ConfigChanged) -> None:
        for model in event.removed:
            self._told.pop(model, None)
            self._revisions.pop(model, None)
        for spec in event.models:
            if self._revisions.get(spec.id) != spec.revision:
                self._revisions[spec.id] = spec.revision
                self._told.pop(spec.id, None)
        for model, need in (event.needs or {}).items():
            if self.world is not None and model in self._revisions:
                # Slots are numbered as they are planned: those with a higher number come after this was told.
                self._told[model] = (state_of(self.world)._sequence, need)

    def move(self, move: Move, reason: Reason) -> None:
        if move.kind is not MoveKind.LOAD or move.model not in self._told:
            return
        since, need = self._told[move.model]
        if int(move.slot[1:]) > since:
            self.judged += 1
            # A machine may have no memory of its host to plan with.
            if sum(move.claim.values()) < need.gpu_mib:
                raise Violation(f"{move.model} needs {need} and is loaded with {dict(move.claim)}")


class CoordinatorRules(Check):
    """Under the coordinator no model leaves for one that only less urgent requests wait for."""

    def __init__(self) -> None:
        self.judged = 0
        self._is_on = False
        self._priorities: dict[str, int] = {}
        self._named: dict[str, tuple[ModelId, ...]] = {}
        self._operators: dict[str, ModelId] = {}
        self._served: dict[SlotId, int] = {}

    def config_changed(self, event: ev.ConfigChanged) -> None:
        if event.limits is not None:
            self._is_on = event.limits.swapper == "coordinator"

    def request_arrived(self, event: ev.RequestArrived) -> None:
        if self._priorities.setdefault(event.request, event.priority) == event.priority:
            self._named[event.request] = event.candidates

    def request_gone(self, event: ev.RequestGone) -> None:
        self._named.pop(event.request, None)

    def serve_done(self, event: ev.ServeDone) -> None:
        if not event.lost_before_first_byte:
            self._named.pop(event.request, None)

    def reject(self, request: RequestId | LeaseId, *_: object) -> None:
        self._named.pop(request, None)

    def lease_asked(self, event: ev.LeaseAsked) -> None:
        self._priorities[event.lease] = event.priority

    def move_asked(self, event: ev.MoveAsked) -> None:
        self._operators[event.op] = event.model

    def answer(self, op: OpId, *_: object) -> None:
        self._operators.pop(op, None)

    def grant(self, request: RequestId | LeaseId, slot: SlotId, reason: Reason) -> None:
        self._served[slot] = self._priorities[request]

    def move(self, move: Move, reason: Reason) -> None:
        self._judge(move, reason)
        if move.kind in (MoveKind.WAKE, MoveKind.SLEEP):
            # A sleeper's stay is over; the request that wakes it sets its priority from then on.
            self._served.pop(move.slot, None)

    def _judge(self, move: Move, reason: Reason) -> None:
        facts = dict(reason.facts)
        comer, own, model = str(facts.get("for_request")), self._served.get(move.slot), facts.get("for_model")
        if not self._is_on or reason.why != "evicted" or comer not in self._priorities or own is None:
            return
        if model in self._operators.values():
            return
        self.judged += 1
        for_it = [self._priorities[request] for request, models in self._named.items() if model in models]
        if own < min(for_it, default=own + 1) and own < self._priorities[comer]:
            raise Violation(f"{move.slot} of priority {own} leaves for {model}, for which no request as urgent waits")
