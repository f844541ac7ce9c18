"""`greenroom lease`: run a program with memory on GPUs that is its own while it runs.

Owns the program's life: it starts when the memory is held, hears the signals that come here, and is ended when the
lease is lost or overdue. The lease is this process's, so that the memory comes back at once however it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from greenroom.cli import screen
from greenroom.cli.descendants import Descendants
from greenroom.cli.failures import CommandFailed, NoGateway, WrongUsage
from greenroom.errors import StoreDown

if TYPE_CHECKING:
    from greenroom.leasing_client import LeaseHandle

NAME = "lease"
HELP = "Run a program with memory on GPUs of its own; idle models leave for it."
# The lease is looked at this often while the program runs.
LOOK_EVERY_S: Final = 0.5
# How long the program has between SIGTERM and SIGKILL when its lease is lost or overdue.
TERM_GRACE_S: Final = 10.0
# What shells answer for a program that cannot be run, and add to the number of the signal that ended one.
NOT_RUNNABLE, NOT_FOUND, BY_SIGNAL = 126, 127, 128
FORWARDED: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGQUIT)
# At a terminal these go to everybody in front of it, the program included.
_FROM_TERMINAL: Final = frozenset({signal.SIGINT, signal.SIGQUIT})
_PR_SET_PDEATHSIG: Final = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, required=True, metavar="N", help="memory on each GPU")
    parser.add_argument("--gpus", type=int, default=1, metavar="K", help="on so many GPUs, all or nothing (default: 1)")
    parser.add_argument("--device", action="append", default=[], metavar="GPU", help="only this one; may be repeated")
    parser.add_argument("--name", help="what it is for (default: the program's name)")
    parser.add_argument("--priority", default="normal", help="high, normal, low or a number (default: normal)")
    parser.add_argument("--preemptible", action="store_true", help="it may be asked to leave for the more urgent")
    parser.add_argument("--grace-s", type=float, default=30.0, metavar="S", help="how long it may stay then")
    parser.add_argument("--ttl-s", type=float, default=30.0, metavar="S", help="lost when not heard of for so long")
    parser.add_argument("--wait", type=float, default=60.0, metavar="S", help="how long to wait for it (default: 60)")
    parser.add_argument("--url", help="the gateway's address, or a redis:// one (default: $GREENROOM_LEASES, …_URL)")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the API key")
    parser.add_argument("command", nargs="+", help="after `--`: the program and its arguments")


def run(args: argparse.Namespace) -> int:
    from greenroom.leasing_client.handle import lease

    wanted = lease(
        args.mib,
        args.gpus,
        args.name or os.path.basename(args.command[0]),
        args.priority,
        preemptible=args.preemptible,
        wait_s=args.wait,
        devices=args.device,
        grace_s=args.grace_s,
        ttl_s=args.ttl_s,
        url=args.url,
        api_key=_key(args.api_key_env),
    )
    began = time.monotonic()
    screen.note(f"waiting for {args.mib:,} MiB on {args.gpus} GPU{'s' if args.gpus > 1 else ''}")
    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(wanted)
        except StoreDown as down:
            raise NoGateway(down.message) from None
        waited = screen.seconds(time.monotonic() - began)
        screen.note(f"holds {', '.join(held.devices)} after {waited}; see `greenroom leases`")
        return Program(args.command, held).run()


def _key(name: str | None) -> str | None:
    if name is not None and not os.environ.get(name):
        raise WrongUsage(f"the environment variable {name} is not set")
    return None if name is None else os.environ[name].strip()


class Program:
    """The program that runs under the lease."""

    def __init__(self, command: list[str], held: LeaseHandle, term_grace_s: float = TERM_GRACE_S) -> None:
        self._command = command
        self._held = held
        self._term_grace_s = term_grace_s
        self._kill_at: float | None = None
        self._is_warned = False

    def run(self) -> int:
        """Its exit status, as a shell would say it."""
        try:
            return self._run()
        except OSError as error:
            screen.fail(CommandFailed(f"{self._command[0]} cannot be run: {error.strerror}"))
            return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUNNABLE

    def _run(self) -> int:
        # Signals that come before there is a program to hear them are kept for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        try:
            self._process = self._started()
            before = {number: signal.signal(number, self._forward) for number in FORWARDED}
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        self._all = Descendants(self._process.pid)
        try:
            return self._waited_for()
        finally:
            self._all.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _started(self) -> subprocess.Popen[bytes]:
        held = self._held
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": held.cuda_visible_devices,
            "GREENROOM_LEASE_ID": held.id,
            "GREENROOM_LEASE_TOKEN": str(held.token),
        }
        return subprocess.Popen(self._command, env=environment, preexec_fn=_in_child(os.getpid()))

    def _waited_for(self) -> int:
        pidfd = os.pidfd_open(self._process.pid)
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        try:
            while not ended.poll(LOOK_EVERY_S * 1000):
                self._look()
        finally:
            os.close(pidfd)
        self._end_rest()
        status = self._process.wait()
        return BY_SIGNAL - status if status < 0 else status

    def _look(self) -> None:
        """End the program if its memory is no longer its own: first in kindness, then not."""
        recall_in_s = self._held.recall_in_s
        if self._kill_at is not None:
            if time.monotonic() >= self._kill_at:
                self._all.send(signal.SIGKILL)
        elif self._held.is_over:
            self._end("the lease is lost")
        elif recall_in_s is not None and recall_in_s <= 0:
            self._end("the lease was recalled and its time is over")
        elif recall_in_s is not None and not self._is_warned:
            self._is_warned = True
            screen.note(f"greenroom: the lease is recalled; {self._command[0]} is ended in {recall_in_s:.0f} s")

    def _end(self, why: str) -> None:
        screen.note(f"greenroom: {why}; ending {self._command[0]}")
        self._kill_at = time.monotonic() + self._term_grace_s
        # Not the program alone: a shell or a launcher does not pass it on to what uses the memory.
        self._all.send(signal.SIGTERM)

    def _end_rest(self) -> None:
        """What the program started and left behind when it was made to end has no lease either."""
        if self._kill_at is not None and not self._all.wait(self._kill_at):
            self._all.send(signal.SIGKILL)

    def _forward(self, number: int, frame: Any) -> None:
        if number not in _FROM_TERMINAL or not _is_in_front():
            self._process.send_signal(number)


def _is_in_front() -> bool:
    """Whether a terminal is in front of us, which then sends its signals to the program itself."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


def _in_child(parent: int) -> Callable[[], None]:
    """The program ends with us, also if we are killed: without us nobody would renew its lease."""
    import ctypes

    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)

    return prepare
