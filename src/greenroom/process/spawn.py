"""Starts an engine process, watches it, and ends it with everything below it.

Owns the life of a child from the fork until nothing of its tree is left. The ladder (SIGTERM, wait, SIGKILL) runs in
the keeper, so neither a cancelled task nor a dead gateway can interrupt it. Tells whether an engine runs, not whether
it is ready.

`KeeperLink` owns the descriptors and the process of one keeper, and releases all of them when it has ended. It works by
callbacks on the loop, so a cancelled task cannot lose anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from greenroom import errors
from greenroom.process import orphans, proc
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
    """What to run. `env` is the whole environment: nothing is inherited from the gateway. `stop_argv` is run instead of
    SIGTERM, with `${PID}` in it replaced by the engine's pid."""

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
        """Ask the engine to stop, kill what is left after `term_s`, and return when its whole tree is gone. May be
        called at any time, repeatedly, and by several tasks: the nearest deadline counts. A cancelled caller stops
        waiting; the stop itself continues."""
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
            self._link = open_link(order, self._identity, self)
        except BaseException:
            self.keeper_ended(is_well=True)
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

    def reported(self, words: list[str]) -> None:
        """One line of the keeper."""
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

    def keeper_ended(self, is_well: bool) -> None:
        """Called last and once. A keeper exits by itself, which `is_well`, only after the whole tree has ended."""
        self._link = None
        if self._overdue is not None:
            self._overdue.cancel()
        if not self._begun.done():
            self.failure = self.failure or "its keeper ended before it"
            self._begun.set_result(None)
        if self.exit is None:
            self._finish(Exit(None, None))
        if is_well:
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
    `identity` must be unique to this start: all processes that carry it are ended if the keeper is lost."""
    child = Child(identity, log, keeper_grace_s)
    # If anything fails from here on, end the child: no caller has it yet.
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


# --- the gateway's end of a keeper ----------------------------------------------------------------------------------

_KEEPER = Path(__file__).with_name("keeper.py")
# One read per turn of the loop, so that an engine that floods its log cannot hold up the gateway.
READ_BYTES = 64 * 1024
# Bytes read when the engine has ended: more than a pipe holds.
DRAIN_BYTES_MAX = 1024 * 1024

# Keepers that are not reaped yet. `orphans.collect` must leave these alone.
keepers: set[int] = set()


class KeeperLink:
    """One running keeper. The child is told what it says, and its end."""

    def __init__(self, process: subprocess.Popen[bytes], fds: tuple[int, int, int], child: Child) -> None:
        self.pid = process.pid
        keepers.add(process.pid)
        self._process = process
        self._control_fd, self._status_fd, self._log_fd = fds
        self._pidfd = os.pidfd_open(process.pid)
        self._child = child
        self._log = child.log
        self._unread = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._status_fd, self._read_status)
        self._loop.add_reader(self._log_fd, self._read_log)
        self._loop.add_reader(self._pidfd, self._collect)

    def send(self, command: str) -> None:
        """Send a command to the keeper. Does nothing if it has ended."""
        # A pipe holds thousands of commands and the keeper reads each at once, so it is never full. If the keeper
        # itself hangs, the caller's deadline handles it.
        if self._control_fd >= 0:
            with contextlib.suppress(BrokenPipeError, BlockingIOError):
                os.write(self._control_fd, command.encode() + b"\n")

    def kill_keeper(self) -> None:
        """Kill the keeper itself, as a last resort. Its engine dies with it; processes below the engine may not."""
        self._process.kill()

    def drain_log(self) -> None:
        """Read everything the engine has printed so far."""
        for _ in range(DRAIN_BYTES_MAX // READ_BYTES):
            if self._log_fd < 0 or not self._read_log():
                return

    def _read_log(self) -> bool:
        """Read once. False if there was nothing, or the pipe is closed."""
        try:
            data = os.read(self._log_fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._log_fd = self._close(self._log_fd)
        self._log.write(data)
        return bool(data)

    def _read_status(self) -> None:
        try:
            data = os.read(self._status_fd, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._status_fd = self._close(self._status_fd)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._child.reported(os.fsdecode(line).split(" "))

    def _collect(self) -> None:
        """The keeper has ended: read its last lines, reap it, release everything."""
        is_well = self._process.wait() == 0
        keepers.discard(self.pid)
        if self._status_fd >= 0:
            self._read_status()
        self.drain_log()
        self._log.flush()
        for fd in (self._control_fd, self._status_fd, self._log_fd, self._pidfd):
            self._close(fd)
        self._control_fd = self._status_fd = self._log_fd = self._pidfd = -1
        self._child.keeper_ended(is_well)

    def _close(self, fd: int) -> int:
        if fd >= 0:
            self._loop.remove_reader(fd)
            os.close(fd)
        return -1


def open_link(order: bytes, identity: str, child: Child) -> KeeperLink:
    """Start a keeper with this order; blocks for about a millisecond. Raises OSError if no process can be created."""
    # Never fork in a worker thread: the parent-death signal fires when the forking thread ends.
    if threading.current_thread() is not threading.main_thread():
        raise errors.GatewayBug("engines may be started from the main thread only")
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        order_fd = _memory_file(order)
        theirs.callback(os.close, order_fd)
        control_read, control_write = _pipe(theirs, ours)
        status_read, status_write = _pipe(ours, theirs)
        log_read, log_write = _pipe(ours, theirs)
        for fd in (control_write, status_read, log_read):
            os.set_blocking(fd, False)
        process = _start_keeper(order_fd, log_write, control_read, status_write, identity)
        link = KeeperLink(process, (control_write, status_read, log_read), child)
        ours.pop_all()
    return link


def _memory_file(content: bytes) -> int:
    """An anonymous file: an order may contain secrets, and may be larger than a pipe."""
    fd = os.memfd_create("greenroom-order", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    """The reading and the writing end of a new pipe, each to be closed with its owner's stack."""
    read_fd, write_fd = os.pipe()
    reader.callback(os.close, read_fd)
    writer.callback(os.close, write_fd)
    return read_fd, write_fd


def _start_keeper(
    order_fd: int, log_write: int, control_read: int, status_write: int, identity: str
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        # Isolated, without site-packages: it needs the standard library only, and starts in half the time.
        [sys.executable, "-I", "-S", "-X", "utf8", str(_KEEPER), str(control_read), str(status_write)],
        stdin=order_fd,
        stdout=log_write,
        stderr=log_write,
        pass_fds=(control_read, status_write),
        env=_keeper_environment(identity),
        start_new_session=True,
    )


def _keeper_environment(identity: str) -> Mapping[str, str]:
    """Its identity, and the library path that an interpreter may need to start."""
    libraries = os.environ.get("LD_LIBRARY_PATH")
    return {IDENTITY_VARIABLE: identity} | ({"LD_LIBRARY_PATH": libraries} if libraries else {})
