"""Series under the names of the runner API, for dashboards that were made for it (`server.metrics_aliases`).

Owns these names, and the one measurement that no other metric has: the time of an answer without its wait. All other
figures are those of `metrics.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.metrics_core import Metric

from greenroom.telemetry.table import Counter, Histogram, MetricSpec, gauge_family

MIB: Final = 1024 * 1024
# From an embedding to a long generation.
_INFERENCE_S: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

REQUESTS = MetricSpec(
    "vllm_requests_total", "Requests answered; status is success or error.", ("model", "tenant", "status")
)
CACHE_HIT_RATE = MetricSpec(
    "vllm_cache_hit_rate", "Share of answers that reused a prefix, where the engine tells.", ("model",)
)
QUEUE_DEPTH = MetricSpec("vllm_queue_depth", "Requests that wait now, for any model.")
GPU_MEMORY = MetricSpec("vllm_gpu_memory_used", "Bytes of a GPU that are used, by any process.", ("gpu",))
SECONDS = MetricSpec(
    "vllm_inference_duration_seconds", "From a slot's grant to the last byte, of successes.", ("model",), _INFERENCE_S
)


class RunnerAliases:
    def __init__(self) -> None:
        self.seconds = Histogram(SECONDS)

    def families(
        self, requests: Counter, hit_rates: Mapping[str, float], queue_depth: int, gpus_mib: Mapping[int, float]
    ) -> Iterator[Metric]:
        """`requests` has the labels of `REQUESTS`; `gpus_mib` is what is used of each GPU, by its number."""
        yield requests.family()
        yield gauge_family(CACHE_HIT_RATE, {(model,): rate for model, rate in hit_rates.items()})
        yield gauge_family(QUEUE_DEPTH, {(): queue_depth})
        yield gauge_family(GPU_MEMORY, {(str(gpu),): mib * MIB for gpu, mib in gpus_mib.items()})
        yield self.seconds.family()
