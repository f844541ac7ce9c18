"""The nouns of the core: models, slots, tiers, moves, devices and claims.

Owns the table of legal moves and the records that the scheduler keeps about slots. Never decides anything: a slot knows
its own facts (`is_idle`, `has_room`), not what should happen to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

ModelId = NewType("ModelId", str)
SlotId = NewType("SlotId", str)
MoveId = NewType("MoveId", str)
RequestId = NewType("RequestId", str)
DeviceId = NewType("DeviceId", str)
TenantId = NewType("TenantId", str)
OpId = NewType("OpId", str)
LeaseId = NewType("LeaseId", str)

NO_TENANT = TenantId("")

# MiB per device. Treated as immutable everywhere; keys are kept sorted so that nothing depends on hash order.
Claim = Mapping[DeviceId, int]
NO_CLAIM: Claim = {}


def cuda_name(device: str) -> str:
    """The name CUDA knows a GPU by: its UUID, or the number of a simulated GPU such as gpu0."""
    number = device.removeprefix("gpu")
    return number if number.isdecimal() else device


def larger(one: Claim, other: Claim) -> Claim:
    """Per device the larger of the two."""
    if other.keys() <= one.keys():
        return {device: max(mib, other.get(device, 0)) for device, mib in one.items()}
    return {device: max(one.get(device, 0), other.get(device, 0)) for device in sorted({*one, *other})}


class Tier(Enum):
    """A slot's place."""

    READY = "ready"
    ASLEEP = "asleep"
    COLD = "cold"


class MoveKind(Enum):
    """Changing tier."""

    # There is one of each, so that identity will do; an Enum's own hash is a call of Python for every look-up.
    __hash__ = object.__hash__

    LOAD = "load"
    WAKE = "wake"
    SLEEP = "sleep"
    PREPARE = "prepare"
    UNLOAD = "unload"


# The only ways from tier to tier. `docs/design/` draws its diagram from this table.
LEGAL_MOVES: Mapping[MoveKind, tuple[frozenset[Tier], Tier]] = {
    MoveKind.LOAD: (frozenset({Tier.COLD}), Tier.READY),
    MoveKind.WAKE: (frozenset({Tier.ASLEEP}), Tier.READY),
    MoveKind.SLEEP: (frozenset({Tier.READY}), Tier.ASLEEP),
    MoveKind.PREPARE: (frozenset({Tier.COLD}), Tier.ASLEEP),
    MoveKind.UNLOAD: (frozenset({Tier.READY, Tier.ASLEEP}), Tier.COLD),
}

# Moves that bring a model closer to serving; the others make room.
ARRIVING = frozenset({MoveKind.LOAD, MoveKind.WAKE, MoveKind.PREPARE})


class Outcome(Enum):
    """How a move ended. Only `failed` is the engine's fault."""

    DONE = "done"
    NO_LEASE = "no_lease"
    NO_MEMORY = "no_memory"
    STORE_DOWN = "store_down"
    FAILED = "failed"
    ABORTED = "aborted"


class DeviceKind(Enum):
    GPU = "gpu"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Device:
    """Something with memory. `margin_mib` is never planned with."""

    id: DeviceId
    kind: DeviceKind
    capacity_mib: int
    margin_mib: int = 0

    @property
    def usable_mib(self) -> int:
        return self.capacity_mib - self.margin_mib


@dataclass(frozen=True, slots=True)
class Need:
    """What a slot needs before it is known where: on GPUs, and on the host besides."""

    gpu_mib: int = 0
    host_mib: int = 0

    def or_more(self, other: Need) -> Need:
        """On each side the larger of the two."""
        return Need(max(self.gpu_mib, other.gpu_mib), max(self.host_mib, other.host_mib))

    def raised(self, factor: float) -> Need:
        return Need(*(int(mib * factor) + 1 if mib else 0 for mib in (self.gpu_mib, self.host_mib)))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the scheduler must know about a model. A changed spec that needs another process has a higher revision."""

    id: ModelId
    revision: int = 1
    need: Need = Need()
    need_asleep: Need | None = None  # None: its engine cannot sleep.
    devices: tuple[DeviceId, ...] = ()  # The operator's choice; empty: any.
    can_split: bool = False
    sizes_itself: bool = False
    concurrency: int | None = None  # None: what the engine says when it is ready.
    priority: int = 1
    ttl_s: float = 0.0  # 0 = never.
    grace_s: float = 30.0
    pinned: bool = False
    preload: bool = False
    gpus: int = 1  # More: its need on each of so many different GPUs, all or nothing. Only leases ask for that.


@dataclass(frozen=True, slots=True)
class Group:
    """Models under one rule. Every model in no group is in one more, with the rules that are the defaults here."""

    name: str
    members: tuple[ModelId, ...]
    swap: bool = True  # Only one member at a time.
    exclusive: bool = True  # A member that comes sends the members of other groups away,
    persistent: bool = False  # except those of persistent groups.


@dataclass(frozen=True, slots=True)
class Matrix:
    """Sets of models that may be ready together, as written.

    A name in `vars` stands for its model, every other one for the model of that id.
    """

    sets: tuple[tuple[str, str], ...]
    costs: Mapping[str, int] = field(default_factory=dict)
    vars: Mapping[str, ModelId] = field(default_factory=dict)

    def model(self, name: str) -> ModelId:
        return self.vars.get(name, ModelId(name))


# Which models may be ready together. Plain records, so that they can travel in events and be replayed.
Rules = tuple[Group, ...] | Matrix


@dataclass(frozen=True, slots=True)
class Move:
    """An order to change a slot's tier. `claim` says what the slot may use where once it has arrived.

    `makes_room_for` is the slot for whose sake this one leaves, if it leaves for another's.
    """

    id: MoveId
    kind: MoveKind
    slot: SlotId
    model: ModelId
    revision: int
    claim: Claim
    started: float
    makes_room_for: SlotId | None = None


@dataclass(frozen=True, slots=True)
class OtherLease:
    """Memory held through another gateway. It is not ours to take back; `claim` is what it takes, seen use included."""

    id: LeaseId
    holder: str
    claim: Claim
    priority: int = 1
    preemptible: bool = False


# In-flight counts before the engine has said how many it takes at once.
CONCURRENCY_UNKNOWN = 1


@dataclass(slots=True, eq=False)
class Slot:
    """One revision of a model on a set of devices. A lease held by another program is a slot without an engine."""

    id: SlotId
    spec: ModelSpec
    claim: Claim
    claim_asleep: Claim = field(default_factory=dict)
    # On both tiers at once: what it holds while it falls asleep or wakes.
    claim_between: Claim = field(init=False)
    can_sleep: bool = False
    tier: Tier = Tier.COLD
    move: Move | None = None
    # A planned slot holds a reservation and waits until the memory it was promised is really free.
    planned: MoveKind | None = None
    concurrency: int = CONCURRENCY_UNKNOWN
    in_flight: dict[RequestId, None] = field(default_factory=dict)
    last_used: float = 0.0
    ready_since: float = 0.0
    # While others wait it is left alone at least until the first, and serves its batch until the second.
    stays_until: float = 0.0
    batch_until: float = 0.0
    # When it was last granted, as far back as anybody asks: who waits too long was overtaken this often.
    recent_grants: deque[float] = field(default_factory=deque)
    # Processor sharing: the clock runs at one over the answers in flight, so that their shares add up to its time.
    shared_s: float = 0.0
    shared_at: float = 0.0
    # When its idleness will be looked at next. Beside the timer, because every answer asks for it.
    looked_at: float | None = None
    # What the latest request that spoke of it said: seconds to stay when idle, or -1; None leaves it to the model.
    keep_alive_s: float | None = None
    last_priority: int = 1
    # A leaving slot takes no further requests and moves to `leaving_to` when it is idle.
    leaving_to: Tier | None = None
    # Whose request brings it, until that has begun.
    caused_by: TenantId | None = None
    # Whose place it makes, while its answers are waited for.
    leaving_for: SlotId | None = None
    lease: LeaseId | None = None
    # Its process is gone, but not all of its answers have been told to have ended.
    lost: bool = False
    # Its process went away during a move, which can only end badly now, whatever its MoveDone says.
    fell: bool = False

    def __post_init__(self) -> None:
        self.claim_between = larger(self.claim, self.claim_asleep)

    @property
    def model(self) -> ModelId:
        return self.spec.id

    @property
    def is_idle(self) -> bool:
        return not self.in_flight

    @property
    def is_serving(self) -> bool:
        """Ready, staying, and not on its way anywhere."""
        return self.tier is Tier.READY and self.move is None and self.leaving_to is None and not self.lost

    @property
    def has_room(self) -> bool:
        return len(self.in_flight) < self.concurrency

    @property
    def idle_s(self) -> float | None:
        """How long it stays when nobody asks for it; None: until its place is needed."""
        if self.spec.pinned:
            return None
        if self.keep_alive_s is not None:
            return self.keep_alive_s if self.keep_alive_s >= 0.0 else None
        return self.spec.ttl_s if self.spec.ttl_s > 0.0 else None

    def share(self, now: float) -> float:
        """The clock by which its answers share its time."""
        if self.in_flight:
            self.shared_s += max(0.0, now - self.shared_at) / len(self.in_flight)
        self.shared_at = now
        return self.shared_s

    def needs_for(self, kind: MoveKind) -> Claim:
        """What it holds while it makes this move. Between ready and asleep it is on both tiers."""
        if kind is MoveKind.LOAD:
            return self.claim
        if kind is MoveKind.PREPARE:
            return self.claim_asleep
        return self.claim_between

    def sleeps_in(self, seen: Claim) -> None:
        """Its sleeping copy takes only this, where that is less than was planned for. On stage the copy is there too.

        Never makes a claim larger: what is seen beyond one is counted beside it.
        """
        spared = {on: self.claim_asleep[on] - mib for on, mib in seen.items() if mib < self.claim_asleep.get(on, 0)}
        if spared:
            self.claim_asleep = {on: seen[on] if on in spared else mib for on, mib in self.claim_asleep.items()}
            self.claim = {
                on: min(mib, max(mib - spared[on], seen[on])) if on in spared else mib for on, mib in self.claim.items()
            }
            self.claim_between = larger(self.claim, self.claim_asleep)

    @property
    def is_arriving(self) -> bool:
        """Will be ready without anyone asking again."""
        kind = self.move.kind if self.move is not None else self.planned
        return self.leaving_to is None and kind in (MoveKind.LOAD, MoveKind.WAKE)

    @property
    def is_going(self) -> bool:
        """Its memory will come back without anyone asking again."""
        return self.leaving_to is not None
