"""Runs a program under a lease, for `greenroom lease`.

Owns the program's life: signals are passed on to it, and it is stopped with all its descendants when the lease is lost
or overdue. Its keeper (`process/program_keeper.py`) ends them all even if this process is killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any, Final

from greenroom.cli import screen
from greenroom.cli.failures import CommandFailed
from greenroom.leases.client import LeaseHandle
from greenroom.process import keeper, program_keeper

# The lease is checked this often while the program runs.
LOOK_EVERY_S: Final = 0.5
# How long the program has between SIGTERM and SIGKILL when its lease is lost or overdue.
TERM_GRACE_S: Final = 10.0
# Longer than any takes to end that can be killed.
KILLED_WITHIN_S: Final = 10.0
# The exit statuses of shells for a program that cannot be run; they add 128 to the signal that ended one.
NOT_RUNNABLE, NOT_FOUND, BY_SIGNAL = 126, 127, 128
FORWARDED: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGQUIT)
# A terminal sends these to its whole foreground group, the program included.
_FROM_TERMINAL: Final = frozenset({signal.SIGINT, signal.SIGQUIT})


class LeasedProgram:
    """One program under one lease."""

    def __init__(self, command: list[str], held: LeaseHandle, term_grace_s: float = TERM_GRACE_S) -> None:
        self._command = command
        self._held = held
        self._term_grace_s = term_grace_s
        self._is_ending = False
        self._is_warned = False
        # Signals that come before the program has started are kept for it.
        self._pidfd: int | None = None
        self._early: list[int] = []

    def run(self) -> int:
        """Run the program to its end. Returns its exit status, as a shell would."""
        try:
            return self._run()
        except OSError as error:
            screen.fail(CommandFailed(f"{self._command[0]} cannot be run: {error.strerror}"))
            return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUNNABLE

    def _run(self) -> int:
        # If the keeper is killed, this process adopts the program's descendants.
        keeper.set_for_this_process(keeper.PR_SET_CHILD_SUBREAPER, 1)
        with contextlib.ExitStack() as stack:
            for number in FORWARDED:
                # A signal that is ignored here (`nohup`) stays ignored for the program too.
                if (before := signal.getsignal(number)) != signal.SIG_IGN:
                    stack.callback(signal.signal, number, before)
                    signal.signal(number, self._forward)
            self._start(stack)
            return self._waited_for()

    def _start(self, stack: contextlib.ExitStack) -> None:
        """Raises OSError if it cannot be run."""
        held = self._held
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": held.cuda_visible_devices,
            "GREENROOM_LEASE_ID": held.id,
            "GREENROOM_LEASE_TOKEN": str(held.token),
        }
        (control_read, self._control_fd), (status_read, status_write) = os.pipe(), os.pipe()
        self._status = stack.enter_context(os.fdopen(status_read, "rb"))
        stack.callback(os.close, self._control_fd)
        argv = [
            sys.executable,
            "-P",
            "-m",
            program_keeper.__name__,
            str(control_read),
            str(status_write),
            str(self._term_grace_s),
        ]
        try:
            self._keeper = subprocess.Popen(
                [*argv, *self._command], env=environment, pass_fds=(control_read, status_write)
            )
        finally:
            os.close(control_read)
            os.close(status_write)
        match self._status.readline().split():
            case [b"started", pid]:
                self._pidfd = os.pidfd_open(int(pid))
                stack.callback(os.close, self._pidfd)
                os.write(self._control_fd, program_keeper.SEEN)
                while self._early:
                    signal.pidfd_send_signal(self._pidfd, self._early.pop(0))
            case [b"failed", number]:
                self._keeper.wait()
                raise OSError(int(number), os.strerror(int(number)))
            case _:
                raise OSError(self._keeper.wait(), "its keeper has ended")

    def _waited_for(self) -> int:
        pidfd = os.pidfd_open(self._keeper.pid)
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        try:
            while not ended.poll(LOOK_EVERY_S * 1000):
                self._look()
        finally:
            os.close(pidfd)
        self._keeper.wait()
        return self._status_of_program()

    def _status_of_program(self) -> int:
        match self._status.readline().split():
            case [b"exited", code]:
                return int(code)
            case [b"signalled", number]:
                return BY_SIGNAL + int(number)
            case _:
                # The keeper was killed, and the program with it; its descendants are ours now.
                _end_descendants()
                return BY_SIGNAL + signal.SIGKILL

    def _look(self) -> None:
        """End the program if its lease is lost or overdue; warn it once if it is recalled."""
        recall_in_s = self._held.recall_in_s
        if self._is_ending:
            return
        if self._held.is_over:
            self._end("the lease is lost")
        elif recall_in_s is not None and recall_in_s <= 0:
            self._end("the lease was recalled and its time is over")
        elif recall_in_s is not None and not self._is_warned:
            self._is_warned = True
            screen.note(f"greenroom: the lease is recalled; {self._command[0]} is ended in {recall_in_s:.0f} s")

    def _end(self, why: str) -> None:
        """End the program and its descendants: a shell or a launcher does not pass signals on."""
        screen.note(f"greenroom: {why}; ending {self._command[0]}")
        self._is_ending = True
        with contextlib.suppress(BrokenPipeError):
            os.write(self._control_fd, program_keeper.END)

    def _forward(self, number: int, frame: Any) -> None:
        if number in _FROM_TERMINAL and _is_in_front():
            return
        if self._pidfd is None:
            self._early.append(number)
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)


def _end_descendants() -> None:
    """Kill what this process adopted, and wait for its end: what adopts it next may never do so."""
    deadline = time.monotonic() + KILLED_WITHIN_S
    while time.monotonic() < deadline:
        keeper.signal_tree(signal.SIGKILL)
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            time.sleep(0.01)


def _is_in_front() -> bool:
    """True in the foreground of a terminal, which then signals the program itself."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False
