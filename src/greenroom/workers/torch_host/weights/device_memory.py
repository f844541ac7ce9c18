"""Device memory with a fixed address: the memory behind it comes and goes, so captured graphs stay valid.

Owns the three kinds of device arena: reserved addresses on a GPU, reserved addresses of this process (KV on the CPU),
and the host arena itself where the CPU is the device. Never copies anything and never knows what is stored where.
"""

from __future__ import annotations

import mmap
from typing import Any, Final, Protocol

import torch

from ..failures import OutOfMemory
from .driver import Driver

PAGE_BYTES: Final = 4096


class DeviceArena(Protocol):
    """Flat memory at a fixed address. After `map` its content is undefined; while unmapped it must not be touched."""

    tensor: torch.Tensor
    size: int
    is_mapped: bool

    def map(self) -> None:
        """Map memory at the address. Raises OutOfMemory; then nothing has changed."""

    def unmap(self) -> None:
        """Free the memory. Nothing may be using it any more."""

    def close(self) -> None:
        """Free the address as well. No view of `tensor` may be used afterwards."""


class CudaArena:
    """Memory of one GPU, by the driver's virtual memory calls."""

    def __init__(self, driver: Driver, index: int, size: int) -> None:
        self._driver, self._index = driver, index
        self.size = _rounded(size, driver.granularity)
        self.is_mapped = False
        self._handle = 0
        self.address = driver.reserve(self.size)
        try:
            self.tensor = self._tensor()
        except BaseException:
            driver.free_addresses(self.address, self.size)
            raise

    def map(self) -> None:
        if self.is_mapped:
            return
        try:
            self._handle = self._driver.map(self.address, self.size)
        except OutOfMemory:
            # Torch's cache may hold enough.
            torch.cuda.empty_cache()
            self._handle = self._map_or_explain()
        self.is_mapped = True

    def unmap(self) -> None:
        if self.is_mapped:
            self.is_mapped = False
            self._driver.unmap(self.address, self.size, self._handle)

    def close(self) -> None:
        if self.address:
            self.unmap()
            self._driver.free_addresses(self.address, self.size)
            self.address = 0

    def _map_or_explain(self) -> int:
        try:
            return self._driver.map(self.address, self.size)
        except OutOfMemory:
            free, total = self._driver.memory()
            raise OutOfMemory(
                f"the GPU has {free:,} of {total:,} bytes free and {self.size:,} are needed in one piece."
                " Let another model sleep, or lower ctx_size or cache_tokens."
            ) from None

    def _tensor(self) -> torch.Tensor:
        """A tensor over all addresses. Torch asks the driver about the first one, so it is mapped for the moment."""
        granule = self._driver.granularity
        handle = self._driver.map(self.address, granule)
        try:
            return torch.as_tensor(_Described(self.address, self.size), device=f"cuda:{self._index}")
        finally:
            self._driver.unmap(self.address, granule, handle)


class PrivateArena:
    """Memory of this process. Unmapping frees the pages and keeps the addresses."""

    def __init__(self, size: int) -> None:
        self.size = _rounded(size, PAGE_BYTES)
        self.is_mapped = False
        self._pages: mmap.mmap | None = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor = torch.frombuffer(self._pages, dtype=torch.uint8)

    def map(self) -> None:
        self.is_mapped = True

    def unmap(self) -> None:
        self.is_mapped = False
        if self._pages is not None:
            self._pages.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        self.unmap()
        self._pages, self.tensor = None, torch.empty(0, dtype=torch.uint8)


class BorrowedArena:
    """Memory owned elsewhere and always mapped: the CPU computes with the host arena itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.size = tensor.numel()
        self.is_mapped = False

    def map(self) -> None:
        self.is_mapped = True

    def unmap(self) -> None:
        self.is_mapped = False

    def close(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8)


class _Described:
    """Memory described by the CUDA array interface."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _rounded(size: int, step: int) -> int:
    return max(1, -(-size // step)) * step
