"""What the rest of Greenroom may see of the core: a read-only view, and questions about it.

Owns no state and changes none. What it hands out has no methods that write and no attributes that can be set: frozen
records, and protocols with read-only properties. `tests/test_layers.py` checks which modules others may import.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from greenroom.core.decide import green_room, placement
from greenroom.core.decide.green_room import Shortfall as Shortfall
from greenroom.core.decide.placement import Mib, Places
from greenroom.core.decide.residents import Residents
from greenroom.core.events import Limits
from greenroom.core.model import (
    Claim,
    Device,
    DeviceId,
    DeviceKind,
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
from greenroom.core.queue.waiter import NO_PRIORITY
from greenroom.core.queue.waitlist import WaiterKind
from greenroom.core.state import ModelRecord, State

# The prefix of a lease's name where the scheduler would name a model.
LEASE_MARK = str(lease_name(LeaseId("")))


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


class SchedulerView:
    def __init__(self, state: State) -> None:
        self._state = state

    @property
    def limits(self) -> Limits:
        return self._state.limits

    @property
    def slots(self) -> Mapping[SlotId, SlotFacts]:
        return self._state.slots

    @property
    def models(self) -> Mapping[ModelId, ModelFacts]:
        return self._state.models

    @property
    def ledger(self) -> LedgerFacts:
        return self._state.ledger

    @property
    def waitlist(self) -> WaitlistFacts:
        return self._state.waitlist

    @property
    def counters(self) -> dict[str, int]:
        """Totals since the start, by name."""
        return asdict(self._state.counters)

    @property
    def avg_wait_s(self) -> float | None:
        return self._state.avg_wait_s

    @property
    def devices(self) -> Sequence[Device]:
        return self._state.devices

    def slots_of(self, model: ModelId) -> Sequence[SlotFacts]:
        return self._state.slots_of(model)

    def slots_of_lease(self, lease: LeaseId) -> Sequence[SlotFacts]:
        return self._state.slots_of(lease_name(lease))

    def most_mib(self) -> dict[DeviceId, int]:
        """Usable memory per device if everything that may leave had left."""
        return self._state.most_mib(None)

    def callers(self) -> Iterator[WaitingCaller]:
        """Waiting requests, by priority and arrival."""
        return (waiter for waiter in self._state.waitlist if waiter.kind is WaiterKind.REQUEST)

    def is_waited_for(self, model: ModelId) -> bool:
        return model in self._state.waitlist.queues

    def is_coming(self, model: ModelId) -> bool:
        """True if it will be ready without a further decision."""
        return self._state.is_coming(model)

    def movable(self, now: float) -> list[Movable]:
        """Models that could be evicted, as if all of them went cold. Leases are left out."""
        there = Residents(self._state, now, Places()).those(may_sleep=False, but=None)
        free = [one for one in there if not one.cannot_leave and self._state.slots[one.slot].lease is None]
        return [Movable(one.model, one.gives_mib, one.loss) for one in free]

    def green_room_shortfall(self, model: ModelId) -> Shortfall | None:
        """Why this model can never sleep here, in numbers; None if host memory is not the reason."""
        return green_room.shortfall(self._state, self._state.models[model].spec)

    def kept_out_by_others(self, after_s: float, now: float) -> dict[ModelId, KeptOut]:
        """Models that have waited for `after_s` and would fit only if other gateways released their leases."""
        state = self._state
        if state.store_is_down or state.shutting_down:
            return {}
        most = state.most_mib(None)
        with_others = {device: mib - state.ledger.foreign.get(device, 0) for device, mib in most.items()}
        without = {device: mib - state.ledger.outside_mib(device) for device, mib in most.items()}
        found: dict[ModelId, KeptOut] = {}
        for model, queue in state.waitlist.queues.items():
            # A preload has no priority here: it waits until there is room.
            if queue.oldest + after_s <= now and queue.priorities.first < NO_PRIORITY:
                record = state.models.get(model)
                if record is not None and (place := self._place(record, without, with_others)):
                    found[model] = KeptOut(record.spec, queue.priorities.first, place)
        return found

    def _place(self, record: ModelRecord, without: Mib, with_others: Mib) -> dict[DeviceId, int]:
        """Its claim on each GPU if other gateways' models left; empty if they do not keep it out."""
        spec, need, devices = record.spec, record.need, self._state.devices
        gpus = {one.id for one in devices if one.kind is DeviceKind.GPU}
        if not need.gpu_mib or not gpus or self._state.slots_of(spec.id):
            return {}
        if placement.options(spec, need, devices, without, without):
            return {}
        claims = placement.options(spec, need, devices, with_others, with_others)
        return {device: mib for device, mib in claims[0].items() if device in gpus} if claims else {}
