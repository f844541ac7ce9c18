"""Runs the program of `greenroom lease`, so that nothing of it outlives its wrapper.

Owns the program's process tree, as `keeper.py` owns an engine's: it is a child subreaper, so processes started by a
shell or launcher in between are found too. It holds a pipe from the wrapper, and when that pipe closes, as it does even
after `kill -9` of the wrapper, it sends SIGTERM to the tree and kills what is left. Unlike an engine's keeper it leaves
the program in the terminal's process group, with its own input and output. A program that ends by itself may leave
others running, as under any shell.

    python -P -m greenroom.process.program_keeper CONTROL_FD STATUS_FD TERM_S PROGRAM ARGUMENTS…

It writes `started PID` or `failed ERRNO` to STATUS, then `exited CODE` or `signalled NUMBER`. It reads `seen` from
CONTROL once the wrapper has opened a pidfd (the program is not reaped before, so its pid is not reused), then `end`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
import time
from typing import NoReturn

from greenroom.process import keeper

# Signals for the program, or for the wrapper, which passes them on. A terminal sends some to the whole group.
DEAF_TO = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
SEEN = b"seen\n"
END = b"end\n"
# Ignored by the Python interpreter.
_PYTHONS_OWN = (signal.SIGPIPE, signal.SIGXFSZ)


class ProgramKeeper:
    def __init__(self, control_fd: int, status_fd: int, term_s: float) -> None:
        self._control_fd = control_fd
        self._status_fd = status_fd
        self._term_s = term_s
        self._pid = 0
        self._is_ending = False
        self._kill_at = keeper.NEVER
        self._kill_again_s = keeper.KILL_AGAIN_S
        self._poll = select.poll()

    def run(self, argv: list[str]) -> None:
        """Run the program, and return when it has ended; if it was told to end, when its whole tree is gone."""
        heeded = _be_deaf()
        wake_fd = _wake_at_ended_children()
        for fd in (wake_fd, self._control_fd):
            self._poll.register(fd, select.POLLIN)
        self._pid, failure = _launched(argv, heeded)
        self._tell(f"failed {failure}" if failure else f"started {self._pid}")
        _let_go_of_input_and_output()
        if not failure:
            self._heed(os.read(self._control_fd, len(SEEN)))
        while not failure and self._reap():
            self._kill_if_due()
            self._wait(wake_fd)

    def _wait(self, wake_fd: int) -> None:
        left_s = max(0.0, self._kill_at - time.monotonic())
        timeout_ms = None if left_s == keeper.NEVER else int(left_s * 1000) + 1
        for fd, _ in self._poll.poll(timeout_ms):
            said = os.read(fd, keeper.READ_BYTES)
            if fd != wake_fd:
                self._heed(said)

    def _heed(self, said: bytes) -> None:
        if not said:
            self._poll.unregister(self._control_fd)
        if said != SEEN:
            self._end_tree()

    def _end_tree(self) -> None:
        if not self._is_ending:
            self._is_ending = True
            keeper.signal_tree(signal.SIGTERM)
            self._kill_at = time.monotonic() + self._term_s

    def _kill_if_due(self) -> None:
        """Send SIGKILL repeatedly: processes may have been forked meanwhile."""
        if time.monotonic() >= self._kill_at:
            keeper.signal_tree(signal.SIGKILL)
            self._kill_at = time.monotonic() + self._kill_again_s
            self._kill_again_s = min(self._kill_again_s * 2, keeper.KILL_AGAIN_MAX_S)

    def _reap(self) -> bool:
        """Reap every child that has ended. False if nothing is left to wait for."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return self._is_ending or self._pid != 0
            if pid == self._pid:
                self._pid = 0
                code = os.waitstatus_to_exitcode(status)
                self._tell(f"exited {code}" if code >= 0 else f"signalled {-code}")

    def _tell(self, line: str) -> None:
        # The wrapper may be gone; the program must still be ended.
        with contextlib.suppress(OSError):
            os.write(self._status_fd, line.encode() + b"\n")


def _be_deaf() -> list[signal.Signals]:
    """Ignore signals for others. Returns those not ignored before: `nohup` must still apply to the program."""
    heeded = [number for number in DEAF_TO if signal.getsignal(number) != signal.SIG_IGN]
    for number in DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    return heeded


def _wake_at_ended_children() -> int:
    """A descriptor that becomes readable when a child ends."""
    wake_read, wake_write = os.pipe()
    for fd in (wake_read, wake_write):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return wake_read


def _launched(argv: list[str], heeded: list[signal.Signals]) -> tuple[int, int]:
    """The pid of the program once exec has succeeded, and 0; or a pid and the errno of the failure."""
    error_read, error_write = os.pipe()
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(argv, heeded, me, error_write)
    os.close(error_write)
    # The writing end closes on exec: no bytes means that the program runs.
    with open(error_read, "rb") as errors:
        failure = errors.read()
    if failure:
        os.waitpid(pid, 0)
    return pid, int(failure or 0)


def _become(argv: list[str], heeded: list[signal.Signals], keeper_pid: int, error_fd: int) -> NoReturn:
    """In the forked child: exec the program, or write the errno to `error_fd`."""
    try:
        for number in (*heeded, *_PYTHONS_OWN, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # The second line of defence: kill the program if the keeper dies.
        keeper.set_for_this_process(keeper.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == keeper_pid:
            os.execvp(argv[0], argv)
    except OSError as error:
        os.write(error_fd, str(error.errno).encode())
    except ValueError:
        # Python's own word for a program without a name.
        os.write(error_fd, str(errno.ENOENT).encode())
    finally:
        os._exit(127)


def _let_go_of_input_and_output() -> None:
    """Close stdin, stdout and stderr: readers of the program must see them close when it ends."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.close(nothing)


def main() -> None:
    control_fd, status_fd, term_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    for fd in (control_fd, status_fd):
        os.set_inheritable(fd, False)
    keeper.set_for_this_process(keeper.PR_SET_CHILD_SUBREAPER, 1)
    ProgramKeeper(control_fd, status_fd, term_s).run(sys.argv[4:])


if __name__ == "__main__":
    main()
