"""The program of a sandbox process: bounds itself, loads the module of its job, then answers orders on stdin.

Owns the bounds of this process and the framing. Never imports torch or anything of ours but that module, so that it
starts in a tenth of a second. `pool.py` is the other end.

    python -I -S program.py '{"worker": PID, "module": FILE, "folders": […], "memory_bytes": …, …}'

Stdin is a socket, used both ways. One letter says that the process is ready. Then orders come and are answered, one
after the other: an order is 8 bytes of length and content, an answer is a word of four letters, 8 bytes of length and
content. `full` means that memory ran out; all other words are the module's.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any, BinaryIO, Final

# The kernel kills this process before any other when memory runs out.
OOM_SCORE: Final = "1000"
PR_SET_PDEATHSIG: Final = 1

ORDER_HEAD: Final = struct.Struct("!Q")
ANSWER_HEAD: Final = struct.Struct("!4sQ")
READY: Final = b"r"
FULL: Final = b"full"

Job = Callable[[bytes], tuple[bytes, bytes]]


def main() -> None:
    setup = json.loads(sys.argv[1])
    end_with(setup["worker"])
    sys.path += setup["folders"]
    job = load(setup["module"])
    bound(setup["memory_bytes"], setup["cpu_s"], setup["wall_s"])
    with open(0, "rb", closefd=False) as source, open(0, "wb", closefd=False) as sink:
        serve(job, source, sink, own_bytes() + setup["kept_bytes"])


def serve(job: Job, source: BinaryIO, sink: BinaryIO, bytes_max: int) -> None:
    """Answer orders until the worker hangs up or this process has grown beyond `bytes_max`."""
    sink.write(READY)
    sink.flush()
    while len(head := source.read(ORDER_HEAD.size)) == ORDER_HEAD.size:
        try:
            word, content = job(source.read(*ORDER_HEAD.unpack(head)))
        except MemoryError:
            word, content = FULL, b""
        sink.write(ANSWER_HEAD.pack(word, len(content)))
        sink.write(content)
        sink.flush()
        # After an answer, never before one: an order that was accepted is answered.
        if own_bytes() > bytes_max:
            return


def load(file: str) -> Job:
    """The job of a module. It is found by its path: its folder holds modules that must not be importable here."""
    spec = importlib.util.spec_from_file_location("job", file)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules["job"] = module
    spec.loader.exec_module(module)
    job: Job = module.answer
    return job


def end_with(worker: int) -> None:
    """Make the kernel kill this process together with the thread that started it, the worker's first."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)
    if prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0 or os.getppid() != worker:
        # The worker ended before this call.
        os._exit(1)


def bound(memory_bytes: int, cpu_s: int | None, wall_s: int | None) -> None:
    """Limit this process for good. The memory comes on top of what it has by now."""
    most = own_bytes() + memory_bytes
    limit(resource.RLIMIT_AS, most, most)
    limit(resource.RLIMIT_CORE, 0, 0)
    if cpu_s is not None:
        # At the hard limit the kernel kills, as when memory runs out: the soft one, which says why, comes first.
        limit(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)
    if wall_s is not None:
        signal.alarm(wall_s)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write(OOM_SCORE)


def limit(kind: int, soft: int, hard: int) -> None:
    """Lower both limits; an unprivileged process cannot raise them again."""
    _, before = resource.getrlimit(kind)
    most = hard if before == resource.RLIM_INFINITY else min(hard, before)
    resource.setrlimit(kind, (min(soft, most), most))


def own_bytes() -> int:
    """The address space of this process, as RLIMIT_AS counts it."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
