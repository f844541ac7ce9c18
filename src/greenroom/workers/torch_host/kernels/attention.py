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

_here = threading.local()


@dataclass(frozen=True, slots=True)
class How:
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
class Store:
    """Keys and values of one layer: `[slots, heads, dim]` each, views of the KV memory."""

    key: torch.Tensor
    value: torch.Tensor


class Step(Protocol):
    """What is being computed now. It is asked with `[batch, heads, tokens, dim]`, once per layer."""

    def attend(
        self, layer: int | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: How
    ) -> torch.Tensor:
        """Write the new keys and values down and attend. The answer is `[batch, tokens, heads, dim]`."""

    def sequence_lengths(self) -> torch.Tensor:
        """How many tokens the whole sequence of each token has; `[batch, tokens]`, or what expands to it."""


@contextmanager
def performing(step: Step) -> Iterator[None]:
    """This step is what the model computes in this thread."""
    _here.step = step
    try:
        yield
    finally:
        _here.step = None


def current_step() -> Step | None:
    """The step that this thread computes; None outside of any."""
    step: Step | None = getattr(_here, "step", None)
    return step


def stores_in(
    memory: torch.Tensor, shapes: Sequence[LayerShape], dtype: torch.dtype, cache_tokens: int
) -> tuple[Store, ...]:
    """One store per layer, one after the other in this flat memory of bytes."""
    slots, offset, stores = slots_for(cache_tokens), 0, []
    for shape in shapes:
        views = []
        for dim in (shape.key_dim, shape.value_dim):
            exact = slots * shape.kv_heads * dim * dtype.itemsize
            views.append(memory[offset : offset + exact].view(dtype).view(slots, shape.kv_heads, dim))
            offset += store_bytes(shape.kv_heads * dim, dtype.itemsize, cache_tokens)
        stores.append(Store(*views))
    return tuple(stores)


def store_of(stores: Sequence[Store], layer: int | None, key: torch.Tensor, value: torch.Tensor) -> Store:
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
    how = How(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    # Transformers' own attention gives memory that lies in order, and some models view it in another shape.
    return step.attend(getattr(module, "layer_idx", None), query, key, value, how).contiguous(), None


def _refuse_own_mask(module: torch.nn.Module, mask: torch.Tensor | None, is_causal: bool) -> None:
    """Raises BadModel where tokens are to see something else than all tokens before them."""
    name = type(module).__name__
    if mask is not None:
        raise BadModel(f"{name} makes an attention mask of its own, which paged attention would not apply.")
    if not is_causal:
        raise BadModel(f"{name} looks at later tokens too. Only models that look back can continue a text.")


def attend_plainly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, how: How
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
    if how.is_plain:
        out = scaled_dot_product_attention(folded, key, value, attn_mask=bias, scale=how.scale)
    else:
        out = _attend_by_hand(folded, key, value, bias, how, tokens)
    return out.reshape(batch, heads, tokens, value.shape[-1])


def _attend_by_hand(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, how: How, tokens: int
) -> torch.Tensor:
    scores = torch.matmul(query, key.transpose(2, 3)).float() * how.scale
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    if bias is not None:
        scores = scores + bias
    if how.sinks is not None:
        batch, kv_heads, rows, _ = scores.shape
        sinks = how.sinks.float().view(1, kv_heads, rows // tokens, 1, 1).expand(batch, -1, -1, tokens, 1)
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
class Lengths:
    """How many tokens each packed sequence asks with and sees, as flash attention wants them: summed up."""

    asks: torch.Tensor
    sees: torch.Tensor
    asks_max: int
    sees_max: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int]], device: torch.device) -> Lengths:
        asks, sees = [0], [0]
        for count, seen in pairs:
            asks.append(asks[-1] + count)
            sees.append(sees[-1] + seen)
        both = torch.tensor([asks, sees], dtype=torch.int32).to(device, non_blocking=True)
        return cls(both[0], both[1], max(count for count, _ in pairs), max(seen for _, seen in pairs))


@dataclass(frozen=True, slots=True)
class Kernels:
    """What this device can do for this model beyond plain attention."""

    packs: bool = False
    pages: bool = False

    @classmethod
    def tried(cls, shape: LayerShape, heads: int, dtype: torch.dtype, device: torch.device) -> Kernels:
        """Try both on the device."""
        if device.type != "cuda" or dtype not in HALF_TYPES:
            return cls()
        with torch.cuda.device(device):
            made = _Example.made(shape, heads, dtype, device)
            return cls(packs=_works("flash attention", made.packs), pages=_works("paged attention", made.pages))

    def can_pack(self, key: torch.Tensor, value: torch.Tensor, how: How) -> bool:
        same = key.shape[-1] == value.shape[-1] <= FLASH_DIM_MAX and key.shape[-1] % FLASH_DIM_STEP == 0
        return self.packs and same and how.is_plain

    def can_page(self, how: How) -> bool:
        return self.pages and how.sinks is None

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, store: Store) -> None:
        """New keys and values, `[tokens, heads, dim]`, to their slots."""
        if self.pages and key.stride(-1) == value.stride(-1) == 1:
            from .triton_kernels import write

            write(key, value, slots, store.key, store.value)
            return
        store.key.index_copy_(0, slots, key)
        store.value.index_copy_(0, slots, value)


def attend_packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Lengths, how: How
) -> torch.Tensor:
    """`[tokens, heads, dim]` of several sequences, each seeing its own keys up to its own place, aligned at the end."""
    left = None if how.window is None else how.window - 1
    out: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, lengths.asks, lengths.sees, lengths.asks_max, lengths.sees_max,
        0.0, True, False,
        scale=how.scale, window_size_left=left, window_size_right=None if left is None else 0,
    )[0]  # fmt: skip
    return out


def attend_paged(
    query: torch.Tensor, store: Store, table: torch.Tensor, lengths: torch.Tensor, how: How
) -> torch.Tensor:
    """`[rows, heads, dim]`, one token a row, straight from the pages. To be asked only where `can_page` is true."""
    from .triton_kernels import attend

    return attend(query, store.key, store.value, table, lengths, how.scale, how.window, how.softcap)


def _works(what: str, differs: Callable[[], float]) -> bool:
    try:
        apart = differs()
    except Exception as error:  # Whatever it is, plain attention still works.
        log.warning("attention goes without %s: %s", what, str(error).splitlines()[0] if str(error) else repr(error))
        return False
    if not apart <= TOLERANCE:
        log.warning("attention goes without %s: it differs by %.3g", what, apart)
    return apart <= TOLERANCE


@dataclass(frozen=True, slots=True)
class _Example:
    """Numbers made up to try kernels on: one short sequence in pages that do not lie in order."""

    query: torch.Tensor
    store: Store
    table: torch.Tensor
    how: How

    @classmethod
    def made(cls, shape: LayerShape, heads: int, dtype: torch.dtype, device: torch.device) -> _Example:
        random = torch.Generator(device=device).manual_seed(1)
        width = -(-TRY_TOKENS // BLOCK_TOKENS)
        slots = (width + 1) * BLOCK_TOKENS

        def some(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=random, device=device, dtype=torch.float32).to(dtype)

        store = Store(some(slots, shape.kv_heads, shape.key_dim), some(slots, shape.kv_heads, shape.value_dim))
        table = torch.arange(width, 0, -1, dtype=torch.int32, device=device)[None].repeat(2, 1)
        return cls(some(TRY_TOKENS, heads, shape.key_dim), store, table, How(scale=shape.key_dim**-0.5))

    def _in_order(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        inside = torch.arange(BLOCK_TOKENS, device=self.table.device)
        slots = (self.table[0].long()[:, None] * BLOCK_TOKENS + inside).view(-1)[:tokens]
        return self.store.key[slots], self.store.value[slots]

    def pages(self) -> float:
        self._rewrite()
        lengths = torch.tensor([TRY_TOKENS, 2], dtype=torch.int32, device=self.table.device)
        asks = self.query[:2]
        got = attend_paged(asks, self.store, self.table, lengths, self.how)
        apart = 0.0
        for row, count in enumerate((TRY_TOKENS, 2)):
            key, value = self._in_order(count)
            want = attend_plainly(asks[row][None, :, None], *_batched(key, value), None, self.how)
            apart = max(apart, float((got[row] - want[0, :, 0]).abs().max()))
        return apart

    def _rewrite(self) -> None:
        """Move the first block to where the second was, by the kernel for it and by hand; both must agree."""
        slots = torch.arange(2 * BLOCK_TOKENS, 3 * BLOCK_TOKENS, device=self.table.device)
        key, value = self.store.key[:BLOCK_TOKENS].clone(), self.store.value[:BLOCK_TOKENS].clone()
        Kernels(pages=True).write(key, value, slots, self.store)
        if not (torch.equal(self.store.key[slots], key) and torch.equal(self.store.value[slots], value)):
            raise RuntimeError("keys were written to where they do not belong")

    def packs(self) -> float:
        key, value = self._in_order(TRY_TOKENS)
        lengths = Lengths.of([(3, TRY_TOKENS)], key.device)
        got = attend_packed(self.query[:3], key, value, lengths, self.how)
        apart = 0.0
        for at in range(3):
            seen = TRY_TOKENS - 2 + at
            both = _batched(key[:seen], value[:seen])
            want = attend_plainly(self.query[at][None, :, None], *both, None, self.how)
            apart = max(apart, float((got[at] - want[0, :, 0]).abs().max()))
        return apart


def _batched(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return key.transpose(0, 1)[None], value.transpose(0, 1)[None]
