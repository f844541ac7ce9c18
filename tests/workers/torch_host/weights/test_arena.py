"""Arenas: tensors in memory that workers share, and the memory of a device that is taken and given back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from greenroom.workers.torch_host.control import device_context
from greenroom.workers.torch_host.control.device_context import numbers_in, processors_near, settle_near
from greenroom.workers.torch_host.failures import OutOfMemory
from greenroom.workers.torch_host.weights.arena import ALIGN_BYTES, HostArena, Layout, TensorPlace, lay_out, view_of
from greenroom.workers.torch_host.weights.device_memory import BorrowedArena, PrivateArena
from greenroom.workers.torch_host.weights.device_weights import RATE_UNKNOWN, CopyRate
from greenroom.workers.torch_host.weights.fold import ChunkTable
from greenroom.workers.torch_host.weights.upload import hooked_modules


def layout_of(*shapes: tuple[int, ...]) -> Layout:
    return lay_out((f"t{number}", torch.empty(shape, device="meta")) for number, shape in enumerate(shapes))


def test_tensors_lie_in_order_and_aligned() -> None:
    layout = layout_of((3, 5), (1,), (200,))
    offsets = [place.offset for place in layout.places.values()]
    assert offsets == [0, ALIGN_BYTES, 2 * ALIGN_BYTES]
    assert layout.bytes == 4 * ALIGN_BYTES


def test_tied_tensors_lie_there_once() -> None:
    shared, other = torch.nn.Parameter(torch.ones(4)), torch.ones(4)
    layout = lay_out([("in", shared), ("out", shared), ("view", shared.detach()), ("other", other)])
    assert layout.places["in"] == layout.places["out"] == layout.places["view"]
    assert layout.places["other"].offset == ALIGN_BYTES
    assert layout.bytes == 2 * ALIGN_BYTES


def test_views_share_the_arenas_memory(descriptor: int) -> None:
    arena = HostArena.create(descriptor, layout_of((4, 4), (2,)), "x", None)
    view_of(arena.tensor, arena.layout.places["t1"]).fill_(7.0)
    assert os.pread(descriptor, 4, ALIGN_BYTES) == torch.tensor(7.0).numpy().tobytes()


def test_a_sealed_arena_is_adopted_by_another_worker(descriptor: int) -> None:
    arena = HostArena.create(descriptor, layout_of((4, 4), (2,)), "these files", None)
    view_of(arena.tensor, arena.layout.places["t0"]).fill_(3.0)
    assert HostArena.adopt(descriptor, "these files", unfolds=True) is None
    arena.seal(ChunkTable(arena.layout.bytes))
    arena.close()
    adopted = HostArena.adopt(os.dup(descriptor), "these files", unfolds=True)
    assert adopted is not None
    assert adopted.layout == arena.layout
    assert torch.equal(view_of(adopted.tensor, adopted.layout.places["t0"]), torch.full((4, 4), 3.0))


def test_the_arena_of_other_files_is_not_adopted(descriptor: int) -> None:
    layout = layout_of((4,))
    HostArena.create(descriptor, layout, "these files", None).seal(ChunkTable(layout.bytes))
    assert HostArena.adopt(descriptor, "those files", unfolds=True) is None


@pytest.mark.parametrize("damage", ["empty", "short", "magic", "length", "json", "place"])
def test_a_damaged_arena_is_not_adopted(descriptor: int, damage: str) -> None:
    arena = HostArena.create(descriptor, layout_of((4,)), "x", None)
    if damage == "place":
        arena.layout = Layout({"t0": TensorPlace("float32", (4,), 8192, 16)}, 512)
    arena.seal(ChunkTable(arena.layout.bytes))
    end = os.fstat(descriptor).st_size
    if damage in ("empty", "short"):
        os.ftruncate(descriptor, 0 if damage == "empty" else end - 3)
    elif damage == "magic":
        os.pwrite(descriptor, b"?", end - 24)
    elif damage == "length":
        os.pwrite(descriptor, b"\xff" * 8, end - 8)
    elif damage == "json":
        os.pwrite(descriptor, b"[", 4096)
    assert HostArena.adopt(descriptor, "x", unfolds=True) is None


def test_an_arena_larger_than_allowed_is_refused_with_both_numbers(descriptor: int) -> None:
    with pytest.raises(OutOfMemory, match="take 4,096 bytes of host memory and 4,095 are allowed"):
        HostArena.create(descriptor, layout_of((1024,)), "x", 4095)
    assert os.fstat(descriptor).st_size == 0


def test_an_arena_larger_than_memory_is_refused_before_it_is_made(descriptor: int) -> None:
    with pytest.raises(OutOfMemory, match="are free"):
        HostArena.create(descriptor, layout_of((2**45,)), "x", None)
    assert os.fstat(descriptor).st_size == 0


def test_an_arena_larger_than_what_the_gateway_says_is_free_is_refused_with_both_numbers(descriptor: int) -> None:
    with pytest.raises(OutOfMemory, match="take 4,096 bytes of host memory and 4,095 are free"):
        HostArena.create(descriptor, layout_of((1024,)), "x", None, 4095)
    assert os.fstat(descriptor).st_size == 0


def test_a_discarded_arena_leaves_nothing_to_its_holder(descriptor: int) -> None:
    arena = HostArena.create(descriptor, layout_of((1024,)), "x", None)
    arena.discard()
    assert os.fstat(descriptor).st_size == 0


def test_a_closed_arena_is_unmapped(descriptor: int) -> None:
    arena = HostArena.create(descriptor, layout_of((4096, 16)), "x", None)
    inode = os.fstat(descriptor).st_ino
    assert mappings(inode) == 1
    arena.close()
    assert mappings(inode) == 0


def mappings(inode: int) -> int:
    with open("/proc/self/maps") as lines:
        return sum(1 for line in lines if line.split()[4] == str(inode) and "memfd:arena" in line)


SIZE = 64 * 2**20


def resident_bytes() -> int:
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * 4096


def test_unmapping_gives_the_memory_back_and_keeps_the_address() -> None:
    arena = PrivateArena(SIZE)
    arena.map()
    view, address = arena.tensor.view(torch.float32), arena.tensor.data_ptr()
    before = resident_bytes()
    view.fill_(1.0)
    filled = resident_bytes()
    arena.unmap()
    emptied = resident_bytes()
    assert filled - before > SIZE * 0.9
    assert filled - emptied > SIZE * 0.9
    arena.map()
    assert arena.tensor.data_ptr() == address
    # What was written before is gone: nothing of one tenant's text outlives a sleep.
    assert view.count_nonzero() == 0


def test_an_arena_of_nothing_still_has_an_address() -> None:
    arena = PrivateArena(0)
    arena.map()
    assert arena.tensor.numel() == arena.size > 0


def test_borrowed_memory_is_the_lenders() -> None:
    lent = torch.zeros(64, dtype=torch.uint8)
    arena = BorrowedArena(lent)
    arena.map()
    arena.tensor.fill_(3)
    arena.unmap()
    assert lent.sum() == 192
    arena.close()
    assert lent.numel() == 64


def test_blocks_wait_as_a_whole_and_what_is_around_them_for_itself() -> None:
    block = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ModuleList([torch.nn.Linear(2, 2)]))
    model = torch.nn.Module()
    model.embed = torch.nn.Embedding(4, 2)
    model.body = torch.nn.Module()
    model.body.layers = torch.nn.ModuleList([block, block])
    model.head = torch.nn.Linear(2, 4)
    found = [(part.module, part.owns_all) for part in hooked_modules(model)]
    expected = [(model, False), (model.embed, False), (model.body, False), (block, True), (block, True)]
    assert found == [*expected, (model.head, False)]


def test_what_a_wake_will_take_is_learned_from_the_last_one() -> None:
    copy_rate = CopyRate()
    assert copy_rate.expected_s(int(RATE_UNKNOWN)) == 1.0
    copy_rate.record(1_000, 0.0)
    copy_rate.record(50 * 10**9, 1.0)
    assert copy_rate.expected_s(25 * 10**9) == 0.5


def test_the_kernels_lists_of_processors_are_read() -> None:
    assert numbers_in("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert numbers_in("\n") == set()


def test_where_all_memory_is_equally_near_cuda_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking makes the device's context, for which the first read would wait."""
    asked: list[torch.device] = []
    (tmp_path / "node0").mkdir()
    monkeypatch.setattr(device_context, "NODES", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_properties", asked.append)
    assert processors_near(torch.device("cuda", 0)) == set()
    assert asked == []
    (tmp_path / "node1").mkdir()
    assert processors_near(torch.device("cuda", 0)) == set()
    assert asked == [torch.device("cuda", 0)]


def test_without_a_gpu_threads_stay_where_they_are() -> None:
    assert processors_near(torch.device("cpu")) == set()
    settle_near(torch.device("cpu"))
