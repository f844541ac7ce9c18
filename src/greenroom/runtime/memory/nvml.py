"""Figures of NVIDIA GPUs, through NVML. The only file that imports its bindings, and only when a probe is made.

Owns the translation of NVML's answers and errors. Any call may fail or be unsupported on some driver, card or
container: without memory figures the look fails; anything else is left out.

NVML lists processes by pid. In a container these pids may be hidden, or be pids of the host, which mean nothing here:
then the processes of a GPU are reported as unknown.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from greenroom.errors import ProbeFailed
from greenroom.runtime.memory.readings import BYTES_A_MIB, THIS_MACHINE, GpuReading, HostProbe, Reading

# The inode of the initial pid namespace on every Linux machine; a container has another one.
FIRST_PID_NAMESPACE = "pid:[4026531836]"
# A process may end between the list and the check; a second list decides.
LISTS_MAX = 2
# Less than any process needs to use a GPU: below it the GPU is idle, and an empty list is correct.
IDLE_MIB = 64
# NVML must be given the version of the struct that it fills: its size and layout number.
_MEMORY_V2 = "nvmlMemory_v2"


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
        """`nvml` are the bindings; those that are installed if none are given."""
        self._host = host
        self._is_open = False
        try:
            self._nvml = nvml or importlib.import_module("pynvml")
        except Exception as error:
            raise ProbeFailed(f"NVML cannot be used: {error}.") from error
        self._open()

    def look(self) -> Reading:
        """Read all GPUs. NVML is opened again after a failure: drivers may be replaced at run time."""
        if not self._is_open:
            self._open()
        try:
            gpus = self._gpus()
        except Exception as error:
            self.close()
            raise ProbeFailed(f"NVML does not answer: {error}.") from error
        return Reading(gpus, self._host.look())

    def glance(self, uuid: str) -> GpuReading | None:
        """Its memory alone: processes and utilisation take the driver longer."""
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
        """The GPUs that answer. One that fell off the bus, or is not permitted, must not hide the others."""
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
        """Read each time: a handle does not outlive the loss of its GPU."""
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        return _Card(handle, nvml.nvmlDeviceGetUUID(handle), index, nvml.nvmlDeviceGetName(handle))

    def _is_cut_up(self, handle: Any) -> bool:
        """Whether it is in MIG mode: its instances are devices of their own, which are not used."""
        mode = self._or_none(self._nvml.nvmlDeviceGetMigMode, handle)
        return mode is not None and bool(mode[0])

    def _reading(self, card: _Card) -> GpuReading:
        nvml, handle = self._nvml, card.handle
        # Memory before processes: a process that starts in between is then not taken for a stranger.
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
        """Total and used bytes. The driver's own part is left out where NVML reports it."""
        version = getattr(self._nvml, _MEMORY_V2, None)
        memory = None if version is None else self._or_none(self._nvml.nvmlDeviceGetMemoryInfo, handle, version)
        if memory is not None:
            return int(memory.total) - int(memory.reserved), int(memory.used)
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        return int(memory.total), int(memory.used)

    # --- its processes ----------------------------------------------------------------------------------------------

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
        """Whether these pids are valid here. In a container that is certain only if all of them exist."""
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
        """NVML's answer; None if the call fails."""
        try:
            return ask(*said)
        except self._nvml.NVMLError:
            return None
