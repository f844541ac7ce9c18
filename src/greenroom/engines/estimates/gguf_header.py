"""Reads the header of a GGUF file: the few facts the gateway plans with.

Owns the reading of GGUF headers (versions 2 and 3), which are untrusted: no count or length is believed until it fits
the bytes of the file. Never reads weights, never maps the file, never allocates by a number found in it, and raises
`BadModelFile` only. Read `read_header` first; `Cursor` enforces the bounds.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from greenroom.base.plain_file import open_plain, why
from greenroom.engines.estimates.gguf_tensors import LAYERS_MAX, WeightBytes, tensor_bytes
from greenroom.errors import LoadFailed

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)

# The longest headers in use hold vocabularies of 260,000 tokens with their merges: about 12 MiB.
HEADER_MAX_BYTES: Final = 32 * 2**20
# Keys and tensors; the largest models have a few thousand tensors.
ENTRIES_MAX: Final = 65_536
# Strings in all arrays together; skipping each costs one step of a loop. A vocabulary and its merges have 700,000.
STRINGS_MAX: Final = 2_000_000
# Longer texts (chat templates, licences) are skipped.
TEXT_MAX_BYTES: Final = 1_024
# Chat templates are looked at up to this size.
TEMPLATE_MAX_BYTES: Final = 256 * 1_024
TEMPLATE: Final = "tokenizer.chat_template"
DIMENSIONS_MAX: Final = 4
ALIGNMENT_DEFAULT: Final = 32
ALIGNMENT_MAX: Final = 65_536
# No model has larger tensors; the bound keeps the arithmetic small.
TENSOR_BYTES_MAX: Final = 2**50
# Larger numbers in a header are ignored, which keeps the arithmetic small.
NUMBER_MAX: Final = 2**40

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SCALARS: Final = {number: struct.Struct("<" + code) for number, code in enumerate("BbHhIif?")} | {
    number: struct.Struct("<" + code) for number, code in zip((10, 11, 12), "Qqd", strict=True)
}
_STRING, _ARRAY = 8, 9

# Architectures that only produce embeddings. Others do if their file names a pooling.
ENCODERS: Final = re.compile(r"bert|embed|t5encoder")
_POOLING_NONE, _POOLING_RANK = 0, 4
_PROJECTORS: Final = ("clip", "mmproj")
_SPLIT: Final = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
# Files of one model that are looked for.
SPLIT_MAX: Final = 1_000

Value = int | float | str | tuple[int, ...]


class BadModelFile(LoadFailed):
    """The file is not a model that can be loaded: wrong format, truncated, corrupt, or missing."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The facts. Numbers a file does not state are 0."""

    architecture: str
    name: str
    context_length: int
    file_type: int | None
    # Where the last tensor ends, counted from the first: the weights' size. Of this file alone if there are several.
    tensor_bytes: int
    shard_count: int
    is_embedding: bool
    is_reranking: bool
    # The same by place: layers, input, output. Of this file alone if there are several.
    weights: WeightBytes
    # All integers of its architecture, by key without that prefix; a tuple if they are per layer.
    numbers: Mapping[str, int | tuple[int, ...]]
    # Its chat template says what to do with tools.
    has_tools: bool = False
    # False for what is no model by itself: an adapter, a projector, a table of importance.
    is_model: bool = True

    def number(self, key: str, default: int = 0) -> int:
        """A non-negative integer; the largest of several."""
        return _number(self.numbers, key) if key in self.numbers else default

    def per_layer(self, key: str, layers: int, default: int = 0) -> tuple[int, ...]:
        """A number for each layer, whether the file states one for all or a list; missing entries are 0."""
        value = self.numbers.get(key, default)
        if isinstance(value, int):
            return (_bounded(value),) * layers
        return tuple(_bounded(number) for number in (*value, *(0,) * layers)[:layers])


def knows_tools(template: str) -> bool:
    """True if a chat template says what to do with tools."""
    return "tools" in template


def has_tools(file: Path) -> bool:
    """The same for a file that is a template or holds one. Never raises."""
    try:
        with open_plain(file) as opened:
            return knows_tools(opened.read(TEMPLATE_MAX_BYTES).decode("utf-8", "replace"))
    except (OSError, ValueError):
        return False


def is_gguf(path: str | Path) -> bool:
    """True if this is a file that begins like a GGUF. Never raises."""
    try:
        with open_plain(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


def read_header(path: str | Path) -> GgufHeader:
    """Read the header. Raises BadModelFile for everything that is not a complete GGUF file. Reads as little as it can
    and at most HEADER_MAX_BYTES: 2 ms for a small model, a tenth of a second for a large vocabulary. Blocks while it
    reads."""
    path = Path(path)
    try:
        with open_plain(path) as file:
            return _facts(Cursor(file.fileno(), path), os.fstat(file.fileno()).st_size)
    except (OSError, ValueError) as reason:
        raise BadModelFile(f"{path} cannot be read: {why(reason)}.") from reason


def read_weights(paths: Iterable[Path]) -> WeightBytes:
    """The weights of all files of one model together. Raises BadModelFile if one is missing or not complete."""
    total = WeightBytes()
    for path in paths:
        try:
            with open_plain(path) as file:
                cursor = Cursor(file.fileno(), path)
                _walk(cursor, os.fstat(file.fileno()).st_size, total)
        except (OSError, ValueError) as reason:
            raise BadModelFile(f"{path} cannot be read: {why(reason)}.") from reason
    return total


def shards(path: Path, header: GgufHeader) -> tuple[Path, ...]:
    """All files of a split model, in order; this one alone if it is not split."""
    named = split_names(path)
    return named if 1 < header.shard_count == len(named) else (path,)


def split_names(path: Path) -> tuple[Path, ...]:
    """The names of all files of a model that is split over several, by the name of one."""
    match = _SPLIT.search(path.name)
    if match is None:
        return (path,)
    stem, count = path.name[: match.start()], int(match[2])
    return tuple(path.with_name(f"{stem}-{k:05d}-of-{count:05d}.gguf") for k in range(1, min(count, SPLIT_MAX) + 1))


def split_stem(name: str) -> str:
    """The name of a GGUF file without its ending and without the number of its part."""
    return _SPLIT.sub("", name).removesuffix(".gguf")


class Cursor:
    """Walks the header within bounds: reads only bytes that exist, and at most HEADER_MAX_BYTES."""

    __slots__ = ("_buffer", "_descriptor", "_path", "_strings_left", "at")

    CHUNK_BYTES: Final = 256 * 1024

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path
        self._buffer = bytearray()
        self._strings_left = STRINGS_MAX
        self.at = 0

    def bad(self, what: str) -> BadModelFile:
        return BadModelFile(f"{self._path} is not a usable GGUF file: {what}.")

    def reach(self, end: int) -> None:
        """Read the bytes up to `end` into memory. Raises BadModelFile beyond the bound or the end of the file."""
        if end > HEADER_MAX_BYTES:
            raise self.bad(f"its header is longer than {HEADER_MAX_BYTES >> 20} MiB, so it is probably corrupt")
        while len(self._buffer) < end:
            more = os.read(self._descriptor, self.CHUNK_BYTES)
            if not more:
                raise self.bad(
                    f"it ends at byte {len(self._buffer):,}, inside its header; perhaps the copy was cut short"
                )
            self._buffer += more

    def skip(self, size: int) -> None:
        self.reach(self.at + size)
        self.at += size

    def take(self, size: int) -> bytes:
        self.skip(size)
        return bytes(self._buffer[self.at - size : self.at])

    def u32(self) -> int:
        self.skip(4)
        return int(_U32.unpack_from(self._buffer, self.at - 4)[0])

    def u64(self) -> int:
        self.skip(8)
        return int(_U64.unpack_from(self._buffer, self.at - 8)[0])

    def text(self, max_bytes: int = TEXT_MAX_BYTES) -> str:
        """A string; empty if it is longer than any that is needed."""
        size = self.u64()
        if size > max_bytes:
            self.skip(size)
            return ""
        return self.take(size).decode("utf-8", "replace")

    def value(self, text_max_bytes: int = TEXT_MAX_BYTES) -> Value | None:
        """The next value, or None if it is not needed."""
        kind = self.u32()
        if kind == _STRING:
            return self.text(text_max_bytes)
        if kind == _ARRAY:
            return self._array()
        return self._scalar(kind)

    def _scalar(self, kind: int) -> int | float:
        form = self._form(kind)
        number: int | float = form.unpack(self.take(form.size))[0]
        return number

    def _form(self, kind: int) -> struct.Struct:
        if kind not in _SCALARS:
            raise self.bad(f"there is no type {kind} of values")
        return _SCALARS[kind]

    def _array(self) -> tuple[int, ...] | None:
        kind, count = self.u32(), self.u64()
        if kind == _STRING:
            self._skip_strings(count)
            return None
        form = self._form(kind)
        self.skip(count * form.size)
        # Numbers per layer are kept, tables as long as the vocabulary are not.
        if count > LAYERS_MAX or form.format[-1] in "fd":
            return None
        raw = memoryview(self._buffer)[self.at - count * form.size : self.at]
        return tuple(int(number) for (number,) in form.iter_unpack(raw.tobytes()))

    def _skip_strings(self, count: int) -> None:
        self._strings_left -= count
        if self._strings_left < 0:
            raise self.bad(f"it lists more than {STRINGS_MAX:,} strings")
        # The only hot loop: a vocabulary has some hundred thousand strings, skipped one by one.
        buffer, at, length_at = self._buffer, self.at, _U64.unpack_from
        for _ in range(count):
            if at + 8 > len(buffer):
                self.reach(at + 8)
            at += 8 + length_at(buffer, at)[0]
            if at > HEADER_MAX_BYTES:
                break
        self.reach(at)
        self.at = at


def _facts(cursor: Cursor, file_bytes: int) -> GgufHeader:
    total = WeightBytes()
    values, end = _walk(cursor, file_bytes, total)
    return _header(cursor, values, end, total)


def _walk(cursor: Cursor, file_bytes: int, total: WeightBytes) -> tuple[dict[str, Value], int]:
    """The values, and the end of the last tensor relative to the first. Adds the tensors to `total`."""
    tensor_count, key_count = _preamble(cursor)
    values = dict(_key_values(cursor, key_count))
    end = _add_tensors(cursor, tensor_count, total)
    alignment = _number(values, "general.alignment") or ALIGNMENT_DEFAULT
    if alignment > ALIGNMENT_MAX or alignment & (alignment - 1):
        raise cursor.bad(f"its alignment is {alignment}")
    needed = -(-cursor.at // alignment) * alignment + end
    if tensor_count and file_bytes < needed:
        raise cursor.bad(f"it has {file_bytes:,} bytes of {needed:,}; perhaps the copy or download was cut short")
    return values, end


def _preamble(cursor: Cursor) -> tuple[int, int]:
    if cursor.take(len(MAGIC)) != MAGIC:
        raise cursor.bad("it does not begin with GGUF")
    version = cursor.u32()
    if version not in VERSIONS:
        raise cursor.bad(f"its version is {version}, known are {VERSIONS[0]} and {VERSIONS[1]}")
    tensor_count, key_count = cursor.u64(), cursor.u64()
    if max(tensor_count, key_count) > ENTRIES_MAX:
        raise cursor.bad(f"it says it has {key_count:,} keys and {tensor_count:,} tensors")
    return tensor_count, key_count


def _key_values(cursor: Cursor, count: int) -> Iterator[tuple[str, Value]]:
    for _ in range(count):
        key = cursor.text()
        value = cursor.value(TEMPLATE_MAX_BYTES if key == TEMPLATE else TEXT_MAX_BYTES)
        if value is not None:
            yield key, value


def _add_tensors(cursor: Cursor, count: int, total: WeightBytes) -> int:
    """The end of the last tensor relative to the first."""
    end = 0
    for _ in range(count):
        name, dimensions = cursor.text(), cursor.u32()
        if dimensions > DIMENSIONS_MAX:
            raise cursor.bad(f"a tensor has {dimensions} dimensions")
        shape = [cursor.u64() for _ in range(dimensions)]
        size = tensor_bytes(math.prod(shape), cursor.u32())
        end = max(end, cursor.u64() + size)
        if end > TENSOR_BYTES_MAX:
            raise cursor.bad("a tensor lies beyond any file's end")
        total.add(name, shape, size)
    return end


def _header(cursor: Cursor, values: Mapping[str, Value], end: int, weights: WeightBytes) -> GgufHeader:
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise cursor.bad("it does not say its architecture")
    name, pooling = values.get("general.name"), values.get(f"{architecture}.pooling_type")
    file_type = values.get("general.file_type")
    return GgufHeader(
        architecture=architecture,
        name=name if isinstance(name, str) else "",
        context_length=_number(values, f"{architecture}.context_length"),
        file_type=file_type if isinstance(file_type, int) else None,
        tensor_bytes=end,
        shard_count=max(1, _number(values, "split.count")),
        is_embedding=pooling != _POOLING_RANK
        and (pooling not in (None, _POOLING_NONE) or ENCODERS.search(architecture) is not None),
        is_reranking=pooling == _POOLING_RANK,
        has_tools=knows_tools(str(values.get(TEMPLATE, ""))),
        is_model=values.get("general.type", "model") == "model" and architecture not in _PROJECTORS,
        weights=weights,
        numbers=dict(_numbers(values, architecture)),
    )


def _numbers(values: Mapping[str, Value], architecture: str) -> Iterator[tuple[str, int | tuple[int, ...]]]:
    prefix = architecture + "."
    for key, value in values.items():
        if key.startswith(prefix) and isinstance(value, int | tuple):
            yield key.removeprefix(prefix), value


def _number(values: Mapping[str, int | tuple[int, ...]] | Mapping[str, Value], key: str) -> int:
    """A non-negative integer; the largest of several; 0 for anything else."""
    value = values.get(key, 0)
    if isinstance(value, tuple):
        value = max(value, default=0)
    return _bounded(value) if isinstance(value, int) else 0


def _bounded(number: int) -> int:
    return number if 0 < number <= NUMBER_MAX else 0
