"""What the rest of Greenroom may see of a scheduler: its tables, and the questions that it answers.

Protocols with read-only properties, and frozen records: nothing here can write. A scheduler whose tables are a `State`
has all of it from `state_view.py`. `tests/test_layers.py` checks which modules others may import.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from greenroom.core.decide.arrival import Option
from greenroom.core.decide.green_room import Shortfall as Shortfall
from greenroom.core.events import Learned, Limits, RequestArrived
from greenroom.core.explain import Explanation, Outlook
from greenroom.core.model import (
    Claim,
    Device,
    DeviceId,
    LeaseId,
    ModelId,
    ModelSpec,
    Move,
    MoveKind,
    Need,
    OtherLease,
    Outcome,
    RequestId,
    SlotId,
    TenantId,
    Tier,
    lease_name,
)

# The prefix of a lease's name where the scheduler would name a model.
LEASE_MARK: Final = str(lease_name(LeaseId("")))


class HoldingFacts(Protocol):
    """The memory of one slot: what it may use, and what it was last seen to use."""

    @property
    def claim(self) -> Claim: ...

    @property
    def seen(self) -> Claim: ...

    def on(self, device: DeviceId) -> int: ...


class SlotFacts(Protocol):
    """A slot as others see it."""

    @property
    def id(self) -> SlotId: ...

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def model(self) -> ModelId: ...

    @property
    def lease(self) -> LeaseId | None:
        """The lease that holds it, if it has no engine."""
        ...

    @property
    def tier(self) -> Tier: ...

    @property
    def move(self) -> Move | None: ...

    @property
    def planned(self) -> MoveKind | None:
        """The move that starts when its memory is free."""
        ...

    @property
    def leaving_to(self) -> Tier | None: ...

    @property
    def leaving_for(self) -> SlotId | None:
        """The slot that this one makes room for."""
        ...

    @property
    def lost(self) -> bool: ...

    @property
    def claim(self) -> Claim: ...

    @property
    def concurrency(self) -> int: ...

    @property
    def in_flight(self) -> Collection[RequestId]: ...

    @property
    def last_used(self) -> float: ...

    @property
    def last_priority(self) -> int: ...

    @property
    def idle_s(self) -> float | None:
        """Seconds it stays when idle; None: until its memory is needed."""
        ...

    @property
    def is_idle(self) -> bool: ...

    @property
    def is_serving(self) -> bool: ...

    @property
    def is_arriving(self) -> bool: ...

    @property
    def is_going(self) -> bool: ...

    def needs_for(self, kind: MoveKind) -> Claim: ...


class LedgerFacts(Protocol):
    """Memory per device."""

    @property
    def devices(self) -> Mapping[DeviceId, Device]: ...

    @property
    def foreign(self) -> Mapping[DeviceId, int]:
        """MiB used by undeclared processes."""
        ...

    @property
    def others(self) -> tuple[OtherLease, ...]:
        """Leases held through other gateways."""
        ...

    @property
    def holdings(self) -> Mapping[SlotId, HoldingFacts]: ...

    def held_by(self, slot: SlotId) -> Claim: ...

    def free_mib(self, without: frozenset[SlotId]) -> dict[DeviceId, int]: ...


class ModelFacts(Protocol):
    """What is known about a model besides its configuration."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def need(self) -> Need: ...

    @property
    def failures(self) -> int: ...

    @property
    def retry_at(self) -> float: ...

    @property
    def pausing(self) -> Outcome | None: ...

    @property
    def learned_s(self) -> Mapping[MoveKind, float]: ...


class WaitingCaller(Protocol):
    """A request that waits."""

    @property
    def id(self) -> str: ...

    @property
    def model(self) -> ModelId: ...

    @property
    def priority(self) -> int: ...

    @property
    def tenant(self) -> TenantId: ...

    @property
    def arrived(self) -> float: ...


class WaitlistFacts(Protocol):
    @property
    def depth(self) -> int:
        """Number of waiting requests, without operators' loads, preloads and leases."""
        ...

    def __contains__(self, waiter_id: str) -> bool: ...

    def count(self, model: ModelId) -> int: ...


@dataclass(frozen=True, slots=True)
class KeptOut:
    """A model that leases of other gateways keep out: its priority, and its claim on each GPU without them."""

    spec: ModelSpec
    priority: int
    place: Mapping[DeviceId, int]


@dataclass(frozen=True, slots=True)
class Movable:
    """A model that could be evicted: what that would free per device, and the policy's cost of losing it."""

    model: ModelId
    gives_mib: Claim
    loss: float


class Tables(Protocol):
    """What is where, and who waits: for status pages, memory, leases and operators."""

    @property
    def limits(self) -> Limits: ...

    @property
    def slots(self) -> Mapping[SlotId, SlotFacts]: ...

    @property
    def models(self) -> Mapping[ModelId, ModelFacts]: ...

    @property
    def ledger(self) -> LedgerFacts: ...

    @property
    def waitlist(self) -> WaitlistFacts: ...

    @property
    def counters(self) -> dict[str, int]:
        """Totals since the start, by name."""
        ...

    @property
    def avg_wait_s(self) -> float | None: ...

    def slots_of(self, model: ModelId) -> Sequence[SlotFacts]: ...

    def callers(self) -> Iterable[WaitingCaller]:
        """Waiting requests, by priority and arrival."""
        ...

    def is_waited_for(self, model: ModelId) -> bool: ...

    def most_mib(self) -> Mapping[DeviceId, int]:
        """Usable memory per device if everything that may leave had left."""
        ...


class Forecasts(Protocol):
    """What requests that are under way ask, and what a gateway remembers when it stops."""

    def outlook(self, request: RequestId, now: float) -> Outlook | None:
        """Position and estimate of a waiting request; None if it does not wait. Heartbeats ask it often."""
        ...

    def candidates_left(self, request: RequestId, now: float) -> tuple[ModelId, ...]:
        """The models that a request can still turn to if the one that it was granted fails."""
        ...

    def learned(self) -> Mapping[ModelId, Learned]:
        """What a later run should know about each model from the start."""
        ...


class Explains(Protocol):
    """What operators ask: what would happen, and why not."""

    def explanation(self, arrival: RequestArrived) -> Explanation:
        """The plan if this request came now, what it would wait behind, evict and why, and how long it may take."""
        ...

    def weigh(self, arrival: RequestArrived) -> tuple[Sequence[Option], int]:
        """Its candidates as they are now, and the position of the one that it would get."""
        ...

    def green_room_shortfall(self, model: ModelId) -> Shortfall | None:
        """Why this model can never sleep here, in numbers; None if host memory is not the reason."""
        ...


class Shares(Protocol):
    """What a gateway asks that shares its GPUs with others."""

    def movable(self, now: float) -> Sequence[Movable]:
        """Models that could be evicted, as if all of them went cold. Leases are left out."""
        ...

    def kept_out_by_others(self, after_s: float, now: float) -> Mapping[ModelId, KeptOut]:
        """Models that have waited for `after_s` and would fit only if other gateways released their leases."""
        ...


class SchedulerView(Tables, Forecasts, Explains, Shares, Protocol):
    """All that the shell and the simulator ask of a scheduler. No question changes anything."""
