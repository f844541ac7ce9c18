"""Attention over paged KV memory, as a function any Transformers model can call.

Owns the name under which Transformers finds it, the stores of keys and values, and plain attention in torch operations.
What a step attends to is told by a step object (`steps.py`) that is current in this thread while the model runs: how
models hand keyword arguments down differs between models and versions, a thread's own variable does not. No mask is
made: Transformers makes none for an implementation missing in its table of masks, and the step knows who sees whom.
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

_thread = threading.local()


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a layer wants of its attention beyond the usual."""

    scale: float
    window: int | None = None
    """Tokens a query sees, itself included; None sees all before it."""
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    """One learned score per head that takes its share of the softmax and gives nothing."""

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Keys and values of one layer: `[slots, heads, dim]` each, views of the KV memory."""

    key: torch.Tensor
    value: torch.Tensor


class ModelStep(Protocol):
    """What is being computed now. It is asked with `[batch, heads, tokens, dim]`, once per layer."""

    def attend(
        self, layer: int | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Write the new keys and values down and attend. The answer is `[batch, tokens, heads, dim]`."""

    def sequence_lengths(self) -> torch.Tensor:
        """How many tokens the whole sequence of each token has; `[batch, tokens]`, or what expands to it."""


@contextmanager
def as_current_step(step: ModelStep) -> Iterator[None]:
    """This step is what the model computes in this thread."""
    _thread.step = step
    try:
        yield
    finally:
        _thread.step = None


def current_step() -> ModelStep | None:
    """The step that this thread computes; None outside of any."""
    step: ModelStep | None = getattr(_thread, "step", None)
    return step


def stores_in(
    memory: torch.Tensor, shapes: Sequence[LayerShape], dtype: torch.dtype, cache_tokens: int
) -> tuple[LayerKV, ...]:
    """One store per layer, one after the other in this flat memory of bytes."""
    slots, offset, stores = slots_for(cache_tokens), 0, []
    for shape in shapes:
        views = []
        for dim in (shape.key_dim, shape.value_dim):
            exact = slots * shape.kv_heads * dim * dtype.itemsize
            views.append(memory[offset : offset + exact].view(dtype).view(slots, shape.kv_heads, dim))
            offset += store_bytes(shape.kv_heads * dim, dtype.itemsize, cache_tokens)
        stores.append(LayerKV(*views))
    return tuple(stores)


def store_of(stores: Sequence[LayerKV], layer: int | None, key: torch.Tensor, value: torch.Tensor) -> LayerKV:
    """Where this layer keeps its keys and values. Raises BadModel where the model does otherwise than it said."""
    if layer is None or not 0 <= layer < len(stores):
        raise BadModel(f"a layer with number {layer} attends, but the configuration speaks of {len(stores)} layers.")
    store = stores[layer]
    if (key.shape[1], key.shape[3]) != store.key.shape[1:] or (value.shape[1], value.shape[3]) != store.value.shape[1:]:
        raise BadModel(
            f"layer {layer} has keys of {key.shape[1]} heads of {key.shape[3]} and values of {value.shape[1]} heads of "
            f"{value.shape[3]}, which is not what the configuration says."
        )
    return store


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
    """What Transformers calls once per layer."""
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
    # Transformers' own attention gives memory that lies in order, and some models view it in another shape.
    return step.attend(getattr(module, "layer_idx", None), query, key, value, options).contiguous(), None


def _refuse_own_mask(module: torch.nn.Module, mask: torch.Tensor | None, is_causal: bool) -> None:
    """Raises BadModel where tokens are to see something else than all tokens before them."""
    name = type(module).__name__
    if mask is not None:
        raise BadModel(f"{name} makes an attention mask of its own, which paged attention would not apply.")
    if not is_causal:
        raise BadModel(f"{name} looks at later tokens too. Only models that look back can continue a text.")


def attend_plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, options: AttentionOptions
) -> torch.Tensor:
    """`[batch, heads, tokens, dim]` against keys with fewer heads; scores get `bias`, `[batch, 1, tokens, keys]`.

    Heads that share keys are seen as further tokens of one head, so that keys are never repeated in memory.
    """
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
    """Make the name known to Transformers. May be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, paged_attention)


assert STORE_ALIGN % 16 == 0, "stores are viewed as numbers of up to sixteen bytes"


log = logging.getLogger(__name__)

HALF_TYPES = (torch.float16, torch.bfloat16)
# Flash attention's own bounds.
FLASH_DIM_MAX = 256
FLASH_DIM_STEP = 8
# How far two ways of summing the same half-precision numbers may lie apart, of values around one.
TOLERANCE = 0.03
TRY_TOKENS = 5 * BLOCK_TOKENS + 3


@dataclass(frozen=True, slots=True)
class PackedLengths:
    """How many tokens each packed sequence asks with and sees, as flash attention wants them: summed up."""

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
    """What this device can do for this model beyond plain attention."""

    packs: bool = False
    pages: bool = False

    @classmethod
    def probe(cls, shape: LayerShape, heads: int, dtype: torch.dtype, device: torch.device) -> AttentionKernels:
        """Try both on the device."""
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
        """New keys and values, `[tokens, heads, dim]`, to their slots."""
        if self.pages and key.stride(-1) == value.stride(-1) == 1:
            from .triton_kernels import write

            write(key, value, slots, store.key, store.value)
            return
        store.key.index_copy_(0, slots, key)
        store.value.index_copy_(0, slots, value)


def attend_packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: PackedLengths, options: AttentionOptions
) -> torch.Tensor:
    """`[tokens, heads, dim]` of several sequences, each seeing its own keys up to its own place, aligned at the end."""
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
    """`[rows, heads, dim]`, one token a row, straight from the pages. To be asked only where `can_page` is true."""
    from .triton_kernels import attend

    return attend(query, store.key, store.value, table, lengths, options.scale, options.window, options.softcap)


def _agrees(what: str, measure: Callable[[], float]) -> bool:
    try:
        difference = measure()
    except Exception as error:  # Whatever it is, plain attention still works.
        log.warning("attention goes without %s: %s", what, str(error).splitlines()[0] if str(error) else repr(error))
        return False
    if not difference <= TOLERANCE:
        log.warning("attention goes without %s: it differs by %.3g", what, difference)
    return difference <= TOLERANCE


@dataclass(frozen=True, slots=True)
class _Example:
    """Numbers made up to try kernels on: one short sequence in pages that do not lie in order."""

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
        lengths = torch.tensor([TRY_TOKENS, 2], dtype=torch.int32, device=self.table.device)
        queries = self.query[:2]
        got = attend_paged(queries, self.store, self.table, lengths, self.options)
        difference = 0.0
        for row, count in enumerate((TRY_TOKENS, 2)):
            key, value = self._in_order(count)
            want = attend_plain(queries[row][None, :, None], *_batched(key, value), None, self.options)
            difference = max(difference, float((got[row] - want[0, :, 0]).abs().max()))
        return difference

    def _rewrite(self) -> None:
        """Move the first block to where the second was, by the kernel for it and by hand; both must agree."""
        slots = torch.arange(2 * BLOCK_TOKENS, 3 * BLOCK_TOKENS, device=self.table.device)
        key, value = self.store.key[:BLOCK_TOKENS].clone(), self.store.value[:BLOCK_TOKENS].clone()
        AttentionKernels(pages=True).write(key, value, slots, self.store)
        if not (torch.equal(self.store.key[slots], key) and torch.equal(self.store.value[slots], value)):
            raise RuntimeError("keys were written to where they do not belong")

    def packs(self) -> float:
        key, value = self._in_order(TRY_TOKENS)
        lengths = PackedLengths.of([(3, TRY_TOKENS)], key.device)
        got = attend_packed(self.query[:3], key, value, lengths, self.options)
        difference = 0.0
        for at in range(3):
            seen = TRY_TOKENS - 2 + at
            both = _batched(key[:seen], value[:seen])
            want = attend_plain(self.query[at][None, :, None], *both, None, self.options)
            difference = max(difference, float((got[at] - want[0, :, 0]).abs().max()))
        return difference


def _batched(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return key.transpose(0, 1)[None], value.transpose(0, 1)[None]
