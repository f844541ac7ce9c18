"""Starts an engine process, watches it, and ends it with everything below it.

Owns the life of a child from the fork until nothing of its tree is left. The ladder (SIGTERM, wait, SIGKILL) runs in
the keeper, so neither a cancelled task nor a dead gateway can interrupt it. Knows whether an engine runs, not whether
it is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from greenroom import errors
from greenroom.process import orphans, proc
from greenroom.process.keeper_link import KeeperLink, open_link
from greenroom.process.logs import LogRing
from greenroom.process.orphans import OwnedProcess
from greenroom.process.proc import IDENTITY_VARIABLE

# A keeper starts in some 30 ms; on a machine that swaps, more. After this the start has failed.
START_S = 30.0
# Extra time for a keeper to end a tree. A keeper that takes longer hangs and is killed.
KEEPER_GRACE_S = 10.0
# Number of last lines in the error of a failed start.
LAST_LINES = 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Command:
    """What to run. `env` is the whole environment: nothing is inherited from the gateway.

    `stop_argv` is run instead of SIGTERM, with `${PID}` in it replaced by the engine's pid.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    cwd: str | None = None
    stop_argv: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended. Both are None if its keeper was lost with it."""

    code: int | None
    signal: int | None

    def __str__(self) -> str:
        if self.code is not None:
            return f"exit code {self.code}"
        if self.signal is None:
            return "lost together with its keeper"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(self.signal).name}"
        return f"killed by signal {self.signal}"


class Child:
    """A running engine. Made by `spawn`."""

    def __init__(self, identity: str, log: LogRing, keeper_grace_s: float = KEEPER_GRACE_S) -> None:
        self.pid = 0
        self.start_ticks = 0
        self.log = log
        self.exit: Exit | None = None
        # Why it could not be started, when it could not.
        self.failure: str | None = None
        self._identity = identity
        self._keeper_grace_s = keeper_grace_s
        self._link: KeeperLink | None = None
        self._callbacks: list[Callable[[Exit], None]] = []
        self._loop = asyncio.get_running_loop()
        self._begun: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[Exit] = self._loop.create_future()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._overdue: asyncio.TimerHandle | None = None
        self._sweep: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self.exit is None

    async def wait(self) -> Exit:
        """Wait for the end of the engine's main process."""
        return await asyncio.shield(self._ended)

    async def stop(self, term_s: float) -> Exit:
        """Ask the engine to stop, kill what is left after `term_s`, and return when its whole tree is gone.

        May be called at any time, repeatedly, and by several tasks: the nearest deadline counts. A cancelled caller
        stops waiting; the stop itself continues.
        """
        self._send(f"stop {max(0.0, term_s)}", term_s)
        await asyncio.shield(self._gone)
        return await self.wait()

    def kill(self) -> None:
        """Kill the whole tree without waiting."""
        self._send("kill", 0.0)

    def on_exit(self, callback: Callable[[Exit], None]) -> None:
        """Call back once on the loop when the engine's main process has ended; soon, if it already has."""
        if self.exit is None:
            self._callbacks.append(callback)
        else:
            self._loop.call_soon(callback, self.exit)

    def tree(self) -> frozenset[int]:
        """The engine and all its descendants, now. Reads the whole process table: a few milliseconds."""
        return proc.below(self._link.pid) if self._link else frozenset()

    async def begin(self, command: Command) -> None:
        """Start a keeper and wait until it runs the command, or `failure` says why not. Called once, by `spawn`."""
        try:
            order = _encode(command, self._identity)
            self._link = open_link(order, self._identity, self.log, self._on_report, self._on_gone)
        except BaseException:
            self._on_gone(ended_well=True)
            raise
        await asyncio.shield(self._begun)

    def _send(self, command: str, allowed_s: float) -> None:
        if self._link is None:
            return
        self._link.send(command)
        due = self._loop.time() + allowed_s + self._keeper_grace_s
        if self._overdue is not None and self._overdue.when() <= due:
            return
        if self._overdue is not None:
            self._overdue.cancel()
        self._overdue = self._loop.call_at(due, self._link.kill_keeper)

    # --- what the keeper says ----------------------------------------------------------------------------------------

    def _on_report(self, words: list[str]) -> None:
        match words:
            case ["started", pid, start_ticks]:
                self.pid, self.start_ticks = int(pid), int(start_ticks)
                self._begun.set_result(None)
            case ["failed", *why]:
                self.failure = " ".join(why)
            case ["exited", code]:
                self._finish(Exit(int(code), None))
            case ["signalled", number]:
                self._finish(Exit(None, int(number)))

    def _finish(self, exit: Exit) -> None:
        # Callbacks will read the last lines.
        if self._link is not None:
            self._link.drain_log()
        self.exit = exit
        self._ended.set_result(exit)
        for callback in self._callbacks:
            self._loop.call_soon(callback, exit)
        self._callbacks.clear()

    def _on_gone(self, ended_well: bool) -> None:
        self._link = None
        if self._overdue is not None:
            self._overdue.cancel()
        if not self._begun.done():
            self.failure = self.failure or "its keeper ended before it"
            self._begun.set_result(None)
        if self.exit is None:
            self._finish(Exit(None, None))
        if ended_well:
            self._gone.set_result(None)
        else:
            # The engine has a parent-death signal; processes below it do not.
            self._sweep = self._loop.create_task(self._end_remains(), name=f"sweep {self._identity}")

    async def _end_remains(self) -> None:
        try:
            # By its pid: the engine may have replaced its environment, or lost it because it is just ending.
            ended = await orphans.end([OwnedProcess(self.pid, self.start_ticks, self._identity)], orphans.SWEEP_TERM_S)
            ended += await orphans.sweep(self._identity, spare=frozenset())
            _log.warning("keeper lost identity=%s ended=%d", self._identity, ended)
        except OSError:
            _log.exception("sweep failed identity=%s", self._identity)
        finally:
            self._gone.set_result(None)


async def spawn(
    command: Command,
    *,
    identity: str,
    log: LogRing,
    start_s: float = START_S,
    keeper_grace_s: float = KEEPER_GRACE_S,
) -> Child:
    """Start a command in a process tree of its own and return once it runs. Raises LoadFailed if it cannot start.

    `identity` must be unique to this start: all processes that carry it are ended if the keeper is lost.
    """
    child = Child(identity, log, keeper_grace_s)
    # If anything fails from here on, end the child: no caller knows of it.
    try:
        async with asyncio.timeout(start_s):
            await child.begin(command)
    except (OSError, ValueError) as error:
        # A TimeoutError is an OSError too.
        await child.stop(term_s=0.0)
        raise _could_not(command, str(error) or f"nothing happened within {start_s:.0f} s", log) from error
    except BaseException:
        await child.stop(term_s=0.0)
        raise
    if child.failure is not None:
        await child.stop(term_s=0.0)
        raise _could_not(command, child.failure, log)
    return child


def _could_not(command: Command, why: str, log: LogRing) -> errors.LoadFailed:
    program = command.argv[0] if command.argv else "an empty command"
    return errors.LoadFailed(f"{program} could not be started: {why}", details="\n".join(log.tail(LAST_LINES)) or None)


def _encode(command: Command, identity: str) -> bytes:
    """The order in the keeper's format. Raises ValueError for values that no program can receive."""
    environment = {**command.env, IDENTITY_VARIABLE: identity}
    if not command.argv or not command.argv[0]:
        raise ValueError("the command is empty")
    for name in environment:
        if not name or "=" in name:
            raise ValueError(f"{name!r} is no name of an environment variable")
    settings = [f"{name}={value}" for name, value in environment.items()]
    stop_argv = command.stop_argv or ()
    words = [_count(command.argv), *command.argv, _count(settings), *settings]
    words += [command.cwd or "", _count(stop_argv), *stop_argv]
    if any("\0" in word for word in words):
        raise ValueError("a word of the command or its environment has a zero byte in it")
    return b"".join(os.fsencode(word) + b"\0" for word in words)


def _count(words: list[str] | tuple[str, ...]) -> str:
    return str(len(words))
