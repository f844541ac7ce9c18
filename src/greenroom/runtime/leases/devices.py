"""Which devices somebody means who asks for a lease, and what could be had there."""

from __future__ import annotations

from collections.abc import Callable

from greenroom.core.ledger import Ledger
from greenroom.core.model import DeviceId, DeviceKind
from greenroom.core.state import State
from greenroom.errors import BadRequest
from greenroom.leases.records import LeaseAsk
from greenroom.runtime.memory.devices import HOST

DeviceNamed = Callable[[str], DeviceId | None]


def devices_meant(ask: LeaseAsk, device_named: DeviceNamed) -> tuple[str, ...]:
    """The ids of the devices that were named. Raises BadRequest."""
    meant = {name: device_named(name) for name in ask.devices}
    if unknown := [name for name, device in meant.items() if device is None]:
        raise BadRequest(f"There is no device {unknown[0]}; `greenroom gpus` lists them.", param="devices")
    if HOST in meant.values():
        raise BadRequest("A lease is for GPUs; the host's memory is not leased.", param="devices")
    devices = tuple(sorted({str(device) for device in meant.values()}))
    if devices and len(devices) < ask.gpus:
        raise BadRequest(f"{ask.gpus} GPUs are wanted and {len(devices)} named.", param="devices")
    return devices


def leasable_mib(ledger: Ledger) -> dict[str, int]:
    """What leases can be given now: on each GPU, or on the host where there is none."""
    free = ledger.free_mib(frozenset())
    return {str(device): max(0, free[device]) for device in _leasable(ledger)}


def most_leasable_mib(state: State) -> dict[str, int]:
    """What there would be if everybody left who ever may."""
    most = state.most_mib(None)
    return {str(device): max(0, most[device]) for device in _leasable(state.ledger)}


def _leasable(ledger: Ledger) -> list[DeviceId]:
    return [one.id for one in ledger.devices.values() if one.kind is DeviceKind.GPU] or list(ledger.devices)
