"""Processes that a benchmark starts, measures and ends, each by its own pid.

CPU is user plus system time from /proc/PID/stat, which other load on the machine changes little. Wall-clock figures are
only compared within one run.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

RIG = Path(__file__).resolve().parent
ROOT = RIG.parents[1]
START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 5.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_CORES = sorted(os.sched_getaffinity(0))


@contextlib.contextmanager
def running(argv: list[str], port: int) -> Iterator[int]:
    """A process that listens on this port; gives its pid. Ended when the block is left."""
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        _wait_for_port(process, port)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def engine_argv(port: str, *, chunks: int = 100, chunk_s: float = 0.02, gate: str = "") -> list[str]:
    """The command of the mock engine; `port` may be a macro of the gateway's configuration."""
    pace = ["--chunks", str(chunks), "--chunk-s", str(chunk_s)]
    return [sys.executable, str(RIG / "mock_engine.py"), "--port", port, *pace, "--gate", gate]


def gpu_worker_argv(python: str, folder: Path, context: int, *more: str) -> list[str]:
    """The command of the plain Transformers server; its port is the gateway's macro."""
    argv = [python, str(RIG / "gpu_worker.py"), "--model", str(folder), "--ctx-size", str(context)]
    return [*argv, *more, "--port", "${PORT}"]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def own_cpu_s(pid: int) -> float:
    """Processor time used so far by this process, without those that it has started."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def memory_mib(pid: int, *kinds: str) -> float:
    """Resident memory of a process: all of it, or only these kinds (`RssAnon`, `RssShmem`, `RssFile`)."""
    wanted = tuple(f"{kind}:" for kind in kinds or ("VmRSS",))
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in status if line.startswith(wanted)) / 1024


def leave_last_core() -> None:
    """Keep this process, and all that it starts from now on, off the last core: what is measured has that one alone.

    Otherwise the kernel puts a proxy, its engine and its callers on cores as it likes, differently in each run, which
    changes what it costs to wake a process. With one core there is nothing to choose.
    """
    if len(_CORES) > 1:
        os.sched_setaffinity(0, _CORES[:-1])


def move_to_last_core(pid: int) -> None:
    """Have this process run there, without those that it has started already."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), _CORES[-1:])


def tree(pid: int) -> list[int]:
    """This process and every process below it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid] + [member for child in children for member in tree(int(child))]


def _wait_for_port(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"{process.args!r} ended with {process.returncode}")
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise SystemExit(f"{process.args!r} did not listen in time")
