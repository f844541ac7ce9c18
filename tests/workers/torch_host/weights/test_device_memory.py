"""Memory that comes and goes at an address that stays, as far as a CPU has it; and in which order weights arrive."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from greenroom.workers.torch_host.control import device_context
from greenroom.workers.torch_host.control.device_context import numbers_in, processors_near, settle_near
from greenroom.workers.torch_host.weights.device_memory import BorrowedArena, PrivateArena
from greenroom.workers.torch_host.weights.device_weights import RATE_UNKNOWN, CopyRate
from greenroom.workers.torch_host.weights.upload import hooked_modules

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
