"""The host arena: all weights of one model in one flat piece of shared memory, with a table of where each tensor is.

Owns the layout (execution order, each tensor once, aligned), the mapping of the memfd that the gateway holds, and the
manifest at its end, by which another worker adopts a filled arena. Never reads model files and never touches a device.
The data comes first, then the manifest as JSON, then a footer with the manifest's length. Chunks of the data may be
folded (`fold`): then they are smaller, and a hole follows each.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from ..failures import BadModel, OutOfMemory
from .fold import CHUNK_BYTES, Chunk, ChunkTable

# Suits the widest vector loads of a GPU, and is a multiple of every item size.
ALIGN_BYTES: Final = 512
PAGE_BYTES: Final = 4096
MANIFEST_MAX_BYTES: Final = 256 * 2**20
_MAGIC: Final = b"grmarena"
# The unit of `st_blocks`.
_BLOCK_BYTES: Final = 512
_FOOTER: Final = struct.Struct("<8sQQ")


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor is. Tied names share a place."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Layout:
    places: Mapping[str, TensorPlace]
    bytes: int


def lay_out(tensors: Iterable[tuple[str, torch.Tensor]]) -> Layout:
    """Places for these tensors in the given order, which is the order of computation."""
    places: dict[str, TensorPlace] = {}
    seen: dict[object, TensorPlace] = {}
    end = 0
    # A list keeps all tensors alive: the id of a freed one could be given to the next.
    for name, tensor in list(tensors):
        key = _identity(tensor)
        if key not in seen:
            size = tensor.numel() * tensor.element_size()
            seen[key] = TensorPlace(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end, size)
            end += -(-size // ALIGN_BYTES) * ALIGN_BYTES
        places[name] = seen[key]
    return Layout(places, end)


def view_of(flat: torch.Tensor, place: TensorPlace) -> torch.Tensor:
    """The tensor at this place of a flat uint8 tensor, sharing its memory."""
    part = flat[place.offset : place.offset + place.size]
    return part.view(getattr(torch, place.dtype)).view(place.shape)


class HostArena:
    """A mapped memfd with a layout. The caller closes the memfd. `filled` is false until `seal`."""

    def __init__(self, descriptor: int, layout: Layout, identity: str, table: ChunkTable | None) -> None:
        """`table` is None until it is filled."""
        self.layout = layout
        self.identity = identity
        self.filled = table is not None
        self._table = table or ChunkTable(layout.bytes)
        self._descriptor = descriptor
        self._map: mmap.mmap | None = mmap.mmap(descriptor, max(PAGE_BYTES, _page_up(layout.bytes)))
        with contextlib.suppress(OSError, ValueError):
            # Larger pages are faster to fault in and to register. Without them, small ones work.
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.tensor: torch.Tensor = torch.frombuffer(self._map, dtype=torch.uint8)[: layout.bytes]

    @classmethod
    def create(
        cls, descriptor: int, layout: Layout, identity: str, max_bytes: int | None, free_bytes: int | None = None
    ) -> HostArena:
        """An empty arena for this layout. Raises OutOfMemory if it is larger than allowed or than free memory.
        `free_bytes`: as measured by the gateway, which reads cgroup limits; None: read from the system."""
        if max_bytes is not None and layout.bytes > max_bytes:
            raise OutOfMemory(
                f"the weights take {layout.bytes:,} bytes of host memory and {max_bytes:,} are allowed."
                " Raise green_room_mib or choose a smaller dtype."
            )
        free = available_bytes() if free_bytes is None else free_bytes
        if layout.bytes > free:
            raise OutOfMemory(
                f"the weights take {layout.bytes:,} bytes of host memory and {free:,} are free. Unload another model."
            )
        os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, max(PAGE_BYTES, _page_up(layout.bytes)))
        return cls(descriptor, layout, identity, None)

    @classmethod
    def adopt(cls, descriptor: int, identity: str, *, unfolds: bool) -> HostArena | None:
        """The arena that another worker filled from the same files, else None. None as well if it is folded and nothing
        `unfolds` it: a CPU computes with the arena itself."""
        manifest = _manifest(descriptor)
        if manifest is None or manifest.get("identity") != identity:
            return None
        try:
            places = {name: _place(entry) for name, entry in manifest["tensors"].items()}
            layout = Layout(places, int(manifest["bytes"]))
            table = ChunkTable.parse(layout.bytes, manifest["folds"])
        except (AttributeError, KeyError, TypeError, ValueError):
            return None
        if any(place.offset + place.size > layout.bytes for place in places.values()):
            return None
        if table.folds and not unfolds:
            return None
        return cls(descriptor, layout, identity, table)

    def seal(self, table: ChunkTable) -> None:
        """Write the manifest, so that the arena can be adopted. `table` says which chunks are folded."""
        self._table = table
        manifest = {
            "identity": self.identity,
            "bytes": self.layout.bytes,
            "folds": table.folds,
            "tensors": {name: asdict(place) for name, place in self.layout.places.items()},
        }
        text = json.dumps(manifest, separators=(",", ":")).encode()
        if len(text) > MANIFEST_MAX_BYTES:
            raise BadModel(f"the model has {len(self.layout.places):,} tensors, more than a manifest can name.")
        start = max(PAGE_BYTES, _page_up(self.layout.bytes))
        _write(self._descriptor, text + _FOOTER.pack(_MAGIC, start, len(text)), start)
        self.filled = True

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory in use, with the manifest and without the holes."""
        return os.fstat(self._descriptor).st_blocks * _BLOCK_BYTES

    @property
    def chunks(self) -> list[Chunk]:
        """All of the data in chunks. Valid once the arena is filled."""
        return self._table.chunks

    def chunks_of(self, name: str) -> set[int]:
        """The numbers of the chunks that hold the tensors of this module, which may hold others as well."""
        places = (place for key, place in self.layout.places.items() if key.startswith(f"{name}.") and place.size)
        ends = ((place.offset, place.offset + place.size - 1) for place in places)
        return {number for first, last in ends for number in range(first // CHUNK_BYTES, last // CHUNK_BYTES + 1)}

    def memory_for(self, numbers: Collection[int]) -> list[int]:
        """The numbers of the chunks for which a device needs memory to hold these. Valid once the arena is filled."""
        return self._table.with_landings(numbers)

    @property
    def buffer(self) -> memoryview:
        """The bytes to be filled."""
        if self._map is None:
            raise ValueError("the arena is closed")
        return memoryview(self._map)[: self.layout.bytes]

    def close(self) -> None:
        """Unmap. The memory lives on while the gateway holds the memfd. No view may be left."""
        if self._map is not None:
            self.tensor = torch.empty(0, dtype=torch.uint8)
            self._map = None

    def discard(self) -> None:
        """Free the memory as well: nothing can be adopted."""
        if self._map is not None:
            os.ftruncate(self._descriptor, 0)
        self.close()


def available_bytes() -> int:
    """Host memory that is available now."""
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _identity(tensor: torch.Tensor) -> object:
    # Tensors without memory are identified as objects, the others by the memory they view.
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return id(tensor)
    storage = tensor.untyped_storage().data_ptr()
    return storage, tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _page_up(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def _manifest(descriptor: int) -> dict[str, Any] | None:
    end = os.fstat(descriptor).st_size
    footer = os.pread(descriptor, _FOOTER.size, max(0, end - _FOOTER.size))
    if len(footer) < _FOOTER.size:
        return None
    magic, start, length = _FOOTER.unpack(footer)
    if magic != _MAGIC or length > MANIFEST_MAX_BYTES or start + length + _FOOTER.size != end:
        return None
    try:
        manifest = json.loads(os.pread(descriptor, length, start))
    except ValueError:
        return None
    return manifest if isinstance(manifest, dict) else None


def _place(entry: Mapping[str, object]) -> TensorPlace:
    dtype, shape, offset, size = (entry[key] for key in ("dtype", "shape", "offset", "size"))
    known = isinstance(getattr(torch, str(dtype), None), torch.dtype)
    if not (known and isinstance(shape, list) and isinstance(offset, int) and isinstance(size, int)) or offset < 0:
        raise ValueError("not a place")
    if math.prod(shape) * getattr(torch, str(dtype)).itemsize != size:
        raise ValueError("shape and size differ")
    return TensorPlace(str(dtype), tuple(shape), offset, size)


def _write(descriptor: int, text: bytes, start: int) -> None:
    rest = memoryview(text)
    while rest:
        written = os.pwrite(descriptor, rest, start)
        rest, start = rest[written:], start + written
