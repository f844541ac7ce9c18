"""Finds and ends processes that an earlier run, or a killed keeper, has left behind.

Owns the search through all processes for ours. A process is ours by the identity in its environment, which children
inherit and which survives any crash of the gateway; never by its name or a remembered pid. Never signals this process
or its ancestors. If this process adopts orphans, as process 1 of a container does, it also reaps them.

Identities are paths of words joined by colons. A prefix matches itself and everything below it: `a:1` matches `a:1`
and `a:1:x`, but not `a:10`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from greenroom.process import proc

# Time between SIGTERM and SIGKILL. No caller waits for an orphan's answers.
SWEEP_TERM_S = 2.0
# SIGKILL works within milliseconds, except on a process stuck in the kernel.
KILL_WAIT_S = 5.0
# Each round ends what it found; another one is needed only for processes forked meanwhile.
SWEEP_ROUNDS_MAX = 5
# Looked at before the loop gets its turn: about two milliseconds.
PIDS_A_TURN = 64
PR_GET_CHILD_SUBREAPER = 37

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OwnedProcess:
    """A process with an identity of ours. The start time tells it from a later process with the same pid."""

    pid: int
    start_ticks: int
    identity: str


def find(identity_prefix: str, pids: Iterable[int] | None = None) -> list[OwnedProcess]:
    """Of these processes (all there are), those at or below this identity, except this one and its ancestors."""
    if not identity_prefix.strip(":"):
        raise ValueError("an empty identity would match strangers")
    found = (_look_at(pid) for pid in (proc.pids() if pids is None else pids))
    spared = proc.self_and_above()
    return [one for one in found if one and _matches(one.identity, identity_prefix) and one.pid not in spared]


async def sweep(identity_prefix: str, *, spare: frozenset[int]) -> int:
    """End all processes at or below this identity except `spare`; return how many were ended."""
    ended = 0
    for _ in range(SWEEP_ROUNDS_MAX):
        found = [one for one in await _found(identity_prefix) if one.pid not in spare]
        if not found:
            return ended
        ended += await end(found, SWEEP_TERM_S)
    _log.warning("orphans left identity=%s rounds=%d", identity_prefix, SWEEP_ROUNDS_MAX)
    return ended


async def _found(identity_prefix: str) -> list[OwnedProcess]:
    """Bit by bit: a machine may have thousands of processes. Not in a thread, which it may have none left for."""
    found, pids = list[OwnedProcess](), list(proc.pids())
    for first in range(0, len(pids), PIDS_A_TURN):
        found += find(identity_prefix, pids[first : first + PIDS_A_TURN])
        await asyncio.sleep(0)
    return found


async def end(found: Iterable[OwnedProcess], term_s: float) -> int:
    """Send SIGTERM, and after `term_s` SIGKILL, to exactly these processes; return how many ended in time."""
    outcomes = await asyncio.gather(*(_end_one(one, term_s) for one in found))
    return sum(outcomes)


async def _end_one(one: OwnedProcess, term_s: float) -> bool:
    try:
        pidfd = os.pidfd_open(one.pid)
    except ProcessLookupError:
        return False
    try:
        # Only with the pidfd open is it certain which process the signal reaches. Its identity is not read again: a
        # process that is just ending has lost its environment already.
        seen = proc.stat(one.pid)
        if seen is None or seen.start_ticks != one.start_ticks:
            return False
        return await _signal_and_wait(pidfd, signal.SIGTERM, term_s) or await _signal_and_wait(
            pidfd, signal.SIGKILL, KILL_WAIT_S
        )
    finally:
        os.close(pidfd)


async def _signal_and_wait(pidfd: int, number: signal.Signals, wait_s: float) -> bool:
    """Send a signal and wait for the process to end. True if it ended in time."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    # A pidfd becomes readable when its process has ended.
    loop.add_reader(pidfd, ended.set)
    try:
        async with asyncio.timeout(wait_s):
            return await ended.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)


def adopts() -> bool:
    """True if processes that lose their parent become children of this one."""
    is_subreaper = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(is_subreaper), 0, 0, 0)
    return os.getpid() == 1 or bool(is_subreaper.value)


def collect(own: Collection[int]) -> None:
    """Reap adopted children that have ended. Skips those in `own` and all of this process's session: their starter
    reaps them. Adopted processes, of an engine or from outside the container, have another session."""
    me, session = os.getpid(), os.getsid(0)
    for seen in filter(None, map(proc.stat, proc.pids())):
        if seen.is_dead and seen.parent == me and seen.session != session and seen.pid not in own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(seen.pid, os.WNOHANG)


def _look_at(pid: int) -> OwnedProcess | None:
    identity = proc.identity(pid)
    seen = proc.stat(pid) if identity else None
    return OwnedProcess(pid, seen.start_ticks, identity) if seen and identity else None


def _matches(identity: str, prefix: str) -> bool:
    return identity == prefix or identity.startswith(prefix.rstrip(":") + ":")
