"""How often the kernel has ended a process for want of memory: on this machine, and in this container.

Owns the reading of two counters. A process that was killed by nobody we know, while one of them grew, was killed for
its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

# The machine's counter, and that of our own control group, which in a container is the only one that counts for it.
COUNTERS = (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events"))
_WORD = "oom_kill"


def oom_kills(counters: Sequence[Path] = COUNTERS) -> int:
    """All counters together. One that cannot be read counts nothing."""
    return sum(_count(path) for path in counters)


def _count(path: Path) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) for line in lines if line.split()[:1] == [_WORD]), 0)
    except (OSError, ValueError, IndexError):
        return 0
