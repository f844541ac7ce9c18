"""What /proc says about processes: parents, start times, identities, the owner of each, and which port it listens on.

Owns the reading of /proc/PID, the search for the owner of a process, and the range of ports that engines get. A process
with a replaced environment is found by its parents, one that left its parents by its identity. Never signals anything
and never connects: an answer on a port does not prove which process answers. Never raises for a process that has ended
meanwhile: that is the normal case.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from greenroom import errors

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
    raw = _read(pid, "stat")
    if raw is None:
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
    for entry in (_read(pid, "environ") or b"").split(b"\0"):
        if entry.startswith(_IDENTITY_KEY):
            return entry[len(_IDENTITY_KEY) :].decode("utf-8", "replace")
    return None


def _read(pid: int, name: str) -> bytes | None:
    """A file of /proc/PID; None if it cannot be read. Without paths: they take longer to make than the file to read."""
    try:
        with open(f"{PROC}/{pid}/{name}", "rb", buffering=0) as file:
            return file.read()
    except OSError:
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


_READ: Final = re.compile(rb"^rchar: (\d+)$", re.MULTILINE)
_MAPPED: Final = re.compile(rb"^RssFile:\s+(\d+) kB$", re.MULTILINE)


def bytes_read(pid: int) -> int:
    """Bytes of files that a process has read, or that it maps and has in memory: a loader does one of both. Not
    `smaps`, which would say it for each file: it waits while the kernel populates a mapping, and walks every page."""
    read = _READ.search(_read(pid, "io") or b"")
    mapped = _MAPPED.search(_read(pid, "status") or b"")
    return max(int(read[1]) if read else 0, int(mapped[1]) * 1024 if mapped else 0)


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


# --- ports ------------------------------------------------------------------------------------------------------------


LOOPBACK = "127.0.0.1"
_LISTENING = "0A"


class PortRange:
    """The TCP ports for engines, `first` to `last` inclusive, used in turn."""

    def __init__(self, first: int, last: int) -> None:
        if not 0 < first <= last < 65536:
            raise errors.ConfigError(f"the port range {first}-{last} is not within 1-65535, first to last")
        self._first = first
        self._last = last
        self._next = first

    def pick(self, avoid: set[int]) -> int:
        """A port that can be bound on loopback now and is not in `avoid`. Raises LoadFailed if all are taken."""
        for _ in range(self._last - self._first + 1):
            port = self._next
            self._next = port + 1 if port < self._last else self._first
            if port not in avoid and can_bind(port):
                return port
        raise errors.LoadFailed(
            f"every port of the range {self._first}-{self._last} is taken; widen the range or free one of its ports"
        )


def listener_pids(port: int) -> frozenset[int] | None:
    """The processes that listen on this TCP port, over IPv4 or IPv6. None if a listener's process is not visible: it
    runs as another user or in another container."""
    wanted = {listener.inode for listener in _listeners(port)}
    owners = {pid: wanted & (_sockets(pid) or frozenset()) for pid in pids()} if wanted else {}
    if wanted - frozenset[int]().union(*owners.values()):
        return None
    return frozenset(pid for pid, inodes in owners.items() if inodes)


def is_ours(port: int, tree: frozenset[int]) -> bool:
    """True if a process of `tree` answers at 127.0.0.1:`port`, and not another program that took the port first. Looks
    at the sockets of the tree only, so another program need not be visible. True too if a process of the tree has
    unreadable files (it changed its user)."""
    wanted = _answering_at_loopback(port)
    held = [_sockets(pid) for pid in tree]
    missing = wanted - frozenset[int]().union(*(inodes for inodes in held if inodes is not None))
    return bool(wanted) and (not missing or None in held)


@dataclass(frozen=True, slots=True)
class _Listener:
    family: socket.AddressFamily
    address: str
    inode: int


def _answering_at_loopback(port: int) -> frozenset[int]:
    """Inodes of the sockets that a connection to 127.0.0.1 may reach. IPv4 comes before an IPv6 wildcard."""
    listeners = _listeners(port)
    ipv4 = frozenset(one.inode for one in listeners if one.address in (LOOPBACK, "0.0.0.0"))
    return ipv4 or frozenset(one.inode for one in listeners if one.address in ("::", f"::ffff:{LOOPBACK}"))


def _listeners(port: int) -> list[_Listener]:
    return [
        *_read_table("net/tcp", socket.AF_INET, port),
        *_read_table("net/tcp6", socket.AF_INET6, port),
    ]


def _read_table(name: str, family: socket.AddressFamily, port: int) -> Iterator[_Listener]:
    try:
        lines = (PROC / name).read_text().splitlines()[1:]
    except OSError:
        # A kernel without IPv6 has no such table.
        return
    suffix = f":{port:04X}"
    for line in lines:
        _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
        if state == _LISTENING and local.endswith(suffix):
            yield _Listener(family, _address(family, local.removesuffix(suffix)), int(inode))


def _address(family: socket.AddressFamily, words: str) -> str:
    """The table prints addresses as 32-bit words in the machine's own byte order."""
    raw, step = bytes.fromhex(words), -1 if sys.byteorder == "little" else 1
    return socket.inet_ntop(family, b"".join(raw[at : at + 4][::step] for at in range(0, len(raw), 4)))


def _sockets(pid: int) -> frozenset[int] | None:
    """The inodes of a process's sockets; empty if it has ended; None if it lives and is not readable."""
    folder = PROC / str(pid) / "fd"
    try:
        names = os.listdir(folder)
    except OSError:
        seen = stat(pid)
        return frozenset() if seen is None or seen.is_dead else None
    return frozenset(filter(None, (_socket_inode(f"{folder}/{name}") for name in names)))


def _socket_inode(path: str) -> int:
    try:
        target = os.readlink(path)
    except OSError:
        # Closed meanwhile.
        return 0
    return int(target[len("socket:[") : -1]) if target.startswith("socket:[") else 0


def can_bind(port: int) -> bool:
    """True if an engine could listen on this port of loopback now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As engines do: connections in TIME_WAIT do not block a bind, listeners do.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


# --- memory that ran out --------------------------------------------------------------------------------------------

# The machine's counter, and that of our own cgroup, which is the only one that counts kills inside a container.
COUNTERS = (PROC / "vmstat", Path("/sys/fs/cgroup/memory.events"))
_KILLS = "oom_kill"


def oom_kills(counters: Sequence[Path] = COUNTERS) -> int:
    """How many processes the kernel has ended for memory, by all counters. One that cannot be read counts as 0."""
    return sum(_kills_in(path) for path in counters)


def _kills_in(path: Path) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) for line in lines if line.split()[:1] == [_KILLS]), 0)
    except (OSError, ValueError, IndexError):
        return 0
