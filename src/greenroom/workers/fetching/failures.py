"""What a download can fail with: each failure has a code that programs read and words for people. Owns the codes. Never
holds a token."""

from __future__ import annotations

import errno
import os
from typing import Final

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class FetchError(Exception):
    """`passes` is true if the same request may succeed later; `retry_after_s` is what the server asked for."""

    def __init__(self, code: str, message: str, *, passes: bool = False, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.passes = passes
        self.retry_after_s = retry_after_s


def of_disk(error: OSError, doing: str) -> FetchError:
    """The failure that an error of the file system is."""
    if is_full(error):
        return FetchError("disk_full", f"The disk is full: {doing} failed. What was fetched stays and is resumed.")
    where = f" ({os.fsdecode(error.filename)})" if isinstance(error.filename, str | bytes) else ""
    return FetchError("disk_error", f"{doing} failed: {error.strerror or error}{where}.")


def is_full(error: OSError) -> bool:
    return error.errno in _FULL
