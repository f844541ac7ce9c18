"""Runs a gateway in the foreground, for `serve` and `demo`.

Owns the event loop, the signals and the messages for a failed start. SIGTERM and SIGINT end it, a second one without
waiting for running answers; SIGHUP reloads the configuration. As process 1 of a container it reaps orphans.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from greenroom.cli import screen
from greenroom.cli.failures import CommandFailed, ExitStatus, OutputLost
from greenroom.errors import GreenroomError

if TYPE_CHECKING:
    from greenroom.app import App
    from greenroom.config.schema import Config

# Every connection is an open file; many systems allow 1024 by default.
OPEN_FILES_WANTED: Final = 65_536
LEAVE_MAX_S: Final = 5.0
# How long a thread that computes keeps the loop waiting; by default five times as long, for each of its reads.
SWITCH_INTERVAL_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What to serve, and the greeting once it is. `reread` loads the configuration again for a reload, with the command
    line's overrides applied."""

    config: Config
    greet: Callable[[App], None]
    path: Path | None = None
    reread: Callable[[], Config] | None = None
    warnings: Sequence[str] = ()


def serve(plan: ServePlan) -> int:
    """Serve until a signal ends it. Raises CommandFailed or ConfigError if it cannot start."""
    import uvloop

    from greenroom.telemetry import logs

    logs.setup(plan.config.log.level.value, plan.config.log.format.value)
    for warning in plan.warnings:
        logs.get_logger("config").warning(warning)
    _allow_open_files()
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    try:
        return runner.run(_serve(plan))
    finally:
        # Everything is closed. To tidy up the loop needs a descriptor, which there may be none for: uvloop raises both.
        with contextlib.suppress(OSError, RuntimeError):
            runner.close()


async def _serve(plan: ServePlan) -> int:
    signals = Signals()
    _collect_orphans()
    await _begin_to_look_up()
    try:
        return await _serve_until_ended(plan, signals)
    finally:
        signals.ignore()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


async def _serve_until_ended(plan: ServePlan, signals: Signals) -> int:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # What a start makes stays: there is no garbage to look for.
    gc.disable()
    from greenroom.app import App

    try:
        app = await App.start(plan.config, plan.path, plan.reread)
    except OSError as error:
        raise CommandFailed(why_not_started(error, plan.config)) from error
    except asyncio.CancelledError:
        # A signal came before the gateway had started.
        return ExitStatus.OK
    finally:
        gc.enable()
    signals.app = app
    try:
        plan.greet(app)
    except (OSError, OutputLost):
        # The greeting cannot be written (`| head`, a full disk): serve all the same.
        screen.hush()
    await app.closed.wait()
    _leave_in_time()
    return ExitStatus.OK


async def _begin_to_look_up() -> None:
    """Have the loop start the threads in which it looks up names: it aborts the process where it is given none."""
    plain = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    await asyncio.get_running_loop().getnameinfo(("127.0.0.1", 0), plain)


def _collect_orphans() -> None:
    """Reap orphans from now on, if this process adopts them."""
    from greenroom.process import orphans, spawn

    loop = asyncio.get_running_loop()
    if orphans.adopts():
        look = partial(orphans.collect, spawn.keepers)
        signal.signal(signal.SIGCHLD, lambda number, frame: loop.call_soon_threadsafe(look))
        look()


def _leave_in_time() -> None:
    """End the process soon: everything is released, and a thread or a socket that hangs must not keep it."""

    def leave(number: int, frame: object) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(ExitStatus.OK)

    # A timer of the kernel needs no thread, which there may be none of.
    signal.signal(signal.SIGALRM, leave)
    signal.setitimer(signal.ITIMER_REAL, LEAVE_MAX_S)


class Signals:
    """Passes signals on to the gateway. Before it has started, SIGTERM cancels the start and SIGHUP does nothing. The
    handlers are Python's, not the loop's: a loop removes its own when it closes, and a signal a moment later would end
    the process as if it had failed."""

    def __init__(self) -> None:
        self.app: App | None = None
        self._loop = asyncio.get_running_loop()
        self._starting = asyncio.current_task()
        self._reload: asyncio.Task[None] | None = None
        self._asked_again = False
        for number in _REACTIONS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self._loop.call_soon_threadsafe(_REACTIONS[signal.Signals(number)], self)

    def ignore(self) -> None:
        """Ignore all signals: the process is about to end by itself."""
        for number in _REACTIONS:
            signal.signal(number, signal.SIG_IGN)

    def end(self) -> None:
        if self.app is not None:
            self.app.shut_down()
        elif self._starting is not None:
            self._starting.cancel()

    def read_again(self) -> None:
        """Reload. If a reload is under way it may have read an older file, so one more follows, however many ask."""
        if self._reload is not None:
            self._asked_again = True
        elif self.app is not None:
            self._reload = self._loop.create_task(self._reload_until_current(self.app), name="reload")

    async def _reload_until_current(self, app: App) -> None:
        self._asked_again = True
        while self._asked_again and not app.is_draining:
            self._asked_again = False
            await _reload(app)
        self._reload = None


_REACTIONS: Final[Mapping[signal.Signals, Callable[[Signals], None]]] = {
    signal.SIGTERM: Signals.end,
    signal.SIGINT: Signals.end,
    signal.SIGHUP: Signals.read_again,
}


async def _reload(app: App) -> None:
    from greenroom.telemetry.logs import get_logger

    try:
        await app.reload()
    except GreenroomError as error:
        get_logger("config").error("not reloaded, nothing was changed", error=error.message)
    except Exception as bug:
        # Nothing awaits this task, so it must be logged here.
        get_logger("config").bug("not reloaded", bug)


# What a disk says, and no socket.
_OF_DISKS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def why_not_started(error: OSError, config: Config) -> str:
    """One line that says why the gateway did not start, and what to do."""
    server = config.server
    where = f"{server.host}:{server.port}"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is taken, perhaps by another gateway (`greenroom ps`); choose another port with --port"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return f"{server.host} is not an address of this machine; choose another with --host"
    if error.errno in (errno.EACCES, errno.EPERM) and error.filename is None:
        return f"this user may not listen on {where}; choose a port above 1023 with --port"
    if error.errno in _OF_DISKS:
        where = str(config.state_dir)
    return f"{error.filename or where}: {error.strerror or error}"


def shown_url(app: App) -> str:
    """The URL to use on this machine: loopback, if the gateway listens on all addresses."""
    address = app.edge.addresses[0]
    for everywhere, loopback in (("0.0.0.0:", "127.0.0.1:"), ("[::]:", "[::1]:")):
        if address.startswith(everywhere):
            address = loopback + address.removeprefix(everywhere)
    return f"http://{address}"


def _allow_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_WANTED if hard == resource.RLIM_INFINITY else min(OPEN_FILES_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
