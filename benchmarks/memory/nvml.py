"""What NVML shows of a GPU: its memory, peaks by process, and how long memory takes to come back.

Never uses the gateway's own probe: a figure is not checked against itself. Imports no torch, so that the benchmark
holds no GPU memory.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pynvml

MIB = 1 << 20
SAMPLE_S = 0.02
# How often memory on its way back is sampled, for how long at most, and how much may stay away: drivers keep a little.
BACK_SAMPLE_S = 0.002
BACK_MAX_S = 30.0
BACK_SLACK_MIB = 64


@dataclass(frozen=True, slots=True)
class Card:
    """What NVML says of a GPU; `reserved_mib` is the driver's own and can never be allocated."""

    uuid: str
    name: str
    driver: str
    total_mib: float
    reserved_mib: float
    used_mib: float


@dataclass(frozen=True, slots=True)
class Return:
    """Memory on its way back, in seconds since the stop was ordered."""

    ended_s: float
    """Its process was gone from /proc. Its first thread ends at once; the driver's work goes on."""
    back_s: float
    """NVML showed its memory free."""
    told_s: float
    """The gateway answered the order."""
    missing_mib: float
    """What was not back when the gateway answered."""


class GpuWatch:
    """Watches the first GPU. While it is open, every process on it is sampled for its peak."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        self._gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.peaks_mib: dict[int, float] = {}
        self._is_over = threading.Event()

    @contextlib.contextmanager
    def open(self) -> Iterator[GpuWatch]:
        sampling = threading.Thread(target=self._sample, name="gpu watch")
        sampling.start()
        try:
            yield self
        finally:
            self._is_over.set()
            sampling.join()

    def _sample(self) -> None:
        while not self._is_over.wait(SAMPLE_S):
            for pid, mib in self.processes().items():
                self.peaks_mib[pid] = max(mib, self.peaks_mib.get(pid, 0.0))

    def card(self) -> Card:
        memory = pynvml.nvmlDeviceGetMemoryInfo(self._gpu, version=pynvml.nvmlMemory_v2)
        return Card(
            pynvml.nvmlDeviceGetUUID(self._gpu),
            pynvml.nvmlDeviceGetName(self._gpu),
            pynvml.nvmlSystemGetDriverVersion(),
            memory.total / MIB,
            memory.reserved / MIB,
            memory.used / MIB,
        )

    def used_mib(self) -> float:
        return self.card().used_mib

    def processes(self) -> dict[int, float]:
        """MiB by pid. Empty where NVML hides them."""
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(self._gpu)
        return {one.pid: one.usedGpuMemory / MIB for one in running if one.usedGpuMemory}

    def returns(self, pid: int, stop: Callable[[], object]) -> Return:
        """Call `stop` and watch the memory of this process come back."""
        expected = self.used_mib() - self.processes().get(pid, 0.0) + BACK_SLACK_MIB
        began = time.monotonic()
        seen: dict[str, float] = {}

        def watch() -> None:
            while len(seen) < 2 and time.monotonic() - began < BACK_MAX_S:
                if "ended" not in seen and not os.path.exists(f"/proc/{pid}"):
                    seen["ended"] = time.monotonic() - began
                if "back" not in seen and self.used_mib() <= expected:
                    seen["back"] = time.monotonic() - began
                time.sleep(BACK_SAMPLE_S)

        watching = threading.Thread(target=watch, name="memory on its way back")
        watching.start()
        stop()
        told_s, missing = time.monotonic() - began, self.used_mib() - expected
        watching.join()
        return Return(seen.get("ended", BACK_MAX_S), seen.get("back", BACK_MAX_S), told_s, max(0.0, missing))
