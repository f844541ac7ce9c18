"""Reads files that others wrote, where anything may lie in their place, and makes names of files durable.

Owns the two bounds on such a read: opening a FIFO or a device never blocks, and a file is never read beyond a limit.
"""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path


class NotPlainFile(ValueError):
    """There is something, but no regular file."""


class FileTooLarge(ValueError):
    """It is larger than what may be read."""


class NotPrivate(ValueError):
    """Other users may read or change it."""


# A group may read it: that is how containers are given secrets.
_OTHERS = stat.S_IRWXO | stat.S_IWGRP


def open_plain(path: str | Path) -> io.FileIO:
    """Open a regular file for reading, without blocking. Raises OSError, NotPlainFile or ValueError (a bad name)."""
    file = io.FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise NotPlainFile("it is not a plain file")


def read_plain(path: str | Path, bytes_max: int) -> bytes:
    """All of a regular file of at most `bytes_max`. Raises what `open_plain` raises, and FileTooLarge."""
    with io.BufferedReader(open_plain(path)) as file:
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise FileTooLarge(f"it is larger than {bytes_max:,} bytes")
    return data


def read_private(path: str | Path, bytes_max: int) -> bytes:
    """All of a file that only its owner may change. Raises what `read_plain` raises, and NotPrivate."""
    with io.BufferedReader(open_plain(path)) as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & _OTHERS:
            raise NotPrivate(f"can be read or changed by other users (mode {mode:04o}); type: chmod 600 {path}")
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise FileTooLarge(f"it is larger than {bytes_max:,} bytes")
    return data


def sync_folder(folder: str | Path) -> None:
    """Names in it survive a power cut from now on. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def why(error: OSError | ValueError) -> str:
    """The reason as words, for a message that names the file itself."""
    return str(getattr(error, "strerror", None) or error)
