"""The green room: host memory for sleeping slots, and which of them leave when there is too little.

Owns the rule that sleepers together stay within `green_room_mib`. Changes nothing: `slots.py` evicts them. A sleeper's
worth is the cost of its absence: request rate times load time, per MiB that it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from greenroom.core.model import Claim, DeviceId, DeviceKind, ModelSpec, MoveKind, Slot, SlotId, Tier
from greenroom.core.state import State

# Moves that end in the green room.
_TO_SLEEP: Final = (MoveKind.SLEEP, MoveKind.PREPARE)

# Compared from the left: the smaller leaves first.
Worth = tuple[float, float, SlotId]


def has_place(state: State, slot: Slot, now: float, wakes: Slot | None = None) -> bool:
    """True if this slot may sleep: there is room, or sleepers that are worth less can make room.

    `wakes` is the sleeping slot for which it would leave. That slot frees its own place here.
    """
    limit_mib = state.limits.green_room_mib
    if limit_mib is None or not (wanted_mib := _host_mib(state, slot.claim_asleep)):
        return True
    if _is_enough(state, limit_mib - wanted_mib):
        return True
    others = [one for one in sleepers(state) if one is not slot and one is not wakes]
    if _total_mib(state, others) + wanted_mib <= limit_mib:
        return True
    own = _worth(state, slot, now)
    stay = [one for one in others if not _may_leave(one) or _worth(state, one, now) > own]
    return _total_mib(state, stay) + wanted_mib <= limit_mib


def can_take(state: State, claim_asleep: Claim) -> bool:
    """True if a model that an operator prepares fits once all sleepers that may leave have left."""
    limit_mib, wanted_mib = state.limits.green_room_mib, _host_mib(state, claim_asleep)
    if limit_mib is None or not wanted_mib:
        return True
    stay = [one for one in sleepers(state) if not _may_leave(one)]
    return _total_mib(state, stay) + wanted_mib <= limit_mib


def within(state: State, most_mib: Mapping[DeviceId, int]) -> Mapping[DeviceId, int]:
    """Upper limit of memory for a sleeper: on the host, the green room without its pinned slots."""
    limit_mib = state.limits.green_room_mib
    if limit_mib is None:
        return most_mib
    left_mib = limit_mib - _total_mib(state, [one for one in sleepers(state) if one.spec.pinned])
    hosts = [device.id for device in state.devices if device.kind is DeviceKind.HOST]
    return {**most_mib, **{host: min(most_mib[host], left_mib) for host in hosts}}


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Host memory that a model takes asleep, the size of the green room, and the part that pinned models keep."""

    needs_mib: int
    size_mib: int
    pinned_mib: int


def shortfall(state: State, spec: ModelSpec) -> Shortfall | None:
    """Why this model can never sleep here, in numbers; None if host memory is not the reason."""
    left = within(state, state.most_mib(None))
    hosts = [device for device in state.devices if device.kind is DeviceKind.HOST]
    if spec.need_asleep is None or not hosts or spec.need_asleep.host_mib <= left[hosts[0].id]:
        return None
    limit_mib, usable_mib = state.limits.green_room_mib, hosts[0].usable_mib
    size_mib = usable_mib if limit_mib is None else min(limit_mib, usable_mib)
    return Shortfall(spec.need_asleep.host_mib, size_mib, max(0, size_mib - left[hosts[0].id]))


def excess(state: State, limit_mib: int, now: float) -> list[Slot]:
    """Sleepers that must leave so that the rest fits into the green room, the least valuable first."""
    if _is_enough(state, limit_mib):
        return []
    there = sleepers(state)
    over_mib = _total_mib(state, there) - limit_mib
    if over_mib <= 0:
        return []
    leave: list[Slot] = []
    for slot in sorted(filter(_may_leave, there), key=lambda one: _worth(state, one, now)):
        mib = _host_mib(state, slot.claim_asleep)
        if over_mib > 0 and mib:
            leave.append(slot)
            over_mib -= mib
    return leave


def sleepers(state: State) -> list[Slot]:
    """Slots that are asleep or falling asleep, without those that are leaving or about to wake."""
    return [slot for slot in state.slots.values() if slot.leaving_to is not Tier.COLD and _sleeps(slot)]


def _sleeps(slot: Slot) -> bool:
    if slot.move is not None:
        return slot.move.kind in _TO_SLEEP
    return slot.tier is Tier.ASLEEP and slot.planned is None


def _may_leave(slot: Slot) -> bool:
    return slot.move is None and not slot.spec.pinned


def _worth(state: State, slot: Slot, now: float) -> Worth:
    record, mib = state.models.get(slot.model), max(1, _host_mib(state, slot.claim_asleep))
    lost_s = 0.0 if record is None else record.rate(state.limits.recency_s, now) * record.move_s(MoveKind.LOAD)
    return (lost_s / mib, slot.last_used, slot.id)


def _is_enough(state: State, mib: int) -> bool:
    """True if sleepers surely take no more: all slots together hold no more on the host. Most questions end here."""
    host = state.ledger.host
    return host is None or state.ledger.held_on(host) <= mib


def _total_mib(state: State, slots: list[Slot]) -> int:
    return sum([_host_mib(state, slot.claim_asleep) for slot in slots])


def _host_mib(state: State, claim: Claim) -> int:
    host = state.ledger.host
    return 0 if host is None else claim.get(host, 0)
