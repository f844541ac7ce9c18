"""Bodies of requests: in memory when small, in an unlinked file when large, always within a budget.

Owns the bytes and the budget they are counted against. Files that lie in memory (tmpfs) count as memory. Never
interprets the bytes, and never waits: writing to and reading from the spool file are plain calls that end in the page
cache.
"""

from __future__ import annotations

import _thread
import contextlib
import math
import os
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

from greenroom.errors import BodiesFull, GatewayBug
from greenroom.http.limits import EdgeLimits

READ_BYTES: Final = 64 * 1024
# Of a file this long the kernel frees the pages within about two milliseconds.
CLOSED_AT_ONCE_BYTES: Final = 16 * 1024 * 1024
# Line breaks between numbers must not come into a text. Texts of JSON have none.
_ON_ONE_LINE: Final = bytes.maketrans(b"\t\n\r", b"   ")
_MOUNTS: Final = Path("/proc/self/mountinfo")
_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})


class Chunked(Protocol):
    """A body that is not in one piece, and may be on disk. Its chunks may be asked for again."""

    @property
    def is_spooled(self) -> bool: ...
    def __len__(self) -> int: ...
    def read(self) -> bytes: ...
    def chunks(self) -> Iterator[bytes]: ...


# What can be sent to an engine.
Payload = bytes | Chunked


class BodyBudget:
    """How many bytes of bodies are held now, in memory and on disk, over all connections.

    Where the spool itself lies in memory, what is spooled is counted in `memory_bytes` as well.
    """

    __slots__ = (
        "_spool_leaves",
        "_spool_max",
        "body_in_memory_max",
        "memory_bytes",
        "memory_max",
        "spool_bytes",
        "spool_dir",
        "spools_to_memory",
    )

    def __init__(self, limits: EdgeLimits, spool_dir: str | None = None) -> None:
        self.memory_bytes = 0
        self.spool_bytes = 0
        self.spool_dir = spool_dir or tempfile.gettempdir()
        self.spools_to_memory = _is_in_memory(self.spool_dir)
        self.memory_max = limits.bodies_total_max
        self._spool_max = limits.spool_total_max
        self._spool_leaves = limits.spool_leaves_bytes
        self.body_in_memory_max = limits.body_in_memory_max

    def take_spool(self, length: int) -> None:
        """Raises BodiesFull when all spooled bodies together would pass their limit, or fill the disk."""
        if self.spool_bytes + length > self._spool_max:
            raise BodiesFull("The spool for large request bodies is full; try again later.", retry_after_s=5.0)
        if _free_bytes(self.spool_dir) - length < self._spool_leaves:
            raise BodiesFull("A large request body cannot be spooled: the disk is nearly full.", retry_after_s=5.0)
        if self.spools_to_memory:
            self.take_memory(length)
        self.spool_bytes += length

    def take_memory(self, length: int) -> None:
        """Raises BodiesFull when all bodies in memory together would pass their limit."""
        if self.memory_bytes + length > self.memory_max:
            raise BodiesFull("Too many request bodies are being held; try again in a moment.", retry_after_s=1.0)
        self.memory_bytes += length

    def give_back_spool(self, length: int) -> None:
        self.spool_bytes -= length
        if self.spools_to_memory:
            self.memory_bytes -= length


class Body:
    """One request's body. `close()` gives its budget back exactly once; after that it cannot be read."""

    __slots__ = ("_budget", "_closed", "_file", "_memory_held", "_parts", "_spool_held", "length")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._parts: list[bytes] = []
        self._file = -1
        self.length = 0
        self._memory_held = 0
        self._spool_held = 0
        self._closed = False

    def __len__(self) -> int:
        return self.length

    @property
    def is_spooled(self) -> bool:
        return self._file >= 0

    def append(self, data: bytes) -> None:
        """Hold these bytes too. Raises BodiesFull when no budget is left for them."""
        length = len(data)
        if self._file >= 0:
            self._spool(data)
        elif self.length + length <= self._budget.body_in_memory_max:
            self._budget.take_memory(length)
            self._memory_held += length
            self._parts.append(data)
        else:
            self._move_to_spool()
            self._spool(data)
        self.length += length

    def read(self) -> bytes:
        """All of it. For a spooled body prefer `chunks`."""
        if self._closed:
            self._expect_open()
        if self._file >= 0:
            return b"".join(self.chunks())
        if len(self._parts) > 1:
            self._parts = [b"".join(self._parts)]
        return self._parts[0] if self._parts else b""

    def chunks(self) -> Iterator[bytes]:
        """Piece by piece from the start; may be asked for again."""
        self._expect_open()
        if self._file < 0:
            yield from self._parts
            return
        offset = 0
        while offset < self.length:
            self._expect_open()
            piece = os.pread(self._file, READ_BYTES, offset)
            if not piece:
                raise GatewayBug("A spooled body is shorter than what was written to it.")
            offset += len(piece)
            yield piece

    def between(self, begin: int, end: int) -> bytes:
        """A part of it."""
        if self._file < 0:
            return self.read()[begin:end]
        self._expect_open()
        part = os.pread(self._file, end - begin, begin)
        if len(part) < end - begin:
            raise GatewayBug("A spooled body is shorter than what was written to it.")
        return part

    def hold(self, length: int) -> None:
        """Count so many bytes that are held beside it. Raises BodiesFull when no budget is left for them."""
        self._expect_open()
        self._budget.take_memory(length)
        self._memory_held += length

    def close(self) -> None:
        """Give the bytes and their budget back. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._budget.memory_bytes -= self._memory_held
        self._parts = []
        if self._file >= 0:
            self._budget.give_back_spool(self._spool_held)
            _close(self._file, self._spool_held)
            self._file = -1

    def _expect_open(self) -> None:
        if self._closed:
            raise GatewayBug("A request body was read after it was closed.")

    def _move_to_spool(self) -> None:
        self._file = _open_unlinked(self._budget.spool_dir)
        self._budget.memory_bytes -= self._memory_held
        self._memory_held = 0
        parts, self._parts = self._parts, []
        for part in parts:
            self._spool(part)

    def _spool(self, data: bytes) -> None:
        self._budget.take_spool(len(data))
        self._spool_held += len(data)
        view, written = memoryview(data), 0
        try:
            while written < len(data):
                written += os.write(self._file, view[written:])
        except OSError as error:
            raise BodiesFull(
                f"A large request body could not be spooled: {error.strerror}.", retry_after_s=5.0
            ) from error


class Spliced:
    """`outline`, in which parts of a body take the places of what stands for them. They are read while it is sent."""

    __slots__ = ("_body", "_length", "_places", "outline")

    def __init__(self, body: Body, outline: bytes) -> None:
        self._body = body
        self.outline = outline
        self._length = len(outline)
        # Five numbers each, which take a tenth of the memory of a tuple: the arguments of `put`.
        self._places = array("Q")

    def put(self, begin: int, end: int, part_begin: int, part_end: int, grown: int) -> None:
        """Put a part of the body in place of these bytes of the outline, behind those before. Where it has grown it
        goes into a text: its quotes and backslashes are escaped. Line breaks and tabs become spaces."""
        self._places.extend((begin, end, part_begin, part_end, grown))
        self._length += part_end - part_begin + grown - (end - begin)

    @property
    def is_spooled(self) -> bool:
        """It is never in one piece, whatever the body is."""
        return True

    def __len__(self) -> int:
        return self._length

    def read(self) -> bytes:
        """All of it. Prefer `chunks`."""
        return b"".join(self.chunks())

    def chunks(self) -> Iterator[bytes]:
        """Piece by piece; may be asked for again. Short ones are joined."""
        held: list[bytes] = []
        held_bytes = 0
        for piece in self._pieces():
            held.append(piece)
            held_bytes += len(piece)
            if held_bytes >= READ_BYTES:
                yield b"".join(held)
                held, held_bytes = [], 0
        if held:
            yield b"".join(held)

    def _pieces(self) -> Iterator[bytes]:
        places, outline, done = self._places, self.outline, 0
        for at in range(0, len(places), 5):
            begin, end, part_begin, part_end, grown = places[at : at + 5]
            yield from _cut(outline, done, begin)
            while part_begin < part_end:
                piece = self._body.between(part_begin, min(part_begin + READ_BYTES, part_end))
                part_begin += len(piece)
                yield piece.replace(b"\\", b"\\\\").replace(b'"', b'\\"') if grown else piece.translate(_ON_ONE_LINE)
            done = end
        yield from _cut(outline, done, len(outline))


def _cut(data: bytes, begin: int, end: int) -> Iterator[bytes]:
    for start in range(begin, end, READ_BYTES):
        yield data[start : min(start + READ_BYTES, end)]


def _close(descriptor: int, length: int) -> None:
    """The kernel frees what the file holds before a close returns: of a large one a thread waits for that."""
    if length > CLOSED_AT_ONCE_BYTES:
        # Without a thread, all wait.
        with contextlib.suppress(RuntimeError, MemoryError):
            _thread.start_new_thread(os.close, (descriptor,))
            return
    os.close(descriptor)


def _open_unlinked(directory: str) -> int:
    """A file without a name: the system deletes it when it is closed, even if we are killed."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        # Not every file system can do that.
        return _open_and_unlink(directory)


def _open_and_unlink(directory: str) -> int:
    try:
        descriptor, path = tempfile.mkstemp(prefix=".body-", dir=directory)
        os.unlink(path)
    except OSError as error:
        raise BodiesFull(f"A large request body could not be spooled: {error.strerror}.", retry_after_s=5.0) from error
    return descriptor


def _free_bytes(directory: str) -> float:
    try:
        seen = os.statvfs(directory)
    except OSError:
        # The write will report what is wrong.
        return math.inf
    return seen.f_frsize * seen.f_bavail


def _is_in_memory(directory: str) -> bool:
    try:
        return lies_in_memory(os.stat(directory).st_dev, _MOUNTS.read_text("utf-8", "replace"))
    except OSError:
        return False


def lies_in_memory(device: int, mounts: str) -> bool:
    """Whether this is the device of a file system without a disk; `mounts` as in /proc/self/mountinfo."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():
        place, _, kind = line.partition(" - ")
        if wanted in place.split(" ")[2:3]:
            return kind.split(" ")[0] in _IN_MEMORY
    return False
