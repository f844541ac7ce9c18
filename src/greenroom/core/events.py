"""Everything that can happen, one frozen record each. They carry ids, numbers and `now`: never sockets or futures.

A list of these alone replays every decision. Adding a word takes an ADR.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    OtherLease,
    Outcome,
    RequestId,
    Rules,
    SlotId,
    TenantId,
    Tier,
)


class TimerKind(Enum):
    """What a timer is for. One that fires late or twice is harmless: its handler looks at the clock and the state."""

    # As of MoveKind.
    __hash__ = object.__hash__

    EXPIRE = "expire"  # a waiting request reaches the end of its patience
    IDLE = "idle"  # a slot may have been idle for its ttl
    RETRY = "retry"  # a model's back-off ends
    GRACE = "grace"  # a leaving slot's running answers are cut
    BUDGET = "budget"  # a running answer has used up its caller's budget
    SWITCH = "switch"  # from now on a waiting model may take another's place


@dataclass(frozen=True, slots=True)
class Timer:
    kind: TimerKind
    subject: str


@dataclass(frozen=True, slots=True)
class Limits:
    """The scheduler's numbers; their reasons stand in the configuration reference."""

    policy: str = "default"
    swapper: str = "memory"
    company: Rules | None = None  # Which models may be ready together.
    tenant_weights: Mapping[TenantId, float] = field(default_factory=dict)  # Shares between tenants; 1 if not named.
    queue_depth_max: int = 1_000
    overtakes_max: int = 8
    residency_swaps: float = 2.0  # While others wait a slot stays at least this many of its own swap times.
    batch_swaps: float = 5.0  # And at most this many, but for `overtakes_max` further requests.
    lift_s: float = 60.0  # Waiting this long lifts a request by one class.
    deadlines_s: tuple[float, float, float] = (5.0, 60.0, 240.0)  # When high, normal and low requests insist.
    recency_s: float = 600.0  # What was asked for this long ago counts a third for how likely it is asked for again.
    backoff_s: float = 5.0
    backoff_max_s: float = 300.0
    replan_s: float = 1.0  # Pause before asking again for a lease that was refused or a store that was down.
    need_raise: float = 1.25  # How much more a model is given after it ran out of memory at load.
    green_room_mib: int | None = None  # Host memory for all sleeping slots together; None: what the host has.


@dataclass(frozen=True, slots=True)
class Learned:
    """What was learned of a model in an earlier run: how long its moves and its answers take."""

    moves_s: Mapping[MoveKind, float]
    service_s: float | None = None


@dataclass(frozen=True, slots=True)
class ConfigChanged:
    """The first event carries everything; later ones carry what is new, changed or gone.

    `needs` are figures that were measured or remembered. They count from a model's next load on: what is there keeps
    its claim.
    """

    now: float
    models: tuple[ModelSpec, ...] = ()
    removed: tuple[ModelId, ...] = ()
    devices: tuple[Device, ...] | None = None
    limits: Limits | None = None
    learned: Mapping[ModelId, Learned] | None = None
    needs: Mapping[ModelId, Need] | None = None


# Two are made for every request, so they are not frozen: that alone would take a microsecond. Nobody changes them.
@dataclass(slots=True)
class RequestArrived:
    """`give_up_at` is when waiting no longer helps; `patient` callers are not refused for a long estimate.

    `answer_by` is the caller's budget: the whole answer must have ended by then, or is not worth beginning.
    `keep_alive_s` is how long the slot that serves it stays afterwards: 0 leaves when idle, -1 sets no idle timer, None
    says nothing.
    """

    now: float
    request: RequestId
    candidates: tuple[ModelId, ...]
    priority: int = 1
    tenant: TenantId = NO_TENANT
    give_up_at: float | None = None
    patient: bool = True
    answer_by: float | None = None
    keep_alive_s: float | None = None


@dataclass(frozen=True, slots=True)
class RequestGone:
    now: float
    request: RequestId


@dataclass(slots=True)
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
    """`seen` is memory per device after the move, where it was measured.

    `took_s` is what the move takes in all where that is not over yet: an engine may answer while it is still arriving.
    """

    now: float
    move: MoveId
    outcome: Outcome
    seen: Claim | None = None
    concurrency: int | None = None
    took_s: float | None = None


@dataclass(frozen=True, slots=True)
class SlotsLost:
    """Everything one process took with it. A slot whose host copy survives is left asleep."""

    now: float
    slots: tuple[SlotId, ...]
    left_in: Tier = Tier.COLD
    cause: str = ""


@dataclass(frozen=True, slots=True)
class MemoryChanged:
    """What processes nobody declared use, per device; devices not named keep their last figure.

    `leases` are all that are held through other gateways; None leaves them as they were told last. `store_is_down` says
    that no memory can be granted at present, because who grants it does not answer; None leaves that as it was.
    """

    now: float
    foreign_mib: Mapping[DeviceId, int]
    seen: Mapping[SlotId, Claim] | None = None
    leases: tuple[OtherLease, ...] | None = None
    store_is_down: bool | None = None


@dataclass(frozen=True, slots=True)
class LeaseAsked:
    """Another program wants memory. Planned like a load; answered by `grant` or `reject` under the lease's id.

    `need.gpu_mib` is wanted on each of `gpus` different GPUs, all or nothing. `waits_since` is for who waited elsewhere
    before.
    """

    now: float
    lease: LeaseId
    need: Need
    priority: int = 1
    devices: tuple[DeviceId, ...] = ()
    preemptible: bool = False
    grace_s: float = 30.0
    give_up_at: float | None = None
    gpus: int = 1
    waits_since: float | None = None


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
