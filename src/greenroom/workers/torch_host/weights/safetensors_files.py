"""Where each tensor of a model is in its safetensors files.

Owns the reading of headers and of the index that names the files. Both are untrusted: every length is bounded, every
range must be inside its file, match shape and dtype, and overlap no other; names in the index stay inside the folder.
Never reads weights. Every error is `BadModel`. Read `find_tensors` first.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from ..failures import BadModel

# The format's own limit is 100 MB; the longest in use, which name every expert, have 10.
HEADER_MAX_BYTES: Final = 32 * 2**20
INDEX_MAX_BYTES: Final = 64 * 2**20
FILES_MAX: Final = 1_000
DIMENSIONS_MAX: Final = 16
INDEX_NAME: Final = "model.safetensors.index.json"
WHOLE_NAME: Final = "model.safetensors"
# Bits per number. `reading` lists those that can be computed with.
DTYPE_BITS: Final[Mapping[str, int]] = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U64": 64,
    "U32": 32,
    "U16": 16,
    "U8": 8,
    "BOOL": 8,
}
_LENGTH: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file: `size` bytes from `offset`, counted from the start of the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


def find_tensors(folder: Path, whole: str = WHOLE_NAME, index: str = INDEX_NAME) -> dict[str, StoredTensor]:
    """Every tensor of the model in this folder by name. Raises BadModel. Blocks. `whole` and `index` name the one file
    with all tensors, and the file that names several."""
    placed = _index(folder / index) if (folder / index).exists() else None
    if placed is None:
        return {tensor.name: tensor for tensor in read_header(_inside(folder, whole))}
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(placed.values())):
        tensors |= {tensor.name: tensor for tensor in read_header(_inside(folder, file))}
    for name, file in placed.items():
        if name not in tensors:
            raise BadModel(f"{folder / index} says that {name} is in {file}, where it is not. Download it again.")
    return tensors


def files_of(folder: Path) -> list[Path]:
    """The weight files of the model, without opening them. Raises BadModel for an index that cannot be read."""
    if (folder / INDEX_NAME).exists():
        return [_inside(folder, name) for name in sorted(set(_index(folder / INDEX_NAME).values()))]
    return [folder / WHOLE_NAME] if (folder / WHOLE_NAME).exists() else []


def read_header(path: Path) -> list[StoredTensor]:
    """All tensors of one file, by offset. Raises BadModel. Blocks."""
    try:
        # Non-blocking: a FIFO in place of a file must not hang the worker.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as reason:
        raise BadModel(f"{path} cannot be opened: {reason.strerror}. Is the model complete?") from reason
    try:
        return _read_header(path, descriptor)
    except OSError as reason:
        raise BadModel(f"{path} cannot be read: {reason.strerror}.") from reason
    finally:
        os.close(descriptor)


def _read_header(path: Path, descriptor: int) -> list[StoredTensor]:
    seen = os.fstat(descriptor)
    if not stat.S_ISREG(seen.st_mode):
        raise BadModel(f"{path} is not a file.")
    start = os.pread(descriptor, _LENGTH.size, 0)
    wrong = f"{path} is not a safetensors file, or only a part of one"
    if len(start) < _LENGTH.size:
        raise BadModel(f"{wrong}: it has {seen.st_size} bytes, fewer than its first number.")
    length = _LENGTH.unpack(start)[0]
    if not 2 <= length <= min(HEADER_MAX_BYTES, seen.st_size - _LENGTH.size):
        raise BadModel(f"{wrong}: its header would have {length:,} bytes and the file has {seen.st_size:,}.")
    header = _parsed(path, os.pread(descriptor, length, _LENGTH.size))
    base = _LENGTH.size + length
    tensors = [
        _tensor(path, name, entry, base, seen.st_size) for name, entry in header.items() if name != "__metadata__"
    ]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.size))
    _refuse_overlap(tensors)
    return tensors


def _parsed(path: Path, text: bytes) -> Mapping[str, Any]:
    try:
        header = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as reason:
        raise BadModel(f"{path} has a header that is not JSON: {reason}.") from reason
    if not isinstance(header, dict):
        raise BadModel(f"{path} has a header that is not a table of tensors.")
    return header


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is there twice")
        found[key] = value
    return found


def _tensor(path: Path, name: str, entry: Any, base: int, file_bytes: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise BadModel(f"{path}: tensor {name} lacks its kind, shape or place.") from None
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise BadModel(
            f"{path}: tensor {name} is of the unknown kind {str(dtype)[:32]!r}; known: {', '.join(DTYPE_BITS)}."
        )
    if not isinstance(shape, list) or len(shape) > DIMENSIONS_MAX or not all(_is_count(number) for number in shape):
        raise BadModel(f"{path}: tensor {name} has a shape that is none: {str(shape)[:80]}.")
    if not (_is_count(begin) and _is_count(end)) or begin > end:
        raise BadModel(f"{path}: tensor {name} has a place that is none: {str([begin, end])[:80]}.")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8 or bits // 8 != end - begin:
        raise BadModel(
            f"{path}: tensor {name} is {dtype} of shape {shape}, which are {bits / 8:,.0f} bytes; its place has"
            f" {end - begin:,}."
        )
    if base + end > file_bytes:
        raise BadModel(
            f"{path} is cut off: tensor {name} ends at byte {base + end:,} and the file at {file_bytes:,}."
            " Download it again."
        )
    return StoredTensor(name, path, dtype, tuple(shape), base + begin, end - begin)


def _is_count(number: Any) -> bool:
    # In Python, True is an int; it is not a count.
    return type(number) is int and 0 <= number < 2**63


def _refuse_overlap(tensors: list[StoredTensor]) -> None:
    for before, after in pairwise(tensor for tensor in tensors if tensor.size):
        if before.offset + before.size > after.offset:
            raise BadModel(f"{before.file}: tensors {before.name} and {after.name} lie over each other.")


def _index(path: Path) -> dict[str, str]:
    try:
        if path.stat().st_size > INDEX_MAX_BYTES:
            raise BadModel(f"{path} is longer than {INDEX_MAX_BYTES:,} bytes.")
        placed = json.loads(path.read_bytes())["weight_map"]
    except OSError as reason:
        raise BadModel(f"{path} cannot be read: {reason.strerror}.") from reason
    except (ValueError, KeyError, TypeError, RecursionError) as reason:
        raise BadModel(f"{path} is not an index of safetensors files: {reason!r}.") from reason
    if not isinstance(placed, dict) or not placed or not all(isinstance(file, str) for file in placed.values()):
        raise BadModel(f"{path} has a weight_map that names no files.")
    if len(set(placed.values())) > FILES_MAX:
        raise BadModel(f"{path} names more than {FILES_MAX:,} files.")
    return placed


def _inside(folder: Path, name: str) -> Path:
    """The path of a file whose name must stay inside the folder. It may be a link, as in a hub's cache."""
    parts = list(_parts(name))
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise BadModel(f"the index in {folder} names {name[:120]!r}, which is not inside the model's folder.")
    return folder / name


def _parts(name: str) -> Iterator[str]:
    return (part for part in name.split("/") if part not in ("", "."))
