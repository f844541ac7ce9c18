"""Ports that a test gives to a program which listens on them later."""

from __future__ import annotations

import contextlib
import os
import socket

# Below those that the system gives out by itself and that engines of tests and of gateways use.
FIRST, LAST = 12_000, 20_999


def claim(name: str) -> bool:
    """True if no other test process of this machine has claimed this name, nor this one before.

    It is a name in the kernel of an open file, which goes with this process.
    """
    claimed = socket.socket(socket.AF_UNIX)
    try:
        claimed.bind(f"\0greenroom-test-{name}")
    except OSError:
        claimed.close()
        return False
    claimed.detach()
    return True


def free_port(count: int = 1) -> int:
    """The first of so many neighbouring ports that are free. No test process of this machine is given one of them while
    this one lives, so that they may be bound at any time, and again after a restart."""
    starts = range(FIRST, LAST + 2 - count, count)
    begin = os.getpid() % len(starts)
    for first in (*starts[begin:], *starts[:begin]):
        if _claimed(range(first, first + count)):
            return first
    raise AssertionError(f"no {count} neighbouring ports are free")


def _claimed(ports: range) -> bool:
    return all(claim(f"port-{port}") for port in ports) and all(_is_free(port) for port in ports)


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False
