"""What an earlier run, or a keeper that was killed, may have left behind: found by identity and ended.

Owns the search through all processes for ours. A process is ours by the identity in its environment, which children
inherit and which survives any crash of the gateway; never by its name, never by a remembered pid. Never signals this
process or one above it. Where this process is the one that orphans are given to, as process 1 of a container is, it
also collects them when they have ended.

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

# How long an orphan gets to leave by itself. Nobody waits for its answers any more.
SWEEP_TERM_S = 2.0
# SIGKILL works within milliseconds, except on a process stuck in the kernel, for which nothing works.
KILL_WAIT_S = 5.0
# Each round ends what was there when it began; a further one is needed only for what was forked meanwhile.
SWEEP_ROUNDS_MAX = 5
PR_GET_CHILD_SUBREAPER = 37

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OwnedProcess:
    """A process with an identity of ours. Start time tells it from a later owner of the same pid."""

    pid: int
    start_ticks: int
    identity: str


def find(identity_prefix: str) -> list[OwnedProcess]:
    """Every living process at or below this identity, apart from this one and those above it. Reads all of /proc."""
    if not identity_prefix.strip(":"):
        raise ValueError("an empty identity would match strangers")
    found = (_look_at(pid) for pid in proc.pids())
    spared = proc.self_and_above()
    return [one for one in found if one and _matches(one.identity, identity_prefix) and one.pid not in spared]


async def sweep(identity_prefix: str, *, spare: frozenset[int]) -> int:
    """End everything at or below this identity apart from `spare`; return how many processes were ended."""
    ended = 0
    for _ in range(SWEEP_ROUNDS_MAX):
        # In a thread, as a machine may have thousands of processes. Nothing is forked there.
        found = [one for one in await asyncio.to_thread(find, identity_prefix) if one.pid not in spare]
        if not found:
            return ended
        ended += await end(found, SWEEP_TERM_S)
    _log.warning("orphans left identity=%s rounds=%d", identity_prefix, SWEEP_ROUNDS_MAX)
    return ended


async def end(found: Iterable[OwnedProcess], term_s: float) -> int:
    """SIGTERM, then after `term_s` SIGKILL, to exactly these processes; return how many were seen to end."""
    outcomes = await asyncio.gather(*(_end_one(one, term_s) for one in found))
    return sum(outcomes)


async def _end_one(one: OwnedProcess, term_s: float) -> bool:
    try:
        pidfd = os.pidfd_open(one.pid)
    except ProcessLookupError:
        return False
    try:
        # Only now, with the pid held, is it certain which process the signal will reach.
        if _look_at(one.pid) != one:
            return False
        return await _signal_and_wait(pidfd, signal.SIGTERM, term_s) or await _signal_and_wait(
            pidfd, signal.SIGKILL, KILL_WAIT_S
        )
    finally:
        os.close(pidfd)


async def _signal_and_wait(pidfd: int, number: signal.Signals, wait_s: float) -> bool:
    """Send a signal and wait for the end of the process. True when it ended in time."""
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
    """Whether processes that lose their parent become children of this one."""
    is_subreaper = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(is_subreaper), 0, 0, 0)
    return os.getpid() == 1 or bool(is_subreaper.value)


def collect(own: Collection[int]) -> None:
    """Reap adopted children that have ended. Those in `own`, and all of this process's session, are left to whoever
    started them: only what was started by an engine or its keeper, or in a container from outside, has another."""
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
