"""Device memory with a fixed address: the memory behind it comes and goes, so captured graphs stay valid.

Owns the three kinds of device arena: reserved addresses on a GPU, reserved addresses of this process (KV on the CPU),
and the host arena itself where the CPU is the device. Never copies anything: others say what is stored where.

`Driver` makes the CUDA driver calls that torch does not offer: virtual memory, host registration, copies on a stream.
Every call works on the primary context of one device, which torch uses too, and makes it current in the calling thread
first.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Sequence
from typing import Any, Final

import torch

from ..failures import DriverError, OutOfMemory

_OUT_OF_MEMORY: Final = 2
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3
# The granularity that is recommended for speed, not the minimum.
_RECOMMENDED: Final = 1
# Registered for all contexts of the process.
_PORTABLE: Final = 1


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Flags(ctypes.Structure):
    _fields_ = [
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", _Flags),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


_SIZE, _ADDRESS, _U64, _INT, _POINTER = ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p
_CALLS: Final[dict[str, Sequence[Any]]] = {
    "cuInit": [ctypes.c_uint],
    "cuDeviceGet": [_POINTER, _INT],
    "cuDevicePrimaryCtxRetain": [_POINTER, _INT],
    "cuCtxSetCurrent": [_POINTER],
    "cuMemGetInfo_v2": [_POINTER, _POINTER],
    "cuMemGetAllocationGranularity": [_POINTER, _POINTER, _INT],
    "cuMemAddressReserve": [_POINTER, _SIZE, _SIZE, _ADDRESS, _U64],
    "cuMemAddressFree": [_ADDRESS, _SIZE],
    "cuMemCreate": [_POINTER, _SIZE, _POINTER, _U64],
    "cuMemMap": [_ADDRESS, _SIZE, _SIZE, _U64, _U64],
    "cuMemSetAccess": [_ADDRESS, _SIZE, _POINTER, _SIZE],
    "cuMemUnmap": [_ADDRESS, _SIZE],
    "cuMemRelease": [_U64],
    "cuMemHostRegister_v2": [_POINTER, _SIZE, ctypes.c_uint],
    "cuMemHostUnregister": [_POINTER],
    "cuMemcpyHtoDAsync_v2": [_ADDRESS, _POINTER, _SIZE, _POINTER],
    "cuGetErrorString": [_INT, _POINTER],
}


class Driver:
    """The driver for one device. Every method may be called from any thread and releases the interpreter lock."""

    def __init__(self, index: int) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        for name, kinds in _CALLS.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = list(kinds), ctypes.c_int
        self._here = _Location(_ON_DEVICE, index)
        self._properties = _Properties(type=_PINNED, location=self._here)
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._use()
        size = ctypes.c_size_t()
        wanted = ctypes.byref(self._properties)
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), wanted, _RECOMMENDED)
        self.granularity = size.value

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the device."""
        self._use()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def reserve(self, size: int) -> int:
        """Reserve an address range, without memory."""
        self._use()
        address = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
        return address.value

    def free_addresses(self, address: int, size: int) -> None:
        self._use()
        self._call("cuMemAddressFree", address, size)

    def map(self, address: int, size: int) -> int:
        """Map new memory at reserved addresses and return its handle. Raises OutOfMemory; then nothing is left."""
        self._use()
        handle = ctypes.c_uint64()
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), 0)
        mapped = False
        try:
            self._call("cuMemMap", address, size, 0, handle, 0)
            mapped = True
            access = _Access(self._here, _READ_WRITE)
            self._call("cuMemSetAccess", address, size, ctypes.byref(access), 1)
        except BaseException:
            if mapped:
                self._library.cuMemUnmap(address, size)
            self._library.cuMemRelease(handle)
            raise
        return handle.value

    def unmap(self, address: int, size: int, handle: int) -> None:
        """Unmap and free the memory. Nothing may be using it."""
        self._use()
        self._call("cuMemUnmap", address, size)
        self._call("cuMemRelease", handle)

    def register(self, pointer: int, size: int) -> None:
        """Pin host memory, so that the device copies from it at full bus speed."""
        self._use()
        self._call("cuMemHostRegister_v2", pointer, size, _PORTABLE)

    def unregister(self, pointer: int) -> None:
        self._use()
        self._call("cuMemHostUnregister", pointer)

    def copy_to_device(self, address: int, pointer: int, size: int, stream: int) -> None:
        """Enqueue a copy of host memory on a stream."""
        self._use()
        self._call("cuMemcpyHtoDAsync_v2", address, pointer, size, stream)

    def _use(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *values: Any) -> None:
        code = getattr(self._library, name)(*values)
        if code == _OUT_OF_MEMORY:
            raise OutOfMemory(f"{name} found no memory.")
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise DriverError(name, code, (text.value or b"unknown error").decode(errors="replace"))


@functools.cache
def driver(index: int) -> Driver:
    """The shared driver of a device. The first call creates the device's context."""
    return Driver(index)


PAGE_BYTES: Final = 4096
# A part of an arena: where it begins, and its bytes.
Span = tuple[int, int]


class DeviceArena:
    """Flat memory at a fixed address. After `map` its content is undefined; while unmapped it must not be touched."""

    def __init__(self, tensor: torch.Tensor, size: int) -> None:
        """`size`: bytes it takes while it is mapped."""
        self.tensor, self.size = tensor, size
        self.is_mapped = False

    def map(self) -> None:
        """Map memory at the address. Raises OutOfMemory; then nothing has changed."""
        self.is_mapped = True

    def unmap(self) -> None:
        """Free the memory. Nothing may be using it any more."""
        self.is_mapped = False

    def close(self) -> None:
        """Free the address as well. No view of `tensor` may be used afterwards."""
        self.tensor = torch.empty(0, dtype=torch.uint8)


class CudaArena(DeviceArena):
    """Memory of one GPU, by the driver's virtual memory calls."""

    def __init__(self, driver: Driver, index: int, size: int, spans: Sequence[Span] | None = None) -> None:
        """`spans` are the parts of it that get memory; None: all of it."""
        self._driver, self._index = driver, index
        self._reserved = _rounded(size, driver.granularity)
        whole = spans is None
        self._spans = [(0, self._reserved)] if whole else [self._inside(start, length) for start, length in spans or ()]
        self._handles: list[int] = []
        self.address = driver.reserve(self._reserved)
        try:
            super().__init__(self._tensor(), sum(length for _, length in self._spans))
        except BaseException:
            driver.free_addresses(self.address, self._reserved)
            raise

    def map(self) -> None:
        if self.is_mapped:
            return
        try:
            self._map()
        except OutOfMemory:
            # Torch's cache may hold enough.
            torch.cuda.empty_cache()
            try:
                self._map()
            except OutOfMemory:
                free, total = self._driver.memory()
                raise OutOfMemory(
                    f"the GPU has {free:,} of {total:,} bytes free and {self.size:,} are needed in one piece."
                    " Let another model sleep, or lower ctx_size or cache_tokens."
                ) from None
        self.is_mapped = True

    def unmap(self) -> None:
        if self.is_mapped:
            self.is_mapped = False
            self._unmap()

    def close(self) -> None:
        if self.address:
            self.unmap()
            self._driver.free_addresses(self.address, self._reserved)
            self.address = 0

    def _inside(self, start: int, length: int) -> Span:
        return start, min(_rounded(length, self._driver.granularity), self._reserved - start)

    def _map(self) -> None:
        """Raises OutOfMemory; then nothing is mapped."""
        try:
            for start, length in self._spans:
                self._handles.append(self._driver.map(self.address + start, length))
        except BaseException:
            self._unmap()
            raise

    def _unmap(self) -> None:
        spans = self._spans[: len(self._handles)]
        while self._handles:
            start, length = spans.pop()
            self._driver.unmap(self.address + start, length, self._handles.pop())

    def _tensor(self) -> torch.Tensor:
        """A tensor over all addresses. Torch asks the driver about the first one, so it is mapped for the moment."""
        granule = self._driver.granularity
        handle = self._driver.map(self.address, granule)
        try:
            return torch.as_tensor(_Described(self.address, self._reserved), device=f"cuda:{self._index}")
        finally:
            self._driver.unmap(self.address, granule, handle)


class PrivateArena(DeviceArena):
    """Memory of this process. Unmapping frees the pages and keeps the addresses."""

    def __init__(self, size: int) -> None:
        size = _rounded(size, PAGE_BYTES)
        self._pages: mmap.mmap | None = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        super().__init__(torch.frombuffer(self._pages, dtype=torch.uint8), size)

    def unmap(self) -> None:
        super().unmap()
        if self._pages is not None:
            self._pages.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        self.unmap()
        super().close()
        self._pages = None


class BorrowedArena(DeviceArena):
    """Memory owned elsewhere and always mapped: the CPU computes with the host arena itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor, tensor.numel())


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
