"""Files that grow by lines, written in a thread so that no disk can stall the loop.

`LineFile` owns the buffer and the rotation: lines wait in a bounded buffer and are encoded and written in batches. What
cannot be written waits for the next try; a line that does not fit is counted and lost. `Appended` owns the file itself:
a regular file that is empty or begins with our head; anything else (a pipe, a device, a link, a foreign file) is
refused and left as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from greenroom.base.detached import run_detached
from greenroom.base.plain_file import named
from greenroom.base.repeated import Repeated
from greenroom.telemetry.logs import get_logger

_log = get_logger("recording")

# Soon enough for a reader, and seldom enough for many lines to share one write.
WRITE_EVERY_S = 0.5
# Lines that may wait for the disk: some seconds of a busy gateway.
WAITING_MAX = 50_000
# Shutdown does not wait longer than this for a disk that hangs.
CLOSE_MAX_S = 10.0
# A file that cannot be rotated grows to this many times its size; then it takes no more.
OVERGROWN = 2
NOT_OURS = "holds something else; move it away or record to another file"

Line = TypeVar("Line")


class LineFile(Generic[Line]):
    """`encode` makes the text of a line, without its end, in the thread. Every file begins with `head`. A file that has
    reached `bytes_max` replaces `PATH.1`; one that may not rotate takes no more lines. Nothing is touched before
    `open`; lines put earlier wait for it."""

    def __init__(
        self,
        path: Path,
        encode: Callable[[Line], str],
        *,
        head: str,
        bytes_max: int,
        rotates: bool,
        waiting_max: int = WAITING_MAX,
        close_max_s: float = CLOSE_MAX_S,
    ) -> None:
        self._path = path
        self._encode = encode
        self._head = head
        self._bytes_max = bytes_max
        self._rotates = rotates
        self._waiting_max = waiting_max
        self._close_max_s = close_max_s
        self._waiting: list[Line] = []
        tell = partial(_log.failed, file=str(path))
        self._writing = Repeated(self.flush, "recording", lambda: WRITE_EVERY_S, tell)
        self._failed = False
        self._closed = False
        self.is_full = False
        # The number of lost lines.
        self.dropped = 0
        self._file: Appended | None = None

    def open(self) -> None:
        """Continue the file or begin it. Raises OSError if it cannot be written or is not ours."""
        self._file = Appended(self._path, self._head)
        self._writing.start()

    def check(self) -> None:
        """Raises OSError if an existing file is not ours. Changes nothing."""
        with contextlib.suppress(FileNotFoundError):
            first_bytes(self._path, self._head, 0)

    def put(self, line: Line, *, must: bool = False) -> bool:
        """Write this line soon. False if it is lost. A line that `must` be written may exceed the limits."""
        is_lost = self.is_full or len(self._waiting) >= self._waiting_max
        if self._closed or (is_lost and not must):
            self.dropped += 1
            return False
        self._waiting.append(line)
        return True

    async def close(self) -> None:
        """Write what waits, as far as the disk permits. Takes no more lines."""
        self._closed = True
        try:
            async with asyncio.timeout(self._close_max_s):
                await self._writing.stop()
                await self.flush()
        except OSError:
            # A disk that is full, or hangs, which raises TimeoutError: a thread may use the file still.
            return
        finally:
            self.dropped += len(self._waiting)
            if self.dropped:
                _log.warning("lines were lost", file=str(self._path), lines=self.dropped)
        if self._file is not None:
            self._file.close()

    async def flush(self) -> None:
        """Write what waits now, as one batch. Raises OSError, and then it waits on."""
        file = self._file
        if file is None or not self._waiting:
            return
        batch, self._waiting = self._waiting, []
        try:
            self._file = await run_detached(lambda: self._written(file, batch), f"write {self._path.name}")
        except OSError:
            self._waiting = batch + self._waiting
            raise
        except BaseException:
            # Cancelled, or one of its lines can never be encoded.
            self.dropped += len(batch)
            raise

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _written(self, file: Appended, batch: list[Line]) -> Appended:
        """Write these lines. Returns the file for the next ones."""
        text = "".join(f"{self._encode(line)}\n" for line in batch)
        # A name that is not valid text must not end the recording.
        file.write(text.encode(errors="backslashreplace"))
        if file.tell() < self._bytes_max:
            return file
        if self._rotates:
            return self._rotated(file)
        self.is_full = True
        return file

    def _rotated(self, file: Appended) -> Appended:
        """A new file, or the same one if rotation fails. The old one is closed last."""
        try:
            set_aside(self._path, self._head)
            new = Appended(self._path, self._head)
        except OSError as error:
            self._warn_once(error)
            self.is_full = file.tell() >= OVERGROWN * self._bytes_max
            return file
        file.close()
        return new

    def _warn_once(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            file = error.filename or str(self._path)
            _log.warning("cannot be written", file=str(file), error=error.strerror or str(error))


# Never wait for the other end of a pipe, never follow a link to a foreign file.
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
        except OSError as error:
            self.close()
            raise named(error, path) from error

    def _begin(self, head: str) -> None:
        if not self._size:
            self.write(f"{head}\n".encode())
        elif os.pread(self._fd, 1, self._size - 1) != b"\n":
            # An earlier run ended in the middle of a line, which must not join our first one.
            self.write(b"\n")

    def write(self, data: bytes) -> None:
        """Write all of it or, if that fails, nothing: half a line would spoil the next. Raises OSError."""
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
        """May be called again. The descriptor is forgotten first: its number may be reused a moment later."""
        fd, self._fd = self._fd, _CLOSED
        if fd != _CLOSED:
            os.close(fd)


def set_aside(path: Path, head: str) -> None:
    """Rename this file to PATH.1, replacing that; nothing if there is none. Raises OSError unless both are ours."""
    for file in (path, Path(f"{path}.1")):
        with contextlib.suppress(FileNotFoundError):
            first_bytes(file, head, 0)
    with contextlib.suppress(FileNotFoundError):
        os.replace(path, f"{path}.1")


def first_bytes(path: Path, head: str, count: int) -> bytes:
    """The first bytes after the head. Raises OSError if the file is not ours or not there."""
    fd = _opened(path, os.O_RDONLY)
    try:
        _refuse_unless_ours(fd, path, head)
        return os.pread(fd, count, len(head.encode()) + 1)
    finally:
        os.close(fd)


def _opened(path: Path, flags: int) -> int:
    # Checked before it is opened: opening alone can act on a device, or wake the reader of a pipe.
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
    if not _is_head(fd, head):
        raise OSError(errno.EEXIST, NOT_OURS, str(path))


def _is_head(fd: int, head: str) -> bool:
    """True if the file is empty or begins with this line."""
    expected = head.encode()
    begins = os.pread(fd, len(expected) + 1, 0)
    return begins in (b"", expected, expected + b"\n")
