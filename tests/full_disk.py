"""A disk that is full for as long as a block lasts: no file of this process grows beyond some bytes."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def full_disk(bytes_max: int = 0) -> Iterator[None]:
    """Writes beyond `bytes_max` of any file fail with EFBIG, after as much as still fits was written."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
