"""Reads bytes of a model's files from wherever they can be had fastest.

Owns the descriptors of one file and the ways to read it. What is in the page cache is copied straight to its target.
The rest is read past the cache, through an aligned buffer of the reading thread, so a model does not evict everything
else; file systems that refuse direct reads are read normally. Nothing here holds the interpreter lock while bytes move.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

# Direct reads start and end at multiples of this: a page, which is a multiple of every disk's block size.
BLOCK_BYTES: Final = 4096
# The number of random bytes of a range that must be in the page cache before all of it is read from there.
PROBES: Final = 2
# Errors of a non-blocking read: not in the page cache, or not supported.
_NOT_CACHED: Final = (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
# Populates a mapping as if each page had been written (Linux 5.14).
_MADV_POPULATE_WRITE: Final = 23
# Unlike `mmap.madvise`, this call releases the interpreter lock.
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes, _madvise.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int


def bounce_for(size: int) -> mmap.mmap:
    """A buffer for one thread's direct reads of up to `size` bytes at any offset."""
    return mmap.mmap(-1, size + 2 * BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class WeightFile:
    """One file's descriptors, opened at the first piece and closed after the last."""

    def __init__(self, path: Path, pieces: int) -> None:
        self.path = path
        self._pieces = pieces
        self._lock = threading.Lock()
        self._cached: int | None = None
        self._direct: int | None = None
        self._refuses_direct = False

    def fill(self, targets: Sequence[memoryview], offset: int, bounce: mmap.mmap) -> int:
        """Fill `targets` in order with the bytes from `offset` on. Returns fewer bytes only at the end of the file."""
        size = sum(map(len, targets))
        cached = self._cached_descriptor()
        done = _from_cache(cached, targets, offset) if _seems_cached(cached, offset, size) else 0
        return done if done == size else done + self._from_disk(_after(targets, done), offset + done, bounce)

    def _cached_descriptor(self) -> int:
        with self._lock:
            if self._cached is None:
                self._cached = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            return self._cached

    def _direct_descriptor(self) -> int | None:
        """A descriptor that reads past the page cache; None if the file system does not support it."""
        with self._lock:
            if self._direct is None and not self._refuses_direct:
                try:
                    self._direct = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
                except OSError:
                    self._refuses_direct = True
            return None if self._refuses_direct else self._direct

    def piece_done(self) -> None:
        with self._lock:
            self._pieces -= 1
            if self._pieces == 0:
                self._close()

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        for descriptor in (self._cached, self._direct):
            if descriptor is not None:
                os.close(descriptor)
        self._cached = self._direct = None

    def _from_disk(self, targets: Sequence[memoryview], offset: int, bounce: mmap.mmap) -> int:
        descriptor = self._direct_descriptor()
        if descriptor is not None:
            try:
                return _past_cache(descriptor, targets, offset, bounce)
            except OSError as reason:
                if reason.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                # Closed later: another thread may be reading from it, and its number could be reused.
                self._refuses_direct = True
        done = 0
        while (rest := _after(targets, done)) and (got := os.preadv(self._cached_descriptor(), rest, offset + done)):
            done += got
        return done


def _seems_cached(descriptor: int, offset: int, size: int) -> bool:
    """True if a few random bytes of the range are in the page cache. Never waits for the disk. Probing a missing byte
    makes the kernel fetch its page; probing a whole missing range would make it read megabytes ahead, which are then
    also read past the cache. Offsets are random, so pages fetched by an earlier probe do not mislead."""
    byte = bytearray(1)
    try:
        return all(os.preadv(descriptor, [byte], offset + random.randrange(size), os.RWF_NOWAIT) for _ in range(PROBES))
    except OSError as reason:
        if reason.errno in _NOT_CACHED:
            return False
        raise


def _from_cache(descriptor: int, targets: Sequence[memoryview], offset: int) -> int:
    """Copy the leading bytes that are in the page cache and return their number. Never waits for the disk."""
    try:
        return os.preadv(descriptor, targets, offset, os.RWF_NOWAIT)
    except OSError as reason:
        if reason.errno in _NOT_CACHED:
            return 0
        raise


def _past_cache(descriptor: int, targets: Sequence[memoryview], offset: int, bounce: mmap.mmap) -> int:
    """Read whole blocks around the range directly, then copy the range. Returns the bytes of it that exist."""
    size = sum(map(len, targets))
    first = offset // BLOCK_BYTES * BLOCK_BYTES
    whole = -(-(offset + size - first) // BLOCK_BYTES) * BLOCK_BYTES
    got = 0
    with memoryview(bounce) as blocks:
        while got < offset - first + size:
            # A read that ends within a block has reached the end of the file.
            step = os.preadv(descriptor, [blocks[got:whole]], first + got)
            got += step
            if step == 0 or step % BLOCK_BYTES:
                break
    here = max(0, min(size, got - (offset - first)))
    _scatter(_address(bounce) + offset - first, targets, here)
    return here


def _scatter(source: int, targets: Sequence[memoryview], size: int) -> None:
    for target in targets:
        part = min(len(target), size)
        if part:
            _populate(_address(target), part)
            # Unlike a slice assignment, this releases the interpreter lock.
            ctypes.memmove(_address(target), source, part)
        source, size = source + part, size - part


def _populate(address: int, size: int) -> None:
    """Populate all pages of a range at once, which is cheaper than one page fault each. Errors are ignored: an older
    kernel leaves the pages as they are, and any other problem shows when they are written. Not used where the kernel
    itself copies to fresh pages: it gains nothing there."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    _madvise(start, address + size - start, _MADV_POPULATE_WRITE)


def _after(targets: Sequence[memoryview], done: int) -> list[memoryview]:
    """The rest of the targets after the first `done` bytes."""
    rest: list[memoryview] = []
    for target in targets:
        if done < len(target):
            rest.append(target[done:])
        done = max(0, done - len(target))
    return rest


def _address(buffer: memoryview | mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
