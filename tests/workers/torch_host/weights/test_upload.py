"""The order of copies and unfolding, on a fake device that records what was enqueued after what."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pytest
import torch

from greenroom.workers.torch_host.weights.arena import HostArena, Layout, TensorPlace
from greenroom.workers.torch_host.weights.fold import CHUNK_BYTES, ChunkTable, Unfolder
from greenroom.workers.torch_host.weights.fold.fold import LANDING_CHUNKS, Fold
from greenroom.workers.torch_host.weights.upload import WeightUpload

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
    made: Any = WeightUpload(driver, torch.device("cpu"), host, weights, lambda size, seconds: None, unfolder, wanted)
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
    assert upload.is_complete
    assert not module._forward_pre_hooks
    upload.begin(module)
    upload.wait_for_weights()
    upload.finish()
