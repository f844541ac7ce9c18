"""The gateway's end of a keeper: the pipes to it, the process itself, and the engine's log.

Owns four descriptors and one child process, and releases all of them when the keeper has ended. Decides nothing:
`spawn.py` does. Works by callbacks on the loop, so a cancelled task cannot lose anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from greenroom import errors
from greenroom.process.logs import LogRing
from greenroom.process.proc import IDENTITY_VARIABLE

_KEEPER = Path(__file__).with_name("keeper.py")
# One read per turn of the loop, so that an engine that floods its log cannot hold up the gateway.
READ_BYTES = 64 * 1024
# Bytes read when the engine has ended: more than a pipe holds.
DRAIN_BYTES_MAX = 1024 * 1024

# Keepers that are not reaped yet. `orphans.collect` must leave these alone.
running: set[int] = set()

Report = Callable[[list[str]], None]
Gone = Callable[[bool], None]


class KeeperLink:
    """One running keeper.

    `on_report` gets each of its lines as words. `on_gone` is called last and once, with True if the keeper exited by
    itself, which it does only after the whole tree has ended.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        fds: tuple[int, int, int],
        log: LogRing,
        on_report: Report,
        on_gone: Gone,
    ) -> None:
        self.pid = process.pid
        running.add(process.pid)
        self._process = process
        self._control_fd, self._status_fd, self._log_fd = fds
        self._pidfd = os.pidfd_open(process.pid)
        self._log = log
        self._on_report = on_report
        self._on_gone = on_gone
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
            self._on_report(os.fsdecode(line).split(" "))

    def _collect(self) -> None:
        """The keeper has ended: read its last lines, reap it, release everything."""
        ended_well = self._process.wait() == 0
        running.discard(self.pid)
        if self._status_fd >= 0:
            self._read_status()
        self.drain_log()
        self._log.flush()
        for fd in (self._control_fd, self._status_fd, self._log_fd, self._pidfd):
            self._close(fd)
        self._control_fd = self._status_fd = self._log_fd = self._pidfd = -1
        self._on_gone(ended_well)

    def _close(self, fd: int) -> int:
        if fd >= 0:
            self._loop.remove_reader(fd)
            os.close(fd)
        return -1


def open_link(order: bytes, identity: str, log: LogRing, on_report: Report, on_gone: Gone) -> KeeperLink:
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
        link = KeeperLink(process, (control_write, status_read, log_read), log, on_report, on_gone)
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
