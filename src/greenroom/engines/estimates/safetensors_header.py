"""What safetensors files say about themselves: how many bytes of weights there are, and of which kinds.

Owns the reading of their headers, which come from strangers: the stated length is bounded and must fit the file, the
offsets must lie inside it. Never reads weights, and knows one error only, `BadModelFile`.
"""

from __future__ import annotations

import functools
import io
import os
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from greenroom.engines.estimates.gguf_header import BadModelFile

# The format's own limit is 100 MB; the longest in use, with every expert by name, have 10.
HEADER_MAX_BYTES: Final = 32 * 2**20
# Files of one model.
FILES_MAX: Final = 1_000
HEADERS_MAX: Final = 2_048
_LENGTH: Final = struct.Struct("<Q")


class _Tensor(msgspec.Struct):
    dtype: str = ""
    # Absent where it is not a tensor but the file's metadata.
    data_offsets: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """Bytes of all tensors, and by kind of number (`BF16`, `F8_E4M3` …)."""

    tensor_bytes: int
    by_dtype: Mapping[str, int]

    @property
    def dtype(self) -> str:
        """The kind most of it is of."""
        return max(self.by_dtype, key=lambda kind: (self.by_dtype[kind], kind), default="")


def read_safetensors(path: str | Path) -> SafetensorsHeader:
    """One file's header. Raises BadModelFile for everything that is not a complete safetensors file. Blocks."""
    try:
        seen = os.stat(path)
        return _read(str(path), seen.st_size, seen.st_mtime_ns)
    except (OSError, ValueError) as reason:
        raise BadModelFile(f"{path} cannot be read: {getattr(reason, 'strerror', None) or reason}.") from reason


def read_all(paths: Iterable[Path]) -> SafetensorsHeader:
    """All files of one model together. Raises BadModelFile if one of them is bad."""
    by_dtype: dict[str, int] = {}
    for path in list(paths)[:FILES_MAX]:
        for dtype, size in read_safetensors(path).by_dtype.items():
            by_dtype[dtype] = by_dtype.get(dtype, 0) + size
    return SafetensorsHeader(sum(by_dtype.values()), by_dtype)


@functools.lru_cache(maxsize=HEADERS_MAX)
def _read(path: str, file_bytes: int, changed_ns: int) -> SafetensorsHeader:
    # Opened without being held up: a FIFO in a model's place must not hang the gateway.
    with io.FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a file")
        start = file.read(_LENGTH.size)
        if len(start) < _LENGTH.size:
            raise _bad(path, "it ends inside its header")
        length = _LENGTH.unpack(start)[0]
        if length > min(HEADER_MAX_BYTES, file_bytes - _LENGTH.size):
            raise _bad(path, f"its header would have {length:,} bytes")
        return _summed(path, _whole(file, length), file_bytes - _LENGTH.size - length)


def _whole(file: io.FileIO, length: int) -> bytes:
    """All of it: a single read may give less."""
    found = bytearray()
    while len(found) < length and (more := file.read(length - len(found))):
        found += more
    return bytes(found)


def _summed(path: str, header: bytes, data_bytes: int) -> SafetensorsHeader:
    try:
        tensors = msgspec.json.decode(header, type=dict[str, _Tensor])
    except (msgspec.MsgspecError, RecursionError) as reason:
        raise _bad(path, f"its header is not understood ({reason})") from reason
    by_dtype: dict[str, int] = {}
    for name, tensor in tensors.items():
        begin, end = tensor.data_offsets
        if not 0 <= begin <= end <= data_bytes:
            raise _bad(path, "a tensor lies beyond its end; perhaps the copy or download was cut short")
        if name != "__metadata__":
            by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + end - begin
    return SafetensorsHeader(sum(by_dtype.values()), by_dtype)


def _bad(path: str, what: str) -> BadModelFile:
    return BadModelFile(f"{path} is not a usable safetensors file: {what}.")
