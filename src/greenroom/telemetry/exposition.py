"""The metrics in the text format of Prometheus: what was counted, and the state of the gateway when it is asked. Never
counts: `metrics.py` does. `server.metrics_aliases` adds series under the names of the runner API."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from greenroom.telemetry import table
from greenroom.telemetry.metrics import UNKNOWN_MODEL, Counter, Histogram, Metrics, Spread
from greenroom.telemetry.table import Labels, MetricSpec

# The label for all tenants where they are summed.
ALL: Final = "all"
_BYTES_A_MIB: Final = 1024 * 1024
# The share in use, tokens looked up, tokens found; None where the engine does not count.
CacheCounts = tuple[float, int | None, int | None]

_LabelsOrPair = TypeVar("_LabelsOrPair", bound=Labels)


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


def render(metrics: Metrics, gauges: Gauges, *, only_models: Collection[str] | None = None) -> tuple[bytes, str]:
    """Everything in the text format of Prometheus, and its content type. With `only_models` the series of other models
    are left out, and tenants are summed. May run in a thread beside the loop that counts, and should: with the most
    tenants that are kept apart it takes about half a second."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Everything(metrics, gauges, only_models))
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


class _Everything(Collector):
    """The collector that the registry asks at a scrape."""

    def __init__(self, metrics: Metrics, gauges: Gauges, only_models: Collection[str] | None) -> None:
        self._metrics = metrics
        self._gauges = gauges
        self._only_models = only_models

    def collect(self) -> Iterator[Metric]:
        models = self._only_models
        for family in _families(self._metrics, self._gauges, by_tenant=models is None):
            if models is not None:
                family.samples = [one for one in family.samples if _is_of(one.labels.get("model"), models)]
            yield family


def _is_of(model: str | None, models: Collection[str]) -> bool:
    return model is None or model == UNKNOWN_MODEL or model in models


def _families(metrics: Metrics, gauges: Gauges, *, by_tenant: bool) -> Iterator[Metric]:
    requests, tokens = metrics.tenant_requests, metrics.tenant_tokens
    if not by_tenant:
        requests, tokens = (_summed(counter, "tenant", counter.spec, ALL) for counter in (requests, tokens))
    yield counter_family(_summed(requests, "status", table.TENANT_REQUESTS))
    yield counter_family(tokens)
    if metrics.answer_seconds is not None:
        yield from _aliases(requests, metrics.answer_seconds, metrics.prefix_hit_rates(), gauges)
    rates = metrics.prefix_hit_rates()
    yield _gauge_family(table.PREFIX_RATIO, {(model,): rate for model, rate in rates.items()})
    yield from map(counter_family, metrics.counters())
    yield from map(_histogram_family, metrics.histograms())
    yield from _gauge_families(gauges)


def _aliases(requests: Counter, seconds: Histogram, hit_rates: Mapping[str, float], gauges: Gauges) -> Iterator[Metric]:
    """The figures that the runner API has, under its names."""
    yield counter_family(requests)
    yield _gauge_family(table.ALIAS_CACHE_HIT_RATE, {(model,): rate for model, rate in hit_rates.items()})
    yield _gauge_family(table.ALIAS_QUEUE_DEPTH, {(): sum(gauges.queue_depth.values())})
    used = {(str(gpu.index),): gpu.used_mib * _BYTES_A_MIB for gpu in gauges.gpus.values()}
    yield _gauge_family(table.ALIAS_GPU_MEMORY, used)
    yield _histogram_family(seconds)


def _summed(counter: Counter, label: str, spec: MetricSpec, *instead: str) -> Counter:
    """A copy of this name in which all values of a label are summed: under another value, or without the label."""
    place = counter.spec.labels.index(label)
    total = Counter(spec)
    for labels in list(counter.series):
        total.at(*labels[:place], *instead, *labels[place + 1 :]).add(counter.series[labels].value)
    return total


def counter_family(counter: Counter) -> CounterMetricFamily:
    family = CounterMetricFamily(counter.spec.name, counter.spec.help, labels=counter.spec.labels)
    # This may run in a thread while the loop adds series. Copying the keys is one step; copying the items is not,
    # because each pair that is made may cause a garbage collection, which may let the loop run.
    for labels in list(counter.series):
        family.add_metric(labels, counter.series[labels].value)
    return family


def _histogram_family(histogram: Histogram) -> HistogramMetricFamily:
    spec = histogram.spec
    family = HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
    bounds = [*(str(float(bound)) for bound in spec.buckets), "+Inf"]
    for labels in list(histogram.series):
        spread = histogram.series[labels]
        family.add_metric(labels, _cumulated(bounds, spread), spread.sum)
    return family


def _cumulated(bounds: list[str], spread: Spread) -> list[tuple[str, float]]:
    """Buckets in the form of Prometheus: each includes all smaller ones."""
    below = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip(bounds, spread.counts, strict=True):
        below += count
        buckets.append((bound, below))
    return buckets


def _kept_elsewhere(spec: MetricSpec, values: Mapping[Labels, int]) -> CounterMetricFamily:
    """A counter that is kept elsewhere, by label values."""
    counter = Counter(spec)
    for labels, value in values.items():
        counter.at(*labels).add(value)
    return counter_family(counter)


def _gauge_family(spec: MetricSpec, values: Mapping[_LabelsOrPair, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(spec.name, spec.help, labels=spec.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _gauge_families(now: Gauges) -> Iterator[Metric]:
    yield _gauge_family(table.QUEUE_DEPTH, {(model,): depth for model, depth in now.queue_depth.items()})
    yield _gauge_family(table.IN_FLIGHT, {(model,): count for model, count in now.in_flight.items()})
    yield _gauge_family(table.SLOTS, now.slots)
    yield _gauge_family(table.MODEL_MEMORY, now.memory_mib)
    yield _gauge_family(table.DEVICE_CAPACITY, {(name,): device.capacity_mib for name, device in now.devices.items()})
    yield _gauge_family(table.DEVICE_FREE, {(name,): device.free_mib for name, device in now.devices.items()})
    yield _gauge_family(table.DEVICE_FOREIGN, {(name,): device.foreign_mib for name, device in now.devices.items()})
    yield from _gpu_families(now.gpus)
    yield _gauge_family(table.STORE_UP, {} if now.store is None else {(): float(now.store.is_up)})
    yield _gauge_family(table.UNLEASED, {} if now.store is None else {(): now.store.slots_without_lease})
    yield _gauge_family(table.LEASES, {(): now.leases.held})
    yield _gauge_family(table.LEASES_WAITING, {(): now.leases.waiting})
    yield _gauge_family(table.LEASE_MEMORY, {(device,): mib for device, mib in now.leases.memory_mib.items()})
    yield from _cache_families(now.caches)
    size_mib = now.green_room_size_mib
    yield _gauge_family(table.GREEN_ROOM_SIZE, {} if size_mib is None else {(): size_mib})
    yield _gauge_family(table.GREEN_ROOM_USED, {(): now.green_room_used_mib})
    yield _gauge_family(table.CONNECTIONS, {(): now.connections})
    yield _gauge_family(table.EVENT_LISTENERS, {(): now.event_listeners})
    yield _kept_elsewhere(table.LOG_LINES_LOST, {(): now.log_lines_lost})
    yield _gauge_family(table.UPTIME, {(): now.uptime_s})


def _gpu_families(gpus: Mapping[str, GpuFigures]) -> Iterator[Metric]:
    yield _gauge_family(table.GPU_TOTAL, {(name,): gpu.total_mib for name, gpu in gpus.items()})
    yield _gauge_family(table.GPU_USED, {(name,): gpu.used_mib for name, gpu in gpus.items()})
    split = {(name, kind): mib for name, gpu in gpus.items() for kind, mib in gpu.split_mib.items()}
    yield _gauge_family(table.GPU_SPLIT, split)
    utilisation = {(name,): gpu.utilisation for name, gpu in gpus.items() if gpu.utilisation is not None}
    temperature = {(name,): gpu.temperature_c for name, gpu in gpus.items() if gpu.temperature_c is not None}
    yield _gauge_family(table.GPU_UTILISATION, utilisation)
    yield _gauge_family(table.GPU_TEMPERATURE, temperature)


def _cache_families(caches: Mapping[str, CacheCounts]) -> Iterator[Metric]:
    """What engines tell of their caches, by model."""
    yield _gauge_family(table.KV_CACHE_USED, {(model,): used for model, (used, _, _) in caches.items()})
    yield _kept_elsewhere(
        table.PREFIX_QUERIES, {(model,): count for model, (_, count, _) in caches.items() if count is not None}
    )
    yield _kept_elsewhere(
        table.PREFIX_HITS, {(model,): count for model, (_, _, count) in caches.items() if count is not None}
    )
