"""Triton kernels that unfold weights: each byte is read once and written once. Imported only where there is a CUDA
device and Triton; `unfolding.py` decides where they are used."""

# Arguments of kernels are pointers and numbers on the device, which Python's types cannot express.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .fold import Fold

BLOCK = 2048
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
    _unfold_kernel[(triton.cdiv(numbers // 2, BLOCK),)](folded, target, numbers, fold.base, block=BLOCK)
    if fold.odd:
        end = numbers // 2 * 3
        middle = end + 4 * fold.odd
        places, values = folded[end:middle].view(torch.int32), folded[middle : middle + 2 * fold.odd].view(torch.int16)
        _odd_kernel[(triton.cdiv(fold.odd, ODD_BLOCK),)](places, values, target, fold.odd, block=ODD_BLOCK)
