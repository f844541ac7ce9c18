"""The green room as people and metrics see it: its size, what is used of it, and by whom. Changes nothing."""

from __future__ import annotations

from greenroom.core.model import DeviceKind, MoveKind, Slot, Tier
from greenroom.core.state import State
from greenroom.server.admin.views import GreenRoomView

_TO_SLEEP = (MoveKind.SLEEP, MoveKind.PREPARE)


def green_room_view(state: State) -> GreenRoomView:
    sleepers = [slot for slot in state.slots.values() if slot.lease is None and _is_there(slot)]
    size_mib, used_mib = state.limits.green_room_mib, green_room_used_mib(state)
    return GreenRoomView(
        size_mib=size_mib,
        used_mib=used_mib,
        free_mib=_free_mib(state, size_mib, used_mib),
        models=sorted({slot.model for slot in sleepers if slot.tier is Tier.ASLEEP}),
    )


def green_room_used_mib(state: State) -> int:
    """What those hold on hosts who are asleep or about to be; who wakes holds it still."""
    return sum(_host_mib(state, slot) for slot in state.slots.values() if slot.lease is None and _is_there(slot))


def _is_there(slot: Slot) -> bool:
    return slot.tier is Tier.ASLEEP or (slot.move is not None and slot.move.kind in _TO_SLEEP)


def _host_mib(state: State, slot: Slot) -> int:
    devices, held = state.ledger.devices, state.ledger.held_by(slot.id)
    return sum(mib for on, mib in held.items() if on in devices and devices[on].kind is DeviceKind.HOST)


def _free_mib(state: State, size_mib: int | None, used_mib: int) -> int | None:
    """The smaller of what its size leaves and what the hosts have; None where there is no host to plan with."""
    free = state.ledger.free_mib(frozenset())
    hosts = [device.id for device in state.ledger.devices.values() if device.kind is DeviceKind.HOST]
    if not hosts:
        return None
    on_hosts = max(0, sum(free[host] for host in hosts))
    return on_hosts if size_mib is None else min(on_hosts, max(0, size_mib - used_mib))
