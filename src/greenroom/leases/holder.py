"""Which process holds a lease, so that its end can be told from that of another with the same number.

Owns the reading of /proc for that. A process is known by machine, pid namespace, number and start time: numbers are
used again, and mean something else in a container. Never signals and never waits.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from greenroom.leases.records import Holder

_PROC = Path("/proc")
_DEAD_STATES = frozenset({b"Z", b"X", b"x"})


def holder_of(pid: int) -> Holder | None:
    """The process of this number as this process sees it; None if there is none, or it has ended."""
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
    """Whether this process sees the same process numbers as that one, so that its life can be looked at.

    Asked of every lease at each look at memory, so that nothing is read for it.
    """
    return (os.uname().nodename, _pid_ns(os.getpid())) == (holder.host, holder.pid_ns)


@functools.lru_cache(maxsize=1)
def _pid_ns(me: int) -> int | None:
    """The namespace of this process, which is the same for all its life; a fork is another one, and asks anew."""
    try:
        return (_PROC / "self" / "ns" / "pid").stat().st_ino
    except OSError:
        return None


def is_alive(holder: Holder) -> bool:
    """Whether that very process lives. Only to be asked where it `is_here`."""
    return holder_of(holder.pid) == holder
