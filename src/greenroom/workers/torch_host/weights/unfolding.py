"""Restores folded weights on the device, as they arrive.

Owns where folded chunks land, and the two ways to unfold: a Triton kernel, tried once against the other, which uses
torch operations and takes five times as long. `fold.py` defines the format. Read `Unfolder` first.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Final

import torch

from .fold import CHUNK_BYTES, LANDING_CHUNKS, ODD_CODE, Chunk, Fold

log = logging.getLogger(__name__)

# Numbers in the trial: every exponent and sign, and odd ones among them.
TRY_NUMBERS: Final = 2**16
_TRY_BASE: Final = 100

Unfold = Callable[[torch.Tensor, torch.Tensor, Fold], None]
"""Called with folded bytes, the target (int16) and the fold: writes the numbers to the target."""


class Unfolder:
    """Restores the chunks of one arena in device memory: each is copied to its `landing`, then `unfold`ed.

    Folded chunks land where the last chunks will be, which are never folded and come last. A device that needs none of
    the last chunks has memory there all the same. Chunks that land in the same place must not be copied before the
    earlier one is unfolded.
    """

    def __init__(self, weights: torch.Tensor, data_bytes: int, unfold: Unfold | None = None) -> None:
        """`weights`: flat device memory for all data. `unfold`: by default the fastest that works."""
        self._weights = weights
        self._whole_chunks = data_bytes // CHUNK_BYTES
        self._unfold = unfolder(weights.device) if unfold is None else unfold

    def landing(self, chunk: Chunk) -> torch.Tensor:
        """Where to copy the stored bytes of this chunk."""
        index = chunk.number if chunk.fold is None else landing_index(chunk.number, self._whole_chunks)
        return self._weights[index * CHUNK_BYTES : index * CHUNK_BYTES + chunk.size]

    def unfold(self, chunk: Chunk) -> None:
        """Restore the chunk from its landing, on the current stream. Does nothing if it is not folded."""
        if chunk.fold is not None:
            target = self._weights[chunk.start : chunk.start + CHUNK_BYTES].view(torch.int16)
            self._unfold(self.landing(chunk), target, chunk.fold)


def landing_index(index: int, whole_chunks: int) -> int:
    """The chunk in whose place a folded one lands: of the last whole chunks, the one a multiple of them later."""
    first = whole_chunks - LANDING_CHUNKS
    return first + (index - first) % LANDING_CHUNKS


def unfold_plainly(folded: torch.Tensor, target: torch.Tensor, fold: Fold) -> None:
    numbers = target.numel()
    half, end = numbers // 2, numbers // 2 * 3
    pairs = folded[numbers:end]
    for start, codes in ((0, pairs & ODD_CODE), (half, pairs >> 4)):
        rest = folded[start : start + half].to(torch.int16)
        exponents = torch.where(codes == 0, 0, codes.to(torch.int16) + fold.base) & 0xFF
        # The sign is moved to bit 15 by a product, which may overflow; a shift might not.
        target[start : start + half] = ((rest & 0x80) * 256) | (exponents << 7) | (rest & 0x7F)
    middle = end + 4 * fold.odd
    places = folded[end:middle].view(torch.int32)
    target[places.long()] = folded[middle : middle + 2 * fold.odd].view(torch.int16)


@functools.cache
def unfolder(device: torch.device) -> Unfold:
    """The fastest function that works on this device."""
    try:
        from ..kernels.triton_kernels import unfold

        folded, fold = _sample(device)
        wanted, found = (torch.zeros(TRY_NUMBERS, dtype=torch.int16, device=device) for _ in range(2))
        unfold_plainly(folded, wanted, fold)
        unfold(folded, found, fold)
        if torch.equal(wanted, found):
            return unfold
        log.warning("the kernel that unfolds weights is wrong here; torch's own operations do it")
    except Exception as reason:
        log.warning("weights are unfolded by torch's own operations: %s", reason)
    return unfold_plainly


def _sample(device: torch.device) -> tuple[torch.Tensor, Fold]:
    """A folded sample with every byte and every pair of codes."""
    fold = Fold(_TRY_BASE, 3)
    parts = [
        (torch.arange(TRY_NUMBERS, device=device) % 256).to(torch.uint8),
        (torch.arange(TRY_NUMBERS // 2, device=device) // (TRY_NUMBERS // 512)).to(torch.uint8),
        torch.tensor([1, TRY_NUMBERS // 2, TRY_NUMBERS - 1], dtype=torch.int32, device=device).view(torch.uint8),
        torch.tensor([-1, 7, 12_345], dtype=torch.int16, device=device).view(torch.uint8),
    ]
    return torch.cat(parts), fold
