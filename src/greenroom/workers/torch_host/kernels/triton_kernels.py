"""The Triton kernels: decode attention straight from KV blocks, writing keys and values, rotary angles, unfolding.

Owns the kernels and their launches. Decode attention cuts each row into parts, so one long sequence keeps the whole
device busy; a second kernel joins the parts. Imported only where there is a CUDA device and Triton; `attention.py`,
`rope.py` and `weights/upload.py` decide where they are used.
"""

# Arguments of kernels are pointers and numbers on the device, which Python's types cannot express.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from ..engine.model_shape import BLOCK_TOKENS
from ..weights.fold import Fold

# Keys per tile.
TILE = 64
# Programs per multiprocessor that keep its memory pipes full.
PROGRAMS_PER_PROCESSOR = 4
PARTS_MAX = 64
# The fewest rows a tensor core multiplies.
GROUP_MIN = 16
WARPS = 4
ROPE_WARPS = 1
STAGES = 3


def _part(
    query, key, value, table, lengths, parts, weights, scale, softcap, window, count,
    query_row, query_head, key_slot, key_head, value_slot, value_head, table_row,
    group: tl.constexpr, group_pad: tl.constexpr, key_dim: tl.constexpr, key_pad: tl.constexpr,
    value_dim: tl.constexpr, value_pad: tl.constexpr, page: tl.constexpr, step: tl.constexpr,
    has_window: tl.constexpr, has_cap: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    length = tl.load(lengths + row)
    first = 0
    if has_window:
        first = tl.maximum(length - window, 0)
    each = tl.cdiv(tl.cdiv(length - first, count), step) * step
    low = first + part * each
    high = tl.minimum(low + each, length)

    one = tl.arange(0, group_pad)
    key_at = tl.arange(0, key_pad)
    value_at = tl.arange(0, value_pad)
    in_group = one < group
    asks = tl.load(
        query + row * query_row + (head * group + one[:, None]) * query_head + key_at[None, :],
        mask=in_group[:, None] & (key_at[None, :] < key_dim),
        other=0.0,
    )
    best = tl.full([group_pad], float("-inf"), tl.float32)
    total = tl.zeros([group_pad], tl.float32)
    summed = tl.zeros([group_pad, value_pad], tl.float32)
    for at in range(low, high, step):
        place = at + tl.arange(0, step)
        is_real = place < high
        block = tl.load(table + row * table_row + place // page, mask=is_real, other=0)
        slot = block.to(tl.int64) * page + place % page
        keys = tl.load(
            key + slot[None, :] * key_slot + head * key_head + key_at[:, None],
            mask=is_real[None, :] & (key_at[:, None] < key_dim),
            other=0.0,
        )
        scores = tl.dot(asks, keys) * scale
        if has_cap:
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        scores = tl.where(is_real[None, :], scores, float("-inf"))
        better = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp(best - better)
        share = tl.exp(scores - better[:, None])
        values = tl.load(
            value + slot[:, None] * value_slot + head * value_head + value_at[None, :],
            mask=is_real[:, None] & (value_at[None, :] < value_dim),
            other=0.0,
        )
        summed = summed * shrink[:, None] + tl.dot(share.to(values.dtype), values)
        total = total * shrink + tl.sum(share, 1)
        best = better

    # An empty part has the weight minus infinity, so its sum is not used.
    filled = total > 0.0
    safe = tl.where(filled, total, 1.0)
    index = ((row * tl.num_programs(1) + head) * count + part) * group + one
    tl.store(weights + index, tl.where(filled, best + tl.log(safe), float("-inf")), mask=in_group)
    tl.store(
        parts + index[:, None] * value_dim + value_at[None, :],
        summed / safe[:, None],
        mask=in_group[:, None] & (value_at[None, :] < value_dim),
    )


def _join(
    parts, weights, out, count,
    group: tl.constexpr, value_dim: tl.constexpr, value_pad: tl.constexpr, parts_pad: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    one = tl.program_id(1)
    part = tl.arange(0, parts_pad)
    at = tl.arange(0, value_pad)
    index = (pair * count + part) * group + one
    weight = tl.load(weights + index, mask=part < count, other=float("-inf"))
    share = tl.exp(weight - tl.max(weight, 0))
    summed = tl.load(
        parts + index[:, None] * value_dim + at[None, :],
        mask=(at < value_dim)[None, :] & (share > 0.0)[:, None],
        other=0.0,
    )
    joined = tl.sum(summed * share[:, None], 0) / tl.sum(share, 0)
    tl.store(out + (pair * group + one) * value_dim + at, joined.to(out.dtype.element_ty), mask=at < value_dim)


def _write(
    key, value, slots, key_store, value_store,
    key_token, key_head, value_token, value_head, key_slot, key_slot_head, value_slot, value_slot_head,
    key_dim: tl.constexpr, key_pad: tl.constexpr, value_dim: tl.constexpr, value_pad: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token)
    key_at = tl.arange(0, key_pad)
    value_at = tl.arange(0, value_pad)
    keys = tl.load(key + token * key_token + head * key_head + key_at, mask=key_at < key_dim)
    tl.store(key_store + slot * key_slot + head * key_slot_head + key_at, keys, mask=key_at < key_dim)
    values = tl.load(value + token * value_token + head * value_head + value_at, mask=value_at < value_dim)
    tl.store(value_store + slot * value_slot + head * value_slot_head + value_at, values, mask=value_at < value_dim)


# One compiled kernel serves any number of parts and any window: compiling takes a second while a request waits.
_part_kernel: Any = triton.jit(do_not_specialize=("count", "window", "table_row"))(_part)
_join_kernel: Any = triton.jit(do_not_specialize=("count",))(_join)
_write_kernel: Any = triton.jit(do_not_specialize=("key_token", "value_token"))(_write)


@cache
def _processors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def parts_for(pairs: int, tokens_max: int, processors: int) -> int:
    """The number of parts per row: a power of two that fills the device and leaves each part at least a tile."""
    wanted = max(1, min(PROGRAMS_PER_PROCESSOR * processors // pairs, -(-tokens_max // TILE), PARTS_MAX))
    return 1 << (wanted.bit_length() - 1)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of `[rows, heads, dim]` over `[slots, kv heads, dim]`, through the block table `[rows, blocks]`."""
    rows, heads, key_dim = query.shape
    kv_heads, value_dim = key.shape[1], value.shape[2]
    group = heads // kv_heads
    processors = _processors(query.device.index or 0) if query.is_cuda else 1
    count = parts_for(rows * kv_heads, table.shape[1] * BLOCK_TOKENS, processors)
    parts = torch.empty((rows, kv_heads, count, group, value_dim), dtype=torch.float32, device=query.device)
    weights = torch.empty((rows, kv_heads, count, group), dtype=torch.float32, device=query.device)
    out = torch.empty((rows, heads, value_dim), dtype=query.dtype, device=query.device)
    _part_kernel[(rows, kv_heads, count)](
        query, key, value, table, lengths, parts, weights, scale, softcap or 0.0, window or 0, count,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        table.stride(0),
        group=group, group_pad=max(GROUP_MIN, triton.next_power_of_2(group)),
        key_dim=key_dim, key_pad=triton.next_power_of_2(key_dim),
        value_dim=value_dim, value_pad=triton.next_power_of_2(value_dim),
        page=BLOCK_TOKENS, step=TILE, has_window=window is not None, has_cap=softcap is not None,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    _join_kernel[(rows * kv_heads, group)](
        parts, weights, out, count,
        group=group, value_dim=value_dim, value_pad=triton.next_power_of_2(value_dim), parts_pad=PARTS_MAX,
        num_warps=WARPS,
    )  # fmt: skip
    return out


def write(
    key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, key_store: torch.Tensor, value_store: torch.Tensor
) -> None:
    """Write keys and values, `[tokens, kv heads, dim]` each, to these slots. The last dimension is contiguous."""
    tokens, kv_heads, key_dim = key.shape
    value_dim = value.shape[2]
    _write_kernel[(tokens, kv_heads)](
        key, value, slots, key_store, value_store,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        key_store.stride(0), key_store.stride(1), value_store.stride(0), value_store.stride(1),
        key_dim=key_dim, key_pad=triton.next_power_of_2(key_dim),
        value_dim=value_dim, value_pad=triton.next_power_of_2(value_dim),
        num_warps=1,
    )  # fmt: skip


def _rope(
    query, key, cos, sin, query_out, key_out, heads, kv_heads, tokens,
    query_batch, query_head, query_token, key_batch, key_head, key_token, cos_batch, cos_token,
    dim: tl.constexpr, pad: tl.constexpr, turned: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.program_id(1)
    batch = token // tokens
    place = token % tokens
    if head < heads:
        source = query + batch.to(tl.int64) * query_batch + head * query_head + place.to(tl.int64) * query_token
        target = query_out + (token.to(tl.int64) * heads + head) * dim
    else:
        own = head - heads
        source = key + batch.to(tl.int64) * key_batch + own * key_head + place.to(tl.int64) * key_token
        target = key_out + (token.to(tl.int64) * kv_heads + own) * dim
    at = tl.arange(0, pad)
    half = turned // 2
    # The other half of the pair; the upper half is negated.
    other = tl.where(at < half, at + half, at - half)
    is_turned = at < turned
    straight = tl.load(source + at, mask=at < dim, other=0.0).to(tl.float32)
    crossed = tl.load(source + other, mask=is_turned, other=0.0).to(tl.float32)
    crossed = tl.where(at < half, -crossed, crossed)
    angle = batch * cos_batch + place * cos_token + at
    along = tl.load(cos + angle, mask=is_turned, other=1.0).to(tl.float32)
    across = tl.load(sin + angle, mask=is_turned, other=0.0).to(tl.float32)
    turned_to = straight * along + crossed * across
    tl.store(target + at, turned_to.to(query_out.dtype.element_ty), mask=at < dim)


_rope_kernel: Any = triton.jit(
    do_not_specialize=("tokens", "query_batch", "query_token", "key_batch", "key_token", "cos_batch", "cos_token")
)(_rope)


def apply_rope(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate `[batch, heads, tokens, dim]` by `[batch, tokens, turned]`. Dimensions beyond `turned` are unchanged."""
    batch, heads, tokens, dim = query.shape
    kv_heads = key.shape[1]
    query_out = torch.empty((batch, tokens, heads, dim), dtype=query.dtype, device=query.device)
    key_out = torch.empty((batch, tokens, kv_heads, dim), dtype=query.dtype, device=query.device)
    # One row of angles may serve the whole batch.
    cos_batch = 0 if cos.shape[0] == 1 else cos.stride(0)
    _rope_kernel[(batch * tokens, heads + kv_heads)](
        query, key, cos, sin, query_out, key_out, heads, kv_heads, tokens,
        query.stride(0), query.stride(1), query.stride(2), key.stride(0), key.stride(1), key.stride(2),
        cos_batch, cos.stride(1),
        dim=dim, pad=triton.next_power_of_2(dim), turned=cos.shape[-1],
        num_warps=ROPE_WARPS,
    )  # fmt: skip
    return query_out.transpose(1, 2), key_out.transpose(1, 2)


# --- folded weights: each byte is read once and written once ---------------------------------------------------------


UNFOLD_BLOCK = 2048
ODD_BLOCK = 1024


def _whole(code, rest, base):
    exponent = tl.where(code == 0, 0, code + base) & 0xFF
    return (((rest & 0x80) << 8) | (exponent << 7) | (rest & 0x7F)).to(tl.int16)


_whole_part: Any = triton.jit(_whole)


def _unfold(folded, target, numbers, base, block: tl.constexpr):
    half = numbers // 2
    at = tl.program_id(0) * block + tl.arange(0, block)
    is_there = at < half
    codes = tl.load(folded + numbers + at, mask=is_there, other=0).to(tl.int32)
    first = tl.load(folded + at, mask=is_there, other=0).to(tl.int32)
    second = tl.load(folded + half + at, mask=is_there, other=0).to(tl.int32)
    tl.store(target + at, _whole_part(codes & 15, first, base), mask=is_there)
    tl.store(target + half + at, _whole_part(codes >> 4, second, base), mask=is_there)


def _set_odd(places, values, target, odd, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    is_there = at < odd
    place = tl.load(places + at, mask=is_there, other=0)
    tl.store(target + place, tl.load(values + at, mask=is_there, other=0), mask=is_there)


_unfold_kernel: Any = triton.jit(do_not_specialize=("numbers", "base"))(_unfold)
_odd_kernel: Any = triton.jit(do_not_specialize=("odd",), do_not_specialize_on_alignment=("values",))(_set_odd)


def unfold(folded: torch.Tensor, target: torch.Tensor, fold: Fold) -> None:
    """Unfold `folded` to `target` (int16), on the current stream."""
    numbers = target.numel()
    _unfold_kernel[(triton.cdiv(numbers // 2, UNFOLD_BLOCK),)](folded, target, numbers, fold.base, block=UNFOLD_BLOCK)
    if fold.odd:
        end = numbers // 2 * 3
        middle = end + 4 * fold.odd
        places, values = folded[end:middle].view(torch.int32), folded[middle : middle + 2 * fold.odd].view(torch.int16)
        _odd_kernel[(triton.cdiv(fold.odd, ODD_BLOCK),)](places, values, target, fold.odd, block=ODD_BLOCK)
