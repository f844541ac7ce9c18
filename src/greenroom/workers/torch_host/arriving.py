"""Weights on their way to the GPU: copied in the order of computation, which may begin before the last has arrived.

Owns the groups weights are copied in, the stream and events of the copies, and the hooks that let a layer wait for its
own. Never maps memory and never computes. Read `Arrival.begin` first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from .arena import Layout
from .driver import Driver
from .registering import pieces

# Copies of this size and more keep the wire busy; smaller groups would only cost events.
GROUP_BYTES: Final = 64 * 2**20


class Arrival:
    """The copies of one model's weights. Begun at every wake; `finish` before the memory is taken away."""

    def __init__(
        self,
        driver: Driver,
        device: torch.device,
        host: torch.Tensor,
        target: int,
        layout: Layout,
        on_arrival: Callable[[int, float], None],
    ) -> None:
        """`on_arrival` is told bytes and seconds of every copy, from a thread of its own."""
        self._driver, self._device, self._on_arrival = driver, device, on_arrival
        self._host, self._target = host, target
        self._ends = group_ends(layout)
        self._bytes = layout.bytes
        self._stream = torch.cuda.Stream(device)
        self._events = [torch.cuda.Event() for _ in self._ends]
        self._begun = torch.cuda.Event(enable_timing=True)
        self._last = torch.cuda.Event(enable_timing=True, blocking=True)
        self._hooks: list[Any] = []
        self._is_here = threading.Event()
        self._is_here.set()
        self._waiter: threading.Thread | None = None
        self.seconds = 0.0

    def begin(self, module: torch.nn.Module) -> None:
        """Enqueue all copies and let the module's parts wait for theirs. Returns before they have arrived."""
        self.finish()
        self._is_here.clear()
        self._begun.record(self._stream)
        start = 0
        for end, event in zip(self._ends, self._events, strict=True):
            for first, last in pieces(start, end):
                source = self._host.data_ptr() + first
                self._driver.copy_to_device(self._target + first, source, last - first, self._stream.cuda_stream)
            event.record(self._stream)
            start = end
        self._last.record(self._stream)
        self._hooks = [part.register_forward_pre_hook(self._hook(group)) for part, group in self._parts(module)]
        self._waiter = threading.Thread(target=self._wait, name="arrive", daemon=True)
        self._waiter.start()

    def arrived(self) -> None:
        """Return when everything is on the device. To be called by the thread that computes: hooks are taken off."""
        if self._hooks:
            self._is_here.wait()
            self._unhook()

    @property
    def is_here(self) -> bool:
        return self._is_here.is_set()

    def finish(self) -> None:
        """Return when no copy is under way. The model must not be computing."""
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
            self._on_arrival(self._bytes, self.seconds)
        except RuntimeError:
            # The device is lost: whoever computes next is told so, and here nobody must wait for ever.
            self.seconds = time.monotonic() - started
        finally:
            self._is_here.set()

    def _hook(self, group: int) -> Any:
        event = self._events[group]

        def wait(module: torch.nn.Module, inputs: Any) -> None:
            # A stream that captures must not wait for what happened outside; by then all is here.
            if not self._is_here.is_set():
                torch.cuda.current_stream(self._device).wait_event(event)

        return wait

    def _parts(self, module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, int]]:
        """Blocks, and the modules outside of them that own weights; each with the last group it needs."""
        for part in outermost_parts(module):
            is_block = part.owns_all
            ends = [self._end(tensor) for tensor in _tensors(part.module, is_block)]
            needed = max((end for end in ends if end is not None), default=None)
            if needed is not None:
                yield part.module, next(index for index, end in enumerate(self._ends) if end >= needed)

    def _end(self, tensor: torch.Tensor) -> int | None:
        """Where a weight ends in the arena; None for what does not lie there."""
        end = tensor.data_ptr() - self._target + tensor.numel() * tensor.element_size()
        return end if 0 < end <= self._bytes else None


class Part:
    """A module that waits as a whole (a block) or for its own weights only."""

    __slots__ = ("module", "owns_all")

    def __init__(self, module: torch.nn.Module, owns_all: bool) -> None:
        self.module, self.owns_all = module, owns_all


def outermost_parts(module: torch.nn.Module) -> Iterator[Part]:
    """The elements of every outermost list of modules are blocks; around them each module stands for itself."""
    yield Part(module, owns_all=False)
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList):
            yield from (Part(block, owns_all=True) for block in child)
        else:
            yield from outermost_parts(child)


def group_ends(layout: Layout) -> list[int]:
    """Where groups end: at the end of a tensor, as soon as a group is large enough, and at the end of all."""
    ends: list[int] = []
    start = 0
    for place in sorted(layout.places.values(), key=lambda place: place.offset):
        end = place.offset + place.size
        if end - start >= GROUP_BYTES:
            ends.append(end)
            start = end
    if not ends or ends[-1] < layout.bytes:
        ends.append(layout.bytes)
    return ends


def _tensors(module: torch.nn.Module, recurse: bool) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=recurse)
    yield from module.buffers(recurse=recurse)
