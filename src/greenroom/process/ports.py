"""Ports for engines: picks a free one, and tells which process listens on it.

Owns the configured range and the reading of the kernel's table of listeners. Never connects: an answer on a port does
not prove which process answers.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from greenroom import errors
from greenroom.process import proc

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
    """The processes that listen on this TCP port, over IPv4 or IPv6.

    None if a listener's process is not visible: it runs as another user or in another container.
    """
    wanted = {listener.inode for listener in _listeners(port)}
    owners = {pid: wanted & (_sockets(pid) or frozenset()) for pid in proc.pids()} if wanted else {}
    if wanted - frozenset[int]().union(*owners.values()):
        return None
    return frozenset(pid for pid, inodes in owners.items() if inodes)


def is_ours(port: int, tree: frozenset[int]) -> bool:
    """True if a process of `tree` answers at 127.0.0.1:`port`, and not another program that took the port first.

    Looks at the sockets of the tree only, so another program need not be visible. True too if a process of the tree
    has unreadable files (it changed its user).
    """
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
        lines = (proc.PROC / name).read_text().splitlines()[1:]
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
    order: Callable[[bytes], bytes] = (lambda word: word[::-1]) if sys.byteorder == "little" else bytes
    raw = bytes.fromhex(words)
    return socket.inet_ntop(family, b"".join(order(raw[at : at + 4]) for at in range(0, len(raw), 4)))


def _sockets(pid: int) -> frozenset[int] | None:
    """The inodes of a process's sockets; empty if it has ended; None if it lives and is not readable."""
    folder = proc.PROC / str(pid) / "fd"
    try:
        names = os.listdir(folder)
    except OSError:
        seen = proc.stat(pid)
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
