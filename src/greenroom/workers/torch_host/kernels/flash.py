"""Faster attention where the device has it: torch's flash attention for prompts, a Triton kernel for decoding.

Owns the question whether they may be used. Both are tried once against plain attention, on numbers made up for it; what
fails, is missing or differs is not used, and plain attention does the work. Never changes what is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..engine.model_shape import BLOCK_TOKENS, LayerShape
from .attention import How, Store, attend_plainly

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
