"""What is seen of memory: each GPU with the processes on it, and the host. One look at a time.

Owns the records of a look and the promise of a `Probe`. Never decides what the figures mean: `attribution.py` says
whose memory it is, `devices.py` which of the GPUs are there to plan with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

BYTES_A_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU. `index` is its number in the order of the PCI bus, as NVML counts."""

    uuid: str
    index: int
    name: str
    total_mib: int
    used_mib: int
    processes: Mapping[int, int] | None  # MiB by pid. None: who uses it cannot be seen (permissions, a container).
    utilisation: int | None = None  # Percent of the time that something ran on it.
    temperature_c: int | None = None


@dataclass(frozen=True, slots=True)
class HostReading:
    """This machine's memory, or what its container may use of it; and its shared memory (/dev/shm)."""

    total_mib: int
    available_mib: int
    shm_total_mib: int
    shm_free_mib: int


@dataclass(frozen=True, slots=True)
class Reading:
    """One look."""

    gpus: tuple[GpuReading, ...]
    host: HostReading

    def gpu(self, uuid: str) -> GpuReading | None:
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)


class Probe(Protocol):
    @property
    def kind(self) -> str:
        """Where its figures come from: nvml, file, simulated or none."""

    def look(self) -> Reading:
        """See what is the case now. Blocks, so it is called beside the loop. Raises ProbeFailed."""

    def glance(self, uuid: str) -> GpuReading | None:
        """What of one GPU's memory is used now, in as little time as there is; None if it is not there.

        Blocks and raises as `look` does, and may be called beside it.
        """

    def close(self) -> None:
        """Give back what it held. It is not asked again."""


def named(gpus: Sequence[GpuReading], word: str) -> GpuReading | None:
    """The one GPU with this number, this UUID or a UUID that begins so; None if there is none, or more than one."""
    if word.isascii() and word.isdigit():
        meant = [gpu for gpu in gpus if gpu.index == int(word)]
    else:
        meant = [gpu for gpu in gpus if gpu.uuid == word] or [gpu for gpu in gpus if word and gpu.uuid.startswith(word)]
    return meant[0] if len(meant) == 1 else None
