"""Folds weights while they are read: a chunk is folded in place as soon as all of it is filled.

Owns the processes that run `fold.py`, and how much of each chunk is still missing. A process that fails may leave a
chunk half written, so the arena must be filled again; after that this worker folds nothing. Never reads weights itself.
Read `Folding` first.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..failures import Failure
from .fold import CHUNK_BYTES, LANDING_CHUNKS, NO_NUMPY, ORDER, Fold

# Each folds a gigabyte a second and takes a chunk of memory. Half of the processors are left to reading.
PROCESSES_MAX: Final = 8
POLL_S: Final = 0.01
_PROGRAM: Final = Path(__file__).with_name("fold.py")
# Keeps NumPy from starting threads that are not needed here.
_ENVIRONMENT: Final = {"OPENBLAS_NUM_THREADS": "1"}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoldSettings:
    """The program that folds, and how long it may hold up a load."""

    patience_share: float = 0.25
    """A request may be waiting: after reading, folding may take this share of the reading time longer. Chunks that are
    not begun by then stay unfolded."""
    patience_min_s: float = 1.0
    """What the processes need to start."""
    chunk_s: float = 30.0
    """A chunk takes a tenth of a second; one that takes this long will never be done."""
    kill_s: float = 5.0
    program: Path = _PROGRAM
    processors: int | None = None
    """How many to count with; None: those that this process may use."""


FOLDING: Final = FoldSettings()


class FoldingFailed(Failure):
    """Folding failed and may have left a chunk half written: the arena must be filled again."""


class Folding:
    """Folds the chunks of one arena. `filled` may be called from any thread; at the end, call `finish` or `stop`."""

    # False after a failure: its cause on this machine would fail every load.
    is_able = True

    def __init__(
        self, descriptor: int, size: int, ranges: Iterable[tuple[int, int]], settings: FoldSettings = FOLDING
    ) -> None:
        """For an arena of `size` bytes of which `ranges` (start, bytes) will be filled."""
        self._settings = settings
        self._lock = threading.Lock()
        self._missing = [0] * max(0, size // CHUNK_BYTES - LANDING_CHUNKS)
        self._processes: _FoldProcesses | None = None
        self._began = time.monotonic()
        for start, length in ranges:
            for index, part in _bytes_by_chunk(start, length):
                if index < len(self._missing):
                    self._missing[index] += part
        if self._missing and Folding.is_able:
            self._processes = _start_processes(descriptor, size, len(self._missing), settings)

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """The processes that fold; none if nothing is to be folded, or folding is over."""
        return [] if self._processes is None else self._processes.running

    def filled(self, start: int, length: int) -> None:
        """These bytes are filled and will not be touched again."""
        with self._lock:
            for index, part in _bytes_by_chunk(start, length):
                if index < len(self._missing):
                    self._missing[index] -= part
                    if self._missing[index] == 0 and self._processes is not None:
                        self._processes.submit(index)

    def finish(self, cancelled: threading.Event) -> dict[int, Fold]:
        """All is filled: wait and return the folded chunks. Raises FoldingFailed or Failure: fill the arena again."""
        processes, self._processes = self._processes, None
        if processes is None:
            return {}
        settings = self._settings
        patience_s = max(settings.patience_min_s, settings.patience_share * (time.monotonic() - self._began))
        try:
            return processes.finish(patience_s, cancelled)
        except Failure:
            # After a cancellation, the processes were killed by us.
            Folding.is_able = cancelled.is_set()
            raise

    def stop(self) -> None:
        """Kill the processes. May be called again. Raises Failure if one cannot be killed."""
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.kill()


class _FoldProcesses:
    """The processes that fold one arena, and the pipe from which they take chunk numbers."""

    def __init__(self, settings: FoldSettings) -> None:
        """Raises OSError."""
        self._settings = settings
        self.running: list[subprocess.Popen[bytes]] = []
        self._submitted: set[int] = set()
        with contextlib.ExitStack() as undo:
            self._numbers_out, self._numbers_in = os.pipe()
            undo.callback(os.close, self._numbers_out)
            self._closing = undo.enter_context(contextlib.ExitStack())
            self._closing.callback(os.close, self._numbers_in)
            os.set_blocking(self._numbers_in, False)
            # They write to a memory file, which is read at the end. Append mode: they share one file offset, and of
            # two lines written at once one would be lost.
            self._output = undo.enter_context(os.fdopen(os.memfd_create("folds"), "rb"))
            fcntl.fcntl(self._output, fcntl.F_SETFL, fcntl.fcntl(self._output, fcntl.F_GETFL) | os.O_APPEND)
            self._open = undo.pop_all()

    def start(self, count: int, *arguments: str, passing: int) -> None:
        """Raises OSError."""
        env = _ENVIRONMENT | {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        argv = (sys.executable, "-I", "-S", str(self._settings.program), str(os.getpid()), *arguments)
        for _ in range(count):
            self.running.append(
                subprocess.Popen(
                    argv, stdin=self._numbers_out, stdout=self._output, pass_fds=(passing,), env=env, cwd="/"
                )
            )

    def submit(self, index: int) -> None:
        # The pipe is full: thousands of chunks are waiting, and this one stays unfolded.
        with contextlib.suppress(BlockingIOError):
            os.write(self._numbers_in, ORDER.pack(index))
            self._submitted.add(index)

    def finish(self, patience_s: float, cancelled: threading.Event) -> dict[int, Fold]:
        """Return the folded chunks. After `patience_s` no further chunk is begun. Raises FoldingFailed or Failure."""
        self._closing.close()
        ends_at = time.monotonic() + patience_s
        while self._is_any_alive() and time.monotonic() < ends_at and not cancelled.wait(POLL_S):
            pass
        # Take back the numbers that no process has taken. The write end is closed, so this ends.
        while found := os.read(self._numbers_out, ORDER.size * 1024):
            self._submitted.difference_update(index for (index,) in ORDER.iter_unpack(found))
        with self._open:
            # A cancelled load does not wait for chunks in progress.
            return self._results(self._exit_codes(0.0 if cancelled.is_set() else self._settings.chunk_s))

    def kill(self) -> None:
        """Kill all at once, whatever the state of their chunks. Raises Failure if one cannot be killed."""
        for process in self.running:
            process.kill()
        self._closing.close()
        with self._open:
            self._exit_codes(0.0)

    def _is_any_alive(self) -> bool:
        return any(process.poll() is None for process in self.running)

    def _exit_codes(self, within_s: float) -> list[int]:
        """Their exit codes, killing those that take too long. Raises Failure if one still lives and could write."""
        ends_at, kill_s = time.monotonic() + within_s, self._settings.kill_s
        for process in self.running:
            try:
                process.wait(max(0.0, ends_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        try:
            return [process.wait(kill_s) for process in self.running]
        except subprocess.TimeoutExpired as stuck:
            raise Failure(f"a process that folds weights could not be ended within {kill_s:g} s.") from stuck

    def _results(self, codes: Sequence[int]) -> dict[int, Fold]:
        wrong = [code for code in codes if code not in (0, NO_NUMPY)]
        if wrong:
            raise FoldingFailed(f"a process that folds weights ended with {wrong[0]}.")
        self._output.seek(0)
        reported = {index: numbers for index, *numbers in (map(int, line.split()) for line in self._output)}
        if reported.keys() != self._submitted:
            raise FoldingFailed(
                f"of {len(self._submitted)} chunks that were to be folded {len(reported)} were told of."
            )
        return {index: Fold(*numbers) for index, numbers in reported.items() if numbers}


def _start_processes(descriptor: int, size: int, chunks: int, settings: FoldSettings) -> _FoldProcesses | None:
    """Processes for these chunks; None if none can be started."""
    found = importlib.util.find_spec("numpy")
    if found is None or found.origin is None:
        return None
    folder = str(Path(found.origin).parent.parent)
    processors = settings.processors or len(os.sched_getaffinity(0))
    count = min(chunks, PROCESSES_MAX, max(1, processors // 2))
    processes: _FoldProcesses | None = None
    try:
        processes = _FoldProcesses(settings)
        processes.start(count, folder, str(descriptor), str(size), passing=descriptor)
    except OSError as reason:
        log.warning("weights are not folded: %s", reason)
        if processes is not None:
            processes.kill()
        return None
    return processes


def _bytes_by_chunk(start: int, length: int) -> Iterable[tuple[int, int]]:
    """The chunks a range covers, each with the bytes in it."""
    end = start + length
    while start < end:
        stop = min(end, (start // CHUNK_BYTES + 1) * CHUNK_BYTES)
        yield start // CHUNK_BYTES, stop - start
        start = stop
