"""A model and its memory: asleep in the host arena, or awake with its weights on one device or several.

Owns the device arenas of one model, the registration of its host arena, and the order of steps at wake and sleep.
Handles no requests: the engine has stopped before `sleep` is called. Read `DeviceWeights` first.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..failures import Failure
from .arena import HostArena
from .building import bind, state_of
from .device_memory import BorrowedArena, CudaArena, DeviceArena, Driver, PrivateArena, Span, driver
from .fold import CHUNK_BYTES
from .upload import CopyRate, WeightUpload


@dataclass(frozen=True, slots=True)
class WakeResult:
    """Bytes to be copied, bytes in use on each device, and the expected seconds until all weights have arrived."""

    bytes: int
    each_device_bytes: list[int]
    expected_s: float

    @property
    def device_bytes(self) -> int:
        return sum(self.each_device_bytes)


class DeviceWeights:
    """One model. `module` is bound to its memory on one or several devices; usable only between `wake` and `sleep`. May
    be created before the host arena is filled, unless it is spread: then call `on_filled` before `wake`."""

    def __init__(
        self,
        module: torch.nn.Module,
        host: HostArena,
        device: torch.device,
        kv_bytes: int,
        copy_rate: CopyRate,
        spread: Mapping[str, torch.device] | None = None,
    ) -> None:
        """`spread` names the device of each child of the module; None: all of it is on `device`."""
        self.module = module
        self.config: Any = module.config
        self.device = device
        self.dtype = _dtype_of(module)
        self.is_awake = False
        self._host, self._copy_rate = host, copy_rate
        self._registration: Registration | None = None
        self.parts: list[DevicePart] = []
        try:
            for one, names in _by_device(device, spread).items():
                self.parts.append(DevicePart(one, names, host, copy_rate))
            self.kv = _arena(device, kv_bytes, None)
        except BaseException:
            for part in self.parts:
                part.arena.close()
            raise
        for part in self.parts:
            part.bind(module)
        if host.filled:
            self.on_filled()

    def on_filled(self) -> None:
        """The host arena is filled: register its memory in the background. May be called again."""
        gpu = next((part.device for part in self.parts if part.upload is not None), None)
        if gpu is not None and self._registration is None:
            start = self._host.tensor.data_ptr()
            pieces = [(start + chunk.start, chunk.size) for chunk in self._host.chunks]
            # For all devices: memory is registered for every context of the process.
            self._registration = Registration(driver(gpu.index or 0), pieces)

    def wake(self) -> WakeResult:
        """Map memory and start the upload; computing may begin at once. Raises OutOfMemory; then it stays asleep."""
        if self.is_awake:
            return WakeResult(0, self.each_device_bytes, 0.0)
        if self._registration is not None:
            self._registration.wait()
        try:
            for arena in self._arenas:
                arena.map()
            for upload in self._uploads:
                upload.begin(self.module)
        except BaseException:
            self._release()
            raise
        self.is_awake = True
        sizes = [upload.bytes for upload in self._uploads]
        # Each device is copied to over a link of its own.
        return WakeResult(sum(sizes), self.each_device_bytes, self._copy_rate.expected_s(max(sizes, default=0)))

    def wait_for_weights(self) -> None:
        """Return when all weights are on the device. Call from the computing thread; free once they are."""
        for upload in self._uploads:
            upload.wait_for_weights()

    def rebind(self) -> None:
        """Put tensors that were converted or replaced since back to their places. Nothing may be computing."""
        for part in self.parts:
            if part.has_left(self.module):
                part.bind(self.module)

    def sleep(self) -> float:
        """Free the device memory and return the seconds it took. Nothing may be computing any more."""
        began = time.monotonic()
        if not self.is_awake:
            return 0.0
        self.is_awake = False
        self._release()
        if any(part.device.type == "cuda" for part in self.parts):
            # Also free what torch keeps cached from finished computations.
            torch.cuda.empty_cache()
        return time.monotonic() - began

    def _release(self) -> None:
        """Unmap all memory, once no copy is in flight."""
        for upload in self._uploads:
            upload.finish()
        for arena in self._arenas:
            arena.unmap()

    def close(self) -> None:
        """Release everything. The module is unusable afterwards."""
        self.sleep()
        if self._registration is not None:
            self._registration.undo()
        # Parameters are views of the arenas: drop them first.
        self.module = torch.nn.Module()
        for part in self.parts:
            part.upload = None
        gc.collect()
        for arena in self._arenas:
            arena.close()
        self._host.close()

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return tuple(part.device for part in self.parts)

    @property
    def each_device_bytes(self) -> list[int]:
        """Bytes this model has on each device now."""
        found = [_held(part.arena) for part in self.parts]
        return [found[0] + _held(self.kv), *found[1:]]

    @property
    def device_bytes(self) -> int:
        return sum(self.each_device_bytes)

    @property
    def last_wake_s(self) -> float:
        """Seconds the last upload took, once it is done."""
        return max((upload.seconds for upload in self._uploads), default=0.0)

    @property
    def registration_problem(self) -> str | None:
        return self._registration.problem if self._registration is not None else None

    @property
    def _uploads(self) -> list[WeightUpload]:
        """None of them where the CPU is the device."""
        return [part.upload for part in self.parts if part.upload is not None]

    @property
    def _arenas(self) -> list[DeviceArena]:
        return [*(part.arena for part in self.parts), self.kv]


class DevicePart:
    """What one device holds of a model: all of it, or the children of the module with these names. Offsets are those of
    the host arena on every device, so a layout means the same everywhere. A device that holds a part has memory only
    for the chunks of that part."""

    def __init__(self, device: torch.device, names: Sequence[str] | None, host: HostArena, copy_rate: CopyRate) -> None:
        self.device = device
        self._names, self._layout = names, host.layout
        wanted = None if names is None else {number for name in names for number in host.chunks_of(name)}
        spans = None if wanted is None else _spans(host.memory_for(wanted))
        self.arena = _arena(device, host.layout.bytes, host.tensor, spans)
        self.upload: WeightUpload | None = None
        if not isinstance(self.arena, CudaArena):
            return
        try:
            # The kernel that unfolds is tried on the current device.
            with torch.cuda.device(device):
                card, flat = driver(device.index or 0), self.arena.tensor
                self.upload = WeightUpload(card, device, host, flat, copy_rate, wanted=wanted)
        except BaseException:
            self.arena.close()
            raise

    def bind(self, module: torch.nn.Module) -> None:
        for prefix, part in self._modules(module):
            bind(part, self.arena.tensor, self._layout, prefix)

    def has_left(self, module: torch.nn.Module) -> bool:
        """True if a tensor of this part lies elsewhere."""
        start = self.arena.tensor.data_ptr()
        end = start + self.arena.tensor.numel()
        tensors = (tensor for _, part in self._modules(module) for _, tensor in state_of(part) if tensor.numel())
        return any(not start <= tensor.data_ptr() < end for tensor in tensors)

    def _modules(self, module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
        return [("", module)] if self._names is None else [(name, getattr(module, name)) for name in self._names]


def _by_device(
    device: torch.device, spread: Mapping[str, torch.device] | None
) -> Mapping[torch.device, list[str] | None]:
    """The names on each device, `device` first; None: everything."""
    if spread is None or set(spread.values()) <= {device}:
        return {device: None}
    others = sorted({*spread.values()} - {device}, key=lambda one: (one.type, one.index or 0))
    return {one: [name for name, other in spread.items() if other == one] for one in (device, *others)}


def _spans(numbers: Sequence[int]) -> list[Span]:
    """Chunks that follow each other, as one span each."""
    found: list[Span] = []
    for number in numbers:
        start = number * CHUNK_BYTES
        if found and sum(found[-1]) == start:
            found[-1] = found[-1][0], found[-1][1] + CHUNK_BYTES
        else:
            found.append((start, CHUNK_BYTES))
    return found


def _arena(
    device: torch.device, size: int, borrowed: torch.Tensor | None, spans: Sequence[Span] | None = None
) -> DeviceArena:
    """Memory of this device. A CPU uses what is `borrowed`, or memory of its own where that is None."""
    if device.type == "cuda":
        return CudaArena(driver(device.index or 0), device.index or 0, size, spans)
    return PrivateArena(size) if borrowed is None else BorrowedArena(borrowed.to(device))


def _held(arena: DeviceArena) -> int:
    """Bytes of the device; what is borrowed is the host arena's."""
    return arena.size if arena.is_mapped and not isinstance(arena, BorrowedArena) else 0


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
