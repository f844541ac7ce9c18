"""A model and its memory: asleep in the host arena, or on stage with its weights on the device.

Owns the device arenas of one model, the registration of its host arena, and the order of things at wake and sleep.
Knows nothing of requests: whoever computes with the module has stopped before `sleep` is called. Read `DeviceWeights`.
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
from .device_memory import BorrowedArena, CudaArena, DeviceArena, PrivateArena
from .driver import Driver, driver
from .upload import WeightUpload

# Until the first wake has been timed: what a wire of the last but one generation does.
RATE_UNKNOWN: Final = 20e9


class CopyRate:
    """How fast weights have been seen to arrive in this process. One model's wake tells the next what to expect."""

    def __init__(self) -> None:
        self._rate = RATE_UNKNOWN

    def expected_s(self, size: int) -> float:
        return size / self._rate

    def record(self, size: int, seconds: float) -> None:
        if size > 0 and seconds > 0:
            self._rate = size / seconds


@dataclass(frozen=True, slots=True)
class WakeResult:
    """What a wake brings: bytes to be copied, bytes of the device in use, and how long until all has arrived."""

    bytes: int
    device_bytes: int
    expected_s: float


class DeviceWeights:
    """One model. `module` is bound to `weights` for good; both are usable only between `wake` and `sleep`.

    May be made before the host arena is filled. Whoever does so calls `on_filled` afterwards, and only then `wake`.
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
        """The host arena has all its weights: have them registered, in the background. May be called again."""
        if self._upload is not None and self._registration is None:
            start = self._host.tensor.data_ptr()
            pieces = [(start + chunk.start, chunk.size) for chunk in self._host.chunks]
            self._registration = Registration(driver(self.device.index or 0), pieces)

    def wake(self) -> WakeResult:
        """Bring the weights. Returns as soon as computing may begin. Raises OutOfMemory; then it sleeps as before."""
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
        """Return when all weights are on the device. Called by the thread that computes; costs nothing afterwards."""
        if self._upload is not None:
            self._upload.wait_for_weights()

    def sleep(self) -> float:
        """Give the device its memory back, and say how many seconds that took. Nothing may be computing any more."""
        began = time.monotonic()
        if not self.is_awake:
            return 0.0
        self.is_awake = False
        if self._upload is not None:
            self._upload.finish()
        self.kv.unmap()
        self.weights.unmap()
        if self.device.type == "cuda":
            # What torch kept of finished computations goes back as well.
            torch.cuda.empty_cache()
        return time.monotonic() - began

    def close(self) -> None:
        """Let go of everything. The module is unusable afterwards."""
        self.sleep()
        if self._registration is not None:
            self._registration.undo()
        # Parameters look into the arenas: they go first.
        self.module = torch.nn.Module()
        self._upload = None
        gc.collect()
        self.kv.close()
        self.weights.close()
        self._host.close()

    @property
    def device_bytes(self) -> int:
        """What this model has on the device now."""
        return sum(arena.size for arena in (self.weights, self.kv) if arena.is_mapped and arena is not self._borrowed)

    @property
    def last_wake_s(self) -> float:
        """How long the last copy took, once it has arrived."""
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
    """What the model computes in: the kind its floating-point weights have."""
    return next((tensor.dtype for tensor in module.parameters() if tensor.is_floating_point()), torch.float32)


class Registration:
    """Pieces of memory (address, bytes), registered as far as the system allows. No copy may be of two."""

    def __init__(self, driver: Driver, pieces: Sequence[tuple[int, int]]) -> None:
        self._driver, self._pieces = driver, pieces
        self._registered: list[int] = []
        self._stop = threading.Event()
        self.problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="register", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when all is registered, or as much as can be."""
        self._thread.join()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def undo(self) -> None:
        """Stop, and take back what was done. Nothing may be copying from the memory any more."""
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
                # Copies from the rest still work, slowly. Whoever looks at this worker is told.
                self.problem = str(reason)
                return
            self._registered.append(pointer)
