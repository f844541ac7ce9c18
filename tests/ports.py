"""Ports that a test gives to a program which listens on them later."""

from __future__ import annotations

import contextlib
import os
import socket

# Below those that the system gives out by itself and that engines of tests and of gateways use.
FIRST, LAST = 12_000, 20_999

# Names in the kernel, one per port that this process chose. They go with the process.
_claims: list[socket.socket] = []


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
    with contextlib.ExitStack() as stack:
        try:
            claims = [_bound(stack, socket.AF_UNIX, f"\0greenroom-test-port-{port}") for port in ports]
            for port in ports:
                _bound(stack, socket.AF_INET, ("127.0.0.1", port)).close()
        except OSError:
            return False
        stack.pop_all()
    _claims.extend(claims)
    return True


def _bound(stack: contextlib.ExitStack, family: int, address: str | tuple[str, int]) -> socket.socket:
    made = stack.enter_context(socket.socket(family))
    made.bind(address)
    return made
