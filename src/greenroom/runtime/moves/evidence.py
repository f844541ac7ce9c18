"""Whether a load that failed ran out of memory: by what its engine printed, or by the kernel having killed it for that.

Owns the look at one load alone: only lines of this start count.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Final

from greenroom.engines.out_of_memory import memory_complaint
from greenroom.process.host_oom import oom_kills
from greenroom.process.spawn import Child, Exit

# How a shell reports a program of its own that was killed.
_KILLED_CODE: Final = 128 + signal.SIGKILL


class Evidence:
    """Made before the engine is started, asked after it has failed."""

    def __init__(self) -> None:
        self._oom_kills_before = oom_kills()

    def of_no_memory(self, child: Child, lines: Sequence[str]) -> str | None:
        """What says that memory ran out, in these lines of this start or by the kernel; None when nothing does."""
        if complaint := memory_complaint(lines):
            return complaint
        if child.exit is not None and _was_killed(child.exit) and oom_kills() > self._oom_kills_before:
            return "the kernel ended it because the host's memory was full"
        return None


def _was_killed(exit: Exit) -> bool:
    return exit.signal == signal.SIGKILL or exit.code == _KILLED_CODE
