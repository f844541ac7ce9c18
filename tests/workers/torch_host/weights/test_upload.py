"""The order of copies and unfolding on a fake device, and the memory of a driver that is mapped and let go."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pytest
import torch

from greenroom.workers.torch_host.failures import DriverError, OutOfMemory
from greenroom.workers.torch_host.weights.arena import HostArena, Layout, TensorPlace
from greenroom.workers.torch_host.weights.device_memory import CudaArena
from greenroom.workers.torch_host.weights.device_weights import Registration
from greenroom.workers.torch_host.weights.fold import CHUNK_BYTES, LANDING_CHUNKS, ChunkTable, Fold
from greenroom.workers.torch_host.weights.upload import CopyRate, Unfolder, WeightUpload

Clock = Counter[int]


class FakeStream:
    """Knows how much work of every stream is done before its next operation."""

    made = 0

    def __init__(self, *_: object, **__: object) -> None:
        FakeStream.made += 1
        self.cuda_stream = FakeStream.made
        self.after: Clock = Counter()
        self.synchronized = 0

    def enqueue(self) -> Clock:
        self.after[self.cuda_stream] += 1
        return self.after.copy()

    def wait_event(self, event: FakeEvent) -> None:
        self.after |= event.after

    def synchronize(self) -> None:
        self.synchronized += 1


class FakeEvent:
    def __init__(self, **_: object) -> None:
        self.after: Clock = Counter()

    def record(self, stream: FakeStream) -> None:
        self.after = stream.after.copy()

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def elapsed_time(self, _: FakeEvent) -> float:
        return 1.0


class Device:
    """A fake driver and unfold kernel: records which bytes are touched and what is done by then."""

    def __init__(self) -> None:
        self.streams: dict[int, FakeStream] = {}
        self.start = 0
        self.done: list[tuple[str, int, int, Clock, int]] = []
        self.unfolds_on: FakeStream

    def copy_to_device(self, address: int, pointer: int, size: int, stream: int) -> None:
        place = address - self.start
        self.done.append(("copy", place, place + size, self.streams[stream].enqueue(), stream))

    def unfold(self, folded: torch.Tensor, target: torch.Tensor, fold: Fold) -> None:
        clock, stream = self.unfolds_on.enqueue(), self.unfolds_on.cuda_stream
        for what, tensor in (("read", folded), ("write", target)):
            place = tensor.data_ptr() - self.start
            size = tensor.numel() * tensor.element_size()
            self.done.append((what, place, place + size, clock, stream))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
    yield device


def upload_of(
    device: Device, chunks: int, folds: Mapping[int, Fold], wanted: Collection[int] | None = None
) -> tuple[WeightUpload, torch.nn.Module]:
    size = chunks * CHUNK_BYTES + 512
    memory = os.memfd_create("arena")
    os.ftruncate(memory, size + 4096)
    layout = Layout({"weight": TensorPlace("uint8", (size,), 0, size)}, size)
    host = HostArena(memory, layout, "these", ChunkTable(size, folds))
    os.close(memory)
    weights = torch.empty(size, dtype=torch.uint8)
    device.start = weights.data_ptr()
    unfolder = Unfolder(weights, size, device.unfold)
    driver: Any = device
    made: Any = WeightUpload(driver, torch.device("cpu"), host, weights, CopyRate(), unfolder, wanted)
    device.streams = {stream.cuda_stream: stream for stream in (made._copy_stream, made._unfold_stream)}
    device.unfolds_on = made._unfold_stream
    module = torch.nn.Module()
    first = 0 if wanted is None else min(wanted) * CHUNK_BYTES
    module.register_buffer("weight", weights if wanted is None else weights[first : first + CHUNK_BYTES])
    return made, module


@pytest.mark.parametrize("chunks", [LANDING_CHUNKS + 1, LANDING_CHUNKS + 4, LANDING_CHUNKS + 7])
@pytest.mark.parametrize("left_out", [None, 0, 1, 2])
def test_nothing_is_overwritten_or_read_too_early(chunks: int, left_out: int | None, cuda: Device) -> None:
    folds = {index: Fold(100, 9) for index in range(chunks - LANDING_CHUNKS) if index != left_out}
    upload, module = upload_of(cuda, chunks, folds)
    for _ in range(2):
        cuda.done.clear()
        upload.begin(module)
        upload.wait_for_weights()
        touched = cuda.done
        check_order(touched)
        written = {start for what, start, _, _, _ in touched if what == "write" or start // CHUNK_BYTES not in folds}
        assert {index * CHUNK_BYTES for index in range(chunks + 1)} <= written
        # The last event means that all weights are there.
        assert all(upload._last.after[stream] >= clock[stream] for *_, clock, stream in touched)
        assert upload.bytes == sum(chunk.size for chunk in upload._host.chunks)


def check_order(touched: list[tuple[str, int, int, Clock, int]]) -> None:
    for number, (what, start, end, clock, _) in enumerate(touched):
        for before, other_start, other_end, other, stream in touched[:number]:
            if other is clock or other_end <= start or end <= other_start or before == what == "read":
                continue
            assert other[stream] <= clock[stream], f"{what} of {start} does not wait for the {before} before it"


# Neighbours, chunks that land in the same place, and a device with the last chunks.
@pytest.mark.parametrize("wanted", [{0, 1}, {0, 2, 4}, {1, 3, 7}, {0, 2, 7, 8}, set(range(10))])
def test_a_device_gets_the_chunks_of_its_part_in_memory_that_it_has(wanted: set[int], cuda: Device) -> None:
    folds = {index: Fold(100, 9) for index in range(7) if index != 1}
    upload, module = upload_of(cuda, 9, folds, wanted)
    there = upload._host.memory_for(wanted)
    assert {*there} - wanted <= {7, 8}, "the rest is where folded ones land"
    for _ in range(2):
        cuda.done.clear()
        upload.begin(module)
        upload.wait_for_weights()
        check_order(cuda.done)
        assert {start // CHUNK_BYTES for _, start, *_ in cuda.done} <= {*there}
        written = {start // CHUNK_BYTES for what, start, *_ in cuda.done if what == "write"}
        assert written == wanted & folds.keys()
        assert upload.bytes == sum(chunk.size for chunk in upload._host.chunks if chunk.number in wanted)


def test_a_wake_that_cannot_begin_leaves_nothing_in_the_way(cuda: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    upload, module = upload_of(cuda, LANDING_CHUNKS + 1, {})

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as scarce:
        scarce.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            upload.begin(module)
    assert all(stream.synchronized for stream in cuda.streams.values())
    assert not module._forward_pre_hooks
    upload.begin(module)
    upload.wait_for_weights()
    upload.finish()


GRANULE = 2 * 2**20
DEADLINE_S = 60.0


class FakeDriver:
    """Counts memory. `free` bytes can still be mapped; registrations may wait, or fail from one on."""

    def __init__(self, free: int = 10**12) -> None:
        self.granularity = GRANULE
        self.free = free
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.registered: dict[int, int] = {}
        self.fails_at: int | None = None
        self.may_register = threading.Event()
        self.may_register.set()
        self._handle = 0

    def memory(self) -> tuple[int, int]:
        return self.free, 10**12

    def reserve(self, size: int) -> int:
        self.reserved[GRANULE] = size
        return GRANULE

    def free_addresses(self, address: int, size: int) -> None:
        assert self.reserved.pop(address) == size

    def map(self, address: int, size: int) -> int:
        if size > self.free:
            raise OutOfMemory("cuMemCreate found no memory.")
        assert address not in self.mapped
        self._handle += 1
        self.free -= size
        self.mapped[address] = size, self._handle
        return self._handle

    def unmap(self, address: int, size: int, handle: int) -> None:
        assert self.mapped.pop(address) == (size, handle)
        self.free += size

    def register(self, pointer: int, size: int) -> None:
        assert self.may_register.wait(DEADLINE_S)
        if self.fails_at is not None and len(self.registered) >= self.fails_at:
            raise DriverError("cuMemHostRegister", 801, "operation not supported")
        self.registered[pointer] = size

    def unregister(self, pointer: int) -> None:
        del self.registered[pointer]


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts how often torch's cache was emptied."""
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append(1))
    monkeypatch.setattr(torch, "as_tensor", lambda described, device: described.__cuda_array_interface__)
    return asked


def arena_of(driver: Any, size: int) -> CudaArena:
    return CudaArena(driver, 0, size)


def test_an_arena_is_made_of_whole_pages_and_needs_no_memory_yet(emptied: list[int]) -> None:
    driver = FakeDriver(free=GRANULE)
    arena = arena_of(driver, 100 * GRANULE + 1)
    assert arena.size == 101 * GRANULE
    described: Any = arena.tensor
    assert described["data"][0] == arena.address
    assert described["shape"] == (arena.size,)
    assert (driver.mapped, driver.free) == ({}, GRANULE)


def test_mapping_and_unmapping_match_however_often_they_are_asked_for(emptied: list[int]) -> None:
    driver = FakeDriver()
    arena = arena_of(driver, GRANULE)
    for _ in range(3):
        arena.map()
        arena.map()
        assert len(driver.mapped) == 1
        arena.unmap()
        arena.unmap()
        assert not driver.mapped
    arena.map()
    arena.close()
    arena.close()
    assert (driver.mapped, driver.reserved) == ({}, {})


def test_what_torch_keeps_for_later_is_taken_before_memory_is_said_to_be_out(emptied: list[int]) -> None:
    driver = FakeDriver(free=2 * GRANULE)
    arena = arena_of(driver, 3 * GRANULE)
    with pytest.raises(OutOfMemory, match=f"has {2 * GRANULE:,} of 1,000,000,000,000 bytes free and {3 * GRANULE:,}"):
        arena.map()
    assert emptied == [1]
    assert not arena.is_mapped
    driver.free = 3 * GRANULE
    arena.map()
    assert arena.is_mapped


def test_an_arena_unseen_by_torch_gives_its_addresses_back(emptied: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(torch, "as_tensor", refuse)
    driver = FakeDriver()
    with pytest.raises(RuntimeError):
        arena_of(driver, GRANULE)
    assert (driver.mapped, driver.reserved) == ({}, {})


def test_an_arena_of_spans_takes_memory_for_these_only(emptied: list[int]) -> None:
    driver = FakeDriver(free=5 * GRANULE)
    spans = [(0, 2 * GRANULE), (8 * GRANULE, 3 * GRANULE)]
    made: Any = driver
    arena = CudaArena(made, 0, 10 * GRANULE, spans)
    assert arena.size == 4 * GRANULE, "it ends with the arena"
    described: Any = arena.tensor
    assert described["shape"] == (10 * GRANULE,), "offsets are those of the whole"
    arena.map()
    assert sorted(driver.mapped) == [arena.address, arena.address + 8 * GRANULE]
    arena.unmap()
    assert (driver.mapped, driver.free) == ({}, 5 * GRANULE)
    driver.free = 3 * GRANULE
    with pytest.raises(OutOfMemory):
        arena.map()
    assert (driver.mapped, driver.free) == ({}, 3 * GRANULE), "half of it is no use"
    arena.close()
    assert not driver.reserved


def registration_of(driver: Any, pieces: int) -> Registration:
    return Registration(driver, [(4096 * (1 + number), 100 + number) for number in range(pieces)])


def test_each_piece_of_memory_is_registered_and_all_of_it_is_let_go() -> None:
    driver = FakeDriver()
    registration = registration_of(driver, 3)
    registration.wait()
    assert driver.registered == {4096: 100, 8192: 101, 12288: 102}
    assert registration.problem is None
    registration.undo()
    assert driver.registered == {}


def test_a_system_that_does_not_register_is_said_to_be_so_and_what_was_done_is_undone() -> None:
    driver = FakeDriver()
    driver.fails_at = 1
    registration = registration_of(driver, 3)
    registration.wait()
    assert registration.problem is not None
    assert "operation not supported" in registration.problem
    registration.undo()
    assert driver.registered == {}


def test_undoing_does_not_wait_for_what_is_still_to_be_registered() -> None:
    driver = FakeDriver()
    driver.may_register.clear()
    registration = registration_of(driver, 100)
    undoing = threading.Thread(target=registration.undo)
    undoing.start()
    driver.may_register.set()
    undoing.join(DEADLINE_S)
    assert not undoing.is_alive()
    assert driver.registered == {}
