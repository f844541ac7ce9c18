"""The nouns of the core: models, slots, tiers, moves, devices and claims.

Owns the table of legal moves and the records that the scheduler keeps about slots. Never decides anything: a slot has
facts (`is_idle`, `has_room`), and others decide what happens to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NewType

ModelId = NewType("ModelId", str)
SlotId = NewType("SlotId", str)
MoveId = NewType("MoveId", str)
RequestId = NewType("RequestId", str)
DeviceId = NewType("DeviceId", str)
TenantId = NewType("TenantId", str)
OpId = NewType("OpId", str)
LeaseId = NewType("LeaseId", str)

NO_TENANT: Final = TenantId("")


def lease_name(lease: LeaseId) -> ModelId:
    """The name of a lease in queues, slots and reasons, where a model would have its id.

    It begins with a space, which no configured model id does, so the two never collide.
    """
    return ModelId(f" lease:{lease}")


# MiB per device. Treated as immutable everywhere; keys are kept sorted so that nothing depends on hash order.
Claim = Mapping[DeviceId, int]
NO_CLAIM: Claim = {}


def cuda_name(device: str) -> str:
    """The name of a GPU in CUDA: its UUID, or the number of a simulated GPU such as gpu0."""
    number = device.removeprefix("gpu")
    return number if number.isdecimal() else device


def larger(one: Claim, other: Claim) -> Claim:
    """The larger of the two on each device."""
    if other.keys() <= one.keys():
        return {device: max(mib, other.get(device, 0)) for device, mib in one.items()}
    return {device: max(one.get(device, 0), other.get(device, 0)) for device in sorted({*one, *other})}


class Tier(Enum):
    """Where a slot is: ready to serve, asleep in host memory, or cold."""

    READY = "ready"
    ASLEEP = "asleep"
    COLD = "cold"


class MoveKind(Enum):
    """A change of tier."""

    # Members are singletons, so identity suffices. Enum's own hash is a Python call on every lookup.
    __hash__ = object.__hash__

    LOAD = "load"
    WAKE = "wake"
    SLEEP = "sleep"
    PREPARE = "prepare"
    UNLOAD = "unload"


# The only legal changes of tier: from which tiers each move starts, and where it ends.
LEGAL_MOVES: Mapping[MoveKind, tuple[frozenset[Tier], Tier]] = {
    MoveKind.LOAD: (frozenset({Tier.COLD}), Tier.READY),
    MoveKind.WAKE: (frozenset({Tier.ASLEEP}), Tier.READY),
    MoveKind.SLEEP: (frozenset({Tier.READY}), Tier.ASLEEP),
    MoveKind.PREPARE: (frozenset({Tier.COLD}), Tier.ASLEEP),
    MoveKind.UNLOAD: (frozenset({Tier.READY, Tier.ASLEEP}), Tier.COLD),
}

# Moves that bring a model closer to serving; the others make room.
ARRIVING: Final = frozenset({MoveKind.LOAD, MoveKind.WAKE, MoveKind.PREPARE})


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
    """A GPU or the host. Plans never use `margin_mib`."""

    id: DeviceId
    kind: DeviceKind
    capacity_mib: int
    margin_mib: int = 0

    @property
    def usable_mib(self) -> int:
        return self.capacity_mib - self.margin_mib


@dataclass(frozen=True, slots=True)
class Need:
    """Memory that a slot needs, before it is placed: on GPUs, and on the host."""

    gpu_mib: int = 0
    host_mib: int = 0

    def or_more(self, other: Need) -> Need:
        """The larger of the two on each side."""
        return Need(max(self.gpu_mib, other.gpu_mib), max(self.host_mib, other.host_mib))

    def raised(self, factor: float) -> Need:
        return Need(*(int(mib * factor) + 1 if mib else 0 for mib in (self.gpu_mib, self.host_mib)))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the scheduler uses of a model's configuration. A change that needs a new process raises `revision`."""

    id: ModelId
    revision: int = 1
    need: Need = Need()
    need_asleep: Need | None = None  # None: its engine cannot sleep.
    devices: tuple[DeviceId, ...] = ()  # The operator's choice; empty: any.
    can_split: bool = False
    sizes_itself: bool = False
    concurrency: int | None = None  # Answers at once; None: one.
    priority: int = 1
    ttl_s: float = 0.0  # 0 = never.
    grace_s: float = 30.0
    pinned: bool = False
    preload: bool = False
    gpus: int = 1  # Above 1: `need` applies to each of this many GPUs, all or nothing. Only leases set it.
    # With `can_split`: it takes equal shares of as many GPUs as one of these; empty: in proportion, of any number.
    split_counts: tuple[int, ...] = ()
    # Models that share this word are configurations of one thing, and never ready together; empty: no such rule.
    exclusive: str = ""
    # With `can_split`: MiB of parts of which each stays whole on one GPU. Every GPU it is spread over also needs what
    # `need` has beyond them, and `beside_mib`. Empty: it can be cut anywhere.
    parts: tuple[int, ...] = ()
    beside_mib: int = 0
    # A coming version of this other model: it makes no slot of that model leave (ADR 22).
    version_of: ModelId | None = None
    # Its slots leave when their answers have ended, and what asks for it waits: its next version takes its place.
    held: bool = False
    # It runs elsewhere: its slot is no resident, and no rule of coresidency concerns it.
    is_remote: bool = False

    @property
    def at_once(self) -> int:
        return self.concurrency or 1

    def rest_mib(self, need: Need) -> int:
        """With `parts`: what each GPU needs beside those it holds."""
        return self.beside_mib + max(0, need.gpu_mib - sum(self.parts))


@dataclass(frozen=True, slots=True)
class Group:
    """Models under one rule. Models in no group share an implicit group with the defaults below."""

    name: str
    members: tuple[ModelId, ...]
    swap: bool = True  # Only one member at a time.
    exclusive: bool = True  # Loading a member evicts the members of other groups,
    persistent: bool = False  # except those of persistent groups.


@dataclass(frozen=True, slots=True)
class Matrix:
    """Sets of models that may be ready together, as written in the configuration.

    A name in `vars` stands for its model, any other name for the model with that id.
    """

    sets: tuple[tuple[str, str], ...]
    costs: Mapping[str, int] = field(default_factory=dict)
    vars: Mapping[str, ModelId] = field(default_factory=dict)

    def model(self, name: str) -> ModelId:
        return self.vars.get(name, ModelId(name))


# Which models may be ready together. Plain records, so that events can carry and replay them.
Rules = tuple[Group, ...] | Matrix


@dataclass(frozen=True, slots=True)
class Move:
    """An order to change a slot's tier. `claim` is what the slot may use after the move.

    `makes_room_for` is the slot for which this one is evicted, if any.
    """

    id: MoveId
    kind: MoveKind
    slot: SlotId
    model: ModelId
    revision: int
    claim: Claim
    started: float
    makes_room_for: SlotId | None = None


Fact = str | int | float | None


# One is created for every request, so it is like `RequestArrived`. Never modified.
@dataclass(slots=True, init=False)
class Reason:
    """Why: one word and the facts behind it. The shell logs and keeps it; policies log nothing."""

    why: str
    facts: tuple[tuple[str, Fact], ...] = ()

    def __init__(self, why: str, facts: tuple[tuple[str, Fact], ...] = ()) -> None:
        self.why = why
        self.facts = facts

    def __str__(self) -> str:
        return " ".join([self.why, *(f"{name}={value}" for name, value in self.facts)])


def because(why: str, **facts: Fact) -> Reason:
    return Reason(why, tuple(facts.items()))


@dataclass(frozen=True, slots=True)
class OtherLease:
    """Memory held through another gateway, which this one cannot take back. `claim` includes the use that was seen.

    `is_model`: a model of that gateway holds it, and not a program.
    """

    id: LeaseId
    holder: str
    claim: Claim
    priority: int = 1
    preemptible: bool = False
    is_model: bool = False


@dataclass(slots=True, eq=False)
class Slot:
    """One revision of a model on a set of devices. A lease of another program is a slot without an engine."""

    id: SlotId
    spec: ModelSpec
    claim: Claim
    claim_asleep: Claim = field(default_factory=dict)
    # What it holds while it falls asleep or wakes: the larger of both claims on each device.
    claim_between: Claim = field(init=False)
    can_sleep: bool = False
    tier: Tier = Tier.COLD
    move: Move | None = None
    # A planned slot holds a promise and waits until the promised memory is free.
    planned: MoveKind | None = None
    concurrency: int = 1
    in_flight: dict[RequestId, None] = field(default_factory=dict)
    last_used: float = 0.0
    # How many of those that waited when it became ready, at `owes_since`, have not had their turn, or another in their
    # place. Those that left without a turn do not count.
    owes: int = 0
    owes_since: float = 0.0
    # Processor sharing: the clock advances by 1/n of real time with n answers in flight, so that the shares of all
    # answers add up to the busy time.
    shared_s: float = 0.0
    shared_at: float = 0.0
    # When idleness is checked next. Kept beside the timer because every answer reads it.
    looked_at: float | None = None
    # From the latest request that set it: seconds to stay when idle, or -1 for no limit. None: `ttl_s` of the model.
    keep_alive_s: float | None = None
    last_priority: int = 1
    # A leaving slot takes no more requests and moves to `leaving_to` when it is idle.
    leaving_to: Tier | None = None
    leaving_because: Reason | None = None
    # The tenant to charge for the swap, until the move has started.
    caused_by: TenantId | None = None
    # The slot that this one makes room for.
    leaving_for: SlotId | None = None
    lease: LeaseId | None = None
    # Its process is gone, but some of its answers have not been reported as ended.
    lost: bool = False
    # Its process died during a move. The move has failed, even if its MoveDone reports success.
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
        """True if it is ready, has no move in progress and is not leaving."""
        return self.tier is Tier.READY and self.move is None and self.leaving_to is None and not self.lost

    @property
    def has_room(self) -> bool:
        return len(self.in_flight) < self.concurrency

    @property
    def idle_s(self) -> float | None:
        """Seconds it stays when idle; None: until its memory is needed."""
        if self.spec.pinned:
            return None
        if self.keep_alive_s is not None:
            return self.keep_alive_s if self.keep_alive_s >= 0.0 else None
        return self.spec.ttl_s if self.spec.ttl_s > 0.0 else None

    def share(self, now: float) -> float:
        """Advance the shared clock to `now` and return it."""
        if self.in_flight:
            self.shared_s += max(0.0, now - self.shared_at) / len(self.in_flight)
        self.shared_at = now
        return self.shared_s

    def needs_for(self, kind: MoveKind) -> Claim:
        """What it holds during this move. Between ready and asleep it holds both tiers."""
        if kind is MoveKind.LOAD:
            return self.claim
        if kind is MoveKind.PREPARE:
            return self.claim_asleep
        return self.claim_between

    def sleeps_in(self, seen: Claim) -> None:
        """Lower its claims to what its sleeping copy was seen to take. The copy also stays while the slot is ready.

        Never raises a claim: the ledger counts use beyond a claim.
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
        """True if it will be ready without a further decision."""
        kind = self.move.kind if self.move is not None else self.planned
        return self.leaving_to is None and kind in (MoveKind.LOAD, MoveKind.WAKE)

    @property
    def is_going(self) -> bool:
        """True if it is leaving: its memory comes back without a further decision."""
        return self.leaving_to is not None


# Weight of the newest measurement in a learned time: about the last five count.
EWMA_ALPHA: Final = 0.2


def learn(old: float | None, new: float) -> float:
    """What is usual, after one more measurement."""
    return new if old is None else old + EWMA_ALPHA * (new - old)
