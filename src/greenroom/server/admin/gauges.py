"""What Prometheus is told of this moment: queue, slots and memory, read from the scheduler's tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from greenroom.core.model import Slot
from greenroom.core.queue.waitlist import WaiterKind
from greenroom.core.state import State
from greenroom.runtime.memory.probes.base import Reading
from greenroom.server.admin.gateway import Gateway
from greenroom.server.admin.green_room_views import green_room_used_mib
from greenroom.telemetry.metrics import DeviceMemory, Gauges, GpuFigures, LeaseFigures, StoreFigures


def gauges(gateway: Gateway, uptime_s: float) -> Gauges:
    """Models that are configured always have their numbers, zeros included; others only while they hold something."""
    state = gateway.loop.scheduler.state
    waiting: Counter[str] = Counter({entry.id: 0 for entry in gateway.catalog})
    in_flight = waiting.copy()
    waiting.update(waiter.model for waiter in state.waitlist if waiter.kind is WaiterKind.REQUEST)
    # A lease has a slot too, whose id anybody may make up: it must not become the name of a model.
    models = [slot for slot in state.slots.values() if slot.lease is None]
    in_flight.update(slot.model for slot in models for _ in slot.in_flight)
    return Gauges(
        queue_depth=waiting,
        in_flight=in_flight,
        slots=Counter((str(slot.model), slot.tier.value) for slot in models),
        memory_mib=_memory_mib(state, models),
        devices=_devices(state),
        gpus=_gpus(gateway.memory_watch.last.reading),
        store=_store(gateway),
        leases=_leases(gateway),
        green_room_size_mib=state.limits.green_room_mib,
        green_room_used_mib=green_room_used_mib(state),
        connections=gateway.edge.connections,
        uptime_s=uptime_s,
    )


def _store(gateway: Gateway) -> StoreFigures | None:
    sharing = gateway.sharing
    return None if sharing is None else StoreFigures(sharing.failure is None, sharing.slots_without_lease)


def _leases(gateway: Gateway) -> LeaseFigures:
    """Of programs, wherever they are kept. Devices always have their number, zero included."""
    devices = gateway.loop.scheduler.state.ledger.devices
    total: dict[str, float] = {str(device): 0 for device in devices}
    programs = [lease for lease in gateway.leasing.known() if lease.kind == "program"]
    held = [lease for lease in programs if lease.state == "held"]
    for lease in held:
        for device, mib in lease.claim.items():
            total[device] = total.get(device, 0) + mib
    return LeaseFigures(len(held), len(programs) - len(held), total)


def _memory_mib(state: State, models: Iterable[Slot]) -> dict[tuple[str, str], float]:
    total: dict[tuple[str, str], float] = {}
    for slot in models:
        for device, mib in state.ledger.held_by(slot.id).items():
            total[slot.model, device] = total.get((slot.model, device), 0) + mib
    return total


def _gpus(seen: Reading) -> dict[str, GpuFigures]:
    return {gpu.uuid: GpuFigures(gpu.total_mib, gpu.used_mib, gpu.utilisation, gpu.temperature_c) for gpu in seen.gpus}


def _devices(state: State) -> dict[str, DeviceMemory]:
    ledger, free = state.ledger, state.ledger.free_mib(frozenset())
    return {
        str(device.id): DeviceMemory(device.capacity_mib, max(0, free[device.id]), ledger.foreign.get(device.id, 0))
        for device in ledger.devices.values()
    }
