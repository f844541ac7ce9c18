"""A real Redis for tests, on a private port of this machine, that can be killed, stopped and brought back empty.

Its wall clock can be set while it runs, by libfaketime. Its other clocks stay as they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.ports import free_port
from tests.waiting import PATIENCE_S, until_now

_STARTS_MAX = 5
_PR_SET_PDEATHSIG = 1
_SHARED = Path("/dev/shm")
MISSING = "redis-server is needed and was not found. Type: apt-get install redis-server (or valkey-server)"

NO_CLOCK = "libfaketime is needed and was not found. Type: apt-get install libfaketime"


def program() -> str:
    """The server there is. Its absence is a failure: these tests are never skipped."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    assert found, MISSING
    return found


class RedisServer:
    """One server process at a time; it keeps its port over restarts, and forgets everything at each."""

    def __init__(self, folder: Path, *options: str, has_own_clock: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._clock = folder / "clock"
        self.clock_s = 0
        self._env = clock_env(self._clock) if has_own_clock else None
        self.port = free_port()
        self.set_clock(0)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it answers. Its port may be another's for a moment: that is tried again."""
        for _ in range(_STARTS_MAX):
            self._process = self._spawned()
            until_now(lambda: self._answers() or self._has_ended(), "redis-server answers or ends")
            is_up = not self._has_ended()
            self._forget_shared_clock()
            if is_up:
                return
            self.kill()
            time.sleep(0.2)
        raise AssertionError(f"redis-server does not start: {(self._folder / 'redis.log').read_text()[-2000:]}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def restart_empty(self) -> None:
        self.kill()
        self.start()

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def set_clock(self, seconds: int) -> None:
        """So far ahead of this machine's clock, or behind it, is the server's; from its next look at it on."""
        self.clock_s = seconds
        written = self._clock.with_suffix(".new")
        written.write_text(f"{seconds:+d}\n")
        written.replace(self._clock)

    def say(self, *words: str) -> str:
        """One command and the first line of its answer, over a connection of its own."""
        request = f"*{len(words)}\r\n" + "".join(f"${len(word.encode())}\r\n{word}\r\n" for word in words)
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S) as sock:
            sock.sendall(request.encode())
            return sock.makefile("rb").readline().decode().strip()

    def _spawned(self) -> subprocess.Popen[bytes]:
        argv = [program(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        argv += ["--save", "", "--appendonly", "no", "--logfile", str(self._folder / "redis.log"), *self._options]
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=self._env, preexec_fn=_end_with_parent
        )

    def _forget_shared_clock(self) -> None:
        """What libfaketime keeps for children, of which there are none, stays behind when its process is killed. Those
        of this process by its number; it has them open and needs their names no more."""
        if self._env is not None:
            for name in (f"faketime_shm_{self.pid}", f"sem.faketime_sem_{self.pid}"):
                (_SHARED / name).unlink(missing_ok=True)

    def _answers(self) -> bool:
        try:
            return self.say("PING") != ""
        except OSError:
            return False

    def _has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None


@contextlib.contextmanager
def redis_server(folder: Path, *options: str, has_own_clock: bool = False) -> Iterator[RedisServer]:
    server = RedisServer(folder, *options, has_own_clock=has_own_clock)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def clock_env(file: Path) -> dict[str, str]:
    """The environment of a process whose wall clock this file sets."""
    found = sorted(Path("/usr").glob("lib*/**/faketime/libfaketime.so.1"))
    assert found, NO_CLOCK
    return {
        **os.environ,
        # The allocator that Redis brings along asks for the time while libfaketime is not ready yet; libc's does not.
        "LD_PRELOAD": f"{found[0]} libc.so.6",
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


def _end_with_parent() -> None:
    """A test run that is killed leaves no server behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
