"""Whose a process is: told by the identity it was started with, or by who stands above it.

Owns the climb from a process to its owner. A process that was given another environment is still found by its parents,
one that left its parents by its identity. Never signals anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from greenroom.process import proc

# No tree of processes is as deep; and a table that is read while it changes may look like a circle.
DEPTH_MAX = 64

# The owner with this identity; None if it is nobody's.
ByIdentity = Callable[[str], str | None]


def owner_of(pid: int, roots: Mapping[int, str], by_identity: ByIdentity) -> str | None:
    """The owner of one process; `roots` are processes whose owner is known, as is everything below them."""
    for _ in range(DEPTH_MAX):
        if pid in roots:
            return roots[pid]
        identity = proc.identity(pid)
        if identity is not None and (owner := by_identity(identity)) is not None:
            return owner
        seen = proc.stat(pid)
        if seen is None or seen.parent <= 0:
            return None
        pid = seen.parent
    return None


def owners_of(pids: Iterable[int], roots: Mapping[int, str], by_identity: ByIdentity) -> dict[int, str]:
    found = ((pid, owner_of(pid, roots, by_identity)) for pid in pids)
    return {pid: owner for pid, owner in found if owner is not None}


def trees(roots: Mapping[int, str]) -> dict[str, set[int]]:
    """Every process at or below these, by owner. Reads the whole process table, once."""
    parents = {seen.pid: seen.parent for seen in map(proc.stat, proc.pids()) if seen is not None and not seen.is_dead}
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
    """What a process calls itself; None when it has ended."""
    try:
        return (proc.PROC / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
