"""Whether a load that failed ran out of memory: by what its engine printed, or by the kernel having killed it for that.

Owns the look at one load alone: only lines of this start count.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from greenroom.http.upstream import Address
from greenroom.process.spawn import Child, Exit

# How a shell reports a program of its own that was killed.
_KILLED_CODE: Final = 128 + signal.SIGKILL


class Evidence:
    """Made before the engine is started, asked after it has failed."""

    def __init__(self) -> None:
        self._oom_kills_before = oom_kills()

    def of_no_memory(self, child: Child, lines: Sequence[str]) -> str | None:
        """What says that memory ran out, in these lines of this start or by the kernel; None when nothing does."""
        if complaint := memory_complaint(lines):
            return complaint
        if child.exit is not None and _was_killed(child.exit) and oom_kills() > self._oom_kills_before:
            return "the kernel ended it because the host's memory was full"
        return None


def _was_killed(exit: Exit) -> bool:
    return exit.signal == signal.SIGKILL or exit.code == _KILLED_CODE


# The machine's counter, and that of our own control group, which in a container is the only one that counts for it.
COUNTERS = (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events"))
_WORD = "oom_kill"


def oom_kills(counters: Sequence[Path] = COUNTERS) -> int:
    """All counters together. One that cannot be read counts nothing."""
    return sum(_count(path) for path in counters)


def _count(path: Path) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) for line in lines if line.split()[:1] == [_WORD]), 0)
    except (OSError, ValueError, IndexError):
        return 0


# One line each, with who prints it. Compared without regard to case.
SIGNATURES: Final = (
    # CUDA, ROCm and whatever is built on them: `CUDA error: out of memory`, `cudaMalloc failed: out of memory`,
    # `torch.OutOfMemoryError: CUDA out of memory. Tried to allocate …`, `HIP out of memory`.
    r"out of memory",
    r"OutOfMemoryError",
    # The same as numbers and constants: the CUDA runtime, its driver interface, Vulkan, Metal, OpenCL.
    r"cudaErrorMemoryAllocation",
    r"CUDA_ERROR_OUT_OF_MEMORY",
    r"CUBLAS_STATUS_ALLOC_FAILED",
    r"hipErrorOutOfMemory",
    r"ErrorOutOf(Device|Host)Memory",
    r"VK_ERROR_OUT_OF_(DEVICE|HOST)_MEMORY",
    r"kIOGPUCommandBufferCallbackErrorOutOfMemory",
    r"CL_MEM_OBJECT_ALLOCATION_FAILURE",
    # llama.cpp and ggml: weights, KV cache and compute buffers.
    r"(failed|unable) to allocate .*buffer",
    r"cudaMalloc failed",
    r"insufficient memory",
    # vLLM, which measures what is free before it begins.
    r"no available memory for the cache blocks",
    r"free memory on device .*less than desired GPU memory utilization",
    r"larger than the (available|maximum number of tokens that can be stored in) KV cache",
    # PyTorch, NumPy and C++ on the host.
    r"not enough memory",
    r"can't allocate memory",
    r"cannot allocate memory",
    r"unable to allocate .*memory",
    r"unable to allocate .*iB for an array",
    r"std::bad_alloc",
    r"\bMemoryError\b",
)
_ANY: Final = re.compile("|".join(f"(?:{signature})" for signature in SIGNATURES), re.IGNORECASE)


def memory_complaint(lines: Iterable[str]) -> str | None:
    """The first line that says that memory ran out; None when none does."""
    return next((line.strip() for line in lines if _ANY.search(line)), None)


# The first questions come quickly, because small models are ready in a tenth of a second; later ones are patient.
ASK_FIRST_S = 0.02
ASK_SLOWEST_S = 0.25
ASK_GROWTH = 1.3
ANSWER_MAX_S = 2.0
_STATUS_LINE_MAX = 4096


async def until_ready(address: Address, path: str) -> None:
    """Return when the path answers 200. Runs until cancelled otherwise."""
    pause_s = ASK_FIRST_S
    while not await answers(address, path):
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * ASK_GROWTH, ASK_SLOWEST_S)


async def answers(address: Address, path: str) -> bool:
    try:
        async with asyncio.timeout(ANSWER_MAX_S):
            return await _status(address, path) == 200
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return False


async def _status(address: Address, path: str) -> int:
    if address.path:
        reader, writer = await asyncio.open_unix_connection(address.path, limit=_STATUS_LINE_MAX)
    else:
        reader, writer = await asyncio.open_connection(address.host, address.port, limit=_STATUS_LINE_MAX)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        line = await reader.readuntil(b"\n")
        return int(line.split(b" ", 2)[1])
    except IndexError as error:
        raise ValueError("not HTTP") from error
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
