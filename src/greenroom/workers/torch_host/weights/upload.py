"""Copies weights to the GPU in the order of computation, which may begin before the last chunk has arrived.

Owns the streams and events of the copies, the hooks by which a layer waits for its own weights, where folded chunks
land, and the two ways to unfold: a Triton kernel, tried once against the other, which uses torch operations and takes
five times as long. `fold.py` defines the format. Never maps memory and never computes. Read `WeightUpload.begin` first.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

import torch

from .arena import HostArena
from .device_memory import Driver
from .fold import CHUNK_BYTES, LANDING_CHUNKS, ODD_CODE, Chunk, Fold

log = logging.getLogger(__name__)

# Numbers in the trial: every exponent and sign, and odd ones among them.
TRY_NUMBERS: Final = 2**16
_TRY_BASE: Final = 100

Unfold = Callable[[torch.Tensor, torch.Tensor, Fold], None]
"""Called with folded bytes, the target (int16) and the fold: writes the numbers to the target."""
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
        for part, is_block in hooked_modules(module):
            ends = [self._end(tensor) for tensor in _tensors(part, recurse=is_block)]
            needed = max((end for end in ends if end is not None), default=None)
            if needed is not None:
                yield part, places[(needed - 1) // CHUNK_BYTES]

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


def hooked_modules(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, bool]]:
    """The elements of every outermost module list, and each module around them. True for those elements: they wait as a
    whole, the others for their own weights only."""
    yield module, False
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList):
            yield from ((block, True) for block in child)
        else:
            yield from hooked_modules(child)


def _tensors(module: torch.nn.Module, recurse: bool) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=recurse)
    yield from module.buffers(recurse=recurse)


# --- folded weights ---------------------------------------------------------------------------------------------------


class Unfolder:
    """Restores the chunks of one arena in device memory: each is copied to its `landing`, then `unfold`ed.

    Folded chunks land where the last chunks will be, which are never folded and come last. A device that needs none of
    the last chunks has memory there all the same. Chunks that land in the same place must not be copied before the
    earlier one is unfolded.
    """

    def __init__(self, weights: torch.Tensor, data_bytes: int, unfold: Unfold | None = None) -> None:
        """`weights`: flat device memory for all data. `unfold`: by default the fastest that works."""
        self._weights = weights
        self._whole_chunks = data_bytes // CHUNK_BYTES
        self._unfold = unfolder(weights.device) if unfold is None else unfold

    def landing(self, chunk: Chunk) -> torch.Tensor:
        """Where to copy the stored bytes of this chunk."""
        index = chunk.number if chunk.fold is None else landing_index(chunk.number, self._whole_chunks)
        return self._weights[index * CHUNK_BYTES : index * CHUNK_BYTES + chunk.size]

    def unfold(self, chunk: Chunk) -> None:
        """Restore the chunk from its landing, on the current stream. Does nothing if it is not folded."""
        if chunk.fold is not None:
            target = self._weights[chunk.start : chunk.start + CHUNK_BYTES].view(torch.int16)
            self._unfold(self.landing(chunk), target, chunk.fold)


def landing_index(index: int, whole_chunks: int) -> int:
    """The chunk in whose place a folded one lands: of the last whole chunks, the one a multiple of them later."""
    first = whole_chunks - LANDING_CHUNKS
    return first + (index - first) % LANDING_CHUNKS


def unfold_plainly(folded: torch.Tensor, target: torch.Tensor, fold: Fold) -> None:
    numbers = target.numel()
    half, end = numbers // 2, numbers // 2 * 3
    pairs = folded[numbers:end]
    for start, codes in ((0, pairs & ODD_CODE), (half, pairs >> 4)):
        rest = folded[start : start + half].to(torch.int16)
        exponents = torch.where(codes == 0, 0, codes.to(torch.int16) + fold.base) & 0xFF
        # The sign is moved to bit 15 by a product, which may overflow; a shift might not.
        target[start : start + half] = ((rest & 0x80) * 256) | (exponents << 7) | (rest & 0x7F)
    middle = end + 4 * fold.odd
    places = folded[end:middle].view(torch.int32)
    target[places.long()] = folded[middle : middle + 2 * fold.odd].view(torch.int16)


@functools.cache
def unfolder(device: torch.device) -> Unfold:
    """The fastest function that works on this device."""
    try:
        from ..kernels.triton_kernels import unfold

        folded, fold = _sample(device)
        wanted, found = (torch.zeros(TRY_NUMBERS, dtype=torch.int16, device=device) for _ in range(2))
        unfold_plainly(folded, wanted, fold)
        unfold(folded, found, fold)
        if torch.equal(wanted, found):
            return unfold
        log.warning("the kernel that unfolds weights is wrong here; torch's own operations do it")
    except Exception as reason:
        log.warning("weights are unfolded by torch's own operations: %s", reason)
    return unfold_plainly


def _sample(device: torch.device) -> tuple[torch.Tensor, Fold]:
    """A folded sample with every byte and every pair of codes."""
    fold = Fold(_TRY_BASE, 3)
    parts = [
        (torch.arange(TRY_NUMBERS, device=device) % 256).to(torch.uint8),
        (torch.arange(TRY_NUMBERS // 2, device=device) // (TRY_NUMBERS // 512)).to(torch.uint8),
        torch.tensor([1, TRY_NUMBERS // 2, TRY_NUMBERS - 1], dtype=torch.int32, device=device).view(torch.uint8),
        torch.tensor([-1, 7, 12_345], dtype=torch.int16, device=device).view(torch.uint8),
    ]
    return torch.cat(parts), fold
