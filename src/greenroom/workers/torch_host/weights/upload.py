"""Copies weights to the GPU in the order of computation, which may begin before the last chunk has arrived.

Owns the streams and events of the copies, and the hooks by which a layer waits for its own weights. Never maps memory
and never computes. Read `WeightUpload.begin` first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

import torch

from .arena import HostArena
from .device_memory import Driver
from .fold import CHUNK_BYTES, Chunk
from .unfolding import Unfolder

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


class WeightUpload:
    """The copies of one model's weights. Call `begin` at every wake, and `finish` before the memory is unmapped."""

    def __init__(
        self,
        driver: Driver,
        device: torch.device,
        host: HostArena,
        weights: torch.Tensor,
        copy_rate: CopyRate,
        unfolder: Unfolder | None = None,
        wanted: Collection[int] | None = None,
    ) -> None:
        """`wanted` are the numbers of the chunks that this device needs; None: all of them."""
        self._driver, self._device, self._copy_rate = driver, device, copy_rate
        self._host, self._weights = host, weights
        self._unfolder = unfolder or Unfolder(weights, host.layout.bytes)
        self._wanted = wanted
        self._chunks: list[Chunk] = []
        # For each chunk, the one that landed before it in the same place; None: no other has.
        self._landed_before: list[int | None] = []
        # Copies run on the first. Unfolding runs on the second, and computation waits for it.
        self._copy_stream, self._unfold_stream = torch.cuda.Stream(device), torch.cuda.Stream(device, priority=-1)
        self._copied: list[torch.cuda.Event] = []
        self._ready: list[torch.cuda.Event] = []
        self._begun = torch.cuda.Event(enable_timing=True)
        self._last = torch.cuda.Event(enable_timing=True, blocking=True)
        self._hooks: list[Any] = []
        self._complete = threading.Event()
        self._complete.set()
        self._waiter: threading.Thread | None = None
        self.seconds = 0.0

    @property
    def bytes(self) -> int:
        """Bytes that are copied."""
        return sum(chunk.size for chunk in self._chunks)

    def begin(self, module: torch.nn.Module) -> None:
        """Enqueue all copies, and hook the module's parts to wait for theirs. Returns before the copies are done. If it
        raises, no copy is in flight: the memory may be unmapped."""
        self.finish()
        if not self._chunks:
            self._chunks = [one for one in self._host.chunks if self._wanted is None or one.number in self._wanted]
            self._landed_before = _earlier([self._unfolder.landing(chunk).data_ptr() for chunk in self._chunks])
            self._copied, self._ready = ([torch.cuda.Event() for _ in self._chunks] for _ in range(2))
        self._begun.record(self._copy_stream)
        try:
            with torch.cuda.stream(self._unfold_stream):
                for index in range(len(self._chunks)):
                    self._enqueue(index)
            self._last.record(self._unfold_stream)
            self._complete.clear()
            for part, index in self._parts(module):
                self._hooks.append(part.register_forward_pre_hook(self._hook(index)))
            waiter = threading.Thread(target=self._wait, name="arrive", daemon=True)
            waiter.start()
        except BaseException:
            self._unhook()
            self._complete.set()
            self._copy_stream.synchronize()
            self._unfold_stream.synchronize()
            raise
        self._waiter = waiter

    def _enqueue(self, index: int) -> None:
        """Enqueue one chunk. The copy waits until an earlier chunk in the same landing place is unfolded."""
        chunk = self._chunks[index]
        before = self._landed_before[index]
        if before is not None:
            self._copy_stream.wait_event(self._ready[before])
        target, source = self._unfolder.landing(chunk), self._host.tensor.data_ptr() + chunk.start
        self._driver.copy_to_device(target.data_ptr(), source, chunk.size, self._copy_stream.cuda_stream)
        self._copied[index].record(self._copy_stream)
        self._unfold_stream.wait_event(self._copied[index])
        self._unfolder.unfold(chunk)
        self._ready[index].record(self._unfold_stream)

    def wait_for_weights(self) -> None:
        """Return when all weights are on the device. Call from the computing thread: it removes the hooks."""
        if self._hooks:
            self._complete.wait()
            self._unhook()

    @property
    def is_complete(self) -> bool:
        return self._complete.is_set()

    def finish(self) -> None:
        """Return when no copy is in flight. The model must not be computing."""
        if self._waiter is not None:
            self._waiter.join()
            self._waiter = None
        self._unhook()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _wait(self) -> None:
        started = time.monotonic()
        try:
            with torch.cuda.device(self._device):
                self._last.synchronize()
                self.seconds = self._begun.elapsed_time(self._last) / 1000
            self._copy_rate.record(self.bytes, self.seconds)
        except RuntimeError:
            # The device is lost. The next computation fails with that; here, waiting threads must be released.
            self.seconds = time.monotonic() - started
        finally:
            self._complete.set()

    def _hook(self, index: int) -> Any:
        event = self._ready[index]

        def wait(module: torch.nn.Module, inputs: Any) -> None:
            # A capturing stream must not wait for an outside event; by then all weights have arrived.
            if not self._complete.is_set():
                torch.cuda.current_stream(self._device).wait_event(event)

        return wait

    def _parts(self, module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, int]]:
        """Blocks, and modules outside of blocks that own weights here, each with the last of our chunks it needs."""
        places = {chunk.number: index for index, chunk in enumerate(self._chunks)}
        for part in hooked_modules(module):
            ends = [self._end(tensor) for tensor in _tensors(part.module, part.owns_all)]
            needed = max((end for end in ends if end is not None), default=None)
            if needed is not None:
                yield part.module, places[(needed - 1) // CHUNK_BYTES]

    def _end(self, tensor: torch.Tensor) -> int | None:
        """The offset at which a weight ends in the arena; None if it is not there."""
        end = tensor.data_ptr() - self._weights.data_ptr() + tensor.numel() * tensor.element_size()
        return end if 0 < end <= self._host.layout.bytes else None


def _earlier(places: Sequence[int]) -> list[int | None]:
    """For each of these, the index of the last one before it that is the same."""
    last: dict[int, int] = {}
    found: list[int | None] = []
    for index, place in enumerate(places):
        found.append(last.get(place))
        last[place] = index
    return found


class HookedModule:
    """A module that waits as a whole (a block) or for its own weights only."""

    __slots__ = ("module", "owns_all")

    def __init__(self, module: torch.nn.Module, owns_all: bool) -> None:
        self.module, self.owns_all = module, owns_all


def hooked_modules(module: torch.nn.Module) -> Iterator[HookedModule]:
    """The elements of every outermost module list, as blocks, and each module around them on its own."""
    yield HookedModule(module, owns_all=False)
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList):
            yield from (HookedModule(block, owns_all=True) for block in child)
        else:
            yield from hooked_modules(child)


def _tensors(module: torch.nn.Module, recurse: bool) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=recurse)
    yield from module.buffers(recurse=recurse)
