"""What the scheduler knows. Plain tables, changed only by `scheduler.py` and `apply.py`, read by `decide.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

from greenroom.core import placement
from greenroom.core.effects import OpOutcome
from greenroom.core.events import Limits, Timer
from greenroom.core.ledger import Ledger
from greenroom.core.model import (
    NO_CLAIM,
    Claim,
    Device,
    DeviceId,
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
)
from greenroom.core.policy import Blocked, Policy
from greenroom.core.waitlist import Waiter, Waitlist

# Weight of the newest measurement in a learned time: about the last five count.
EWMA_ALPHA = 0.2


def learn(old: float | None, new: float) -> float:
    return new if old is None else old + EWMA_ALPHA * (new - old)


@dataclass(slots=True)
class ModelRecord:
    """What is known of a model besides its spec: how its loads went and how long things take."""

    spec: ModelSpec
    need: Need
    failures: int = 0
    retry_at: float = 0.0
    # Why loads pause without anyone being rejected: a refused lease or a store that is down.
    pausing: Outcome | None = None
    memory_retries: int = 0
    # The back-off of a preload: when it ends the model is wished for again, unless it came or was unloaded meanwhile.
    wish_again: bool = False
    is_lease: bool = False
    learned_s: dict[MoveKind, float] = field(default_factory=dict)
    service_s: float | None = None


@dataclass(slots=True)
class Grant:
    """A request that is being served."""

    slot: SlotId
    waiter: Waiter
    is_cut: bool = False


@dataclass(slots=True)
class LeavingOp:
    """An operator's unload or sleep, and the slots it still waits for."""

    to: Tier
    slots: dict[SlotId, None]
    outcome: OpOutcome = OpOutcome.DONE


@dataclass(slots=True)
class Counters:
    """What happened, for the status page and for tests."""

    ignored: int = 0
    grants: int = 0
    dones: int = 0
    overtakes: int = 0


class State:
    def __init__(self, policy: Policy) -> None:
        self.limits = Limits()
        self.policy = policy
        self.ledger = Ledger()
        self.models: dict[ModelId, ModelRecord] = {}
        self.slots: dict[SlotId, Slot] = {}
        self.slots_by_model: dict[ModelId, list[Slot]] = {}
        self.moves: dict[MoveId, Slot] = {}
        self.waitlist = Waitlist()
        self.grants: dict[RequestId, Grant] = {}
        # Earlier waiters that block later ones, by the model they wait for, and how often each was overtaken.
        self.blocked: dict[ModelId, Blocked] = {}
        self.overtaken: dict[ModelId, int] = {}
        self.leaving_ops: dict[OpId, LeavingOp] = {}
        self.timers: dict[Timer, float] = {}
        self.avg_wait_s: float | None = None
        self.shutting_down = False
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
        """Nobody waits for anything, so nothing can have become possible."""
        return not (self.waitlist or self.blocked or self.overtaken or self.ledger.promises)

    def knows(self, some_id: str) -> bool:
        """Whether a request, lease or operator's order of this id is under way. Ids are unique among all of them."""
        return some_id in self.waitlist or some_id in self.grants or some_id in self.leaving_ops

    def record_of(self, slot: Slot) -> ModelRecord | None:
        """The model's record, if the slot still is of its current revision."""
        record = self.models.get(slot.model)
        return record if record is not None and record.spec.revision == slot.spec.revision else None

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

    def asleep_at(self, spec: ModelSpec, claim: Claim) -> Claim:
        """What a slot of this model placed there holds when asleep; nothing if it cannot sleep."""
        return NO_CLAIM if spec.need_asleep is None else placement.asleep(spec.need_asleep, claim, self.devices)

    def room_mib(self) -> dict[DeviceId, int]:
        """Free memory per device with promises kept and with everyone who is already going gone."""
        going = [slot for slot in self.slots.values() if slot.is_going]
        room = self.ledger.free_mib(without=frozenset(slot.id for slot in going))
        for slot in going:
            if slot.leaving_to is Tier.ASLEEP:
                _take(room, slot.claim_asleep)
        return room

    def most_mib(self, but: Slot | None) -> dict[DeviceId, int]:
        """What there could be per device if everybody left who ever may: pinned models stay, strangers may go."""
        most = {device.id: device.usable_mib for device in self.ledger.devices.values()}
        for slot in self.slots.values():
            if slot.spec.pinned and slot.lease is None and slot is not but and not slot.is_going and not slot.lost:
                _take(most, slot.claim if slot.planned or slot.move else self.ledger.held_by(slot.id))
        return most


def _take(room: dict[DeviceId, int], claim: Claim) -> None:
    for device, mib in claim.items():
        room[device] = room.get(device, 0) - mib
