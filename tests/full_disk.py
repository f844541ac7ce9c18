"""For as long as a block lasts, a disk that is full, or nothing more that can be opened."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def full_disk(bytes_max: int = 0) -> Iterator[None]:
    """Writes beyond `bytes_max` of any file fail with EFBIG, after as much as still fits was written."""
    with _limited(resource.RLIMIT_FSIZE, bytes_max):
        yield


@contextlib.contextmanager
def descriptors(more: int) -> Iterator[None]:
    """Only so many more files and folders are open at once; further ones fail with EMFILE."""
    taken: list[int] = []
    before = max(map(int, os.listdir("/proc/self/fd")))
    try:
        # Every number below counts as taken.
        while (fd := os.open("/dev/null", os.O_RDONLY)) <= before:
            taken.append(fd)
        os.close(fd)
        with _limited(resource.RLIMIT_NOFILE, fd + more):
            yield
    finally:
        for fd in taken:
            os.close(fd)


@contextlib.contextmanager
def _limited(what: int, most: int) -> Iterator[None]:
    before, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (before, hard))
