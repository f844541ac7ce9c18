"""Weights folded while they are read: as soon as all of a chunk has come, it is written smaller where it lies.

Owns the processes of `fold.py`, and what has not come yet of which chunk. One that fails may have left a chunk half
written, so the arena is lost with it; from then on this worker folds nothing. Never reads weights itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from .failures import Failure
from .fold import CHUNK_BYTES, LANDING_CHUNKS, NO_NUMPY, ORDER, Fold

# A gigabyte a second each, and a chunk of memory; half of the processors have enough to do with reading.
PROCESSES_MAX: Final = 8
# Somebody may be waiting for the model: when all is read, folding may take so much longer. What it has not begun by
# then stays as it is. The least is what its processes need to start.
PATIENCE_SHARE: Final = 0.25
PATIENCE_MIN_S: Final = 1.0
_PROGRAM: Final = Path(__file__).with_name("fold.py")
# NumPy would start threads for arithmetic that is not done here.
_ENVIRONMENT: Final = {"OPENBLAS_NUM_THREADS": "1"}

log = logging.getLogger(__name__)


class Folding:
    """The chunks of one arena. `filled` may be called from any thread; in the end `finish`, or `stop`."""

    # False once it has failed: what is wrong with this machine would fail every load.
    is_able = True

    def __init__(self, descriptor: int, size: int, ranges: Iterable[tuple[int, int]]) -> None:
        """Of an arena of `size` bytes, each of `ranges` (start, bytes) will be filled."""
        self._lock = threading.Lock()
        self._missing = [0] * max(0, size // CHUNK_BYTES - LANDING_CHUNKS)
        self._crew: _Crew | None = None
        self._began = time.monotonic()
        for start, length in ranges:
            for index, part in _shares(start, length):
                if index < len(self._missing):
                    self._missing[index] += part
        if self._missing and Folding.is_able:
            self._crew = _crew(descriptor, size, len(self._missing))

    def filled(self, start: int, length: int) -> None:
        """These bytes have come and will not be touched again."""
        with self._lock:
            for index, part in _shares(start, length):
                if index < len(self._missing):
                    self._missing[index] -= part
                    if self._missing[index] == 0 and self._crew is not None:
                        self._crew.order(index)

    def finish(self) -> dict[int, Fold]:
        """All is filled: how each chunk was folded that was. Raises Failure: then the arena is worth nothing."""
        crew, self._crew = self._crew, None
        if crew is None:
            return {}
        said, codes = crew.dismiss(max(PATIENCE_MIN_S, PATIENCE_SHARE * (time.monotonic() - self._began)))
        wrong = [code for code in codes if code not in (0, NO_NUMPY)]
        if wrong:
            Folding.is_able = False
            raise Failure(f"folding weights ended with {wrong[0]}. From now on this worker does without; try again.")
        return {index: Fold(*numbers) for index, *numbers in said if numbers}

    def stop(self) -> None:
        """Nobody wants them any more. May be called again."""
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.kill()
            crew.dismiss(0.0)


class _Crew:
    """The processes that fold one arena, and the pipe from which whoever is free takes the next order."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._processes: list[subprocess.Popen[bytes]] = []
        with contextlib.ExitStack() as undo:
            self._unread, self._orders = os.pipe()
            undo.callback(os.close, self._unread)
            self._closing = undo.enter_context(contextlib.ExitStack())
            self._closing.callback(os.close, self._orders)
            # What they say goes to memory: nobody has to listen meanwhile.
            self._said = undo.enter_context(os.fdopen(os.memfd_create("folds"), "rb"))
            self._open = undo.pop_all()

    def hire(self, count: int, *arguments: str, passing: int) -> None:
        """Raises OSError."""
        env = _ENVIRONMENT | {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        argv = (sys.executable, "-I", "-S", str(_PROGRAM), str(os.getpid()), *arguments)
        for _ in range(count):
            self._processes.append(
                subprocess.Popen(argv, stdin=self._unread, stdout=self._said, pass_fds=(passing,), env=env, cwd="/")
            )

    def order(self, index: int) -> None:
        # The pipe takes as many as there are chunks in a terabyte before anybody would have to wait.
        os.write(self._orders, ORDER.pack(index))

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def dismiss(self, patience_s: float) -> tuple[list[list[int]], list[int]]:
        """What they said, and how they ended: after this time they do no more than they have begun."""
        self._closing.close()
        ends_at = time.monotonic() + patience_s
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in self._processes:
                process.wait(max(0.0, ends_at - time.monotonic()))
        # Orders that nobody has taken are taken back. Nobody writes any more, so that this comes to an end.
        while os.read(self._unread, mmap.PAGESIZE):
            pass
        codes = [process.wait() for process in self._processes]
        self._said.seek(0)
        said = [[int(word) for word in line.split()] for line in self._said]
        self._open.close()
        return said, codes


def _crew(descriptor: int, size: int, chunks: int) -> _Crew | None:
    """Processes for these chunks; None where there can be none."""
    found = importlib.util.find_spec("numpy")
    if found is None or found.origin is None:
        return None
    folder = str(Path(found.origin).parent.parent)
    count = min(chunks, PROCESSES_MAX, max(1, len(os.sched_getaffinity(0)) // 2))
    crew: _Crew | None = None
    try:
        crew = _Crew()
        crew.hire(count, folder, str(descriptor), str(size), passing=descriptor)
    except OSError as reason:
        log.warning("weights are not folded: %s", reason)
        if crew is not None:
            crew.kill()
            crew.dismiss(0.0)
        return None
    return crew


def _shares(start: int, length: int) -> Iterable[tuple[int, int]]:
    """How many bytes of a range lie in which chunk."""
    end = start + length
    while start < end:
        stop = min(end, (start // CHUNK_BYTES + 1) * CHUNK_BYTES)
        yield start // CHUNK_BYTES, stop - start
        start = stop
