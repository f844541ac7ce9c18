"""Weights folded while they are read: as soon as all of a chunk has come, it is written smaller where it lies.

Owns the processes of `fold.py`, and what has not come yet of which chunk. One that fails may have left a chunk half
written, so the arena is lost with it; from then on this worker folds nothing. Never reads weights itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from .failures import Failure
from .fold import CHUNK_BYTES, LANDING_CHUNKS, NO_NUMPY, ORDER, Fold

# A gigabyte a second each, and a chunk of memory; half of the processors have enough to do with reading.
PROCESSES_MAX: Final = 8
_PROGRAM: Final = Path(__file__).with_name("fold.py")
# NumPy would start threads for arithmetic that is not done here.
_ENVIRONMENT: Final = {"OPENBLAS_NUM_THREADS": "1"}

log = logging.getLogger(__name__)


class Folding:
    """The chunks of one arena. `filled` may be called from any thread; in the end `finish` or `stop`, once."""

    # False once it has failed: what is wrong with this machine would fail every load.
    is_able = True

    def __init__(self, descriptor: int, size: int, ranges: Iterable[tuple[int, int]]) -> None:
        """Of an arena of `size` bytes, each of `ranges` (start, bytes) will be filled."""
        self._lock = threading.Lock()
        self._missing = [0] * max(0, size // CHUNK_BYTES - LANDING_CHUNKS)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._orders = self._said = -1
        for start, length in ranges:
            for index, part in _shares(start, length):
                if index < len(self._missing):
                    self._missing[index] += part
        folder = _numpy_folder() if self._missing and Folding.is_able else None
        if folder is not None:
            self._start(folder, descriptor, size)

    def filled(self, start: int, length: int) -> None:
        """These bytes have come and will not be touched again."""
        with self._lock:
            for index, part in _shares(start, length):
                if index < len(self._missing):
                    self._missing[index] -= part
                    if self._missing[index] == 0:
                        self._order(index)

    def finish(self) -> dict[int, Fold]:
        """Wait for the last chunk; how each was folded that was. Raises Failure: then the arena is worth nothing."""
        if not self._processes:
            return {}
        lines, codes = self._ended()
        wrong = [code for code in codes if code not in (0, NO_NUMPY)]
        if wrong:
            Folding.is_able = False
            raise Failure(f"folding weights ended with {wrong[0]}. From now on this worker does without; try again.")
        return {index: Fold(*numbers) for index, *numbers in (map(int, line.split()) for line in lines) if numbers}

    def stop(self) -> None:
        """Nobody wants them any more. May be called again."""
        for process in self._processes:
            process.kill()
        if self._processes:
            self._ended()

    def _ended(self) -> tuple[list[bytes], list[int]]:
        """What was said, and how they ended, once there is nothing more to do."""
        with self._lock:
            os.close(self._orders)
            self._orders = -1
        codes = [process.wait() for process in self._processes]
        self._processes = []
        with os.fdopen(self._said, "rb") as said:
            said.seek(0)
            return said.read().splitlines(), codes

    def _start(self, folder: str, descriptor: int, size: int) -> None:
        argv = (sys.executable, "-I", "-S", str(_PROGRAM), str(os.getpid()), folder, str(descriptor), str(size))
        env = _ENVIRONMENT | {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        orders, self._orders = os.pipe()
        # What they say goes to memory: nobody has to listen meanwhile.
        self._said = os.memfd_create("folds")
        try:
            for _ in range(min(len(self._missing), PROCESSES_MAX, max(1, len(os.sched_getaffinity(0)) // 2))):
                self._processes.append(
                    subprocess.Popen(argv, stdin=orders, stdout=self._said, pass_fds=(descriptor,), env=env, cwd="/")
                )
        except OSError as reason:
            log.warning("weights are not folded: %s", reason)
            self.stop()
        finally:
            os.close(orders)

    def _order(self, index: int) -> None:
        # Nobody listens any more: `finish` says why.
        with contextlib.suppress(BrokenPipeError):
            if self._processes and self._orders >= 0:
                os.write(self._orders, ORDER.pack(index))


def _shares(start: int, length: int) -> Iterable[tuple[int, int]]:
    """How many bytes of a range lie in which chunk."""
    end = start + length
    while start < end:
        stop = min(end, (start // CHUNK_BYTES + 1) * CHUNK_BYTES)
        yield start // CHUNK_BYTES, stop - start
        start = stop


def _numpy_folder() -> str | None:
    found = importlib.util.find_spec("numpy")
    return str(Path(found.origin).parent.parent) if found is not None and found.origin else None
