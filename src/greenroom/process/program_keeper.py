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

import errno
import os
import signal
import sys

from greenroom.process import keeper

# Signals for the program, or for the wrapper, which passes them on. A terminal sends some to the whole group.
DEAF_TO = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
SEEN = b"seen\n"
END = b"end\n"
# Ignored by the Python interpreter.
_PYTHONS_OWN = (signal.SIGPIPE, signal.SIGXFSZ)


class ProgramKeeper(keeper.TreeKeeper):
    def __init__(self, control_fd: int, status_fd: int, term_s: float) -> None:
        # What is ignored already, as under `nohup`, stays ignored for the program too.
        self._heeded = [number for number in DEAF_TO if signal.getsignal(number) != signal.SIG_IGN]
        super().__init__(control_fd, status_fd, DEAF_TO)
        self._term_s = term_s

    def run(self, argv: list[str]) -> None:
        """Run the program, and return when it has ended; if it was told to end, when its whole tree is gone."""
        try:
            self._pid = self._launch(argv)
        except keeper.StartFailed as failure:
            self._tell(f"failed {failure}")
            return
        self._tell(f"started {self._pid}")
        _let_go_of_input_and_output()
        self._hear(os.read(self._control_fd, len(SEEN)))
        self._keep()

    def _hear(self, received: bytes) -> None:
        if received != SEEN and not self._is_ending:
            self._end_tree(self._term_s)

    def _waits_on(self) -> bool:
        return self._is_ending or self._pid != 0

    def _note_end(self, pid: int, code: int) -> None:
        if pid == self._pid:
            self._pid = 0
            self._tell_end(code)

    def _become(self, argv: list[str], keeper_pid: int, error_fd: int) -> None:
        """Why not is said by its errno."""
        try:
            for number in (*self._heeded, *_PYTHONS_OWN, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            keeper.end_with(keeper_pid)
            os.execvp(argv[0], argv)
        except OSError as error:
            os.write(error_fd, str(error.errno).encode())
        except ValueError:
            # Python's own word for a program without a name.
            os.write(error_fd, str(errno.ENOENT).encode())


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
