"""The keeper: a small program between the gateway and one engine that ends the engine's whole process tree.

Owns one engine process and everything below it. It is a child subreaper, so a grandchild that calls setsid or forks
twice is re-parented to the keeper instead of init; the tree is gone exactly when the keeper has no child left. Imports
nothing of ours and never outlives the gateway: it holds a pipe from it, and when that pipe closes, as it does even
after `kill -9` of the gateway, it ends the tree and exits.

    python -I -S keeper.py CONTROL_FD STATUS_FD < ORDER       (stdout and stderr are the engine's log)

ORDER is what to run: strings that each end in a zero byte, `argc argv… envc key=value… cwd stopc stop…`, on stdin
because command lines are public. The keeper reads the lines `stop SECONDS` and `kill` from CONTROL. It writes to
STATUS, once each, `started PID START_TICKS` or `failed WHY`, then `exited CODE` or `signalled NUMBER`. Words rather
than JSON: importing a JSON reader would nearly double the time an engine waits for its keeper.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

# Time between SIGTERM and SIGKILL if no deadline was given: the gateway is gone, or the engine itself has ended.
TREE_TERM_S = 1.0
# SIGKILL is sent again for processes forked meanwhile: soon at first, then rarely, since a process stuck in the kernel
# can only be waited for.
KILL_AGAIN_S = 0.02
KILL_AGAIN_MAX_S = 1.0
# Bytes of one read from a pipe. A command is a dozen bytes.
READ_BYTES = 4096

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

# A terminal's Ctrl-C or a service manager's SIGTERM is for the gateway, which drains first and then sends stop.
DEAF_TO = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)

NEVER = float("inf")
NAME_IN_PS = "greenroom-keep"

prctl = ctypes.CDLL(None, use_errno=True).prctl
prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)


class StartFailed(Exception):
    """The program could not be executed. The text says why."""


class LaunchOrder:
    """What to run, read from the bytes the gateway wrote."""

    def __init__(self, raw: bytes) -> None:
        words = iter(os.fsdecode(raw).split("\0"))
        self.argv = [next(words) for _ in range(int(next(words)))]
        self.env = dict(next(words).split("=", 1) for _ in range(int(next(words))))
        self.cwd = next(words)
        self.stop_argv = [next(words) for _ in range(int(next(words)))]


class TreeKeeper:
    """A program that this one has started, and everything below it. `deaf_to` are signals that are for others."""

    def __init__(self, control_fd: int, status_fd: int, deaf_to: tuple[signal.Signals, ...] = DEAF_TO) -> None:
        self._control_fd = control_fd
        self._status_fd = status_fd
        self._wake_fd = wake_at_signals(deaf_to)
        self._poll = select.poll()
        for fd in (control_fd, self._wake_fd):
            self._poll.register(fd, select.POLLIN)
        # 0 before the start and after the reap: a reaped pid may already belong to another process.
        self._pid = 0
        self._is_ending = False
        self._kill_at = NEVER
        self._kill_again_s = KILL_AGAIN_S

    # --- what each kind does in its own way --------------------------------------------------------------------------

    def _hear(self, received: bytes) -> None:
        """Words from the other end of the control pipe; none at all when it has closed."""
        raise NotImplementedError

    def _note_end(self, pid: int, code: int) -> None:
        """A child was reaped."""
        raise NotImplementedError

    def _waits_on(self) -> bool:
        """True if children that are left are waited for."""
        return True

    def _become(self, argv: list[str], keeper_pid: int, error_fd: int) -> None:
        """In the forked child: exec the program, or write to `error_fd` why not."""
        raise NotImplementedError

    # --- the loop ----------------------------------------------------------------------------------------------------

    def _launch(self, argv: list[str]) -> int:
        """Start a program and return its pid once exec has succeeded. Raises StartFailed."""
        error_read, error_write = os.pipe()
        keeper_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._become(argv, keeper_pid, error_write)
            finally:
                os._exit(127)
        os.close(error_write)
        # The writing end closes on exec: no bytes means that the program runs.
        with open(error_read, "rb") as errors:
            failure = os.fsdecode(errors.read())
        if failure:
            os.waitpid(pid, 0)
            raise StartFailed(failure)
        return pid

    def _keep(self) -> None:
        while self._reap():
            self._kill_if_due()
            self._wait()

    def _wait(self) -> None:
        """Sleep until a child ends, the other end says something or goes away, or it is time to kill."""
        left_s = max(0.0, self._kill_at - time.monotonic())
        # Rounded up: waking early would spin until the deadline.
        timeout_ms = None if left_s == NEVER else int(left_s * 1000) + 1
        for fd, _ in self._poll.poll(timeout_ms):
            received = os.read(fd, READ_BYTES)
            if fd == self._control_fd:
                if not received:
                    self._poll.unregister(fd)
                self._hear(received)

    def _tell(self, line: str) -> None:
        # The other end may be gone; the program must still be ended.
        with contextlib.suppress(OSError):
            os.write(self._status_fd, os.fsencode(line.replace("\n", " ")) + b"\n")

    def _tell_end(self, code: int) -> None:
        self._tell(f"exited {code}" if code >= 0 else f"signalled {-code}")

    def _end_tree(self, term_s: float) -> None:
        """Send SIGTERM to the whole tree, and SIGKILL to what is left after `term_s`."""
        self._is_ending = True
        signal_tree(signal.SIGTERM)
        self._kill_at = min(self._kill_at, time.monotonic() + term_s)

    def _kill_if_due(self) -> None:
        if time.monotonic() < self._kill_at:
            return
        signal_tree(signal.SIGKILL)
        self._kill_at = time.monotonic() + self._kill_again_s
        self._kill_again_s = min(self._kill_again_s * 2, KILL_AGAIN_MAX_S)

    def _reap(self) -> bool:
        """Reap every child that has ended, forked or adopted. False if nothing is left to wait for."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return self._waits_on()
            self._note_end(pid, os.waitstatus_to_exitcode(status))


class Keeper(TreeKeeper):
    """One engine, from its start to the end of the last process below it."""

    def __init__(self, control_fd: int, status_fd: int, order: LaunchOrder) -> None:
        super().__init__(control_fd, status_fd)
        self._order = order
        self._unread = b""
        self._stop_pid = 0

    def run(self) -> None:
        """Start the engine, follow commands, and return when nothing of its tree is left."""
        try:
            self._pid = self._launch(self._order.argv)
        except StartFailed as failure:
            self._tell(f"failed {failure}")
            return
        self._tell(f"started {self._pid} {start_ticks(self._pid)}")
        self._keep()

    def _become(self, argv: list[str], keeper_pid: int, error_fd: int) -> None:
        """It leads a session of its own."""
        place = argv[0]
        try:
            os.setsid()
            stop_ignoring_signals()
            end_with(keeper_pid)
            if self._order.cwd:
                place = self._order.cwd
                os.chdir(self._order.cwd)
                place = argv[0]
            os.execvpe(argv[0], argv, self._order.env)
        except OSError as error:
            os.write(error_fd, os.fsencode(f"{error.strerror}: {place!r}"))
        except BaseException as error:
            os.write(error_fd, os.fsencode(f"{error}: {place!r}"))

    # --- what the gateway says ---------------------------------------------------------------------------------------

    def _hear(self, received: bytes) -> None:
        if not received:
            self._end_tree(TREE_TERM_S)
            return
        *lines, self._unread = (self._unread + received).split(b"\n")
        for line in lines:
            self._obey(line.decode().split())

    def _obey(self, words: list[str]) -> None:
        if words[0] == "stop":
            self._stop_engine(float(words[1]))
        elif words[0] == "kill":
            self._kill_at = 0.0

    # --- the ladder --------------------------------------------------------------------------------------------------

    def _stop_engine(self, term_s: float) -> None:
        """Ask the engine to stop; kill the tree after `term_s`. If called again, the nearer deadline counts."""
        self._kill_at = min(self._kill_at, time.monotonic() + term_s)
        if self._is_ending or not self._pid:
            return
        self._is_ending = True
        if not self._run_stop_command():
            self._term_engine()

    def _run_stop_command(self) -> bool:
        argv = [word.replace("${PID}", str(self._pid)) for word in self._order.stop_argv]
        if not argv:
            return False
        try:
            self._stop_pid = self._launch(argv)
        except StartFailed as failure:
            print(f"greenroom: the stop command could not be started: {failure}", file=sys.stderr, flush=True)
        return bool(self._stop_pid)

    def _term_engine(self) -> None:
        # It leads a session and so a process group, and it is not reaped yet, so its pid cannot have been reused.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGTERM)

    # --- children that ended -----------------------------------------------------------------------------------------

    def _note_end(self, pid: int, code: int) -> None:
        if pid == self._pid:
            self._pid = 0
            self._tell_end(code)
            self._end_tree(TREE_TERM_S)
        elif pid == self._stop_pid:
            self._stop_pid = 0
            # A stop command that failed has not stopped the engine.
            if code != 0 and self._pid:
                self._term_engine()


def end_with(keeper_pid: int) -> None:
    """Second line of defence of a forked child: it is killed if the keeper dies, or ends here if that is dead."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    set_for_this_process(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper_pid:
        os._exit(127)


def stop_ignoring_signals() -> None:
    """Reset signals that the keeper, the interpreter or a shell ignores: exec would keep them ignored."""
    for number in signal.valid_signals():
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


# --- the tree, as /proc shows it ------------------------------------------------------------------------------------


def stat_of(pid: int) -> tuple[int, int]:
    """The parent and the start time of a process. Raises OSError if it does not exist."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The name in parentheses may itself hold spaces and parentheses.
        fields = file.read().rpartition(b")")[2].split()
    return int(fields[1]), int(fields[19])


def start_ticks(pid: int) -> int:
    try:
        return stat_of(pid)[1]
    except OSError:
        return 0


def descendants() -> list[tuple[int, int]]:
    """(pid, start time) of every process below this one, parents before their children."""
    children: dict[int, list[tuple[int, int]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            # It may end meanwhile.
            with contextlib.suppress(OSError):
                parent, ticks = stat_of(int(name))
                children.setdefault(parent, []).append((int(name), ticks))
    below = children.get(os.getpid(), [])
    # The list grows while it is iterated; every pid has one parent, so this ends.
    for pid, _ in below:
        below += children.pop(pid, [])
    return below


def signal_tree(number: signal.Signals) -> None:
    for pid, ticks in descendants():
        # It has ended, or runs as another user.
        with contextlib.suppress(OSError):
            signal_exactly(pid, ticks, number)


def signal_exactly(pid: int, ticks: int, number: signal.Signals) -> None:
    """Signal the process with this pid and start time, never a later process with the same pid."""
    pidfd = os.pidfd_open(pid)
    try:
        if stat_of(pid)[1] == ticks:
            signal.pidfd_send_signal(pidfd, number)
    finally:
        os.close(pidfd)


# --- the program ----------------------------------------------------------------------------------------------------


def wake_at_signals(deaf_to: tuple[signal.Signals, ...]) -> int:
    """Ignore these signals; return a descriptor that becomes readable when a child ends."""
    for number in deaf_to:
        signal.signal(number, signal.SIG_IGN)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return wake_read


def read_order() -> LaunchOrder:
    """Read the order from stdin, and put /dev/null there for the engine to inherit."""
    with open(0, "rb", closefd=False) as stdin:
        order = LaunchOrder(stdin.read())
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return order


def set_for_this_process(option: int, value: int) -> None:
    if prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def main() -> None:
    control_fd, status_fd = int(sys.argv[1]), int(sys.argv[2])
    # The engine must not inherit these: a closed pipe is how each side learns that the other is gone.
    for fd in (control_fd, status_fd):
        os.set_inheritable(fd, False)
    os.set_blocking(status_fd, False)
    set_for_this_process(PR_SET_CHILD_SUBREAPER, 1)
    order = read_order()
    with open("/proc/self/comm", "w") as name:
        name.write(NAME_IN_PS)
    Keeper(control_fd, status_fd, order).run()


if __name__ == "__main__":
    main()
