"""NVIDIA's own figures, through NVML. The only file that imports its bindings, and only when it is asked to look.

Owns the translation of NVML's answers and errors. Any of its calls may fail or be unsupported on some driver, card or
container: without memory figures a GPU cannot be used and the look fails; everything else is left out instead.

Who uses a GPU is told by pid. In a container those pids may be hidden, or be those of the machine outside, which mean
nothing here: then the processes of a GPU are said to be unknown rather than wrong.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from greenroom.errors import ProbeFailed
from greenroom.runtime.memory.probes.base import BYTES_A_MIB, GpuReading, Reading
from greenroom.runtime.memory.probes.host import THIS_MACHINE, HostProbe

# The number Linux gives to the first namespace of processes, on every machine; a container has another one.
FIRST_PID_NAMESPACE = "pid:[4026531836]"
# A process may end between being listed and being looked for; a second list decides.
LISTS_MAX = 2
# Less than any process needs to use a GPU at all: then nobody does, and it does not matter who can be seen.
IDLE_MIB = 64
# NVML sets a version into the record it is to fill: the size of the record and the number of the layout.
_MEMORY_V2 = "nvmlMemory_v2"


def _bindings() -> Any:
    return importlib.import_module("pynvml")


@dataclass(frozen=True, slots=True)
class _Card:
    handle: Any
    uuid: str
    index: int
    name: str


class NvmlProbe:
    """Every GPU of the machine that is not cut into MIG instances. Making one raises ProbeFailed."""

    kind = "nvml"

    def __init__(self, nvml: Any = None, host: HostProbe = THIS_MACHINE) -> None:
        self._host = host
        self._is_open = False
        try:
            self._nvml = nvml or _bindings()
        except Exception as error:
            raise ProbeFailed(f"NVML cannot be used: {error}.") from error
        self._open()

    def look(self) -> Reading:
        """After a failure NVML is opened anew: drivers are exchanged under running programs."""
        if not self._is_open:
            self._open()
        try:
            gpus = self._gpus()
        except Exception as error:
            self.close()
            raise ProbeFailed(f"NVML does not answer: {error}.") from error
        return Reading(gpus, self._host.look())

    def glance(self, uuid: str) -> GpuReading | None:
        """Its memory alone: who uses it and how busy it is takes the driver longer to say."""
        try:
            total, used = self._memory_bytes(self._nvml.nvmlDeviceGetHandleByUUID(uuid))
        except Exception as error:
            # The next look finds out whether it opens anew.
            raise ProbeFailed(f"NVML does not answer for {uuid}: {error}.") from error
        return GpuReading(uuid, 0, "", total // BYTES_A_MIB, -(-used // BYTES_A_MIB), None)

    def close(self) -> None:
        self._is_open = False
        self._or_none(self._nvml.nvmlShutdown)

    def _open(self) -> None:
        try:
            self._nvml.nvmlInit()
        except Exception as error:
            # The bindings raise their own errors, and OSError or AttributeError for libraries they do not expect.
            raise ProbeFailed(f"NVML cannot be used: {error}.") from error
        self._is_open = True

    # --- one GPU ----------------------------------------------------------------------------------------------------

    def _gpus(self) -> tuple[GpuReading, ...]:
        """Those that answer. One that fell off the bus, or that we may not use, must not hide the others."""
        found, failure = [], None
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                card = self._card(index)
                if not self._is_cut_up(card.handle):
                    found.append(self._reading(card))
            except self._nvml.NVMLError as error:
                failure = error
        if failure is not None and not found:
            raise failure
        return tuple(found)

    def _card(self, index: int) -> _Card:
        """Asked anew each time: a handle does not outlive the loss of its GPU."""
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        return _Card(handle, nvml.nvmlDeviceGetUUID(handle), index, nvml.nvmlDeviceGetName(handle))

    def _is_cut_up(self, handle: Any) -> bool:
        """MIG: its instances are devices of their own, which we leave alone."""
        mode = self._or_none(self._nvml.nvmlDeviceGetMigMode, handle)
        return mode is not None and bool(mode[0])

    def _reading(self, card: _Card) -> GpuReading:
        nvml, handle = self._nvml, card.handle
        # Memory before processes: what starts to use some in between is then not taken for a stranger's.
        total, used = self._memory_bytes(handle)
        rates = self._or_none(nvml.nvmlDeviceGetUtilizationRates, handle)
        return GpuReading(
            uuid=card.uuid,
            index=card.index,
            name=card.name,
            total_mib=total // BYTES_A_MIB,
            used_mib=-(-used // BYTES_A_MIB),
            processes=self._processes(handle, used // BYTES_A_MIB),
            utilisation=None if rates is None else int(rates.gpu),
            temperature_c=self._or_none(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        )

    def _memory_bytes(self, handle: Any) -> tuple[int, int]:
        """All that can be allocated, and what is. What the driver keeps for itself is left out where it is told."""
        version = getattr(self._nvml, _MEMORY_V2, None)
        memory = None if version is None else self._or_none(self._nvml.nvmlDeviceGetMemoryInfo, handle, version)
        if memory is not None:
            return int(memory.total) - int(memory.reserved), int(memory.used)
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        return int(memory.total), int(memory.used)

    # --- who uses it ------------------------------------------------------------------------------------------------

    def _processes(self, handle: Any, used_mib: int) -> dict[int, int] | None:
        for _ in range(LISTS_MAX):
            listed = self._listed(handle)
            if listed is None or self._are_ours_to_see(listed) or (not listed and used_mib < IDLE_MIB):
                return listed
        return None

    def _listed(self, handle: Any) -> dict[int, int] | None:
        """MiB by pid. A process that computes and draws is in both lists with the same figure."""
        found: dict[int, int] = {}
        for ask in (self._nvml.nvmlDeviceGetComputeRunningProcesses, self._nvml.nvmlDeviceGetGraphicsRunningProcesses):
            listed = self._or_none(ask, handle)
            if listed is None or any(process.usedGpuMemory is None for process in listed):
                return None
            for process in listed:
                used_mib = -(-int(process.usedGpuMemory) // BYTES_A_MIB)
                found[process.pid] = max(found.get(process.pid, 0), used_mib)
        return found

    def _are_ours_to_see(self, pids: Iterable[int]) -> bool:
        """In a container only a list of processes that are there says that pids mean the same inside and outside."""
        if self._is_first_namespace():
            return True
        there = [(self._host.proc / str(pid)).exists() for pid in pids]
        return bool(there) and all(there)

    def _is_first_namespace(self) -> bool:
        try:
            return os.readlink(Path(self._host.proc, "self", "ns", "pid")) == FIRST_PID_NAMESPACE
        except OSError:
            return False

    def _or_none(self, ask: Callable[..., Any], *said: Any) -> Any:
        """What NVML answers; None where it cannot."""
        try:
            return ask(*said)
        except self._nvml.NVMLError:
            return None
