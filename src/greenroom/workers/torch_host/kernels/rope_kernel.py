"""Turning queries and keys by their positions in one Triton kernel, where Transformers takes ten.

Owns the kernel. Imported only where there is a CUDA device and Triton; `rope.py` says where it may be used.
"""

# What a kernel is given is a pointer or a number on the device: no type of Python's says that.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

WARPS = 1


def _turn(
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
    # The other half of the pair: what comes from above is taken negative.
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


_turn_kernel: Any = triton.jit(
    do_not_specialize=("tokens", "query_batch", "query_token", "key_batch", "key_token", "cos_batch", "cos_token")
)(_turn)


def turn(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[batch, heads, tokens, dim]` by `[batch, tokens, turned]`; the last dimensions beyond stay as they are."""
    batch, heads, tokens, dim = query.shape
    kv_heads = key.shape[1]
    query_out = torch.empty((batch, tokens, heads, dim), dtype=query.dtype, device=query.device)
    key_out = torch.empty((batch, tokens, kv_heads, dim), dtype=query.dtype, device=query.device)
    # One row of angles may stand for the whole batch.
    cos_batch = 0 if cos.shape[0] == 1 else cos.stride(0)
    _turn_kernel[(batch * tokens, heads + kv_heads)](
        query, key, cos, sin, query_out, key_out, heads, kv_heads, tokens,
        query.stride(0), query.stride(1), query.stride(2), key.stride(0), key.stride(1), key.stride(2),
        cos_batch, cos.stride(1),
        dim=dim, pad=triton.next_power_of_2(dim), turned=cos.shape[-1],
        num_warps=WARPS,
    )  # fmt: skip
    return query_out.transpose(1, 2), key_out.transpose(1, 2)
