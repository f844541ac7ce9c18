"""Everything that can happen, one frozen record each. They carry ids, numbers and `now`: never sockets or futures.

A list of these alone replays every decision. Adding a word takes an ADR.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from greenroom.core.model import (
    NO_TENANT,
    Claim,
    Device,
    DeviceId,
    LeaseId,
    ModelId,
    ModelSpec,
    MoveId,
    MoveKind,
    Need,
    OpId,
    Outcome,
    RequestId,
    SlotId,
    TenantId,
    Tier,
)


class TimerKind(Enum):
    """What a timer is for. One that fires late or twice is harmless: its handler looks at the clock and the state."""

    EXPIRE = "expire"  # a waiting request reaches the end of its patience
    IDLE = "idle"  # a slot may have been idle for its ttl
    RETRY = "retry"  # a model's back-off ends
    GRACE = "grace"  # a leaving slot's running answers are cut


@dataclass(frozen=True, slots=True)
class Timer:
    kind: TimerKind
    subject: str


@dataclass(frozen=True, slots=True)
class Limits:
    """The scheduler's numbers; their reasons stand in the configuration reference."""

    queue_depth_max: int = 1_000
    overtakes_max: int = 8
    backoff_s: float = 5.0
    backoff_max_s: float = 300.0
    replan_s: float = 1.0  # Pause before asking again for a lease that was refused or a store that was down.
    need_raise: float = 1.25  # How much more a model is given after it ran out of memory at load.


@dataclass(frozen=True, slots=True)
class ConfigChanged:
    """The first event carries everything; later ones carry what is new, changed or gone."""

    now: float
    models: tuple[ModelSpec, ...] = ()
    removed: tuple[ModelId, ...] = ()
    devices: tuple[Device, ...] | None = None
    limits: Limits | None = None
    learned_s: Mapping[ModelId, Mapping[MoveKind, float]] | None = None


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """`give_up_at` is when waiting no longer helps; `patient` callers are not refused for a long estimate."""

    now: float
    request: RequestId
    candidates: tuple[ModelId, ...]
    priority: int = 1
    tenant: TenantId = NO_TENANT
    give_up_at: float | None = None
    patient: bool = True


@dataclass(frozen=True, slots=True)
class RequestGone:
    now: float
    request: RequestId


@dataclass(frozen=True, slots=True)
class ServeDone:
    """A granted request has ended. One lost before its first byte goes back to its place, once."""

    now: float
    request: RequestId
    lost_before_first_byte: bool = False


@dataclass(frozen=True, slots=True)
class MoveAsked:
    """An operator asks; `answer` tells when it is done. `evict` names models that must leave first."""

    now: float
    op: OpId
    kind: MoveKind
    model: ModelId
    evict: tuple[ModelId, ...] = ()
    grace_s: float | None = None


@dataclass(frozen=True, slots=True)
class MoveDone:
    """`seen` is memory per device after the move, where it was measured."""

    now: float
    move: MoveId
    outcome: Outcome
    seen: Claim | None = None
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class SlotsLost:
    """Everything one process took with it. A slot whose host copy survives is left asleep."""

    now: float
    slots: tuple[SlotId, ...]
    left_in: Tier = Tier.COLD
    cause: str = ""


@dataclass(frozen=True, slots=True)
class MemoryChanged:
    """What processes nobody declared use, per device; devices not named keep their last figure."""

    now: float
    foreign_mib: Mapping[DeviceId, int]
    seen: Mapping[SlotId, Claim] | None = None


@dataclass(frozen=True, slots=True)
class LeaseAsked:
    """Another program wants memory. Planned like a load; answered by `grant` or `reject` under the lease's id."""

    now: float
    lease: LeaseId
    need: Need
    priority: int = 1
    devices: tuple[DeviceId, ...] = ()
    preemptible: bool = False
    grace_s: float = 30.0
    give_up_at: float | None = None


@dataclass(frozen=True, slots=True)
class LeaseGone:
    now: float
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class TimerFired:
    now: float
    timer: Timer


@dataclass(frozen=True, slots=True)
class ShutdownAsked:
    now: float
    drain_s: float


Event = (
    ConfigChanged
    | RequestArrived
    | RequestGone
    | ServeDone
    | MoveAsked
    | MoveDone
    | SlotsLost
    | MemoryChanged
    | LeaseAsked
    | LeaseGone
    | TimerFired
    | ShutdownAsked
)
