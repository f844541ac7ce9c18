"""Bytes of a model's files, from wherever they are had fastest.

Owns the descriptors of one file and the ways of reading it: what is in the page cache is copied from it straight to
where it belongs; the rest is read past the cache, so that a model does not push everything else out, through an aligned
buffer of the reading thread's own. Where a file system refuses that, the ordinary way is taken. Nothing here holds the
interpreter while bytes move.
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

# Direct reads begin and end at multiples of this: a page, which is a multiple of every disk's block.
BLOCK_BYTES: Final = 4096
# So many bytes of a range, drawn by lot, must be in the page cache before all of it is asked for there.
PROBES: Final = 2
# What a kernel says that cannot tell what is in its page cache, or that has it not.
_NOT_CACHED: Final = (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
# Brings pages to a mapping as if each had been written to (Linux 5.14).
_MADV_POPULATE_WRITE: Final = 23
# Called through this, unlike through `mmap.madvise`, the other threads run meanwhile.
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes, _madvise.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int


def bounce_for(size: int) -> mmap.mmap:
    """A thread's own buffer for direct reads of up to `size` bytes, wherever they begin."""
    return mmap.mmap(-1, size + 2 * BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class SourceFile:
    """One file's descriptors, opened at the first piece and closed after the last."""

    def __init__(self, path: Path, pieces: int) -> None:
        self.path = path
        self._pieces = pieces
        self._lock = threading.Lock()
        self._cached: int | None = None
        self._direct: int | None = None
        self._refuses_direct = False

    def fill(self, targets: Sequence[memoryview], offset: int, bounce: mmap.mmap) -> int:
        """Bring `targets`, one after the other, the bytes from `offset` on. Says how many the file still had."""
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
        """A descriptor that reads past the page cache, or None where the file system does not have that."""
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
                # Not closed yet: another thread may be reading from it, and its number would be given to somebody else.
                self._refuses_direct = True
        done = 0
        while (rest := _after(targets, done)) and (got := os.preadv(self._cached_descriptor(), rest, offset + done)):
            done += got
        return done


def _seems_cached(descriptor: int, offset: int, size: int) -> bool:
    """Whether the page cache has a few bytes of the range. Never waits for the disk.

    A byte that is not there makes the kernel fetch its page; a whole range that is not there would make it read
    megabytes ahead, which are then read past the cache as well. By lot, so that the pages of one time do not mislead
    the next.
    """
    byte = bytearray(1)
    try:
        return all(os.preadv(descriptor, [byte], offset + random.randrange(size), os.RWF_NOWAIT) for _ in range(PROBES))
    except OSError as reason:
        if reason.errno in _NOT_CACHED:
            return False
        raise


def _from_cache(descriptor: int, targets: Sequence[memoryview], offset: int) -> int:
    """Copy what is in the page cache from the start on, and say how much that was. Never waits for the disk."""
    try:
        return os.preadv(descriptor, targets, offset, os.RWF_NOWAIT)
    except OSError as reason:
        if reason.errno in _NOT_CACHED:
            return 0
        raise


def _past_cache(descriptor: int, targets: Sequence[memoryview], offset: int, bounce: mmap.mmap) -> int:
    """One direct read of whole blocks around the range, then a copy of the range. Says how much of it there was."""
    size = sum(map(len, targets))
    first = offset // BLOCK_BYTES * BLOCK_BYTES
    whole = -(-(offset + size - first) // BLOCK_BYTES) * BLOCK_BYTES
    got = 0
    with memoryview(bounce) as blocks:
        while got < offset - first + size:
            # A read that stops short of a block has come to the end of the file.
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
            # Unlike an assignment of slices this lets the other threads run.
            ctypes.memmove(_address(target), source, part)
        source, size = source + part, size - part


def _populate(address: int, size: int) -> None:
    """Have all pages of a range made at once, which is cheaper than one at a time as they are written to.

    A kernel that does not know how leaves them as they are; whatever else it complains of, writing meets again. What
    the kernel itself copies to fresh pages gains nothing by it.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    _madvise(start, address + size - start, _MADV_POPULATE_WRITE)


def _after(targets: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of the targets when the first `done` bytes are there."""
    rest: list[memoryview] = []
    for target in targets:
        if done < len(target):
            rest.append(target[done:])
        done = max(0, done - len(target))
    return rest


def _address(buffer: memoryview | mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
