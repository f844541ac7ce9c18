"""A file that grows by lines, written beside the loop so that no disk can stall it.

Owns the file, its size and its rotation. Lines wait in a bounded buffer and are encoded and written by a thread, one
batch at a time. What does not fit, or cannot be written, is counted and lost; nobody ever waits for it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from greenroom.telemetry.logs import get_logger

_log = get_logger("recording")

# Soon enough for somebody who looks, seldom enough for many lines to share one write.
WRITE_EVERY_S = 0.5
# Lines that may wait for the disk: some seconds of a busy gateway.
WAITING_MAX = 50_000
# The end of the gateway does not wait longer than this for a disk that hangs.
CLOSE_MAX_S = 10.0

Line = TypeVar("Line")


class LineFile(Generic[Line]):
    """`encode` makes the text of a line, without its end, in the thread. `head` begins every file.

    A file that has reached `bytes_max` becomes `PATH.1`, which is replaced; one that may not rotate takes no more.
    """

    def __init__(
        self,
        path: Path,
        encode: Callable[[Line], str],
        *,
        head: str,
        bytes_max: int,
        rotates: bool,
        waiting_max: int = WAITING_MAX,
    ) -> None:
        """Raises OSError if the file cannot be written."""
        self._path = path
        self._encode = encode
        self._head = head
        self._bytes_max = bytes_max
        self._rotates = rotates
        self._waiting_max = waiting_max
        self._waiting: list[Line] = []
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self._failed = False
        self._closed = False
        self.is_full = False
        # Lines that were lost.
        self.dropped = 0
        self._file = self._opened()

    def put(self, line: Line, *, must: bool = False) -> bool:
        """Write this line soon. False if it is lost, unless it `must` be: a last line goes beyond every limit."""
        is_lost = self.is_full or len(self._waiting) >= self._waiting_max
        if self._closed or (is_lost and not must):
            self.dropped += 1
            return False
        self._waiting.append(line)
        if self._timer is None and self._writing is None:
            self._timer = asyncio.get_running_loop().call_later(WRITE_EVERY_S, self._start_writing)
        return True

    async def close(self) -> None:
        """Write what waits, as far as the disk lets us. Nothing is taken any more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        try:
            async with asyncio.timeout(CLOSE_MAX_S):
                if self._writing is not None:
                    await asyncio.wait((self._writing,))
                await self._write_waiting()
        except TimeoutError:
            return
        finally:
            if self.dropped:
                _log.warning("lines were lost", file=str(self._path), lines=self.dropped)
        self._file.close()

    def _start_writing(self) -> None:
        self._timer = None
        self._writing = asyncio.get_running_loop().create_task(self._write_all(), name=f"write {self._path.name}")

    async def _write_all(self) -> None:
        while self._waiting:
            await self._write_waiting()
        self._writing = None

    async def _write_waiting(self) -> None:
        batch, self._waiting = self._waiting, []
        try:
            await asyncio.to_thread(self._write, batch)
        except asyncio.CancelledError:
            self.dropped += len(batch)
            raise
        except OSError as error:
            self.dropped += len(batch)
            if not self._failed:
                self._failed = True
                _log.warning("cannot be written", file=str(self._path), error=error.strerror or str(error))

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _write(self, batch: list[Line]) -> None:
        self._file.write("".join(f"{self._encode(line)}\n" for line in batch).encode())
        if self._file.tell() < self._bytes_max:
            return
        if self._rotates:
            self._file.close()
            os.replace(self._path, f"{self._path}.1")
            self._file = self._opened()
        else:
            self.is_full = True

    def _opened(self) -> _Appended:
        return _Appended(self._path, self._head)


class _Appended:
    """Written without a buffer of its own, so that what was not written is known at once. For its owner's eyes only."""

    def __init__(self, path: Path, head: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._fd).st_size
        if not self._size:
            self.write(f"{head}\n".encode())

    def write(self, data: bytes) -> None:
        """All of it or, if that cannot be, nothing: half a line would spoil the next."""
        begin, left = self._size, memoryview(data)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            os.ftruncate(self._fd, begin)
            raise
        self._size += len(data)

    def tell(self) -> int:
        return self._size

    def close(self) -> None:
        os.close(self._fd)
