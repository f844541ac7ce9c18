"""The machine under the hosted models: its GPU, its memory, its disk, and plain programs to compare with."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Final

import pynvml

from benchmarks.hosted.models import weight_files

MIB: Final = 1 << 20


class Card:
    """The first GPU as NVML shows it. Never uses the gateway's own probe."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        self._gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.name = str(pynvml.nvmlDeviceGetName(self._gpu))

    @property
    def used_mib(self) -> float:
        return float(pynvml.nvmlDeviceGetMemoryInfo(self._gpu).used) / MIB

    def until_below(self, mib: float, limit_s: float = 5.0) -> float:
        """How long it takes until less than this is used."""
        began = time.perf_counter()
        while self.used_mib > mib and time.perf_counter() - began < limit_s:
            time.sleep(0.001)
        return time.perf_counter() - began


def host_used_mib() -> float:
    """Of the whole machine, caches of files not counted."""
    info = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    kib = {name: int(info[name].split()[0]) for name in ("MemTotal", "MemAvailable")}
    return (kib["MemTotal"] - kib["MemAvailable"]) / 1024


def drop_pages(folder: Path) -> None:
    """The model's files leave the page cache."""
    for path in weight_files(folder):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


# --- plain programs -------------------------------------------------------------------------------------------------

_FRESH = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto", device_map=sys.argv[2])
ids = torch.arange(64, device=sys.argv[2])[None]
print(model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)[0, -1].item(), flush=True)
"""
_WIRE = """
import time, torch
host = torch.zeros(4 << 30, dtype=torch.uint8)
torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), 0)
gpu, rates = torch.empty_like(host, device="cuda"), []
for _ in range(8):
    torch.cuda.synchronize(); began = time.perf_counter()
    gpu.copy_(host, non_blocking=True); torch.cuda.synchronize()
    rates.append(host.numel() / (time.perf_counter() - began))
print(sorted(rates)[len(rates) // 2])
"""
_DISK = """
import mmap, os, sys, time
from concurrent.futures import ThreadPoolExecutor
piece, tasks = 16 << 20, []
for path in sys.argv[1:]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    tasks += [(fd, start) for start in range(0, os.fstat(fd).st_size, piece)]
def read(task):
    with_room = mmap.mmap(-1, piece)
    got = os.preadv(task[0], [with_room], task[1])
    with_room.close()
    return got
began = time.perf_counter()
with ThreadPoolExecutor(8) as pool:
    done = sum(pool.map(read, tasks))
print(done / (time.perf_counter() - began))
"""


def program(python: str, script: str, *arguments: str) -> tuple[float, str]:
    """How long a plain Python program takes from its start to its end, and what it prints."""
    began = time.perf_counter()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([python, "-c", script, *arguments], capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(f"a plain program failed:\n{done.stderr[-2000:]}")
    return time.perf_counter() - began, done.stdout.strip()


def fresh_process_s(python: str, folder: Path, device: str) -> float:
    """From nothing to the first token in a process of its own, as a restart does it. Its file is in the page cache."""
    return program(python, _FRESH, str(folder), device)[0]


def wire_rate(python: str) -> float:
    """Bytes a second from registered host memory to the GPU, in one piece: no copy is faster."""
    return float(program(python, _WIRE)[1])


def disk_rate(python: str, folder: Path) -> float:
    """Bytes a second that plain parallel reads get from the disk."""
    drop_pages(folder)
    return float(program(python, _DISK, *map(str, weight_files(folder)))[1])
