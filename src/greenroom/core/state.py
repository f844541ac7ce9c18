"""The scheduler's state. Plain tables: event handlers, `apply.py` and `slots.py` write; others read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import exp, inf
from typing import Final

from greenroom.core.decide import placement
from greenroom.core.decide.placement import Ways
from greenroom.core.effects import OpOutcome
from greenroom.core.events import Limits, Timer
from greenroom.core.ledger import Ledger
from greenroom.core.model import (
    ARRIVING,
    NO_CLAIM,
    Claim,
    Device,
    DeviceId,
    DeviceKind,
    LeaseId,
    ModelId,
    ModelSpec,
    MoveId,
    MoveKind,
    Need,
    OpId,
    Outcome,
    RequestId,
    Slot,
    SlotId,
    Tier,
    larger,
    learn,
    lease_name,
)
from greenroom.core.policy.base import Pacing, Policy
from greenroom.core.queue.waiter import Accounts
from greenroom.core.queue.waitlist import Prices, Queue, Waiter, Waitlist

# Estimate of a load before one was measured: a start-up time, then a GiB per second.
GUESS_START_S: Final = 2.0
GUESS_MIB_PER_S: Final = 1024.0
# A wake copies what is in host memory already.
GUESS_WAKE_MIB_PER_S: Final = 10_240.0

# A rate is taken over no less than this: a burst right after the start says little.
RATE_MIN_S: Final = 60.0

# Number of answers over which a typical answer is averaged.
TYPICAL_OF: Final = 100


@dataclass(slots=True)
class Claimant:
    """A model or a lease that memory is planned for."""

    spec: ModelSpec
    need: Need
    retry_at: float = -inf
    # Why it pauses without rejecting waiters: a refused lease, or a store that is down.
    pausing: Outcome | None = None
    learned_s: dict[MoveKind, float] = field(default_factory=dict)
    service_s: float | None = None
    # The mean over many more answers, for estimates that must not jump with the last few.
    typical_s: float = 0.0
    # Exponentially decayed count of requests, as of `heat_at`. Not counted for leases.
    heat: float = 0.0
    heat_at: float = 0.0
    # When counting began.
    since: float = 0.0

    def rate(self, recency_s: float, now: float) -> float:
        """Requests per second; older requests count less.

        A steady stream has filled only a part of the count when counting began less than `recency_s` ago.
        """
        filled = 1.0 - exp(-max(RATE_MIN_S, now - self.since) / recency_s)
        return self.heat * exp(min(0.0, self.heat_at - now) / recency_s) / (recency_s * filled)

    def move_s(self, kind: MoveKind) -> float:
        """Seconds that this move takes, as learned or else estimated from its size."""
        if (learned := self.learned_s.get(kind)) is not None:
            return learned
        mib = self.need.gpu_mib + self.need.host_mib
        return mib / GUESS_WAKE_MIB_PER_S if kind is MoveKind.WAKE else GUESS_START_S + mib / GUESS_MIB_PER_S


@dataclass(slots=True)
class LeaseRecord(Claimant):
    """A lease that another program asked for or holds. It has no engine: nothing is loaded and nothing is learned."""


@dataclass(slots=True)
class ModelRecord(Claimant):
    """What is known about a model besides its spec: how its loads went and how long things take."""

    failures: int = 0
    memory_retries: int = 0
    # Preload the model again when its back-off ends. Cleared when the model arrives or is unloaded.
    preload_again: bool = False
    answers: int = 0
    # When an answer last ended by itself, or a request with a budget was last granted.
    tried_at: float = -inf
    # Slot time that an answer takes when it shares the slot with others.
    share_s: float | None = None

    def answered(self, took_s: float) -> None:
        """An answer has ended by itself."""
        self.service_s = learn(self.service_s, took_s)
        self.answers += 1
        self.typical_s += (took_s - self.typical_s) / min(self.answers, TYPICAL_OF)

    def inherit(self, old: ModelRecord) -> None:
        """Take over what was learned about an earlier revision."""
        self.learned_s = old.learned_s
        self.service_s, self.typical_s, self.answers, self.share_s = (
            old.service_s,
            old.typical_s,
            old.answers,
            old.share_s,
        )
        self.heat, self.heat_at, self.since = old.heat, old.heat_at, old.since

    def warm_up(self, now: float, recency_s: float) -> None:
        """Count one more request."""
        self.heat = 1.0 + self.heat * exp(min(0.0, self.heat_at - now) / recency_s)
        self.heat_at = now


class Grant:
    """A request or a lease that holds a slot."""

    __slots__ = ("charged_s", "granted_at", "is_cut", "share_from", "slot", "waiter")

    def __init__(
        self, slot: SlotId, waiter: Waiter, granted_at: float, share_from: float = 0.0, charged_s: float = 0.0
    ) -> None:
        """`share_from` is the slot's shared clock at the grant, `charged_s` what its tenant was charged in advance."""
        self.slot = slot
        self.waiter = waiter
        self.granted_at = granted_at
        self.share_from = share_from
        self.charged_s = charged_s
        self.is_cut = False


@dataclass(slots=True)
class LeavingOp:
    """An operator's unload or sleep, and the slots that it still waits for."""

    to: Tier
    slots: dict[SlotId, None]
    outcome: OpOutcome = OpOutcome.DONE


@dataclass(slots=True)
class Counters:
    """Totals for the status page and for tests."""

    ignored: int = 0
    grants: int = 0
    dones: int = 0
    swaps: int = 0


@dataclass(slots=True)
class Crowd:
    """The models on a device: how many are busy or on their way, how many requests run or wait for all of them, and how
    many there are, asleep or not."""

    busy: int = 0
    requests: int = 0
    models: int = 0


class State:
    def __init__(self, policy: Policy) -> None:
        self.limits = Limits()
        self.policy = policy
        self.pacing = Pacing(self.limits)
        self.ledger = Ledger()
        self.models: dict[ModelId, ModelRecord] = {}
        self.leases: dict[LeaseId, LeaseRecord] = {}
        # Both by the name that they have in queues, slots and plans: a model's id, or `lease_name`.
        self.claimants: dict[ModelId, Claimant] = {}
        self.slots: dict[SlotId, Slot] = {}
        self.slots_by_model: dict[ModelId, list[Slot]] = {}
        self.moves: dict[MoveId, Slot] = {}
        self.waitlist = Waitlist(policy.priority_class)
        self.accounts = Accounts()
        self.grants: dict[RequestId, Grant] = {}
        # Devices kept for models that insist and cannot come yet, so that later models do not take them bit by bit.
        # Written by `Rounds` alone.
        self.kept: dict[ModelId, frozenset[DeviceId]] = {}
        self.leaving_ops: dict[OpId, LeavingOp] = {}
        self.timers: dict[Timer, float] = {}
        self.avg_wait_s: float | None = None
        self.avg_swap_s: float | None = None
        self.shutting_down = False
        # While the lease store does not answer, no further memory can be granted.
        self.store_is_down = False
        self.counters = Counters()
        self._sequence = 0

    @property
    def devices(self) -> list[Device]:
        return list(self.ledger.devices.values())

    def next_number(self) -> int:
        self._sequence += 1
        return self._sequence

    @property
    def is_settled(self) -> bool:
        """True if nothing waits and nothing is planned, so no event can have made anything possible."""
        return not (self.waitlist or self.ledger.promises)

    def add_model(self, record: ModelRecord) -> None:
        """Add this model, or replace its earlier revision."""
        self.models[record.spec.id] = self.claimants[record.spec.id] = record

    def drop_model(self, model: ModelId) -> None:
        self.claimants.pop(model, None)
        self.models.pop(model, None)

    def add_lease(self, lease: LeaseId, record: LeaseRecord) -> None:
        self.leases[lease] = self.claimants[record.spec.id] = record

    def drop_lease(self, lease: LeaseId) -> LeaseRecord:
        record = self.leases.pop(lease)
        del self.claimants[record.spec.id]
        return record

    def serving(self, model: ModelId) -> list[Slot]:
        """Its slots that take requests now."""
        revision = self.claimants[model].spec.revision
        return [slot for slot in self.slots_of(model) if slot.is_serving and slot.spec.revision == revision]

    def has_room(self, model: ModelId) -> bool:
        """True if one more request for this model could be served at once."""
        return model in self.models and any(slot.has_room for slot in self.serving(model))

    def swap_s(self, model: ModelId) -> float:
        """Seconds until this model could be ready, once there is room and nothing of it leaves any more."""
        return self.claimants[model].move_s(self.next_move(model))

    def next_move(self, model: ModelId) -> MoveKind:
        """The move that brings this model once what is under way has ended: a wake if it will sleep then."""
        for slot in self.slots_of(model):
            is_prepared = slot.move is not None and slot.move.kind is MoveKind.PREPARE
            if not slot.lost and (is_prepared or (slot.leaving_to or slot.tier) is Tier.ASLEEP):
                return MoveKind.WAKE
        return MoveKind.LOAD

    def open_ways(self, ways: Ways, model: ModelId) -> Ways:
        """Those of a model's ways where no device is kept for another model."""
        kept = self._kept_from(model)
        return ways if kept.isdisjoint(ways.on) else ways.apart_from(kept)

    def _kept_from(self, model: ModelId) -> set[DeviceId]:
        """Devices that are kept for other models."""
        return {device for other, on in self._still_kept() if other != model for device in on}

    def keepers(self, devices: frozenset[DeviceId], but: ModelId) -> tuple[ModelId, ...]:
        """Models for which one of these devices is kept."""
        return tuple(model for model, kept in self._still_kept() if model != but and not kept.isdisjoint(devices))

    def _still_kept(self) -> list[tuple[ModelId, frozenset[DeviceId]]]:
        """Kept devices by model. A model that moves towards serving no longer needs them, also if only to sleep."""
        return [(model, kept) for model, kept in self.kept.items() if not any(map(_moves_in, self.slots_of(model)))]

    def is_away(self, queue: Queue, now: float) -> bool:
        """True if its model is neither ready, moving, planned, leaving nor pausing: a round may bring it."""
        model = queue.model
        record, slots = self.claimants[model], self.slots_by_model.get(model)
        if record.spec.held or (record.pausing is not None and now < record.retry_at):
            return False
        for slot in slots or ():
            is_somewhere = slot.move is not None or slot.planned is not None or slot.is_serving or slot.is_going
            if is_somewhere and slot.spec.revision == record.spec.revision and not slot.lost:
                return False
        return True

    def price_queue(self, model: ModelId) -> None:
        """Update the costs in this model's queue."""
        if model in self.waitlist.queues and model in self.claimants:
            self.waitlist.price(model, self.prices(model))

    def prices(self, model: ModelId) -> Prices:
        """What it takes now to make this model ready and to answer: swap time, answer time, concurrency."""
        record = self.claimants[model]
        return self.swap_s(model), record.service_s or 0.0, record.spec.concurrency or 1

    def knows(self, some_id: str) -> bool:
        """True if a request, lease or operator's order with this id is in progress. Ids are unique across them."""
        return some_id in self.waitlist or some_id in self.grants or some_id in self.leaving_ops

    def record_of(self, slot: Slot) -> ModelRecord | None:
        """The model's record, if the slot is of its current revision."""
        record = self.models.get(slot.model)
        return record if record is not None and record.spec.revision == slot.spec.revision else None

    def at_rest(self) -> list[Slot]:
        """Slots that neither move nor leave and have no plan. On a busy machine these are few."""
        slots = self.slots.values()
        return [slot for slot in slots if slot.move is None and slot.planned is None and slot.leaving_to is None]

    def slots_of(self, model: ModelId) -> list[Slot]:
        return self.slots_by_model.get(model, [])

    def add_slot(self, slot: Slot) -> None:
        self.slots[slot.id] = slot
        self.slots_by_model.setdefault(slot.model, []).append(slot)

    def drop_slot(self, slot: Slot) -> None:
        del self.slots[slot.id]
        siblings = self.slots_by_model[slot.model]
        siblings.remove(slot)
        if not siblings:
            del self.slots_by_model[slot.model]

    def must_wait_its_turn(self, slot: Slot) -> bool:
        """True while a move shares a GPU with it and one of the two engines sizes itself by free memory.

        Such an engine starts only while no other move is under way on its GPUs, and until it is ready nothing else
        starts there. Departures are not held back. Also true while another configuration of the same thing leaves, and
        under coresidency rules while a model that makes room for it still answers.
        """
        if self.limits.company is not None and any(
            other.leaving_for == slot.id and not other.is_idle for other in self.slots.values()
        ):
            return True
        if (word := slot.spec.exclusive) and any(
            other.spec.exclusive == word and other.model != slot.model and (other.is_going or other.lost)
            for other in self.slots.values()
        ):
            return True
        for other in self.moves.values():
            starts = other.move is not None and other.move.kind in ARRIVING
            one_sizes_itself = slot.spec.sizes_itself or (other.spec.sizes_itself and starts)
            if one_sizes_itself and not self._gpus(slot).isdisjoint(self._gpus(other)):
                return True
        return False

    def _gpus(self, slot: Slot) -> set[DeviceId]:
        devices = self.ledger.devices
        return {device for device in slot.claim if device in devices and devices[device].kind is DeviceKind.GPU}

    def asleep_at(self, spec: ModelSpec, claim: Claim) -> Claim:
        """What a slot of this model with that claim holds when asleep; nothing if it cannot sleep."""
        return NO_CLAIM if spec.need_asleep is None else placement.asleep(spec.need_asleep, claim, self.devices)

    def holders(self, on: tuple[DeviceId, ...] = ()) -> tuple[str, ...]:
        """Holders of memory through other gateways, on these devices or on any."""
        held = [lease.holder for lease in self.ledger.others if not on or not lease.claim.keys().isdisjoint(on)]
        return tuple(dict.fromkeys(held))

    def lasting_leases(self, priority: int) -> dict[LeaseId, Claim]:
        """What programs hold by leases that are not recalled for this priority. When these end is not known."""
        lasting: dict[LeaseId, Claim] = {}
        for lease in self.leases:
            for slot in self.slots_of(lease_name(lease)):
                is_recalled = slot.is_going or (not slot.spec.pinned and slot.last_priority > priority)
                if not is_recalled:
                    lasting[lease] = larger(slot.claim, self.ledger.held_by(slot.id))
        for other in self.ledger.others:
            if not other.is_model and not (other.preemptible and other.priority > priority):
                lasting[other.id] = other.claim
        return lasting

    def crowds(self) -> dict[DeviceId, Crowd]:
        """What is on each device. Leases count as busy, those of other gateways too; what is leaving does not count."""
        crowds = {device: Crowd() for device in self.ledger.devices}
        queues = self.waitlist.queues
        for slot in self.slots.values():
            if slot.leaving_to is not None or slot.lost:
                continue
            queue, answers = queues.get(slot.model), len(slot.in_flight)
            for device in slot.claim:
                if (crowd := crowds.get(device)) is not None:
                    crowd.busy += bool(answers) or slot.lease is not None or slot.is_arriving
                    crowd.requests += answers + (queue.waiting if queue is not None else 0)
                    crowd.models += 1
        for lease in self.ledger.others:
            for device in lease.claim:
                if (crowd := crowds.get(device)) is not None:
                    crowd.busy += 1
        return crowds

    def most_mib(
        self, but: Slot | None, leaving: Collection[ModelId] = (), stays: ModelId | None = None
    ) -> dict[DeviceId, int]:
        """Usable memory per device if everything that may leave had left.

        Only pinned models and the model `stays` stay, but not those in `leaving`.
        """
        most = {device.id: device.usable_mib for device in self.ledger.devices.values()}
        for slot, claim in self.fixed(stays):
            if slot is not but and slot.model not in leaving:
                _take(most, claim)
        return most

    def fixed(self, stays: ModelId | None) -> list[tuple[Slot, Claim]]:
        """Slots of pinned models and of the model `stays`, with what they hold or will hold."""
        # Every round asks this of all slots, and few of them are pinned.
        slots = self.slots.values()
        fixed = [slot for slot in slots if slot.spec.pinned or (stays is not None and slot.spec.id == stays)]
        return [
            (slot, slot.claim if slot.planned or slot.move else self.ledger.held_by(slot.id))
            for slot in fixed
            if (slot.lease is None or slot.model == stays) and not slot.is_going and not slot.lost
        ]

    def likely_mib(self, most: Mapping[DeviceId, int]) -> dict[DeviceId, int]:
        """The same without what undeclared processes and leases hold now: they leave only when they choose to."""
        likely = {device: mib - self.ledger.outside_mib(device) for device, mib in most.items()}
        for slot in self.slots.values():
            if slot.lease is not None:
                _take(likely, self.ledger.held_by(slot.id))
        return likely


def _moves_in(slot: Slot) -> bool:
    kind = slot.move.kind if slot.move is not None else slot.planned
    return slot.leaving_to is None and kind in ARRIVING


def _take(room: dict[DeviceId, int], claim: Claim) -> None:
    for device, mib in claim.items():
        room[device] = room.get(device, 0) - mib
