"""Which GPUs this gateway was given: CUDA_VISIBLE_DEVICES, read as CUDA reads it.

Owns the meaning of that variable. Numbers are taken in the order of the PCI bus, as NVML counts; CUDA counts so only
with CUDA_DEVICE_ORDER=PCI_BUS_ID or when all GPUs are alike, and `order_warning` says when the two may differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from greenroom.runtime.memory.probes.base import GpuReading, Probe, Reading

VISIBLE_NAME = "CUDA_VISIBLE_DEVICES"
ORDER_NAME = "CUDA_DEVICE_ORDER"
PCI_ORDER = "PCI_BUS_ID"
# An instance of a GPU that is cut up. It is neither planned with nor taken for a mistake; engines find it themselves.
_MIG = "MIG-"


class VisibleProbe:
    """Another probe, of which only the GPUs that were given are seen."""

    def __init__(self, probe: Probe, said: str) -> None:
        self._probe = probe
        self._said = said
        # Decided at the first look: when a GPU vanishes the numbers of the others change, but not what CUDA meant.
        self._uuids: frozenset[str] | None = None

    @property
    def kind(self) -> str:
        return self._probe.kind

    def look(self) -> Reading:
        reading = self._probe.look()
        if self._uuids is None:
            self._uuids = frozenset(gpu.uuid for gpu in visible(reading.gpus, self._said))
        return replace(reading, gpus=tuple(gpu for gpu in reading.gpus if gpu.uuid in self._uuids))

    def glance(self, uuid: str) -> GpuReading | None:
        return self._probe.glance(uuid) if uuid in (self._uuids or ()) else None

    def close(self) -> None:
        self._probe.close()


def visible(gpus: Sequence[GpuReading], said: str) -> list[GpuReading]:
    """Those that the variable names. What it cannot mean ends the list, as with CUDA: -1, an unknown number or UUID."""
    found: list[GpuReading] = []
    for word in (word.strip() for word in said.split(",")):
        if word.startswith(_MIG):
            continue
        meant = named(gpus, word)
        if meant is None:
            break
        if meant not in found:
            found.append(meant)
    return found


def named(gpus: Sequence[GpuReading], word: str) -> GpuReading | None:
    """The one GPU with this number, this UUID or a UUID that begins so; None if there is none, or more than one."""
    if word.isascii() and word.isdigit():
        meant = [gpu for gpu in gpus if gpu.index == int(word)]
    else:
        meant = [gpu for gpu in gpus if gpu.uuid == word] or [gpu for gpu in gpus if word and gpu.uuid.startswith(word)]
    return meant[0] if len(meant) == 1 else None


def order_warning(gpus: Sequence[GpuReading], environ: Mapping[str, str]) -> str | None:
    """What is to be said if numbers in the variable may mean other GPUs to CUDA than to us."""
    numbers = any(word.strip().isdigit() for word in environ.get(VISIBLE_NAME, "").split(","))
    differ = len({(gpu.name, gpu.total_mib) for gpu in gpus}) > 1
    if not numbers or not differ or environ.get(ORDER_NAME) == PCI_ORDER:
        return None
    return (
        f"{VISIBLE_NAME} has numbers and the GPUs differ: they are read in the order of the PCI bus, while CUDA puts "
        f"the fastest first. Set {ORDER_NAME}={PCI_ORDER}, or write UUIDs."
    )
