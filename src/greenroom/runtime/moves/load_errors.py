"""Errors of loads: what a failed load or a lost engine means, and whether memory ran out."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from greenroom.core.model import ModelId, Move, SlotId
from greenroom.errors import BadModel, GreenroomError, LoadFailed, OutOfMemory
from greenroom.process.logs import START_LINES_MAX
from greenroom.process.spawn import Child, Exit
from greenroom.process.state_dir import StateDir
from greenroom.runtime.catalogue import Catalog, Entry
from greenroom.runtime.memory.hosted_memory import HostedMemory
from greenroom.runtime.moves.admission import NoGrant
from greenroom.runtime.workers.control_link import OpFailed
from greenroom.runtime.workers.worker import Worker

# Lines of the process that go with the error.
LAST_LINES: Final = 20


class LoadErrors(dict[ModelId, GreenroomError]):
    def __init__(self, state_dir: StateDir, catalog: Catalog, is_going: Callable[[SlotId], bool]) -> None:
        """`is_going` says which slots are to leave anyway."""
        super().__init__()
        self._is_going = is_going
        self._state_dir = state_dir
        self._catalog = catalog

    def keep(self, model: ModelId, error: GreenroomError) -> None:
        # An engine's words may say where it was to listen.
        error.message = self._state_dir.unnamed(error.message)
        error.details = None if error.details is None else self._state_dir.unnamed(error.details)
        self[model] = error

    def ended(self, entry: Entry, slot: SlotId, who: str, exit: Exit, lines: Sequence[str]) -> None:
        """A process that had served ended by itself: whoever is refused for it hears how, as after a failed load."""
        if self._catalog.revision(entry.id, entry.spec.revision) is None or self._is_going(slot):
            # Of a model that was changed, removed or told to leave nobody wants this one back.
            return
        said = f"{entry.id} was lost: its {who} ended ({exit})."
        self.keep(entry.id, LoadFailed(said, public=said, details="\n".join(lines) or None))


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


# The error of a load that ran out of memory, with the numbers.
Shortage = Callable[[Move, Entry, str, str], OutOfMemory]


class HostedErrors:
    def __init__(self, memory: HostedMemory, shortage: Shortage) -> None:
        self._memory = memory
        self._shortage = shortage

    def no_load(self, move: Move, entry: Entry, error: OpFailed) -> LoadFailed:
        if error.kind == "out_of_memory":
            return self._shortage(move, entry, error.message.rstrip("."), "")
        kind = BadModel if error.kind == "bad_model" else LoadFailed
        return kind(f"{entry.id} could not be loaded: {error.message}")

    async def no_wake(self, move: Move, entry: Entry, error: OpFailed) -> Exception:
        if error.kind == "out_of_memory" and (missing := await self._memory.missing(move.claim)):
            said = " ".join(f"{device}={mib}" for device, mib in missing.items())
            return NoGrant(f"somebody else has the memory of {entry.id} now, missing_mib: {said}")
        return self.no_load(move, entry, error)

    def worker_ended(self, move: Move, entry: Entry, worker: Worker, evidence: Evidence) -> LoadFailed:
        details = "\n".join(worker.lines_of(move.slot, LAST_LINES))
        if complaint := evidence.of_no_memory(worker.child, worker.lines_of(move.slot, START_LINES_MAX)):
            return self._shortage(move, entry, complaint, details)
        said = f"{entry.id} could not be loaded: its worker ended ({worker.child.exit})."
        return LoadFailed(said, public=said, details=details or None)
