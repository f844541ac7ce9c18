"""Everything that can happen, one record each. Events carry ids, numbers and `now`: never sockets or futures.

A list of events replays every decision. A new kind of event takes an ADR.
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
    """What a timer is for. Late or twice is harmless: its handler checks the clock and the state."""

    # See MoveKind.
    __hash__ = object.__hash__

    EXPIRE = "expire"  # a waiter gives up
    IDLE = "idle"  # a slot may have been idle for its ttl
    RETRY = "retry"  # a model's back-off or pause ends
    GRACE = "grace"  # running answers of a leaving slot are cut
    BUDGET = "budget"  # a running answer has used up its caller's budget
    SWITCH = "switch"  # a waiting model may now take a resident's place


@dataclass(frozen=True, slots=True)
class Timer:
    kind: TimerKind
    subject: str


@dataclass(frozen=True, slots=True)
class Limits:
    """The scheduler's numbers. The configuration reference gives the reasons."""

    policy: str = "default"
    swapper: str = "memory"
    company: Rules | None = None  # Which models may be ready together.
    tenant_weights: Mapping[TenantId, float] = field(default_factory=dict)  # Shares between tenants; 1 if not named.
    queue_depth_max: int = 1_000
    tenant_depths: Mapping[TenantId, int] = field(default_factory=dict)  # Requests of each that may wait at once.
    tenant_depth_max: int | None = None  # The same for tenants not named there; None: as many as may wait at all.
    others_share_depth: bool = False  # It holds for all tenants not named together: callers make their names up.
    away_share: float = 0.1  # A busy model is sent away for others at most this share of the time.
    wait_max_s: float | None = None  # Callers give up after this long.
    lift_s: float = 240.0  # Waiting this long lifts a request by one class.
    deadlines_s: tuple[float, float, float] = (5.0, 240.0, 480.0)  # Before that no busy model is closed.
    recency_s: float = 600.0  # A request this old counts 1/e in the rate of its model.
    backoff_s: float = 5.0
    backoff_max_s: float = 300.0
    replan_s: float = 1.0  # Pause before retrying after a refused lease or a store that is down.
    need_raise: float = 1.25  # Factor on a model's need after it ran out of memory while loading.
    green_room_mib: int | None = None  # Host memory for all sleeping slots together; None: all of the host's.


@dataclass(frozen=True, slots=True)
class Learned:
    """What an earlier run learned about a model: how long its moves and its answers take."""

    moves_s: Mapping[MoveKind, float]
    service_s: float | None = None


@dataclass(frozen=True, slots=True)
class ConfigChanged:
    """The first event carries everything; later ones carry what is new, changed or removed.

    `needs` are measured or remembered figures. They apply from a model's next load on: existing slots keep their
    claims.
    """

    now: float
    models: tuple[ModelSpec, ...] = ()
    removed: tuple[ModelId, ...] = ()
    devices: tuple[Device, ...] | None = None
    limits: Limits | None = None
    learned: Mapping[ModelId, Learned] | None = None
    needs: Mapping[ModelId, Need] | None = None


@dataclass(frozen=True, slots=True)
class VersionPromoted:
    """The slots of `coming` are now slots of the model `spec.id`, whose own slots leave when their answers have ended.

    Requests that wait for the model are served by them. `coming` is removed. `spec` has a new revision.
    """

    now: float
    coming: ModelId
    spec: ModelSpec


@dataclass(frozen=True, slots=True)
class Choice:
    """How a request chooses among its candidates, which are in order of preference.

    A later one is taken if it is warm and serves sooner by more than `prefer_first_s`, never with `pin_primary`. Those
    of `last_resort` are taken only if no other can serve at all, or none by `answer_by`.
    """

    prefer_first_s: float = 0.0
    pin_primary: bool = False
    last_resort: tuple[ModelId, ...] = ()


# Two are created for every request, so these are not frozen, and have constructors that are compiled: those of
# dataclasses never are. Never modified.
@dataclass(slots=True, init=False)
class RequestArrived:
    """`give_up_at` is when waiting no longer helps; `patient` callers are not refused for a long estimate.

    `answer_by` is the caller's budget: the whole answer must end by then. `keep_alive_s` is how long its slot stays
    when idle afterwards: 0 leaves when idle, -1 sets no idle timer, None leaves it unchanged. `choice` is for several
    candidates.
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
    choice: Choice | None = None

    def __init__(
        self,
        now: float,
        request: RequestId,
        candidates: tuple[ModelId, ...],
        priority: int = 1,
        tenant: TenantId = NO_TENANT,
        give_up_at: float | None = None,
        patient: bool = True,
        answer_by: float | None = None,
        keep_alive_s: float | None = None,
        choice: Choice | None = None,
    ) -> None:
        self.now = now
        self.request = request
        self.candidates = candidates
        self.priority = priority
        self.tenant = tenant
        self.give_up_at = give_up_at
        self.patient = patient
        self.answer_by = answer_by
        self.keep_alive_s = keep_alive_s
        self.choice = choice


@dataclass(frozen=True, slots=True)
class RequestGone:
    now: float
    request: RequestId


@dataclass(slots=True, init=False)
class ServeDone:
    """A granted request has ended. If it was lost before its first byte, it goes back to its place, once.

    `was_busy`: it was lost because the model has no room for it, which is no reason to turn to a last resort.
    """

    now: float
    request: RequestId
    lost_before_first_byte: bool = False
    was_busy: bool = False

    def __init__(
        self, now: float, request: RequestId, lost_before_first_byte: bool = False, was_busy: bool = False
    ) -> None:
        self.now = now
        self.request = request
        self.lost_before_first_byte = lost_before_first_byte
        self.was_busy = was_busy


@dataclass(frozen=True, slots=True)
class MoveAsked:
    """An operator asks for a move; `answer` reports its end. `evict` names models that must leave first."""

    now: float
    op: OpId
    kind: MoveKind
    model: ModelId
    evict: tuple[ModelId, ...] = ()
    grace_s: float | None = None


@dataclass(frozen=True, slots=True)
class MoveDone:
    """`seen` is the memory per device after the move, where it was measured.

    `took_s` is the duration of the whole move if it has not ended yet: an engine may answer while it is still arriving.
    """

    now: float
    move: MoveId
    outcome: Outcome
    seen: Claim | None = None
    took_s: float | None = None


@dataclass(frozen=True, slots=True)
class SlotsLost:
    """A process has died, and these slots with it. If the host copy survives, `left_in` is asleep."""

    now: float
    slots: tuple[SlotId, ...]
    left_in: Tier = Tier.COLD
    cause: str = ""


@dataclass(frozen=True, slots=True)
class MemoryChanged:
    """What undeclared processes use, per device; devices that are not named keep their last figure.

    `leases` are all leases held through other gateways. `store_is_down` says that the lease store does not answer, so
    no memory can be granted. None leaves either unchanged. `taken` are slots whose memory the store has granted to
    another holder: they leave at once, pinned or not, and their answers are cut.
    """

    now: float
    foreign_mib: Mapping[DeviceId, int]
    seen: Mapping[SlotId, Claim] | None = None
    leases: tuple[OtherLease, ...] | None = None
    store_is_down: bool | None = None
    taken: tuple[SlotId, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaseAsked:
    """Another program asks for memory. Planned like a load; answered by `grant` or `reject` under the lease's id.

    `need.gpu_mib` applies to each of `gpus` different GPUs, all or nothing. `waits_since` is set if the lease has
    waited elsewhere before.
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
    | VersionPromoted
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
