"""Calls to the CUDA driver, against a fake that keeps account: pairs match, and failures leave nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from greenroom.workers.torch_host.failures import DriverError, OutOfMemory
from greenroom.workers.torch_host.weights.device_memory import CudaArena
from greenroom.workers.torch_host.weights.device_weights import Registration

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
    assert not registration.is_done
    undoing = threading.Thread(target=registration.undo)
    undoing.start()
    driver.may_register.set()
    undoing.join(DEADLINE_S)
    assert not undoing.is_alive()
    assert driver.registered == {}
