"""The memory a model is expected to need, part by part, before it was measured.

Owns the records of an estimate. Reads no headers: `gguf.py`, `hf_folder.py` and `hosted.py` do. A figure consists of
parts, so that a person can see where it comes from and compare it with what the engine reports.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from greenroom.core.model import Need

MIB: Final = 1024 * 1024

# Where a figure comes from, best first: the file's headers, its size, its name.
GGUF: Final = "gguf"
SAFETENSORS: Final = "safetensors"
FILE_SIZE: Final = "file size"
NAME: Final = "name"


@dataclass(frozen=True, slots=True)
class EstimatePart:
    """One reason for memory: `weights`, `KV cache`, `recurrent state`, `compute buffers`, `context` …"""

    what: str
    gpu_mib: int
    host_mib: int

    @property
    def is_weights(self) -> bool:
        return "weights" in self.what

    @property
    def is_kv(self) -> bool:
        return "KV" in self.what


@dataclass(frozen=True, slots=True)
class Estimate:
    """All parts, and what they were read from."""

    parts: tuple[EstimatePart, ...]
    source: str
    # How many tokens its KV cache was estimated for; 0 if that is not known.
    kv_tokens: int = 0

    @property
    def need(self) -> Need:
        return Need(sum(part.gpu_mib for part in self.parts), sum(part.host_mib for part in self.parts))


def mib(size_bytes: float) -> int:
    """Bytes in MiB, rounded up."""
    return -int(-size_bytes // MIB)


def file_bytes(path: str | Path) -> int:
    """0 for a file that is missing or not readable: its own load will report it."""
    try:
        return os.path.getsize(path) if os.path.isfile(path) else 0
    except (OSError, ValueError):
        return 0


def part(what: str, gpu_bytes: float = 0, host_bytes: float = 0) -> EstimatePart:
    return EstimatePart(what, mib(gpu_bytes), mib(host_bytes))


def placed(what: str, size_bytes: float, on_gpu: bool) -> EstimatePart:
    """All of it on the GPU or all of it on the host."""
    return part(what, size_bytes) if on_gpu else part(what, 0, size_bytes)


def known(parts: Iterable[EstimatePart]) -> tuple[EstimatePart, ...]:
    """The parts that need any memory."""
    return tuple(one for one in parts if one.gpu_mib or one.host_mib)
