"""A model and its memory: asleep in the host arena, or awake with its weights on the device.

Owns the device arenas of one model, the registration of its host arena, and the order of steps at wake and sleep. Knows
nothing of requests: the engine has stopped before `sleep` is called. Read `DeviceWeights` first.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..failures import Failure
from .arena import HostArena
from .building import bind
from .device_memory import BorrowedArena, CudaArena, DeviceArena, Driver, PrivateArena, driver
from .upload import WeightUpload

# Bytes per second assumed until the first wake is timed: PCIe 4.0 in practice.
RATE_UNKNOWN: Final = 20e9


class CopyRate:
    """The rate of the last upload in this process. Predicts the next one."""

    def __init__(self) -> None:
        self._rate = RATE_UNKNOWN

    def expected_s(self, size: int) -> float:
        return size / self._rate

    def record(self, size: int, seconds: float) -> None:
        if size > 0 and seconds > 0:
            self._rate = size / seconds


@dataclass(frozen=True, slots=True)
class WakeResult:
    """Bytes to be copied, bytes of the device in use, and the expected seconds until all weights have arrived."""

    bytes: int
    device_bytes: int
    expected_s: float


class DeviceWeights:
    """One model. `module` is bound to `weights`; both are usable only between `wake` and `sleep`.

    May be created before the host arena is filled: then call `on_filled` before `wake`.
    """

    def __init__(
        self, module: torch.nn.Module, host: HostArena, device: torch.device, kv_bytes: int, copy_rate: CopyRate
    ) -> None:
        self.module = module
        self.config: Any = module.config
        self.device = device
        self.dtype = _dtype_of(module)
        self.is_awake = False
        self._host, self._copy_rate = host, copy_rate
        self._registration: Registration | None = None
        self._upload: WeightUpload | None = None
        self.weights, self.kv = _arenas(host, device, kv_bytes)
        bind(module, self.weights.tensor, host.layout)
        if isinstance(self.weights, CudaArena):
            card = driver(device.index or 0)
            self._upload = WeightUpload(card, device, host, self.weights.tensor, copy_rate.record)
        if host.filled:
            self.on_filled()

    def on_filled(self) -> None:
        """The host arena is filled: register its memory in the background. May be called again."""
        if self._upload is not None and self._registration is None:
            start = self._host.tensor.data_ptr()
            pieces = [(start + chunk.start, chunk.size) for chunk in self._host.chunks]
            self._registration = Registration(driver(self.device.index or 0), pieces)

    def wake(self) -> WakeResult:
        """Map memory and start the upload; computing may begin at once. Raises OutOfMemory; then it stays asleep."""
        if self.is_awake:
            return WakeResult(0, self.device_bytes, 0.0)
        if self._registration is not None:
            self._registration.wait()
        try:
            self.weights.map()
            self.kv.map()
            if self._upload is not None:
                self._upload.begin(self.module)
        except BaseException:
            self.kv.unmap()
            self.weights.unmap()
            raise
        self.is_awake = True
        size = self._upload.bytes if self._upload is not None else 0
        return WakeResult(size, self.device_bytes, self._copy_rate.expected_s(size))

    def wait_for_weights(self) -> None:
        """Return when all weights are on the device. Call from the computing thread; free once they are."""
        if self._upload is not None:
            self._upload.wait_for_weights()

    def sleep(self) -> float:
        """Free the device memory and return the seconds it took. Nothing may be computing any more."""
        began = time.monotonic()
        if not self.is_awake:
            return 0.0
        self.is_awake = False
        if self._upload is not None:
            self._upload.finish()
        self.kv.unmap()
        self.weights.unmap()
        if self.device.type == "cuda":
            # Also free what torch keeps cached from finished computations.
            torch.cuda.empty_cache()
        return time.monotonic() - began

    def close(self) -> None:
        """Release everything. The module is unusable afterwards."""
        self.sleep()
        if self._registration is not None:
            self._registration.undo()
        # Parameters are views of the arenas: drop them first.
        self.module = torch.nn.Module()
        self._upload = None
        gc.collect()
        self.kv.close()
        self.weights.close()
        self._host.close()

    @property
    def device_bytes(self) -> int:
        """Bytes this model has on the device now."""
        return sum(arena.size for arena in (self.weights, self.kv) if arena.is_mapped and arena is not self._borrowed)

    @property
    def last_wake_s(self) -> float:
        """Seconds the last upload took, once it is done."""
        return self._upload.seconds if self._upload is not None else 0.0

    @property
    def registration_problem(self) -> str | None:
        return self._registration.problem if self._registration is not None else None

    @property
    def _borrowed(self) -> DeviceArena | None:
        return self.weights if isinstance(self.weights, BorrowedArena) else None


def _arenas(host: HostArena, device: torch.device, kv_bytes: int) -> tuple[DeviceArena, DeviceArena]:
    if device.type != "cuda":
        return BorrowedArena(host.tensor), PrivateArena(kv_bytes)
    index = device.index or 0
    torch.cuda.set_device(index)
    weights = CudaArena(driver(index), index, host.layout.bytes)
    try:
        return weights, CudaArena(driver(index), index, kv_bytes)
    except BaseException:
        weights.close()
        raise


def _dtype_of(module: torch.nn.Module) -> torch.dtype:
    """The dtype of the model's floating-point weights."""
    return next((tensor.dtype for tensor in module.parameters() if tensor.is_floating_point()), torch.float32)


class Registration:
    """Registers pieces of host memory (address, bytes) in the background. A copy must not span two pieces."""

    def __init__(self, driver: Driver, pieces: Sequence[tuple[int, int]]) -> None:
        self._driver, self._pieces = driver, pieces
        self._registered: list[int] = []
        self._stop = threading.Event()
        self.problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="register", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when all pieces are registered, or one has failed."""
        self._thread.join()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def undo(self) -> None:
        """Stop and unregister. Nothing may be copying from the memory any more."""
        self._stop.set()
        self._thread.join()
        while self._registered:
            self._driver.unregister(self._registered.pop())

    def _run(self) -> None:
        for pointer, size in self._pieces:
            if self._stop.is_set():
                return
            try:
                self._driver.register(pointer, size)
            except Failure as reason:
                # Copies from the rest still work, slowly. The slot's status reports the problem.
                self.problem = str(reason)
                return
            self._registered.append(pointer)
