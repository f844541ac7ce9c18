"""The two kinds of step a model computes: chunks of prompts, or one token for each row of a batch.

Owns which keys each token sees, and where new keys and values are written. Never decides what is computed next (the
batch scheduler does) and keeps nothing after the step. Read `PrefillStep.attend` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..failures import BadModel
from ..kernels.attention import (
    AttentionKernels,
    AttentionOptions,
    LayerKV,
    PackedLengths,
    attend_packed,
    attend_paged,
    attend_plain,
)
from .model_shape import BLOCK_TOKENS


def slots_of(blocks: Sequence[int], first: int, last: int) -> list[int]:
    """The slots of the tokens from `first` up to `last`, by a sequence's block table."""
    return [blocks[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS for at in range(first, last)]


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's chunk among the packed tokens: its start, its length and the tokens before it."""

    start: int
    count: int
    past: int
    length: int = 0
    """Tokens of the whole sequence, if more follow this chunk."""

    @property
    def seen(self) -> int:
        return self.past + self.count


class _Paged:
    """A step that stores keys and values, once per layer."""

    def __init__(self, stores: Sequence[LayerKV]) -> None:
        self._stores = stores
        self._attended: set[int | None] = set()

    def _store(self, layer: int | None, key: torch.Tensor, value: torch.Tensor) -> LayerKV:
        """The KV view of this layer. Raises BadModel if it attends twice, as its second keys would overwrite the first,
        or if it is not what the configuration says."""
        if layer in self._attended:
            raise BadModel(f"layer {layer} attends twice for each token; paged KV memory keeps its keys once.")
        self._attended.add(layer)
        if layer is None or not 0 <= layer < len(self._stores):
            layers = len(self._stores)
            raise BadModel(f"a layer with number {layer} attends, but the configuration speaks of {layers} layers.")
        store = self._stores[layer]
        key_shape, value_shape = (key.shape[1], key.shape[3]), (value.shape[1], value.shape[3])
        if key_shape != store.key.shape[1:] or value_shape != store.value.shape[1:]:
            raise BadModel(
                f"layer {layer} has keys of {key.shape[1]} heads of {key.shape[3]} and values of {value.shape[1]} heads"
                f" of {value.shape[3]}, which is not what the configuration says."
            )
        return store


class PrefillStep(_Paged):
    """Chunks of several prompts, packed into a batch of one: `[1, heads, tokens, dim]`."""

    def __init__(
        self,
        stores: Sequence[LayerKV],
        kernels: AttentionKernels,
        spans: Sequence[Span],
        write: torch.Tensor,
        read: torch.Tensor,
    ) -> None:
        """`write`: the slot of each new token; `read`: the slots of all tokens each span sees, span after span."""
        super().__init__(stores)
        self._kernels = kernels
        self._spans = spans
        self._write = write
        self._read = read
        self.windows: set[int | None] = set()
        self._has_past = any(span.past for span in spans)
        self._lengths: PackedLengths | None = None

    def attend(
        self, layer: int | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        store = self._store(layer, key, value)
        self.windows.add(options.window)
        fresh_key, fresh_value = key[0].transpose(0, 1), value[0].transpose(0, 1)
        self._kernels.write(fresh_key, fresh_value, self._write, store)
        if self._has_past:
            all_key, all_value = store.key.index_select(0, self._read), store.value.index_select(0, self._read)
        else:
            all_key, all_value = fresh_key, fresh_value
        packed = query[0].transpose(0, 1)
        if self._kernels.can_pack(all_key, all_value, options):
            return attend_packed(packed, all_key, all_value, self._packed_lengths(query.device), options)[None]
        return self._attend_each(query, all_key, all_value, options)

    def sequence_lengths(self) -> torch.Tensor:
        lengths = [max(span.length, span.seen) for span in self._spans for _ in range(span.count)]
        return torch.tensor([lengths], device=self._write.device)

    def _packed_lengths(self, device: torch.device) -> PackedLengths:
        if self._lengths is None:
            self._lengths = PackedLengths.of([(span.count, span.seen) for span in self._spans], device)
        return self._lengths

    def _attend_each(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        outs, at = [], 0
        for span in self._spans:
            own = query[:, :, span.start : span.start + span.count]
            seen_key = key[at : at + span.seen].transpose(0, 1)[None]
            seen_value = value[at : at + span.seen].transpose(0, 1)[None]
            outs.append(_attend_causal(own, seen_key, seen_value, span, options))
            at += span.seen
        return torch.cat(outs, dim=2).transpose(1, 2)


def _attend_causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, span: Span, options: AttentionOptions
) -> torch.Tensor:
    if span.past == 0 and options.is_plain and (options.window is None or span.count <= options.window):
        shares = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(
            query, key, value, is_causal=span.count > 1, scale=options.scale, enable_gqa=shares
        )
    at = torch.arange(span.past, span.seen, device=query.device)[:, None]
    other = torch.arange(span.seen, device=query.device)[None, :]
    return attend_plain(
        query, key, value, bias_where(_visible(at, other, options.window), query.dtype)[None, None], options
    )


def _visible(at: torch.Tensor, other: torch.Tensor, window: int | None) -> torch.Tensor:
    before = other <= at
    return before if window is None else before & (other > at - window)


def bias_where(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zero where allowed, minus infinity elsewhere."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))


class DecodeStep(_Paged):
    """One new token for each row: `[rows, heads, 1, dim]`. Only tensor operations, so that it can be captured."""

    def __init__(
        self, stores: Sequence[LayerKV], kernels: AttentionKernels, positions: torch.Tensor, table: torch.Tensor
    ) -> None:
        """`positions`: of each row's new token; `table`: the rows' blocks, as wide as the longest row needs."""
        super().__init__(stores)
        self._kernels = kernels
        self.positions = positions
        self.table = table
        self.lengths = (positions + 1).to(torch.int32)
        block = table.gather(1, (positions // BLOCK_TOKENS)[:, None])[:, 0]
        self._write = block.long() * BLOCK_TOKENS + positions % BLOCK_TOKENS
        self._read: torch.Tensor | None = None
        self._biases: dict[int | None, torch.Tensor] = {}

    def attend(
        self, layer: int | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        store = self._store(layer, key, value)
        self._kernels.write(key[:, :, 0], value[:, :, 0], self._write, store)
        if self._kernels.can_page(options):
            return attend_paged(query[:, :, 0], store, self.table, self.lengths, options)[:, None]
        return self._attend_gathered(query, store, options)

    def sequence_lengths(self) -> torch.Tensor:
        # A row's sequence ends with the token of this step.
        return self.lengths[:, None]

    def _attend_gathered(self, query: torch.Tensor, store: LayerKV, options: AttentionOptions) -> torch.Tensor:
        rows, width = self.table.shape
        read = self._read_slots()
        key = store.key.index_select(0, read).view(rows, width * BLOCK_TOKENS, *store.key.shape[1:]).transpose(1, 2)
        value = (
            store.value.index_select(0, read).view(rows, width * BLOCK_TOKENS, *store.value.shape[1:]).transpose(1, 2)
        )
        return attend_plain(query, key, value, self._bias(options.window, query.dtype), options).transpose(1, 2)

    def _read_slots(self) -> torch.Tensor:
        if self._read is None:
            inside = torch.arange(BLOCK_TOKENS, device=self.table.device)
            self._read = (self.table.long()[:, :, None] * BLOCK_TOKENS + inside).view(-1)
        return self._read

    def _bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        if window not in self._biases:
            other = torch.arange(self.table.shape[1] * BLOCK_TOKENS, device=self.table.device)[None, :]
            allowed = _visible(self.positions[:, None], other, window)
            self._biases[window] = bias_where(allowed, dtype)[:, None, None, :]
        return self._biases[window]
