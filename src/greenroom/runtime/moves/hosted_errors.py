"""What went wrong with a hosted slot, told as errors of ours: by the worker's words, or by its end.

Owns the translation. Running out of memory at a wake is told apart: where the driver shows that the memory is used, a
stranger has it and nobody has failed.
"""

from __future__ import annotations

from collections.abc import Callable

from greenroom.core.model import Move
from greenroom.errors import BadModel, LoadFailed, OutOfMemory
from greenroom.process.logs import START_LINES_MAX
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.memory.grants import NoGrant
from greenroom.runtime.memory.hosted_memory import HostedMemory
from greenroom.runtime.moves.evidence import Evidence
from greenroom.runtime.workers.control_link import OpFailed
from greenroom.runtime.workers.worker_host import LAST_LINES, Worker

# The error of a load that ran out of memory, with the numbers.
Shortage = Callable[[Move, Entry, str, str], OutOfMemory]


class Mishaps:
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
