"""What /proc says about processes: parents, start times, identities, and the owner of each.

Owns the reading of /proc/PID and the search for the owner of a process. A process with a replaced environment is found
by its parents, one that left its parents by its identity. Never signals anything, and never raises for a process that
has ended meanwhile: that is the normal case.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
IDENTITY_VARIABLE = "GREENROOM_IDENTITY"
_IDENTITY_KEY = IDENTITY_VARIABLE.encode() + b"="
_DEAD_STATES = frozenset({b"Z", b"X", b"x"})


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of /proc/PID/stat that are needed."""

    pid: int
    parent: int
    session: int
    start_ticks: int
    is_dead: bool


def pids() -> Iterator[int]:
    """Every process id at this moment."""
    return (int(name) for name in os.listdir(PROC) if name.isdigit())


def stat(pid: int) -> Stat | None:
    """Parent, session and start time of a process; None if it does not exist."""
    try:
        raw = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The name in parentheses may itself hold spaces and parentheses.
    fields = raw.rpartition(b")")[2].split()
    return Stat(
        pid,
        parent=int(fields[1]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
        is_dead=fields[0] in _DEAD_STATES,
    )


def identity(pid: int) -> str | None:
    """The identity in a process's environment; None if it has none, has ended, or belongs to another user."""
    try:
        raw = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    for entry in raw.split(b"\0"):
        if entry.startswith(_IDENTITY_KEY):
            return entry[len(_IDENTITY_KEY) :].decode("utf-8", "replace")
    return None


def below(pid: int) -> frozenset[int]:
    """Every living process below `pid`, not `pid` itself. Reads the whole process table."""
    children: dict[int, list[Stat]] = {}
    for seen in filter(None, map(stat, pids())):
        children.setdefault(seen.parent, []).append(seen)
    found = children.pop(pid, [])
    # The list grows while it is iterated; every process is popped once, so this ends.
    for process in found:
        found += children.pop(process.pid, [])
    return frozenset(process.pid for process in found if not process.is_dead)


def self_and_above() -> frozenset[int]:
    """This process and its ancestors, up to the first that is not visible."""
    found: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        seen = stat(pid)
        pid = seen.parent if seen else 0
    return frozenset(found)


# Deeper than any process tree. A table that changes while it is read may look like a circle.
DEPTH_MAX = 64

# The owner with this identity; None if there is none.
ByIdentity = Callable[[str], str | None]


def owner_of(pid: int, roots: Mapping[int, str], by_identity: ByIdentity) -> str | None:
    """The owner of a process; None if unknown. `roots` maps processes to the owner of their whole tree."""
    for _ in range(DEPTH_MAX):
        if pid in roots:
            return roots[pid]
        carried = identity(pid)
        if carried is not None and (owner := by_identity(carried)) is not None:
            return owner
        seen = stat(pid)
        if seen is None or seen.parent <= 0:
            return None
        pid = seen.parent
    return None


def owners_of(processes: Iterable[int], roots: Mapping[int, str], by_identity: ByIdentity) -> dict[int, str]:
    found = ((pid, owner_of(pid, roots, by_identity)) for pid in processes)
    return {pid: owner for pid, owner in found if owner is not None}


def trees(roots: Mapping[int, str]) -> dict[str, set[int]]:
    """All processes at or below `roots`, by owner. Reads the whole process table once."""
    parents = {seen.pid: seen.parent for seen in map(stat, pids()) if seen is not None and not seen.is_dead}
    found: dict[str, set[int]] = {}
    for pid in parents:
        above = pid
        for _ in range(DEPTH_MAX):
            if above in roots:
                found.setdefault(roots[above], set()).add(pid)
                break
            if above not in parents:
                break
            above = parents[above]
    return found


def name_of(pid: int) -> str | None:
    """The name of a process; None if it has ended."""
    try:
        return (PROC / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
