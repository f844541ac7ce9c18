"""Weights from files into an arena: the same bytes whichever way they come, and nothing left when that fails."""

from __future__ import annotations

import fcntl
import gc
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from greenroom.workers.torch_host.failures import BadModel, Failure, WorkCancelled
from greenroom.workers.torch_host.weights import reading
from greenroom.workers.torch_host.weights.arena import HostArena, TensorPlace, lay_out, view_of
from greenroom.workers.torch_host.weights.folding import Folding
from greenroom.workers.torch_host.weights.reading import LoadContext, TensorRead, pieces_of
from greenroom.workers.torch_host.weights.safetensors_files import StoredTensor, read_header
from greenroom.workers.torch_host.weights.weight_file import WeightFile, bounce_for

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0


PIECE_BYTES = 8192


def read_all(transfers: list[TensorRead], arena: HostArena, context: LoadContext | None = None) -> int:
    return reading.read_all(transfers, arena, context or LoadContext(), Folding(-1, 0, ()), PIECE_BYTES)


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    shapes = {"first": (33, 129), "second": (7,), "third": (64, 200), "none": (0, 4)}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def arena_for(
    path: Path, weights: dict[str, torch.Tensor], descriptor: int, dtype: torch.dtype = torch.float32
) -> tuple[HostArena, list[TensorRead]]:
    save_file(weights, path)
    layout = lay_out((name, tensor.to(dtype)) for name, tensor in weights.items())
    arena = HostArena.create(descriptor, layout, "test", None)
    stored = {tensor.name: tensor for tensor in read_header(path)}
    return arena, [TensorRead(stored[name], layout.places[name]) for name in weights]


def forget_cached(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "way", ["cached", "half cached", "forgotten", "refused when opened", "refused when read", "no nowait"]
)
def test_the_bytes_are_the_same_whichever_way_they_come(
    way: str,
    dtype: torch.dtype,
    tmp_path: Path,
    weights: dict[str, torch.Tensor],
    descriptor: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena, transfers = arena_for(tmp_path / "model.safetensors", weights, descriptor, dtype)
    if way == "half cached":
        monkeypatch.setattr(os, "preadv", cached_by_half)
    elif way != "cached":
        forget_cached(tmp_path / "model.safetensors")
    if way == "no nowait":
        monkeypatch.setattr(os, "preadv", without_nowait)
    elif way == "refused when opened":
        monkeypatch.setattr(os, "preadv", without_nowait)
        monkeypatch.setattr(os, "open", without_direct)
    elif way == "refused when read":
        monkeypatch.setattr(os, "preadv", not_directly)
    done = read_all(transfers, arena)
    assert done == sum(tensor.numel() * 4 for tensor in weights.values())
    for name, tensor in weights.items():
        assert torch.equal(view_of(arena.tensor, arena.layout.places[name]), tensor.to(dtype))


PREADV = os.preadv


def cached_by_half(descriptor: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
    """The page cache has the first half of each range."""
    if flags & os.RWF_NOWAIT and len(buffers[0]) > 1:
        return PREADV(descriptor, [memoryview(buffers[0])[: len(buffers[0]) // 2]], offset)
    return PREADV(descriptor, buffers, offset)


def test_what_is_not_cached_is_asked_of_the_cache_by_the_byte(
    tmp_path: Path, weights: dict[str, torch.Tensor], descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer probe would make the kernel read ahead what is then read past the cache again."""
    arena, transfers = arena_for(tmp_path / "model.safetensors", weights, descriptor)
    asked: list[int] = []

    def nothing_cached(descriptor: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        if not flags & os.RWF_NOWAIT:
            return PREADV(descriptor, buffers, offset)
        asked.append(sum(map(len, buffers)))
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "preadv", nothing_cached)
    read_all(transfers, arena)
    assert asked
    assert set(asked) == {1}


def without_nowait(descriptor: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
    if flags & os.RWF_NOWAIT:
        raise OSError(95, "Operation not supported")
    return PREADV(descriptor, buffers, offset)


def not_directly(descriptor: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
        raise OSError(22, "Invalid argument")
    return without_nowait(descriptor, buffers, offset, flags)


OPEN = os.open


def without_direct(path: Any, flags: int, *more: Any, **named: Any) -> int:
    if flags & os.O_DIRECT:
        raise OSError(22, "Invalid argument")
    return OPEN(path, flags, *more, **named)


def test_direct_reads_bring_any_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = os.urandom(20_000)
    (tmp_path / "file").write_bytes(content)
    bounce = bounce_for(20_000)
    # Nothing comes from the cache; whether the file system reads directly or not, whole blocks are read.
    monkeypatch.setattr(os, "preadv", without_nowait)
    monkeypatch.setattr(os, "open", lambda path, flags, *more: OPEN(path, flags & ~os.O_DIRECT, *more))
    file = WeightFile(tmp_path / "file", 1)
    for offset, size in ((0, 1), (0, 4096), (4095, 2), (4097, 8192), (100, 19_900), (19_999, 1)):
        target = bytearray(size)
        assert file.fill([memoryview(target)], offset, bounce) == size
        assert target == content[offset : offset + size]
    # What lies behind the end is not there, and is not made up.
    assert file.fill([memoryview(bytearray(100))], 19_950, bounce) == 50
    assert file.fill([memoryview(bytearray(100))], 30_000, bounce) == 0
    file.close()


def test_a_file_cut_off_meanwhile_is_bad(tmp_path: Path, weights: dict[str, torch.Tensor], descriptor: int) -> None:
    path = tmp_path / "model.safetensors"
    arena, transfers = arena_for(path, weights, descriptor)
    os.truncate(path, path.stat().st_size - 5_000)
    with pytest.raises(BadModel, match="ends inside tensor"):
        read_all(transfers, arena)


def test_a_file_that_is_gone_is_said_to_be(tmp_path: Path, weights: dict[str, torch.Tensor], descriptor: int) -> None:
    path = tmp_path / "model.safetensors"
    arena, transfers = arena_for(path, weights, descriptor)
    path.unlink()
    with pytest.raises(Failure, match=r"model\.safetensors failed: No such file"):
        read_all(transfers, arena)


def test_reading_stops_when_it_is_cancelled(tmp_path: Path, weights: dict[str, torch.Tensor], descriptor: int) -> None:
    arena, transfers = arena_for(tmp_path / "model.safetensors", weights, descriptor)

    class Load(LoadContext):
        def on_progress(self, share: float) -> None:
            self.cancelled.set()

    with pytest.raises(WorkCancelled):
        read_all(transfers, arena, Load())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-")]


def test_progress_reaches_1_and_files_are_closed(
    tmp_path: Path, weights: dict[str, torch.Tensor], descriptor: int
) -> None:
    arena, transfers = arena_for(tmp_path / "model.safetensors", weights, descriptor)
    seen: list[float] = []

    class Load(LoadContext):
        def on_progress(self, share: float) -> None:
            seen.append(share)

    # What failed before may still hold descriptors, and must not let go of them in between.
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    read_all(transfers, arena, Load())
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert len(os.listdir("/proc/self/fd")) == before


def test_reading_threads_are_settled_first(tmp_path: Path, weights: dict[str, torch.Tensor], descriptor: int) -> None:
    arena, transfers = arena_for(tmp_path / "model.safetensors", weights, descriptor)
    settled: list[str] = []

    class Load(LoadContext):
        def on_thread(self) -> None:
            settled.append(threading.current_thread().name)

    read_all(transfers, arena, Load())
    assert len(settled) == len(set(settled)) >= 4


def test_what_is_begun_beside_reading_is_begun_while_every_thread_reads(
    tmp_path: Path, weights: dict[str, torch.Tensor], descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena, transfers = arena_for(tmp_path / "model.safetensors", weights, descriptor)
    begun = threading.Event()
    fill = WeightFile.fill

    def fill_once_begun(self: WeightFile, *what: Any) -> int:
        assert begun.wait(DEADLINE_S)
        return fill(self, *what)

    class Load(LoadContext):
        def on_reading(self) -> None:
            begun.set()

    monkeypatch.setattr(WeightFile, "fill", fill_once_begun)
    read_all(transfers, arena, Load())
    assert begun.is_set()


def test_a_thread_that_cannot_settle_fails_all(
    tmp_path: Path, weights: dict[str, torch.Tensor], descriptor: int
) -> None:
    arena, transfers = arena_for(tmp_path / "model.safetensors", weights, descriptor)

    class Load(LoadContext):
        def on_thread(self) -> None:
            raise Failure("no processor is near")

    with pytest.raises(Failure, match="no processor is near"):
        read_all(transfers, arena, Load())


def transfers_of(*ranges: tuple[int, int]) -> list[TensorRead]:
    """Tensors of one file, each from an offset on and so many bytes long."""
    file = Path("model.safetensors")
    stored = [StoredTensor(str(offset), file, "U8", (size,), offset, size) for offset, size in ranges]
    return [TensorRead(one, TensorPlace("uint8", one.shape, 0, one.size)) for one in stored]


def ranges_of(transfers: list[TensorRead], parts_max: int = 512) -> list[tuple[int, int]]:
    return [(piece.offset, piece.size) for piece in pieces_of(transfers, PIECE_BYTES, parts_max)]


def test_small_tensors_that_follow_each_other_are_read_together() -> None:
    assert ranges_of(transfers_of((1007, 100), (107, 900), (1107, 0), (1107, 50))) == [(107, 1050)]


def test_what_lies_between_tensors_is_not_read() -> None:
    assert ranges_of(transfers_of((0, 100), (200, 100))) == [(0, 100), (200, 100)]


def test_large_tensors_are_cut_between_their_numbers() -> None:
    pieces = list(pieces_of(transfers_of((3, 100), (103, 20_000)), PIECE_BYTES))
    assert all(part.start % reading.CUT_BYTES == 0 for piece in pieces for part in piece.parts)
    assert all(piece.size <= PIECE_BYTES for piece in pieces)
    ends = [piece.offset + piece.size for piece in pieces]
    assert [piece.offset for piece in pieces] == [3, *ends[:-1]]
    assert ends[-1] == 20_103


def test_one_read_has_no_more_places_than_the_kernel_takes() -> None:
    assert ranges_of(transfers_of(*((10 * number, 10) for number in range(6))), parts_max=4) == [(0, 40), (40, 20)]
