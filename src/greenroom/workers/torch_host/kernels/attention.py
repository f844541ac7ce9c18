"""Attention over paged KV memory, as a function that any Transformers model can call, and its faster kernels.

Owns the name under which Transformers finds it, the KV views of layers, plain attention in torch operations, and the
choice of kernels: torch's flash attention for prompts and a Triton kernel for decoding. Both are tried once against
plain attention; a kernel that fails, is missing or differs is not used. A step object (`steps.py`), which is current in
this thread while the model runs, says what to attend to: keyword arguments would not do, because models pass them on
in different ways. No mask is made: Transformers makes none for an attention it has no mask function for, and
the step says what each token sees.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..engine.model_shape import BLOCK_TOKENS, STORE_ALIGN, LayerShape, slots_for, store_bytes
from ..failures import BadModel

IMPLEMENTATION = "greenroom_paged"
HALF_TYPES = (torch.float16, torch.bfloat16)
# Limits of flash attention.
FLASH_DIM_MAX = 256
FLASH_DIM_STEP = 8
# Tolerance between two orders of summing half-precision numbers around one.
TOLERANCE = 0.03
TRY_TOKENS = 5 * BLOCK_TOKENS + 3
assert STORE_ALIGN % 16 == 0, "stores are viewed as numbers of up to sixteen bytes"

log = logging.getLogger(__name__)

_thread = threading.local()


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The options a layer passes to its attention."""

    scale: float
    window: int | None = None
    """Tokens a query sees, itself included; None: all before it."""
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    """One learned score per head that takes part in the softmax and contributes no value."""

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Keys and values of one layer: `[slots, heads, dim]` each, views of the KV memory."""

    key: torch.Tensor
    value: torch.Tensor


class ModelStep(Protocol):
    """What is being computed now. Called with `[batch, heads, tokens, dim]`, once per layer."""

    def attend(
        self, layer: int | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Store the new keys and values, then attend. Returns `[batch, tokens, heads, dim]`."""

    def sequence_lengths(self) -> torch.Tensor:
        """The length of each token's whole sequence: `[batch, tokens]`, or a shape that expands to it."""


@contextmanager
def as_current_step(step: ModelStep) -> Iterator[None]:
    """Inside, this thread computes this step."""
    _thread.step = step
    try:
        yield
    finally:
        _thread.step = None


def current_step() -> ModelStep | None:
    """The step this thread computes; None outside of a step."""
    step: ModelStep | None = getattr(_thread, "step", None)
    return step


def stores_in(
    memory: torch.Tensor, shapes: Sequence[LayerShape], dtype: torch.dtype, cache_tokens: int
) -> tuple[LayerKV, ...]:
    """The KV views of all layers, one after the other in this flat byte memory."""
    slots, offset, stores = slots_for(cache_tokens), 0, []
    for shape in shapes:
        views = []
        for dim in (shape.key_dim, shape.value_dim):
            exact = slots * shape.kv_heads * dim * dtype.itemsize
            views.append(memory[offset : offset + exact].view(dtype).view(slots, shape.kv_heads, dim))
            offset += store_bytes(shape.kv_heads * dim, dtype.itemsize, cache_tokens)
        stores.append(LayerKV(*views))
    return tuple(stores)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that Transformers calls once per layer."""
    step = current_step()
    if step is None:
        raise RuntimeError("paged attention was called outside of a step")
    if kwargs.get("position_bias") is not None:
        raise BadModel(f"{type(module).__name__} adds a bias by position, which paged attention does not know.")
    is_causal = kwargs.get("is_causal")
    is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    _refuse_own_mask(module, attention_mask, is_causal)
    options = AttentionOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    # Contiguous like Transformers' own attention: some models view the result in another shape.
    return step.attend(getattr(module, "layer_idx", None), query, key, value, options).contiguous(), None


def _refuse_own_mask(module: torch.nn.Module, mask: torch.Tensor | None, is_causal: bool) -> None:
    """Raises BadModel if tokens should see anything else than all tokens before them."""
    name = type(module).__name__
    if mask is not None:
        raise BadModel(f"{name} makes an attention mask of its own, which paged attention would not apply.")
    if not is_causal:
        raise BadModel(f"{name} looks at later tokens too. Only models that look back can continue a text.")


def attend_plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, options: AttentionOptions
) -> torch.Tensor:
    """`[batch, heads, tokens, dim]` against keys with fewer heads; scores get `bias`, `[batch, 1, tokens, keys]`. Query
    heads that share keys are treated as further tokens of one head, so keys are not repeated in memory."""
    batch, heads, tokens, dim = query.shape
    kv_heads = key.shape[1]
    shared = heads // kv_heads
    folded = query.reshape(batch, kv_heads, shared * tokens, dim)
    if bias is not None and tokens > 1 and shared > 1:
        bias = bias.repeat(1, 1, shared, 1)
    if options.is_plain:
        out = scaled_dot_product_attention(folded, key, value, attn_mask=bias, scale=options.scale)
    else:
        out = _attend_in_steps(folded, key, value, bias, options, tokens)
    return out.reshape(batch, heads, tokens, value.shape[-1])


def _attend_in_steps(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    options: AttentionOptions,
    tokens: int,
) -> torch.Tensor:
    scores = torch.matmul(query, key.transpose(2, 3)).float() * options.scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if bias is not None:
        scores = scores + bias
    if options.sinks is not None:
        batch, kv_heads, rows, _ = scores.shape
        sinks = options.sinks.float().view(1, kv_heads, rows // tokens, 1, 1).expand(batch, -1, -1, tokens, 1)
        scores = torch.cat((scores, sinks.reshape(batch, kv_heads, rows, 1)), dim=-1)
        return torch.matmul(scores.softmax(dim=-1)[..., :-1].to(value.dtype), value)
    return torch.matmul(scores.softmax(dim=-1).to(value.dtype), value)


def register() -> None:
    """Register the name with Transformers. May be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, paged_attention)


@dataclass(frozen=True, slots=True)
class PackedLengths:
    """Queries and keys of each packed sequence, as the cumulative sums flash attention takes."""

    queries: torch.Tensor
    keys: torch.Tensor
    queries_max: int
    keys_max: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int]], device: torch.device) -> PackedLengths:
        queries, keys = [0], [0]
        for count, seen in pairs:
            queries.append(queries[-1] + count)
            keys.append(keys[-1] + seen)
        both = torch.tensor([queries, keys], dtype=torch.int32).to(device, non_blocking=True)
        return cls(both[0], both[1], max(count for count, _ in pairs), max(seen for _, seen in pairs))


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """The kernels this device can use for this model instead of plain attention."""

    packs: bool = False
    pages: bool = False

    @classmethod
    def probe(cls, shape: LayerShape, heads: int, dtype: torch.dtype, device: torch.device) -> AttentionKernels:
        """Try both kernels on the device."""
        if device.type != "cuda" or dtype not in HALF_TYPES:
            return cls()
        with torch.cuda.device(device):
            example = _Example.example(shape, heads, dtype, device)
            return cls(packs=_agrees("flash attention", example.packs), pages=_agrees("paged attention", example.pages))

    def can_pack(self, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions) -> bool:
        same = key.shape[-1] == value.shape[-1] <= FLASH_DIM_MAX and key.shape[-1] % FLASH_DIM_STEP == 0
        return self.packs and same and options.is_plain

    def can_page(self, options: AttentionOptions) -> bool:
        return self.pages and options.sinks is None

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, store: LayerKV) -> None:
        """Write new keys and values, `[tokens, heads, dim]`, to their slots."""
        if self.pages and key.stride(-1) == value.stride(-1) == 1:
            from .triton_kernels import write

            write(key, value, slots, store.key, store.value)
            return
        store.key.index_copy_(0, slots, key)
        store.value.index_copy_(0, slots, value)


def attend_packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: PackedLengths, options: AttentionOptions
) -> torch.Tensor:
    """Causal attention of several packed sequences, `[tokens, heads, dim]`, each aligned at the end of its keys."""
    left = None if options.window is None else options.window - 1
    out: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, lengths.queries, lengths.keys, lengths.queries_max, lengths.keys_max,
        0.0, True, False,
        scale=options.scale, window_size_left=left, window_size_right=None if left is None else 0,
    )[0]  # fmt: skip
    return out


def attend_paged(
    query: torch.Tensor, store: LayerKV, table: torch.Tensor, lengths: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Attention of one token per row, `[rows, heads, dim]`, straight from the blocks. Call only if `can_page`."""
    from .triton_kernels import attend

    return attend(query, store.key, store.value, table, lengths, options.scale, options.window, options.softcap)


def _agrees(what: str, measure: Callable[[], float]) -> bool:
    try:
        difference = measure()
    except Exception as error:  # Whatever the error, plain attention still works.
        log.warning("attention goes without %s: %s", what, str(error).splitlines()[0] if str(error) else repr(error))
        return False
    if not difference <= TOLERANCE:
        log.warning("attention goes without %s: it differs by %.3g", what, difference)
    return difference <= TOLERANCE


@dataclass(frozen=True, slots=True)
class _Example:
    """Random data to try kernels on: one short sequence in blocks that are not in order."""

    query: torch.Tensor
    store: LayerKV
    table: torch.Tensor
    options: AttentionOptions

    @classmethod
    def example(cls, shape: LayerShape, heads: int, dtype: torch.dtype, device: torch.device) -> _Example:
        random = torch.Generator(device=device).manual_seed(1)
        width = -(-TRY_TOKENS // BLOCK_TOKENS)
        slots = (width + 1) * BLOCK_TOKENS

        def randn(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=random, device=device, dtype=torch.float32).to(dtype)

        store = LayerKV(randn(slots, shape.kv_heads, shape.key_dim), randn(slots, shape.kv_heads, shape.value_dim))
        table = torch.arange(width, 0, -1, dtype=torch.int32, device=device)[None].repeat(2, 1)
        return cls(randn(TRY_TOKENS, heads, shape.key_dim), store, table, AttentionOptions(scale=shape.key_dim**-0.5))

    def _in_order(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        inside = torch.arange(BLOCK_TOKENS, device=self.table.device)
        slots = (self.table[0].long()[:, None] * BLOCK_TOKENS + inside).view(-1)[:tokens]
        return self.store.key[slots], self.store.value[slots]

    def pages(self) -> float:
        self._rewrite()
        seen = (TRY_TOKENS, 2)
        lengths = torch.tensor(seen, dtype=torch.int32, device=self.table.device)
        return self._difference(attend_paged(self.query[:2], self.store, self.table, lengths, self.options), seen)

    def packs(self) -> float:
        key, value = self._in_order(TRY_TOKENS)
        lengths = PackedLengths.of([(3, TRY_TOKENS)], key.device)
        got = attend_packed(self.query[:3], key, value, lengths, self.options)
        return self._difference(got, range(TRY_TOKENS - 2, TRY_TOKENS + 1))

    def _difference(self, got: torch.Tensor, seen: Sequence[int]) -> float:
        """The largest difference to plain attention, of which each query sees so many tokens."""
        difference = 0.0
        for row, count in enumerate(seen):
            key, value = (part.transpose(0, 1)[None] for part in self._in_order(count))
            want = attend_plain(self.query[row][None, :, None], key, value, None, self.options)
            difference = max(difference, float((got[row] - want[0, :, 0]).abs().max()))
        return difference

    def _rewrite(self) -> None:
        """Copy the first block over the third with the write kernel. Raises RuntimeError if the result is wrong."""
        slots = torch.arange(2 * BLOCK_TOKENS, 3 * BLOCK_TOKENS, device=self.table.device)
        key, value = self.store.key[:BLOCK_TOKENS].clone(), self.store.value[:BLOCK_TOKENS].clone()
        AttentionKernels(pages=True).write(key, value, slots, self.store)
        if not (torch.equal(self.store.key[slots], key) and torch.equal(self.store.value[slots], value)):
            raise RuntimeError("keys were written to where they do not belong")
