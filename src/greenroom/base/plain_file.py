"""Reads files that others wrote, where anything may lie in their place, and writes files of ours whole or not at all.

Owns the two bounds on such a read: opening a FIFO or a device never blocks, and a file is never read beyond a limit.
What is written is on disk when a function returns; one that raises has changed nothing.
"""

from __future__ import annotations

import contextlib
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
# Of a file of ours that grows.
APPENDING = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


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


def write_all(fd: int, data: bytes) -> None:
    """All of it, on disk when this returns. Raises OSError: some of it may be written then."""
    while data:
        data = data[os.write(fd, data) :]
    os.fsync(fd)


def append_whole(fd: int, data: bytes) -> None:
    """Write it at the end of a file. Raises OSError, and then nothing is written: half a line would spoil the next."""
    size = os.fstat(fd).st_size
    try:
        write_all(fd, data)
    except OSError:
        os.ftruncate(fd, size)
        raise


def replaced(path: Path, content: bytes) -> int:
    """Replace the file atomically. Returns the new one, open for appending. Raises OSError, and the old one stays."""
    draft = path.with_suffix(".new")
    fd = os.open(draft, APPENDING | os.O_TRUNC, 0o600)
    try:
        write_all(fd, content)
        os.replace(draft, path)
    except OSError:
        os.close(fd)
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    return fd


def replace_file(path: Path, text: str) -> None:
    """Replace the file durably and atomically. Blocks. Raises OSError, and then nothing has changed."""
    try:
        os.close(replaced(path, text.encode()))
    except OSError as error:
        raise named(error, path) from error


def named(error: OSError, path: Path) -> OSError:
    """The same error with the name of the file: one of a write knows only the descriptor."""
    return OSError(error.errno, error.strerror or str(error), str(path))


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
