"""Runs a model's forward passes on its device: chunks of prompts, and one decode token for each row of a batch.

Owns the KV views of the layers, the static inputs of decoding and the CUDA graphs captured of it, by rows and width.
Graphs hold addresses: weights, KV memory and the static inputs never move, so graphs stay valid over sleep and wake. If
a step cannot be captured (it synchronizes with the host), all later steps run without graphs. Never decides what is
computed next and never samples (the batch scheduler and `sampling` do). Used by the model's thread only. Read
`ModelRunner.prefill` and `decode` first.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..failures import BadModel
from ..kernels.attention import IMPLEMENTATION, AttentionKernels, LayerKV, ModelStep, as_current_step, stores_in
from ..kernels.fuse import fuse_modules
from ..kernels.rope import fuse_rope, rope_by_length
from .model_shape import BLOCK_TOKENS, SCRATCH_BLOCK, blocks_for, kv_bytes, layer_shapes, text_config, token_limits
from .steps import DecodeStep, PrefillStep, Span, slots_of

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


class Graphs:
    """Decode steps as graphs on a CUDA device, by rows and width."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        # Each graph, and where it leaves its result.
        self._captured: dict[tuple[int, int], tuple[Any, torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._side: Any = None
        self.is_able = True

    def run(self, rows: int, width: int) -> torch.Tensor:
        """The logits of a step. Valid until the next run, in stream order."""
        found = self._captured.get((rows, width))
        if found is None and self.is_able:
            found = self._capture(rows, width)
        if found is None:
            return self._runner.step(rows, width)
        graph, out = found
        graph.replay()
        return out

    def _capture(self, rows: int, width: int) -> tuple[Any, torch.Tensor] | None:
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
        self._captured[rows, width] = graph, out
        return graph, out

    def _capturing_stream(self) -> Any:
        """The current stream, or a side stream if that is the default one, which cannot capture. Always the same side
        stream: libraries keep a workspace for every stream they have seen."""
        current = torch.cuda.current_stream()
        if current != torch.cuda.default_stream():
            return current
        if self._side is None:
            self._side = torch.cuda.Stream()
        return self._side

    def _record(self, graph: Any, rows: int, width: int) -> torch.Tensor:
        # The first run lets libraries allocate and kernels compile, which a graph must not contain. Computing the step
        # twice is safe: it writes the same keys and values again, as long as positions do not advance.
        self._runner.compute(rows, width)
        torch.cuda.current_stream().synchronize()
        # Only this thread is bound by the rules of capture: other models may allocate meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            out = self._runner.step(rows, width)
        finally:
            graph.capture_end()
        return out


# Without paged attention a captured step keeps memory for all gathered keys: larger steps are not captured.
GATHERED_TOKENS_MAX = 65536
# Models whose rotary embedding synchronizes with the host in the middle of a step.
UNCAPTURABLE = frozenset({"phimoe"})


class KVMemory(Protocol):
    """KV memory: flat bytes on the device, mapped only while the model is awake."""

    @property
    def tensor(self) -> torch.Tensor: ...


class DeviceModel(Protocol):
    """A model on a device, as the runner needs it: its module and its KV memory."""

    module: torch.nn.Module
    config: Any
    device: torch.device
    dtype: torch.dtype

    @property
    def kv(self) -> KVMemory: ...

    def wait_for_weights(self) -> None:
        """Returns when all weights are on the device."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive tokens of one sequence, computed in one step."""

    tokens: Sequence[int]
    past: int
    blocks: Sequence[int]
    """The sequence's block table, long enough for `past` and `tokens`."""
    is_last: bool
    """True if the logits after its last token are wanted."""
    length: int = 0
    """Tokens of the whole sequence, if more follow these."""


class ModelRunner:
    """Built once per model. Captured graphs stay valid over sleep and wake."""

    def __init__(self, model: DeviceModel, cache_tokens: int, batch_max: int, context: int) -> None:
        self.model = model
        self.cache_tokens = cache_tokens
        self.context = min(context, blocks_for(cache_tokens) * BLOCK_TOKENS)
        self.shapes = layer_shapes(model.config)
        self.heads = int(text_config(model.config).num_attention_heads)
        _check(model)
        self.rope_switches = rope_by_length(model.module, model.config)
        """Lengths beyond which a sequence must be computed again, because its keys need other rotary factors."""
        self.kernels = AttentionKernels.probe(self.shapes[0], self.heads, model.dtype, model.device)
        self.inputs = DecodeInputs(batch_max, blocks_for(self.context) + 1, model.device)
        self._stores: tuple[LayerKV, ...] = ()
        self.windows: set[int | None] = set()
        """The attention windows that layers used in the last prefill; None: no window."""
        self._vocabulary = token_limits(model.module).choices
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.module.forward).parameters
        self._batches = batch_sizes(batch_max)
        # One block more than the context: a step may start before the end of a sequence is known.
        longest = (blocks_for(self.context) + 1) * BLOCK_TOKENS
        # With paged attention a wide block table costs nothing: one width is captured for all lengths.
        self._lengths = (longest,) if self.kernels.pages else token_sizes(longest)
        self._graphs: Graphs | None = None
        if model.device.type == "cuda":
            fuse_modules(model.module)
            if self.kernels.pages:
                fuse_rope(model.module, self.shapes[0].key_dim, model.dtype, model.device)
            if text_config(model.config).model_type not in UNCAPTURABLE:
                self._graphs = Graphs(self)

    def on_wake(self) -> None:
        """KV memory is mapped again. It is zeroed: masked positions must hold finite numbers."""
        memory = self.model.kv.tensor
        memory.zero_()
        self._stores = stores_in(memory, self.shapes, self.model.dtype, self.cache_tokens)

    def on_sleep(self) -> None:
        self._stores = ()

    @contextmanager
    def scratch_memory(self, rows: int, tokens: int) -> Iterator[None]:
        """Inside, steps use temporary inputs and KV memory, and are not captured."""
        model, kept = self.model, (self.inputs, self._stores, self._graphs)
        memory = torch.zeros(
            kv_bytes(model.config, model.dtype.itemsize, tokens), dtype=torch.uint8, device=model.device
        )
        self.inputs = DecodeInputs(rows, blocks_for(tokens) + 1, model.device)
        self._stores, self._graphs = stores_in(memory, self.shapes, model.dtype, tokens), None
        try:
            yield
        finally:
            self.inputs, self._stores, self._graphs = kept

    def prefill(self, chunks: Sequence[PrefillChunk]) -> torch.Tensor:
        """Compute these chunks in one step. Returns the logits after each chunk that `is_last`, in order."""
        spans: list[Span] = []
        tokens, positions, write, read, wanted = list[int](), list[int](), list[int](), list[int](), list[int]()
        for chunk in chunks:
            span = Span(len(tokens), len(chunk.tokens), chunk.past, chunk.length)
            slots = slots_of(chunk.blocks, 0, span.seen)
            spans.append(span)
            tokens.extend(chunk.tokens)
            positions.extend(range(span.past, span.seen))
            write.extend(slots[span.past :])
            read.extend(slots)
            wanted.extend([len(tokens) - 1] if chunk.is_last else [])
        ids, places, write_at = self._upload([tokens, positions, write])
        (read_at,) = self._upload([read])
        step = PrefillStep(self._stores, self.kernels, spans, write_at, read_at)
        # At least one position must be kept even if no logits are wanted.
        (kept,) = self._upload([wanted or [0]])
        logits = self._forward(step, ids[None], places[None], kept)
        self.windows = step.windows
        return logits[0, : len(wanted)]

    def decode(self, count: int, longest: int) -> torch.Tensor:
        """Decode one token for the first `count` rows of `inputs`, the longest of which now has `longest` tokens."""
        self.model.wait_for_weights()
        size, length = bucket(count, self._batches), bucket(longest, self._lengths)
        is_small = self.kernels.pages or size * length <= GATHERED_TOKENS_MAX
        if self._graphs is not None and is_small:
            return self._graphs.run(size, blocks_for(length))[:count]
        return self.step(count, blocks_for(longest))

    def step(self, count: int, width: int) -> torch.Tensor:
        """Compute the logits of the first `count` rows and advance their positions."""
        logits = self.compute(count, width)
        self.inputs.advance(count)
        return logits

    def compute(self, count: int, width: int) -> torch.Tensor:
        """The logits of the first `count` rows. Positions stay, so it may be called again."""
        tokens, positions, table = self.inputs.views(count, width)
        step = DecodeStep(self._stores, self.kernels, positions, table)
        return self._forward(step, tokens[:, None], positions[:, None], None)[:, -1]

    def _forward(
        self, step: ModelStep, ids: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor | None
    ) -> torch.Tensor:
        keeps = {"logits_to_keep": kept} if kept is not None and self._takes_logits_to_keep else {}
        with torch.no_grad(), as_current_step(step):
            out = self.model.module(input_ids=ids, position_ids=positions, use_cache=False, **keeps)
        # A sampled token is an input of the next step: ids without an embedding row are cut off.
        logits: torch.Tensor = out.logits[..., : self._vocabulary]
        return logits if kept is None or self._takes_logits_to_keep else logits[:, kept]

    def _upload(self, lists: Sequence[Sequence[int]]) -> torch.Tensor:
        made = torch.tensor(lists, dtype=torch.long, pin_memory=self.model.device.type == "cuda")
        return made.to(self.model.device, non_blocking=True)


def _check(model: DeviceModel) -> None:
    name = type(model.module).__name__
    if not getattr(model.module, "_supports_attention_backend", False):
        raise BadModel(
            f"{name} computes its attention in a way of its own, which cannot be served from paged KV memory."
        )
    if getattr(model.module, "_is_stateful", False):
        raise BadModel(f"{name} keeps more than keys and values between tokens, which does not fit paged KV memory.")
    if any(hasattr(part, "create_position_ids_from_input_ids") for part in model.module.modules()):
        raise BadModel(f"{name} counts positions by its padding token, which paged KV memory does not know.")
    given = getattr(text_config(model.config), "_attn_implementation", IMPLEMENTATION)
    if given != IMPLEMENTATION:
        raise BadModel(f"{name} was built with {given} attention instead of {IMPLEMENTATION}.")


@dataclass(frozen=True, slots=True)
class DecodeRow:
    token: int
    position: int
    blocks: Sequence[int]


class DecodeInputs:
    """The inputs of a decode step: each row's token, position and block table, as tensors that never move. Captured
    graphs read them at fixed addresses. Unused rows keep position zero and write to the scratch block."""

    def __init__(self, batch_max: int, width_max: int, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        # Token, position and increment of the position, in one tensor: one upload for all three.
        self._state = torch.zeros((3, batch_max), dtype=torch.long, device=device)
        self._table = torch.full((batch_max, width_max), SCRATCH_BLOCK, dtype=torch.int32, device=device)
        self._placed = 0

    def views(self, count: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, positions and table of the first `count` rows."""
        return self._state[0, :count], self._state[1, :count], self._table[:count, :width]

    def advance(self, count: int) -> None:
        """Advance the position of the first `count` rows that are in use."""
        self._state[1, :count].add_(self._state[2, :count])

    def set_rows(self, rows: Sequence[DecodeRow]) -> None:
        """Replace all rows by these."""
        cleared = max(self._placed, len(rows))
        idle = [0] * (cleared - len(rows))
        state = [[row.token for row in rows], [row.position for row in rows], [1] * len(rows)]
        self._state[:, :cleared].copy_(self._host([part + idle for part in state], torch.long), non_blocking=True)
        width = max((len(row.blocks) for row in rows), default=1)
        table = [self._padded(row.blocks, width) for row in rows] + [self._padded((), width)] * len(idle)
        self._table[:cleared, :width].copy_(self._host(table, torch.int32), non_blocking=True)
        self._table[:cleared, width:] = SCRATCH_BLOCK
        self._placed = len(rows)

    def grow(self, row: int, first: int, blocks: Sequence[int]) -> None:
        """Append these blocks to the row's table, from index `first` on."""
        self._table[row, first : first + len(blocks)].copy_(self._host(blocks, torch.int32), non_blocking=True)

    def set_tokens(self, tokens: torch.Tensor) -> None:
        """Set the next token of each row, in order."""
        self._state[0, : tokens.shape[0]].copy_(tokens)

    def _padded(self, blocks: Sequence[int], width: int) -> list[int]:
        return [*blocks, *[SCRATCH_BLOCK] * (width - len(blocks))]

    def _host(self, numbers: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype) -> torch.Tensor:
        # Torch reuses pinned memory only after the copy is done, so a new tensor each time is safe.
        return torch.tensor(numbers, dtype=dtype, pin_memory=self._is_cuda)
