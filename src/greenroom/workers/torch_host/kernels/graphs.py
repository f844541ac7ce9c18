"""Decode steps captured once as CUDA graphs and replayed with one launch.

Owns the captured graphs of one model, by rows and width, and their memory pool. Never knows what a step computes.
Graphs hold addresses: weights, KV memory and the static inputs never move, so graphs stay valid over sleep and wake. If
a step cannot be captured (it synchronizes with the host), all later steps run without graphs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

log = logging.getLogger(__name__)

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS_MIN = 256


def bucket(count: int, sizes: Sequence[int]) -> int:
    """The smallest size that holds this many, else the largest."""
    return next((size for size in sizes if size >= count), sizes[-1])


def batch_sizes(batch_max: int) -> tuple[int, ...]:
    return (*(size for size in BATCHES if size < batch_max), batch_max)


def token_sizes(context: int) -> tuple[int, ...]:
    """Lengths a step is captured for: doubled up to the whole context."""
    sizes, size = [], TOKENS_MIN
    while size < context:
        sizes.append(size)
        size *= 2
    return (*sizes, context)


@dataclass(frozen=True, slots=True)
class Captured:
    graph: Any
    out: torch.Tensor


class Graphs:
    """`compute(rows, width)` followed by `advance(rows)`, as graphs on a CUDA device."""

    def __init__(self, compute: Callable[[int, int], torch.Tensor], advance: Callable[[int], None]) -> None:
        self._compute = compute
        self._advance = advance
        self._captured: dict[tuple[int, int], Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._side: Any = None
        self.is_able = True

    def run(self, rows: int, width: int) -> torch.Tensor:
        """The result of `compute`. Valid until the next run, in stream order."""
        found = self._captured.get((rows, width))
        if found is None and self.is_able:
            found = self._capture(rows, width)
        if found is None:
            return self._step(rows, width)
        found.graph.replay()
        return found.out

    def _step(self, rows: int, width: int) -> torch.Tensor:
        out = self._compute(rows, width)
        self._advance(rows)
        return out

    def _capture(self, rows: int, width: int) -> Captured | None:
        began = time.monotonic()
        side = self._capturing_stream()
        side.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(side):
                out = self._record(graph, rows, width)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            self.is_able = False
            log.warning("decode steps go without graphs: %s", str(error).splitlines()[0] if str(error) else repr(error))
            return None
        torch.cuda.current_stream().wait_stream(side)
        log.info("graph captured rows=%d width=%d took_s=%.3f", rows, width, time.monotonic() - began)
        self._captured[rows, width] = Captured(graph, out)
        return self._captured[rows, width]

    def _capturing_stream(self) -> Any:
        """The current stream, or a side stream if that is the default one, which cannot capture.

        Always the same side stream: libraries keep a workspace for every stream they have seen.
        """
        current = torch.cuda.current_stream()
        if current != torch.cuda.default_stream():
            return current
        if self._side is None:
            self._side = torch.cuda.Stream()
        return self._side

    def _record(self, graph: Any, rows: int, width: int) -> torch.Tensor:
        # The first run lets libraries allocate and kernels compile, which a graph must not contain. Computing the step
        # twice is safe: it writes the same keys and values again, as long as positions do not advance.
        self._compute(rows, width)
        torch.cuda.current_stream().synchronize()
        # Only this thread is bound by the rules of capture: other models may allocate meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            out = self._step(rows, width)
        finally:
            graph.capture_end()
        return out
