"""Probes that look at no hardware: GPUs that the configuration makes up, and none at all.

Owns no figures of use: nothing runs on these GPUs, so nothing is seen there and plans go by what is claimed.
"""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.config.schema import Gpu
from greenroom.runtime.memory.host import THIS_MACHINE, Host
from greenroom.runtime.memory.probes.base import GpuReading, Reading


@dataclass(frozen=True, slots=True)
class SimulatedProbe:
    """The GPUs under `gpus` in the configuration, called gpu0, gpu1 …"""

    gpus: tuple[Gpu, ...]
    host: Host = THIS_MACHINE
    kind: str = "simulated"

    def look(self) -> Reading:
        seen = (
            GpuReading(f"gpu{index}", index, "simulated", gpu.memory_mib, 0, {}) for index, gpu in enumerate(self.gpus)
        )
        return Reading(tuple(seen), self.host.look())

    def glance(self, uuid: str) -> GpuReading | None:
        return self.look().gpu(uuid)

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class NoProbe:
    """A machine without GPUs, or one where they are not to be used. `why` says which, for the log."""

    why: str = ""
    host: Host = THIS_MACHINE
    kind: str = "none"

    def look(self) -> Reading:
        return Reading((), self.host.look())

    def glance(self, uuid: str) -> GpuReading | None:
        return None

    def close(self) -> None:
        """Nothing is held."""
