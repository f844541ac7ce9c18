"""A program with the bad habits of engines, one per mode. Prints `pid N` for every process it is made of.

python small_engine.py MODE [ARGUMENT]
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def stay(*, deaf: bool = False) -> None:
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say(f"pid {os.getpid()}")
    while True:
        time.sleep(3600)


def fork_setsid() -> None:
    """A grandchild in a session of its own that ignores SIGTERM."""
    if os.fork() == 0:
        os.setsid()
        stay(deaf=True)
    stay()


def daemon() -> None:
    """A grandchild whose parent has ended, as daemons are made."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            stay(deaf=True)
        os._exit(0)
    os.wait()
    stay()


def leave_behind(code: int) -> None:
    """Ends and leaves a grandchild, which is by then deaf to SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    left = os.fork()
    if left == 0:
        os.setsid()
        while True:
            time.sleep(3600)
    say(f"pid {left}")
    os._exit(code)


def listen(port: int) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        say("listening")
        stay()


def flood(lines: int) -> None:
    for number in range(lines):
        say(f"line {number}")
    stay()


def flood_for_ever() -> None:
    """Never stops printing, even if its output is not read any more."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        with contextlib.suppress(OSError):
            say("\n".join([f"pid {os.getpid()}"] + ["x" * 100] * 20))


def last_words(code: int) -> None:
    for number in range(500):
        say(f"line {number}")
    os.write(2, b"error: no such tensor")
    os._exit(code)


def usr1_ends() -> None:
    def end(number: int, frame: object) -> None:
        os.write(2, b"last words")
        os._exit(7)

    signal.signal(signal.SIGUSR1, end)
    stay(deaf=True)


def forget() -> None:
    """Becomes a program that has neither our identity nor a signal for the death of its parent."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, 0, 0, 0, 0)
    os.execve(sys.executable, [sys.executable, "-I", "-S", __file__, "deaf"], {})


def show() -> None:
    """What an engine finds when it starts."""
    ignored = [number.name for number in signal.valid_signals() if _is_ignored(number)]
    fds = sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1]
    say(f"cwd={os.getcwd()}")
    say(f"ignored={ignored}")
    say(f"fds={fds}")
    say(f"stdin={os.read(0, 1)!r}")
    say(f"session={os.getsid(0) == os.getpid()}")
    say(f"env={sorted(os.environ.items())}")


def _is_ignored(number: signal.Signals | int) -> bool:
    # The interpreter itself ignores these two.
    return signal.getsignal(number) == signal.SIG_IGN and number not in (signal.SIGPIPE, signal.SIGXFSZ)


def main() -> None:
    mode, *arguments = sys.argv[1:]
    modes = {
        "plain": stay,
        "deaf": lambda: stay(deaf=True),
        "fork-setsid": fork_setsid,
        "daemon": daemon,
        "leave-behind": lambda: leave_behind(int(arguments[0])),
        "exit": lambda: sys.exit(int(arguments[0])),
        "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "listen": lambda: listen(int(arguments[0])),
        "flood": lambda: flood(int(arguments[0])),
        "flood-for-ever": flood_for_ever,
        "last-words": lambda: last_words(int(arguments[0])),
        "usr1-ends": usr1_ends,
        "forget": forget,
        "show": show,
    }
    modes[mode]()


if __name__ == "__main__":
    main()
