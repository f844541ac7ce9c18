"""Bodies of requests while they are ours: in memory when small, in an unlinked file when large, always within a budget.

Owns the bytes and the budget they are counted against. Never interprets them, and never waits: writing to and reading
from the spool file are plain calls that end in the page cache.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Final, Protocol

from greenroom.errors import BodiesFull, GatewayBug
from greenroom.proxy.limits import EdgeLimits

READ_BYTES: Final = 64 * 1024


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
    """How many bytes of bodies are held now, in memory and on disk, over all connections."""

    __slots__ = ("_spool_max", "body_in_memory_max", "memory_bytes", "memory_max", "spool_bytes", "spool_dir")

    def __init__(self, limits: EdgeLimits, spool_dir: str | None = None) -> None:
        self.memory_bytes = 0
        self.spool_bytes = 0
        self.spool_dir = spool_dir
        self.memory_max = limits.bodies_total_max
        self._spool_max = limits.spool_total_max
        self.body_in_memory_max = limits.body_in_memory_max

    def take_spool(self, length: int) -> None:
        """Raises BodiesFull when all spooled bodies together would pass their limit."""
        if self.spool_bytes + length > self._spool_max:
            raise BodiesFull("The spool for large request bodies is full; try again later.", retry_after_s=5.0)
        self.spool_bytes += length


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
            budget = self._budget
            if budget.memory_bytes + length > budget.memory_max:
                raise BodiesFull("Too many request bodies are being held; try again in a moment.", retry_after_s=1.0)
            budget.memory_bytes += length
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

    def close(self) -> None:
        """Give the bytes and their budget back. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._budget.memory_bytes -= self._memory_held
        self._parts = []
        if self._file >= 0:
            self._budget.spool_bytes -= self._spool_held
            os.close(self._file)
            self._file = -1

    def _expect_open(self) -> None:
        if self._closed:
            raise GatewayBug("A request body was read after it was closed.")

    def _move_to_spool(self) -> None:
        self._file = _open_unlinked(self._budget.spool_dir)
        for part in self._parts:
            self._spool(part)
        self._budget.memory_bytes -= self._memory_held
        self._memory_held = 0
        self._parts = []

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


def _open_unlinked(directory: str | None) -> int:
    """A file without a name: it is gone when closed, even if we are killed."""
    try:
        descriptor, path = tempfile.mkstemp(prefix="greenroom-body-", dir=directory)
        os.unlink(path)
    except OSError as error:
        raise BodiesFull(f"A large request body could not be spooled: {error.strerror}.", retry_after_s=5.0) from error
    return descriptor
