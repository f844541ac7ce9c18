"""The host arena: all weights of one model in one flat piece of shared memory, with a table of what lies where.

Owns the layout (execution order, each tensor once, aligned), the mapping of the memfd the gateway holds, and the
manifest at its end, by which another worker adopts a filled arena after this one is gone. Never reads model files and
never touches a device. The data comes first, then the manifest as JSON, then a footer that says how long that is.
Chunks of the data may be folded (`fold.py`): then they are smaller, and behind each is a hole up to the next.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from ..failures import BadModel, OutOfMemory
from .fold import Chunk, ChunkTable

# What the widest vector loads of a GPU like, and a multiple of every kind of number.
ALIGN_BYTES: Final = 512
PAGE_BYTES: Final = 4096
MANIFEST_MAX_BYTES: Final = 256 * 2**20
_MAGIC: Final = b"grmarena"
# What the system counts a file's memory in.
_BLOCK_BYTES: Final = 512
_FOOTER: Final = struct.Struct("<8sQQ")


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor lies. Tied names share a place."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Layout:
    places: Mapping[str, TensorPlace]
    bytes: int


def lay_out(tensors: Iterable[tuple[str, torch.Tensor]]) -> Layout:
    """Places for these tensors in the order they come, which is the order in which they will be computed with."""
    places: dict[str, TensorPlace] = {}
    seen: dict[object, TensorPlace] = {}
    end = 0
    # A list: a tensor that died on the way would lend its identity to the next.
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
    """A mapped memfd with a layout. The memfd is lent: whoever gave it closes it. `filled` is false until `seal`."""

    def __init__(self, descriptor: int, layout: Layout, identity: str, table: ChunkTable | None) -> None:
        """`table` is None until it is filled."""
        self.layout = layout
        self.identity = identity
        self.filled = table is not None
        self._table = table or ChunkTable(layout.bytes)
        self._descriptor = descriptor
        self._map: mmap.mmap | None = mmap.mmap(descriptor, max(PAGE_BYTES, _page_up(layout.bytes)))
        with contextlib.suppress(OSError, ValueError):
            # Larger pages are faster to fault in and to register. Where the system does not want it, small ones do.
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.tensor: torch.Tensor = torch.frombuffer(self._map, dtype=torch.uint8)[: layout.bytes]

    @classmethod
    def create(
        cls, descriptor: int, layout: Layout, identity: str, max_bytes: int | None, free_bytes: int | None = None
    ) -> HostArena:
        """An empty arena for this layout. Raises OutOfMemory where it is larger than allowed or than memory.

        `free_bytes` is what the gateway found free, which knows the limits of cgroups; None: the machine is asked.
        """
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
        """The arena another worker has filled, or None where it is not the one of these files.

        Nor is one that is folded, where nothing `unfolds` it: a CPU computes with the arena itself.
        """
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
        """Write the manifest: from now on this arena can be adopted. `table` says which chunks are folded."""
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
        """What the arena takes of host memory, its manifest included and its holes not."""
        return os.fstat(self._descriptor).st_blocks * _BLOCK_BYTES

    @property
    def chunks(self) -> list[Chunk]:
        """All of the data, once it is filled."""
        return self._table.chunks

    @property
    def buffer(self) -> memoryview:
        """The bytes to be filled."""
        if self._map is None:
            raise ValueError("the arena is closed")
        return memoryview(self._map)[: self.layout.bytes]

    def close(self) -> None:
        """Let go of the mapping; the memory lives on where the gateway still holds it. Views must be gone by then."""
        if self._map is not None:
            self.tensor = torch.empty(0, dtype=torch.uint8)
            self._map = None

    def discard(self) -> None:
        """Give the memory back as well: nothing is left for anyone to adopt."""
        if self._map is not None:
            os.ftruncate(self._descriptor, 0)
        self.close()


def available_bytes() -> int:
    """Host memory that could be had now."""
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _identity(tensor: torch.Tensor) -> object:
    # Tensors without memory are told apart as objects, the others by the memory they look at.
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
