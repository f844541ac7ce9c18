"""The green room: host memory for those who sleep, and who has to leave it when there is too little.

Owns the rule that sleepers together stay within `green_room_mib`. Changes nothing: `stage.py` makes them leave. What a
sleeper is worth is what its absence would cost: how often it is asked for, times its load, for every MiB it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from greenroom.core.model import Claim, DeviceId, DeviceKind, ModelSpec, MoveKind, Slot, SlotId, Tier
from greenroom.core.state import State

# Moves that end there.
_TO_SLEEP = (MoveKind.SLEEP, MoveKind.PREPARE)

# Compared from the left: the smaller goes first.
Worth = tuple[float, float, SlotId]


def has_place(state: State, slot: Slot, now: float, wakes: Slot | None = None) -> bool:
    """Whether this slot may go to sleep: there is room, or sleepers who are worth less can make some.

    `wakes` is one for whose sake it would leave, and who then leaves its own place here.
    """
    limit_mib = state.limits.green_room_mib
    if limit_mib is None or not (wanted_mib := _host_mib(state, slot.claim_asleep)):
        return True
    others = [one for one in _sleepers(state) if one is not slot and one is not wakes]
    if _total_mib(state, others) + wanted_mib <= limit_mib:
        return True
    own = _worth(state, slot, now)
    stay = [one for one in others if not _may_leave(one) or _worth(state, one, now) > own]
    return _total_mib(state, stay) + wanted_mib <= limit_mib


def can_take(state: State, claim_asleep: Claim) -> bool:
    """Whether an operator's choice may come here: there is room when everybody has left who may."""
    limit_mib, wanted_mib = state.limits.green_room_mib, _host_mib(state, claim_asleep)
    if limit_mib is None or not wanted_mib:
        return True
    stay = [one for one in _sleepers(state) if not _may_leave(one)]
    return _total_mib(state, stay) + wanted_mib <= limit_mib


def within(state: State, most_mib: Mapping[DeviceId, int]) -> Mapping[DeviceId, int]:
    """What there could be at most for one who sleeps: on the host no more than the green room without the pinned."""
    limit_mib = state.limits.green_room_mib
    if limit_mib is None:
        return most_mib
    left_mib = limit_mib - _total_mib(state, [one for one in _sleepers(state) if one.spec.pinned])
    hosts = [device.id for device in state.devices if device.kind is DeviceKind.HOST]
    return {**most_mib, **{host: min(most_mib[host], left_mib) for host in hosts}}


@dataclass(frozen=True, slots=True)
class Shortfall:
    """What a model takes of the host asleep, how much may sleep there, and what of that pinned models keep."""

    needs_mib: int
    size_mib: int
    pinned_mib: int


def shortfall(state: State, spec: ModelSpec) -> Shortfall | None:
    """Why this model can never sleep here, in numbers; None where the host's memory is not what it lacks."""
    left = within(state, state.most_mib(None))
    hosts = [device for device in state.devices if device.kind is DeviceKind.HOST]
    if spec.need_asleep is None or not hosts or spec.need_asleep.host_mib <= left[hosts[0].id]:
        return None
    limit_mib, usable_mib = state.limits.green_room_mib, hosts[0].usable_mib
    size_mib = usable_mib if limit_mib is None else min(limit_mib, usable_mib)
    return Shortfall(spec.need_asleep.host_mib, size_mib, max(0, size_mib - left[hosts[0].id]))


def excess(state: State, now: float) -> list[Slot]:
    """Who has to leave so that the others stay within the green room, those who are worth least first."""
    limit_mib = state.limits.green_room_mib
    if limit_mib is None:
        return []
    there = _sleepers(state)
    over_mib = _total_mib(state, there) - limit_mib
    leave: list[Slot] = []
    for slot in sorted(filter(_may_leave, there), key=lambda one: _worth(state, one, now)):
        mib = _host_mib(state, slot.claim_asleep)
        if over_mib > 0 and mib:
            leave.append(slot)
            over_mib -= mib
    return leave


def _sleepers(state: State) -> list[Slot]:
    """Those who stay or are on their way there. Who has to leave, or is about to wake, no longer counts."""
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


def _total_mib(state: State, slots: list[Slot]) -> int:
    return sum(_host_mib(state, slot.claim_asleep) for slot in slots)


def _host_mib(state: State, claim: Claim) -> int:
    devices = state.ledger.devices
    return sum(mib for on, mib in claim.items() if on in devices and devices[on].kind is DeviceKind.HOST)
