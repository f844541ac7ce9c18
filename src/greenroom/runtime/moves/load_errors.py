"""Errors of moves: of failed loads, of workers and of engines that were lost, and whether memory ran out.

Owns the last error of each model, the words of these errors, and the patterns by which engines say that memory ran out.
Never retries: the scheduler decides what follows.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from typing import Final

from greenroom.core.events import SlotsLost
from greenroom.core.model import ModelId, Move, SlotId, Tier
from greenroom.errors import GreenroomError, LoadFailed, UnusableModel
from greenroom.process.logs import START_LINES_MAX, telling_line
from greenroom.process.proc import oom_kills
from greenroom.process.spawn import Child, Exit
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.memory.slot_memory import HostedMemory, SlotMemory
from greenroom.runtime.memory.watch import MemoryWatch
from greenroom.runtime.moves.admission import NoGrant
from greenroom.runtime.shell import Shell
from greenroom.runtime.workers.control_link import OpFailed
from greenroom.runtime.workers.worker import Worker

# Lines of the process that go with the error.
LAST_LINES: Final = 20


def failed(said: str, why: str, reason: str | None, lines: Sequence[str]) -> LoadFailed:
    """The engine's own reason comes first where it is known, for operators; the last lines go along."""
    public = f"{said}: {why}."
    message = public if reason is None else f"{said}: {reason.rstrip('.')}; {why}."
    return LoadFailed(message, public=public, details="\n".join(lines[-LAST_LINES:]) or None)


class LoadErrors(dict[ModelId, GreenroomError]):
    """The last error of each model. Reports slots that were lost because their process ended without being asked to."""

    def __init__(self, shell: Shell, watch: MemoryWatch) -> None:
        super().__init__()
        self._loop = shell.loop
        self._state_dir = shell.state_dir
        self._catalog = shell.catalog
        self._watch = watch

    def keep(self, model: ModelId, error: GreenroomError) -> None:
        """Keep this error, without paths of the state directory."""
        # An engine's output may name its socket.
        error.message = self._state_dir.unnamed(error.message)
        error.details = None if error.details is None else self._state_dir.unnamed(error.details)
        self[model] = error

    def ended(self, entry: Entry, slot: SlotId, program: str, exit: Exit, lines: Sequence[str]) -> None:
        """A serving process ended by itself: callers that are rejected for it are told how, as after a failed load."""
        known = self._loop.view.slots.get(slot)
        is_going = known is not None and known.is_going
        if is_going or self._catalog.revision(entry.id, entry.spec.revision) is None:
            # The model was changed or removed, or the slot was told to leave: its end is no error.
            return
        said, why = f"{entry.id} was lost", f"its {program} ended ({exit})"
        self.keep(entry.id, failed(said, why, telling_line(lines), lines))

    def post_lost(self, slots: Sequence[SlotId], left_in: Tier, exit: Exit) -> None:
        """Tell the scheduler, in one event for all slots of the process."""
        self._watch.post_and_look(SlotsLost(self._loop.clock(), tuple(slots), left_in, str(exit)))


# --- whether memory ran out -----------------------------------------------------------------------------------------

# The exit code of a shell whose program was killed.
_KILLED_CODE: Final = 128 + signal.SIGKILL


def evidence_of_no_memory(child: Child, lines: Sequence[str], kills: int) -> str | None:
    """The line of this start, or the act of the kernel, which shows that memory ran out; None if there is none. `kills`
    are the processes that the kernel has ended for memory since the start."""
    if complaint := memory_complaint(lines):
        return complaint
    was_killed = child.exit is not None and (child.exit.signal == signal.SIGKILL or child.exit.code == _KILLED_CODE)
    if was_killed and kills > 0:
        return "the kernel ended it because the host's memory was full"
    return None


# One pattern a line, grouped by the program that prints it. Case is ignored.
SIGNATURES: Final = (
    # CUDA, ROCm and what is built on them: `CUDA error: out of memory`, `cudaMalloc failed: out of memory`,
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
    # vLLM, which checks free memory before it begins.
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
    """The first line that says that memory ran out; None if there is none."""
    return next((line.strip() for line in lines if _ANY.search(line)), None)


# --- errors of workers ----------------------------------------------------------------------------------------------


class HostedErrors:
    """Translates what workers report into errors of ours."""

    def __init__(self, memory: HostedMemory, slot_memory: SlotMemory) -> None:
        self._memory = memory
        self._slot_memory = slot_memory

    def load_error(self, move: Move, entry: Entry, error: OpFailed) -> LoadFailed:
        if error.kind == "out_of_memory":
            return self._slot_memory.shortage(move, entry, error.message.rstrip("."), "")
        kind = UnusableModel if error.kind == "bad_model" else LoadFailed
        return kind(f"{entry.id} could not be loaded: {error.message}")

    async def wake_error(self, move: Move, entry: Entry, error: OpFailed) -> Exception:
        """NoGrant where something else took the memory meanwhile: the model itself has not failed."""
        if error.kind == "out_of_memory" and (missing := await self._memory.missing(move.claim)):
            said = " ".join(f"{device}={mib}" for device, mib in missing.items())
            return NoGrant(f"another process has the memory of {entry.id} now, missing_mib: {said}")
        return self.load_error(move, entry, error)

    def worker_ended(self, move: Move, entry: Entry, worker: Worker, kills_before: int) -> LoadFailed:
        """The error of a load during which the worker ended."""
        lines = worker.lines_of(move.slot, START_LINES_MAX)
        if complaint := evidence_of_no_memory(worker.child, lines, oom_kills() - kills_before):
            return self._slot_memory.shortage(move, entry, complaint, "\n".join(lines[-LAST_LINES:]))
        said, why = f"{entry.id} could not be loaded", f"its worker ended ({worker.child.exit})"
        return failed(said, why, telling_line(lines), lines)
