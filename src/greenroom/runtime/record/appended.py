"""One regular file of ours that only grows, and what has to be true of a file before we touch it.

Owns the descriptor and the size. A file is ours if it is empty or its first line is the head we give it; everything
else (a pipe, a device, a link, somebody's file) is refused and left as it is. Never buffers: what was not written is
known at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

# Never waits for the other end of a pipe, never follows a link to somebody else's file.
_SAFELY = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
_CLOSED = -1


class Appended:
    def __init__(self, path: Path, head: str) -> None:
        """Continue this file, or begin it with `head`. Raises OSError, also if it is not ours."""
        self._fd = _opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            self._size = os.fstat(self._fd).st_size
            _refuse_unless_ours(self._fd, path, head)
            self._begin(head)
        except OSError:
            self.close()
            raise

    def _begin(self, head: str) -> None:
        if not self._size:
            self.write(f"{head}\n".encode())
        elif os.pread(self._fd, 1, self._size - 1) != b"\n":
            # An earlier run ended in the middle of a line, which must not spoil our first one too.
            self.write(b"\n")

    def write(self, data: bytes) -> None:
        """All of it or, if that cannot be, nothing: half a line would spoil the next."""
        begin, written = self._size, 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError:
            os.ftruncate(self._fd, begin)
            raise
        self._size += len(data)

    def tell(self) -> int:
        return self._size

    def close(self) -> None:
        """The number is forgotten first: it may be somebody else's file a moment later."""
        fd, self._fd = self._fd, _CLOSED
        if fd != _CLOSED:
            os.close(fd)


def set_aside(path: Path, head: str) -> None:
    """Make this file PATH.1 and forget what that was. Nothing if there is none. Raises OSError unless both are ours."""
    kept = Path(f"{path}.1")
    for file in (path, kept):
        with contextlib.suppress(FileNotFoundError):
            first_bytes(file, head, 0)
    with contextlib.suppress(FileNotFoundError):
        os.replace(path, kept)


def first_bytes(path: Path, head: str, count: int) -> bytes:
    """What stands behind the head of a file of ours. Raises OSError if it is not ours or not there."""
    fd = _opened(path, os.O_RDONLY)
    try:
        _refuse_unless_ours(fd, path, head)
        return os.pread(fd, count, len(head.encode()) + 1)
    finally:
        os.close(fd)


def _opened(path: Path, flags: int) -> int:
    # Looked at before it is opened, because opening alone can do something to a device or wake who waits at a pipe.
    with contextlib.suppress(FileNotFoundError):
        _refuse_unless_regular(os.lstat(path), path)
    fd = os.open(path, flags | _SAFELY, 0o600)
    try:
        _refuse_unless_regular(os.fstat(fd), path)
    except OSError:
        os.close(fd)
        raise
    return fd


def _refuse_unless_regular(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file; nothing is recorded there", str(path))


def _refuse_unless_ours(fd: int, path: Path, head: str) -> None:
    expected = head.encode()
    begins = os.pread(fd, len(expected) + 1, 0)
    if begins and begins not in (expected, expected + b"\n"):
        raise OSError(errno.EEXIST, "holds something else; move it away or record to another file", str(path))


def replace_file(path: Path, text: str) -> None:
    """Whole or not at all, also if the machine stops meanwhile. Blocks; raises OSError, and then nothing is changed."""
    draft = path.with_suffix(".new")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
