"""How long the gateway waits for workers, drivers and disks that do not answer, in seconds.

One record with a default for each wait, handed down in the `Shell`. Times that operators set are in the configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# After the drain engines have their own time to stop; nothing may delay the exit longer than this.
STOP_MAX_S = 60.0


@dataclass(frozen=True, slots=True)
class WorkerTimeouts:
    spare_after_s: float = 3.0
    """A spare starts this long after it was wanted: its imports take a core for seconds, and the first answers of the
    model that was just loaded go first."""
    look_every_s: float = 10.0
    """How often a worker is asked whether it still answers."""
    answer_s: float = 60.0
    """A worker that loads through Transformers, or compiles its first kernels, may be busy for seconds."""
    wake_s: float = 120.0
    """A wake maps memory and starts to copy; it may wait for host memory that is still being registered."""
    sleep_s: float = 30.0
    """A sleep waits for the current step and unmaps. A worker that needs longer for its only slot is ended."""
    sleep_shared_s: float = 150.0
    """A worker that serves other slots has longer than it waits for its own threads: a step on a slow CPU takes a
    minute."""
    close_s: float = 20.0
    """A worker that cannot close its only slot within this is ended: starting another one is quicker."""
    close_shared_s: float = 150.0
    """A worker that serves other slots has longer than it waits for its own threads before it counts as stuck. Then it
    is ended, and its other slots go on in another worker."""


@dataclass(frozen=True, slots=True)
class MemoryTimeouts:
    look_s: float = 10.0
    """A look takes milliseconds; a driver that has not answered after this long is stuck."""
    glance_s: float = 1.0
    """A glance in the middle of a swap is given up sooner."""
    ready_look_s: float = 2.0
    """A ready engine is measured before its first request; a slow driver must not keep callers waiting longer."""
    room_s: float = 5.0
    """Memory that is free in the ledger but not really is waited for this long; then the move is planned again."""
    back_s: float = 10.0
    """Memory of an ended process is usually back within a second. What is not back by then counts as a stranger's."""
    settled_s: float = 0.1
    """Where processes cannot be seen, memory is back when use no longer falls between two looks this far apart."""
    slept_s: float = 2.0
    """After a worker has answered, the driver shows its memory as free within milliseconds. Then the move goes on
    regardless: the next one looks again."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    workers: WorkerTimeouts = WorkerTimeouts()
    memory: MemoryTimeouts = MemoryTimeouts()
    look_at_models_s: float = 60.0
    """A header is read in milliseconds; thousands of models on a slow disk take seconds."""
    close_s: float = 10.0
    """The longest wait for a part that depends on a peer to close."""


TIMEOUTS: Final = Timeouts()
