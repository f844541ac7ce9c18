"""The table of metrics: every name, its meaning, its labels and its buckets, in one place.

Owns the names, and the counters and histograms behind them: plain numbers in dicts, turned into families of
prometheus_client when asked for. Its own counters take a lock for every increment, which costs more than the rest of a
request's bookkeeping; here one event loop owns the numbers, so there is no lock. `metrics.py` counts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

Labels = tuple[str, ...]
_LabelsOrPair = TypeVar("_LabelsOrPair", bound=Labels)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One entry of the table of metrics. Only histograms have bucket bounds."""

    name: str
    help: str
    labels: Labels = ()
    buckets: tuple[float, ...] = ()


class Count:
    """One series of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def add(self, amount: int = 1) -> None:
        self.value += amount


class Spread:
    """One series of a histogram: how many values fell into each bucket, and their sum."""

    __slots__ = ("_bounds", "_lowest", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._lowest = bounds[0]
        # The last bucket is everything above the highest bound.
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        # Most requests do not wait.
        self.counts[0 if value <= self._lowest else bisect_left(self._bounds, value)] += 1
        self.sum += value


class Counter:
    """All series of one counter, by label values."""

    __slots__ = ("series", "spec")

    def __init__(self, spec: MetricSpec) -> None:
        self.spec = spec
        self.series: dict[Labels, Count] = {}

    def at(self, *labels: str) -> Count:
        """The series with these labels; made when it is first asked for."""
        found = self.series.get(labels)
        if found is None:
            found = self.series[labels] = Count()
        return found

    def summed(self, label: str, value: str) -> Counter:
        """A copy in which all values of this label are summed under `value`."""
        place = self.spec.labels.index(label)
        total = Counter(self.spec)
        for labels in list(self.series):
            total.at(*labels[:place], value, *labels[place + 1 :]).add(self.series[labels].value)
        return total

    def without(self, label: str, spec: MetricSpec) -> Counter:
        """A copy of this name in which all values of a label are summed, and the label is left out."""
        place = self.spec.labels.index(label)
        total = Counter(spec)
        for labels in list(self.series):
            total.at(*labels[:place], *labels[place + 1 :]).add(self.series[labels].value)
        return total

    def family(self) -> CounterMetricFamily:
        family = CounterMetricFamily(self.spec.name, self.spec.help, labels=self.spec.labels)
        # This may run in a thread while the loop adds series. Copying the keys is one step; copying the items is not,
        # because each pair that is made may cause a garbage collection, which may let the loop run.
        for labels in list(self.series):
            family.add_metric(labels, self.series[labels].value)
        return family


class Histogram:
    """All series of one histogram, by label values."""

    __slots__ = ("_bound_names", "series", "spec")

    def __init__(self, spec: MetricSpec) -> None:
        self.spec = spec
        self.series: dict[Labels, Spread] = {}
        self._bound_names = [*(str(float(bound)) for bound in spec.buckets), "+Inf"]

    def at(self, *labels: str) -> Spread:
        """The series with these labels; made when it is first asked for."""
        found = self.series.get(labels)
        if found is None:
            found = self.series[labels] = Spread(self.spec.buckets)
        return found

    def family(self) -> HistogramMetricFamily:
        family = HistogramMetricFamily(self.spec.name, self.spec.help, labels=self.spec.labels)
        for labels in list(self.series):
            spread = self.series[labels]
            family.add_metric(labels, self._cumulated(spread), spread.sum)
        return family

    def _cumulated(self, spread: Spread) -> list[tuple[str, float]]:
        """Buckets as Prometheus wants them: each includes all smaller ones."""
        below = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip(self._bound_names, spread.counts, strict=True):
            below += count
            buckets.append((bound, below))
        return buckets


def counter_family(spec: MetricSpec, values: Mapping[Labels, int]) -> CounterMetricFamily:
    """A counter that is kept elsewhere, by label values."""
    counter = Counter(spec)
    for labels, value in values.items():
        counter.at(*labels).add(value)
    return counter.family()


def gauge_family(spec: MetricSpec, values: Mapping[_LabelsOrPair, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(spec.name, spec.help, labels=spec.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


# Answers take from a cached embedding's milliseconds to a long generation's minutes.
_ANSWER_S: Final = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# Most requests do not wait; wait_max_s bounds the longest wait.
_WAIT_S: Final = (0.001, 0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
# A wake takes a fraction of a second, a load from a slow disk minutes.
_MOVE_S: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
# From a slow disk (0.1 GB/s) over PCIe 3 to 5 (12, 25, 50) to faster links.
_BYTES_PER_S: Final = (1e8, 3e8, 1e9, 3e9, 6e9, 1.2e10, 2e10, 2.5e10, 4e10, 5e10, 6e10, 1e11, 2e11, 4e11)

# From a word to hours of sound, and from a hundred times as fast as speech to slower.
_AUDIO_S: Final = (1, 5, 15, 30, 60, 300, 900, 1800, 3600, 7200, 14400)
_FACTOR: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 2, 5)

# --- the table: every metric there is -------------------------------------------------------------------------------
REQUESTS = MetricSpec("greenroom_requests_total", "Requests answered.", ("model", "route", "status"))
REQUEST_SECONDS = MetricSpec("greenroom_request_seconds", "From arrival to last byte.", ("model", "route"), _ANSWER_S)
WAIT_SECONDS = MetricSpec("greenroom_queue_wait_seconds", "From arrival to a slot's grant.", ("model",), _WAIT_S)
WAIT_CAUSE_SECONDS = MetricSpec(
    "greenroom_queue_wait_cause_seconds",
    "Parts of that wait: not_there (until its slot was ready) and full (that served as many as it can).",
    ("model", "cause"),
    _WAIT_S,
)
FIRST_BYTE_SECONDS = MetricSpec(
    "greenroom_first_byte_seconds", "Streams: from arrival to the first event.", ("model",), _ANSWER_S
)
TENANT_REQUESTS = MetricSpec("greenroom_tenant_requests_total", "Requests answered, by tenant.", ("model", "tenant"))
TOKENS = MetricSpec(
    "greenroom_tokens_total", "Tokens; kind is prompt, completion or cached.", ("model", "tenant", "kind")
)
AUDIO_SECONDS = MetricSpec(
    "greenroom_audio_seconds", "Length of the sound of answers, heard or spoken.", ("model", "route"), _AUDIO_S
)
AUDIO_FACTOR = MetricSpec(
    "greenroom_audio_realtime_factor",
    "Seconds that an answer took for each second of sound; below 1 is faster than it is spoken.",
    ("model", "route"),
    _FACTOR,
)
LOOKUPS = MetricSpec(
    "greenroom_model_lookups_total", "Requests granted at once (hit) or not (miss).", ("model", "result")
)
PREFIX_ANSWERS = MetricSpec(
    "greenroom_prefix_cache_answers_total",
    "Answers that reused a prefix of their prompt (hit) or none (miss), where the engine tells.",
    ("model", "result"),
)
PREFIX_RATIO = MetricSpec(
    "greenroom_prefix_cache_hit_ratio",
    "Share of answers since the start that reused a prefix of their prompt, where the engine tells.",
    ("model",),
)
MOVES = MetricSpec("greenroom_moves_total", "Moves between tiers that ended.", ("model", "kind", "outcome"))
MOVE_SECONDS = MetricSpec("greenroom_move_seconds", "How long moves took that succeeded.", ("model", "kind"), _MOVE_S)
EVICTIONS = MetricSpec("greenroom_evictions_total", "Models that had to leave.", ("model", "reason"))
REJECTIONS = MetricSpec(
    "greenroom_rejections_total", "Requests refused while they waited or before.", ("model", "code")
)
EDGE_REFUSALS = MetricSpec("greenroom_edge_refusals_total", "Requests refused before the scheduler.", ("code",))
WAKE_BYTES = MetricSpec("greenroom_wake_bytes_total", "Weights copied from the green room to a device.", ("model",))
WAKE_RATE = MetricSpec(
    "greenroom_wake_bytes_per_second", "How fast each wake copied weights.", ("model",), _BYTES_PER_S
)
PREPARE_BYTES = MetricSpec("greenroom_prepare_bytes_total", "Weights read from disk into the green room.", ("model",))
PREPARE_RATE = MetricSpec(
    "greenroom_prepare_bytes_per_second", "How fast each was read from disk.", ("model",), _BYTES_PER_S
)
WORKER_STARTS = MetricSpec("greenroom_worker_starts_total", "Worker processes started: needed or spare.", ("purpose",))
WORKER_LOSSES = MetricSpec("greenroom_worker_losses_total", "Worker processes that ended unasked.")
FLUSHED_BYTES = MetricSpec("greenroom_cache_flushed_bytes_total", "Prefix caches freed on request.", ("model",))
PREFETCH_BYTES = MetricSpec(
    "greenroom_prefetch_bytes_total", "Read ahead into the page cache for models that wait.", ("model",)
)

QUEUE_DEPTH = MetricSpec("greenroom_queue_depth", "Requests that wait now.", ("model",))
IN_FLIGHT = MetricSpec("greenroom_in_flight", "Requests that are answered now.", ("model",))
SLOTS = MetricSpec("greenroom_slots", "Slots by tier: ready, asleep, cold.", ("model", "tier"))
MODEL_MEMORY = MetricSpec("greenroom_model_memory_mib", "Memory a model holds on a device.", ("model", "device"))
DEVICE_CAPACITY = MetricSpec("greenroom_device_capacity_mib", "Memory a device has.", ("device",))
DEVICE_FREE = MetricSpec("greenroom_device_free_mib", "Memory that can still be planned with.", ("device",))
DEVICE_FOREIGN = MetricSpec("greenroom_device_foreign_mib", "Memory of processes that are not ours.", ("device",))
GPU_TOTAL = MetricSpec("greenroom_gpu_total_mib", "Memory of a GPU that can be allocated.", ("device",))
GPU_USED = MetricSpec("greenroom_gpu_used_mib", "Memory of a GPU that is used, by any process.", ("device",))
GPU_SPLIT = MetricSpec(
    "greenroom_gpu_split_mib",
    "The same memory by kind: weights and kv as planned for ready models, other is the rest.",
    ("device", "kind"),
)
GPU_UTILISATION = MetricSpec(
    "greenroom_gpu_utilisation_percent", "Share of the time something ran on a GPU.", ("device",)
)
GPU_TEMPERATURE = MetricSpec("greenroom_gpu_temperature_celsius", "How hot a GPU is.", ("device",))
STORE_UP = MetricSpec("greenroom_lease_store_up", "Whether the shared lease store answers; absent where there is none.")
UNLEASED = MetricSpec("greenroom_slots_without_lease", "Models that run without a lease in the shared store.")
LEASES = MetricSpec("greenroom_leases", "Leases that other programs hold, of this gateway or in the shared store.")
LEASES_WAITING = MetricSpec("greenroom_leases_waiting", "Leases that other programs wait for there.")
LEASE_ASKS = MetricSpec(
    "greenroom_lease_asks_total", "Leases asked of this gateway: granted, denied, given_up.", ("outcome",)
)
LEASE_MEMORY = MetricSpec("greenroom_lease_memory_mib", "Memory that such leases hold on a device.", ("device",))
KV_CACHE_USED = MetricSpec(
    "greenroom_engine_kv_cache_used_ratio", "The fullest KV cache of a model, as its engine tells it.", ("model",)
)
PREFIX_QUERIES = MetricSpec(
    "greenroom_engine_prefix_queries_total", "Prompt tokens that engines looked up in their prefix cache.", ("model",)
)
PREFIX_HITS = MetricSpec(
    "greenroom_engine_prefix_hits_total", "Prompt tokens that engines found in their prefix cache.", ("model",)
)

GREEN_ROOM_SIZE = MetricSpec("greenroom_green_room_size_mib", "Host memory for models asleep; absent if unbounded.")
GREEN_ROOM_USED = MetricSpec("greenroom_green_room_used_mib", "Host memory that models asleep hold.")
CONNECTIONS = MetricSpec("greenroom_connections", "Open connections of callers.")
EVENT_LISTENERS = MetricSpec("greenroom_event_listeners", "Open streams of events.")
LOG_LINES_LOST = MetricSpec(
    "greenroom_log_lines_lost_total", "Log lines that could not be written since the gateway started."
)
UPTIME = MetricSpec("greenroom_uptime_seconds", "Since the gateway started.")

TABLE: Final = (
    *(REQUESTS, REQUEST_SECONDS, WAIT_SECONDS, WAIT_CAUSE_SECONDS, FIRST_BYTE_SECONDS),
    *(TENANT_REQUESTS, TOKENS, AUDIO_SECONDS, AUDIO_FACTOR, LOOKUPS, PREFIX_ANSWERS, PREFIX_RATIO),
    *(MOVES, MOVE_SECONDS, EVICTIONS, REJECTIONS, EDGE_REFUSALS),
    *(WAKE_BYTES, WAKE_RATE, PREPARE_BYTES, PREPARE_RATE, WORKER_STARTS, WORKER_LOSSES, FLUSHED_BYTES, PREFETCH_BYTES),
    *(QUEUE_DEPTH, IN_FLIGHT, SLOTS, MODEL_MEMORY, DEVICE_CAPACITY, DEVICE_FREE, DEVICE_FOREIGN),
    *(GPU_TOTAL, GPU_USED, GPU_SPLIT, GPU_UTILISATION, GPU_TEMPERATURE, STORE_UP, UNLEASED),
    *(LEASES, LEASES_WAITING, LEASE_MEMORY, LEASE_ASKS, KV_CACHE_USED, PREFIX_QUERIES, PREFIX_HITS),
    *(GREEN_ROOM_SIZE, GREEN_ROOM_USED, CONNECTIONS, EVENT_LISTENERS, LOG_LINES_LOST, UPTIME),
)


# The share in use, tokens looked up, tokens found; None where the engine does not count.
CacheCounts = tuple[float, int | None, int | None]


def cache_families(caches: Mapping[str, CacheCounts]) -> Iterator[Metric]:
    """What engines tell of their caches, by model."""
    yield gauge_family(KV_CACHE_USED, {(model,): used for model, (used, _, _) in caches.items()})
    yield counter_family(
        PREFIX_QUERIES, {(model,): count for model, (_, count, _) in caches.items() if count is not None}
    )
    yield counter_family(PREFIX_HITS, {(model,): count for model, (_, _, count) in caches.items() if count is not None})


@dataclass(slots=True)
class ModelCounts:
    """How often a model was there when it was asked for, and what was done to have it there."""

    hits: int = 0
    misses: int = 0
    loads: int = 0
    load_s: float = 0.0
    evictions: int = 0

    def add(self, other: ModelCounts) -> None:
        self.hits += other.hits
        self.misses += other.misses
        self.loads += other.loads
        self.load_s += other.load_s
        self.evictions += other.evictions


def model_counts(lookups: Counter, evictions: Counter, moves: Counter, seconds: Histogram) -> dict[str, ModelCounts]:
    """Counts by model."""
    found: dict[str, ModelCounts] = {}

    def of(model: str) -> ModelCounts:
        return found.setdefault(model, ModelCounts())

    for (model, result), count in lookups.series.items():
        of(model).add(ModelCounts(hits=count.value) if result == "hit" else ModelCounts(misses=count.value))
    for (model, _), count in evictions.series.items():
        of(model).evictions += count.value
    for (model, kind, outcome), count in moves.series.items():
        of(model).loads += count.value if (kind, outcome) == ("load", "done") else 0
    for (model, kind), spread in seconds.series.items():
        of(model).load_s += spread.sum if kind == "load" else 0
    return found
