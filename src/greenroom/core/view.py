"""What everything outside the core may see of it: a read-only view, and the questions that are asked of it.

Owns no state and changes none. The types below have nothing that writes, so that a caller which tries does not pass the
type check. Which modules may be imported from outside is kept by `tests/test_layers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from greenroom.core.decide import green_room, placement
from greenroom.core.decide.green_room import Shortfall as Shortfall
from greenroom.core.decide.placement import Mib, Places
from greenroom.core.decide.residents import Residents
from greenroom.core.events import Limits
from greenroom.core.leases import name_of
from greenroom.core.model import (
    Claim,
    Device,
    DeviceId,
    DeviceKind,
    LeaseId,
    ModelId,
    ModelSpec,
    MoveKind,
    Need,
    OtherLease,
    Outcome,
    Slot,
    SlotId,
    TenantId,
)
from greenroom.core.policy.swapper import Resident
from greenroom.core.queue.waitlist import Queue, WaiterKind
from greenroom.core.state import Counters as Counters
from greenroom.core.state import ModelRecord, State

# What the scheduler puts before the name of a lease where it would name a model.
LEASE_MARK = str(name_of(LeaseId("")))


class HoldingFacts(Protocol):
    """One claimant's memory: what it may use and what it was last seen to use."""

    @property
    def claim(self) -> Claim: ...

    @property
    def seen(self) -> Claim: ...

    def on(self, device: DeviceId) -> int: ...


class LedgerFacts(Protocol):
    """Memory per device."""

    @property
    def devices(self) -> Mapping[DeviceId, Device]: ...

    @property
    def foreign(self) -> Mapping[DeviceId, int]:
        """MiB of processes that nobody declared."""
        ...

    @property
    def others(self) -> tuple[OtherLease, ...]:
        """Leases that are held through other gateways."""
        ...

    @property
    def holdings(self) -> Mapping[SlotId, HoldingFacts]: ...

    def held_by(self, slot: SlotId) -> Claim: ...

    def free_mib(self, without: frozenset[SlotId]) -> dict[DeviceId, int]: ...


class ModelFacts(Protocol):
    """What is known of a model besides its configuration."""

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
        """Requests that wait; operators, preloads and leases do not count."""
        ...

    def __contains__(self, waiter_id: str) -> bool: ...

    def count(self, model: ModelId) -> int: ...


@dataclass(frozen=True, slots=True)
class KeptOut:
    """A model that memory of other gateways keeps out: how urgent it is, and what it could have of each GPU without."""

    spec: ModelSpec
    priority: int
    place: Mapping[DeviceId, int]


class SchedulerView:
    def __init__(self, state: State) -> None:
        self._state = state

    @property
    def limits(self) -> Limits:
        return self._state.limits

    @property
    def slots(self) -> Mapping[SlotId, Slot]:
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
    def counters(self) -> Counters:
        return self._state.counters

    @property
    def avg_wait_s(self) -> float | None:
        return self._state.avg_wait_s

    @property
    def devices(self) -> list[Device]:
        return self._state.devices

    def slots_of(self, model: ModelId) -> list[Slot]:
        return self._state.slots_of(model)

    def slots_of_lease(self, lease: LeaseId) -> list[Slot]:
        return self._state.slots_of(name_of(lease))

    def most_mib(self) -> dict[DeviceId, int]:
        """What there could be per device if all left that ever may."""
        return self._state.most_mib(None)

    def callers(self) -> Iterator[WaitingCaller]:
        """Requests that wait, by priority and arrival."""
        return (waiter for waiter in self._state.waitlist if waiter.kind is WaiterKind.REQUEST)

    def is_waited_for(self, model: ModelId) -> bool:
        return model in self._state.waitlist.queues

    def is_coming(self, model: ModelId) -> bool:
        """Will be ready without anyone asking again."""
        return self._state.is_coming(model)

    def movable(self, now: float) -> list[Resident]:
        """Models that could be made to leave, as if all of them went cold. Leases are left out."""
        there = Residents(self._state, now, Places()).those(may_sleep=False, but=None)
        return [one for one in there if not one.cannot_leave and self._state.slots[one.slot].lease is None]

    def green_room_shortfall(self, model: ModelId) -> Shortfall | None:
        """Why this model can never sleep here, in numbers; None where the host's memory is not what it lacks."""
        return green_room.shortfall(self._state, self._state.models[model].spec)

    def kept_out_by_others(self, after_s: float, now: float) -> dict[ModelId, KeptOut]:
        """Models that have been waited for so long, cannot come even if all of ours left, and could if others' did."""
        state = self._state
        if state.store_is_down or state.shutting_down:
            return {}
        most = state.most_mib(None)
        with_others = {device: mib - state.ledger.foreign.get(device, 0) for device, mib in most.items()}
        without = {device: mib - state.ledger.outside_mib(device) for device, mib in most.items()}
        found: dict[ModelId, KeptOut] = {}
        for model, queue in state.waitlist.queues.items():
            priorities = _priorities(queue)
            if queue.oldest + after_s <= now and priorities:
                record = state.models.get(model)
                if record is not None and (place := self._place(record, without, with_others)):
                    found[model] = KeptOut(record.spec, min(priorities), place)
        return found

    def _place(self, record: ModelRecord, without: Mib, with_others: Mib) -> dict[DeviceId, int]:
        """What it could have of each GPU if others' models left; nothing for one that is not kept out by them."""
        spec, need, devices = record.spec, record.need, self._state.devices
        gpus = {one.id for one in devices if one.kind is DeviceKind.GPU}
        if not need.gpu_mib or not gpus or self._state.slots_of(spec.id):
            return {}
        if placement.options(spec, need, devices, without, without):
            return {}
        claims = placement.options(spec, need, devices, with_others, with_others)
        return {device: mib for device, mib in claims[0].items() if device in gpus} if claims else {}


def _priorities(queue: Queue) -> list[int]:
    """Of those that would make others leave. A preload waits until there is room."""
    return [priority for kind, priority, _ in queue.lanes if kind != WaiterKind.PRELOAD.value]
