"""Whether a load that failed ran out of memory: by what its engine printed, or by the kernel having killed it for that.

Owns the look at one load alone. A model's log outlives its engines, so what was printed before does not count.
"""

from __future__ import annotations

import signal
from typing import Final

from greenroom.engines.out_of_memory import memory_complaint
from greenroom.process.host_oom import oom_kills
from greenroom.process.logs import LogRing
from greenroom.process.spawn import Child, Exit

# An engine that ran out of memory says so near its end; Python's engines with a long traceback after it.
LINES_MAX: Final = 400
# How a shell reports a program of its own that was killed.
_KILLED_CODE: Final = 128 + signal.SIGKILL


class Evidence:
    """Made before the engine is started, asked after it has failed."""

    def __init__(self, log: LogRing) -> None:
        self.log = log
        self._lines_before = log.lines_seen
        self._oom_kills_before = oom_kills()

    def of_no_memory(self, child: Child) -> str | None:
        """What says that memory ran out; None when nothing does."""
        if complaint := memory_complaint(self.log.tail(self._lines)):
            return complaint
        if child.exit is not None and _was_killed(child.exit) and oom_kills() > self._oom_kills_before:
            return "the kernel ended it because the host's memory was full"
        return None

    @property
    def _lines(self) -> int:
        return min(LINES_MAX, self.log.lines_seen - self._lines_before)


def _was_killed(exit: Exit) -> bool:
    return exit.signal == signal.SIGKILL or exit.code == _KILLED_CODE
