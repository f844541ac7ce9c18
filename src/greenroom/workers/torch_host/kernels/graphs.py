"""Decode steps captured once and replayed: the host says one word and the device does the whole step.

Owns the captured graphs of one model, by rows and width, and the memory pool they share. Never knows what a step
computes. A graph remembers addresses: weights, KV memory and the static inputs never move, so graphs outlive sleep. A
step that cannot be captured (it asks the host something in the middle) is computed as it stands, from then on.
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
    """The smallest size that holds this many; the largest where none does."""
    return next((size for size in sizes if size >= count), sizes[-1])


def batch_sizes(batch_max: int) -> tuple[int, ...]:
    return (*(size for size in BATCHES if size < batch_max), batch_max)


def token_sizes(context: int) -> tuple[int, ...]:
    """Lengths a step is captured for: doubled until the whole context is in."""
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
    """`compute(rows, width)` and then `advance(rows)`, what goes on from step to step, as graphs on a CUDA device."""

    def __init__(self, compute: Callable[[int, int], torch.Tensor], advance: Callable[[int], None]) -> None:
        self._compute = compute
        self._advance = advance
        self._captured: dict[tuple[int, int], Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._side: Any = None
        self.is_able = True

    def run(self, rows: int, width: int) -> torch.Tensor:
        """What `compute` gives. It stands until the next run, in the order of the stream."""
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
        """The stream in use, or one beside it where that is the default one, which cannot capture.

        Always the same: libraries keep room to work for every stream they have seen, and never give it back.
        """
        current = torch.cuda.current_stream()
        if current != torch.cuda.default_stream():
            return current
        if self._side is None:
            self._side = torch.cuda.Stream()
        return self._side

    def _record(self, graph: Any, rows: int, width: int) -> torch.Tensor:
        # The first time through, libraries allocate and kernels are compiled, which no graph may contain. The step
        # itself may be computed twice: it writes the same keys and values again, as long as nothing advances.
        self._compute(rows, width)
        torch.cuda.current_stream().synchronize()
        # Only this thread's calls are held to a capture's rules: other models go on allocating meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            out = self._step(rows, width)
        finally:
            graph.capture_end()
        return out
