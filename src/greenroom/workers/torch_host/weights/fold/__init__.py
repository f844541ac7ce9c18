"""Folded weights: bfloat16 numbers kept in about one and a half bytes each, bit for bit.

This is the face of the package. `ChunkTable` says how an arena's data is cut and which chunks are folded, `fill_folded`
folds chunks while they are read, `Unfolder` restores them as they arrive on a device. Nothing outside uses the format
(`fold.py`), the processes that fold (`folding.py`) or the kernels that unfold (`unfolding.py`, `unfold_kernel.py`).
"""

from .fold import CHUNK_BYTES, Chunk, ChunkTable
from .folding import FOLDING, FoldSettings, fill_folded
from .unfolding import Unfolder

__all__ = ["CHUNK_BYTES", "FOLDING", "Chunk", "ChunkTable", "FoldSettings", "Unfolder", "fill_folded"]
