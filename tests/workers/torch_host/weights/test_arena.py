"""The host arena: its layout, when it can be adopted, and that its memory is freed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from greenroom.workers.torch_host.failures import OutOfMemory
from greenroom.workers.torch_host.weights.arena import ALIGN_BYTES, HostArena, Layout, TensorPlace, lay_out, view_of
from greenroom.workers.torch_host.weights.fold import ChunkTable


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = os.memfd_create("arena")
    yield made
    os.close(made)


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
