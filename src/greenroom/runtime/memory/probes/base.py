"""Readings of memory: each GPU with the processes on it, and the host.

Owns the records of a reading and the protocol `Probe`. Never decides what the figures mean: `attribution.py` attributes
memory, `devices.py` says which GPUs to plan with.
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
    processes: Mapping[int, int] | None  # MiB by pid. None: processes cannot be seen (permissions, a container).
    utilisation: int | None = None  # Percent of time in which something ran on it.
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
        """The source of its figures: nvml, file, simulated or none."""

    def look(self) -> Reading:
        """Read everything now. Blocks, so it is called in a thread. Raises ProbeFailed."""

    def glance(self, uuid: str) -> GpuReading | None:
        """The memory of one GPU now, as quickly as possible; None if there is no such GPU.

        Blocks and raises as `look` does, and may run at the same time.
        """

    def close(self) -> None:
        """Release what it holds. It is not used again."""


def named(gpus: Sequence[GpuReading], word: str) -> GpuReading | None:
    """The GPU with this index, UUID or beginning of a UUID; None if there is none, or more than one."""
    if word.isascii() and word.isdigit():
        meant = [gpu for gpu in gpus if gpu.index == int(word)]
    else:
        meant = [gpu for gpu in gpus if gpu.uuid == word] or [gpu for gpu in gpus if word and gpu.uuid.startswith(word)]
    return meant[0] if len(meant) == 1 else None
