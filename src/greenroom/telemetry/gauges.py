"""The state of the gateway at the moment of a scrape, and the families of metrics it becomes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric

from greenroom.telemetry import table
from greenroom.telemetry.table import CacheCounts, counter_family, gauge_family


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    capacity_mib: float
    free_mib: float
    foreign_mib: float = 0


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """As the driver reports them; None where it does not."""

    total_mib: float
    used_mib: float
    utilisation: float | None = None
    temperature_c: float | None = None
    index: int = 0
    split_mib: Mapping[str, float] = field(default_factory=dict)
    """By kind: weights, kv, other."""


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """Of a lease store that is shared with other gateways."""

    is_up: bool
    slots_without_lease: int = 0


@dataclass(frozen=True, slots=True)
class LeaseFigures:
    """Leases of programs that are not models."""

    held: int = 0
    waiting: int = 0
    memory_mib: Mapping[str, float] = field(default_factory=dict)
    """By device."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """The state at the moment of a scrape. A model or device that is missing here has no series."""

    queue_depth: Mapping[str, int] = field(default_factory=dict)
    """By model."""
    in_flight: Mapping[str, int] = field(default_factory=dict)
    """By model."""
    slots: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """By model and tier."""
    memory_mib: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """By model and device."""
    caches: Mapping[str, CacheCounts] = field(default_factory=dict)
    """By model: the share of its KV cache in use, tokens looked up for a prefix, and tokens found."""
    devices: Mapping[str, DeviceMemory] = field(default_factory=dict)
    gpus: Mapping[str, GpuFigures] = field(default_factory=dict)
    store: StoreFigures | None = None
    leases: LeaseFigures = field(default_factory=LeaseFigures)
    green_room_size_mib: float | None = None
    green_room_used_mib: float = 0
    connections: int = 0
    event_listeners: int = 0
    log_lines_lost: int = 0
    uptime_s: float = 0.0


def gauge_families(now: Gauges) -> Iterator[Metric]:
    yield gauge_family(table.QUEUE_DEPTH, {(model,): depth for model, depth in now.queue_depth.items()})
    yield gauge_family(table.IN_FLIGHT, {(model,): count for model, count in now.in_flight.items()})
    yield gauge_family(table.SLOTS, now.slots)
    yield gauge_family(table.MODEL_MEMORY, now.memory_mib)
    yield gauge_family(table.DEVICE_CAPACITY, {(name,): device.capacity_mib for name, device in now.devices.items()})
    yield gauge_family(table.DEVICE_FREE, {(name,): device.free_mib for name, device in now.devices.items()})
    yield gauge_family(table.DEVICE_FOREIGN, {(name,): device.foreign_mib for name, device in now.devices.items()})
    yield from _gpu_families(now.gpus)
    yield gauge_family(table.STORE_UP, {} if now.store is None else {(): float(now.store.is_up)})
    yield gauge_family(table.UNLEASED, {} if now.store is None else {(): now.store.slots_without_lease})
    yield gauge_family(table.LEASES, {(): now.leases.held})
    yield gauge_family(table.LEASES_WAITING, {(): now.leases.waiting})
    yield gauge_family(table.LEASE_MEMORY, {(device,): mib for device, mib in now.leases.memory_mib.items()})
    yield from table.cache_families(now.caches)
    size_mib = now.green_room_size_mib
    yield gauge_family(table.GREEN_ROOM_SIZE, {} if size_mib is None else {(): size_mib})
    yield gauge_family(table.GREEN_ROOM_USED, {(): now.green_room_used_mib})
    yield gauge_family(table.CONNECTIONS, {(): now.connections})
    yield gauge_family(table.EVENT_LISTENERS, {(): now.event_listeners})
    yield counter_family(table.LOG_LINES_LOST, {(): now.log_lines_lost})
    yield gauge_family(table.UPTIME, {(): now.uptime_s})


def _gpu_families(gpus: Mapping[str, GpuFigures]) -> Iterator[Metric]:
    yield gauge_family(table.GPU_TOTAL, {(name,): gpu.total_mib for name, gpu in gpus.items()})
    yield gauge_family(table.GPU_USED, {(name,): gpu.used_mib for name, gpu in gpus.items()})
    split = {(name, kind): mib for name, gpu in gpus.items() for kind, mib in gpu.split_mib.items()}
    yield gauge_family(table.GPU_SPLIT, split)
    utilisation = {(name,): gpu.utilisation for name, gpu in gpus.items() if gpu.utilisation is not None}
    temperature = {(name,): gpu.temperature_c for name, gpu in gpus.items() if gpu.temperature_c is not None}
    yield gauge_family(table.GPU_UTILISATION, utilisation)
    yield gauge_family(table.GPU_TEMPERATURE, temperature)
