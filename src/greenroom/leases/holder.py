"""Identifies the process that holds a lease, by host, pid namespace, pid and start time.

Owns the reading of /proc for that. A pid alone is not enough: pids are reused, and differ between containers. Never
signals and never waits.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from greenroom.leases.records import Holder

_PROC = Path("/proc")
_DEAD_STATES = frozenset({b"Z", b"X", b"x"})


def holder_of(pid: int) -> Holder | None:
    """The process with this pid, as this process sees it; None if there is none, or it has ended."""
    try:
        raw = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    namespace = _pid_ns(os.getpid())
    # The name in parentheses may itself hold spaces and parentheses.
    fields = raw.rpartition(b")")[2].split()
    if namespace is None or fields[0] in _DEAD_STATES:
        return None
    return Holder(os.uname().nodename, pid, int(fields[19]), namespace)


def is_here(holder: Holder) -> bool:
    """Whether the holder is in our pid namespace, so that it can be watched. Reads nothing after the first call."""
    return (os.uname().nodename, _pid_ns(os.getpid())) == (holder.host, holder.pid_ns)


@functools.lru_cache(maxsize=1)
def _pid_ns(me: int) -> int | None:
    """The pid namespace of this process. It never changes; a fork has another pid and looks again."""
    try:
        return (_PROC / "self" / "ns" / "pid").stat().st_ino
    except OSError:
        return None


def is_alive(holder: Holder) -> bool:
    """Whether this very process lives. Valid only if it `is_here`."""
    return holder_of(holder.pid) == holder
