"""The table of metrics: every name, its meaning, its labels and its buckets, in one place. Owns the names. `metrics.py`
counts, `exposition.py` turns the counts into Prometheus's text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One entry of the table of metrics. Only histograms have bucket bounds."""

    name: str
    help: str
    labels: Labels = ()
    buckets: tuple[float, ...] = ()


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
TENANT_REQUESTS = MetricSpec("greenroom_tenant_requests_total", "Requests, refused ones included.", ("model", "tenant"))
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

# --- names of the runner API ----------------------------------------------------------------------------------------

# For dashboards that were made for it (`server.metrics_aliases`). From an embedding to a long generation.
_INFERENCE_S: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

ALIAS_REQUESTS = MetricSpec(
    "vllm_requests_total", "Requests, refused ones included; status is success or error.", ("model", "tenant", "status")
)
ALIAS_CACHE_HIT_RATE = MetricSpec(
    "vllm_cache_hit_rate", "Share of answers that reused a prefix, where the engine tells.", ("model",)
)
ALIAS_QUEUE_DEPTH = MetricSpec("vllm_queue_depth", "Requests that wait now, for any model.")
ALIAS_GPU_MEMORY = MetricSpec("vllm_gpu_memory_used", "Bytes of a GPU that are used, by any process.", ("gpu",))
ALIAS_SECONDS = MetricSpec(
    "vllm_inference_duration_seconds", "From a slot's grant to the last byte, of successes.", ("model",), _INFERENCE_S
)
