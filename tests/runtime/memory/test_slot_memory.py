"""What moves know of memory: what a slot took, how it grew, what is remembered of it, and whether it was given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from greenroom.config.diff import diff
from greenroom.config.schema import Config
from greenroom.core.effects import Effects
from greenroom.core.events import ConfigChanged
from greenroom.core.model import Claim, Device, DeviceId, DeviceKind, ModelId, Move, MoveId, MoveKind, Need, SlotId
from greenroom.core.scheduler import DefaultScheduler
from greenroom.errors import ProbeFailed
from greenroom.runtime.catalogue import Catalog, Entry
from greenroom.runtime.memory.devices import HOST
from greenroom.runtime.memory.memory import EVERY_S, Growth
from greenroom.runtime.memory.needs import Needs
from greenroom.runtime.memory.slot_memory import SlotMemory
from greenroom.runtime.memory.watch import MemoryWatch
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.runtime.slots import LiveSlot, LiveSlots
from greenroom.runtime.timeouts import MemoryTimeouts
from tests.runtime.memory.readings import gpu, reading, used
from tests.runtime.memory.test_watch import P1, P2, SOON_S, FakeOwners, FakeProbe
from tests.waiting import until

A, B = DeviceId("GPU-a"), DeviceId("GPU-b")
M = ModelId("m")
S = SlotId("s1")


class NoEffects:
    def __getattr__(self, name: str) -> Any:
        return lambda *said: None


class Rig:
    """One model, two GPUs of 24,000 MiB, and a probe that shows what the test says."""

    def __init__(self, scheduler: dict[str, Any] | None = None, back_s: float = 10.0, **keys: Any) -> None:
        self.probe, self.owners = FakeProbe(), FakeOwners()
        self.scheduler = DefaultScheduler(cast(Effects, NoEffects()))
        clock = asyncio.get_running_loop().time
        empty = reading(gpu("GPU-a"), gpu("GPU-b", 1))
        self.probe.now = empty
        loop = SchedulerLoop(self.scheduler, clock)
        self.watch = MemoryWatch(self.probe, self.owners, loop, 1_000.0, empty)
        self.needs = Needs(gpus={A: "fake", B: "fake"})
        self.catalog = Catalog(self.needs)
        self.config = config(scheduler, **keys)
        gpus = (Device(A, DeviceKind.GPU, 24_000, 512), Device(B, DeviceKind.GPU, 24_000, 512))
        devices = (*gpus, Device(HOST, DeviceKind.HOST, 64_000))
        self.scheduler.handle(ConfigChanged(clock(), models=self.catalog.fill(self.config), devices=devices))
        times = MemoryTimeouts(ready_look_s=0.05, back_s=back_s, settled_s=0.01)
        self.memory = SlotMemory(loop, self.catalog, self.needs, self.watch, times)

    @property
    def entry(self) -> Entry:
        found = self.catalog.find(M)
        assert found is not None
        return found

    @property
    def need(self) -> Need:
        """What the next load is planned with."""
        return self.scheduler.view.models[M].need

    def remembered(self, entry: Entry | None = None) -> bool:
        return self.needs.account_of(entry or self.entry).measured is not None

    async def seen(self, mib: int, device: DeviceId = A) -> None:
        """The slot is seen to use so much."""
        self.owners.own(S, {device: mib}, P1)
        others = [gpu(name, number) for number, name in enumerate((A, B)) if name != device]
        self.probe.show(used(device, {P1: mib}), *others)
        await self.watch.look_now()

    def move(self, claim: Claim) -> Move:
        return Move(MoveId("m1"), MoveKind.LOAD, S, M, 1, claim, 0.0)


def config(scheduler: dict[str, Any] | None = None, **keys: Any) -> Config:
    models = {"m": {"cmd": "serve ${PORT}", **keys}}
    return Config.model_validate({"models": models, "scheduler": scheduler or {}})


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    rig.probe.gate.set()
    await rig.watch.close()
    await rig.needs.close()


# --- what a slot takes ----------------------------------------------------------------------------------------------


async def test_ready_slot_is_looked_at(rig: Rig) -> None:
    rig.owners.own(S, {A: 500}, P1)
    rig.probe.show(used("GPU-a", {P1: 400, P2: 7_000}))
    assert await rig.memory.look(S) == {A: 400}


async def test_slot_that_cannot_be_seen_says_nothing(rig: Rig) -> None:
    rig.owners.own(S, {A: 500}, P1)
    assert await rig.memory.look(S) is None


async def test_a_failing_probe_ends_the_wait_for_a_slots_memory(rig: Rig) -> None:
    rig.probe.now = ProbeFailed("gone")
    await rig.watch.look_now()
    looks = rig.probe.looks
    assert await rig.memory.look(S) is None
    await rig.memory.back(S, rig.memory.held_by(S))
    assert rig.probe.looks == looks


async def test_driver_that_hangs_keeps_a_ready_slot_only_for_a_moment(rig: Rig) -> None:
    rig.probe.gate.clear()
    async with asyncio.timeout(SOON_S):
        assert await rig.memory.look(S) is None


async def test_peak_is_what_the_next_load_is_given(rig: Rig) -> None:
    assert rig.need == Need()
    await rig.seen(3_000)
    await rig.seen(2_000)
    rig.memory.remember(S, rig.entry)
    assert rig.need == Need(3_000, 0)


async def test_what_was_never_seen_is_not_remembered(rig: Rig) -> None:
    rig.memory.remember(S, rig.entry)
    assert rig.need == Need() and not rig.remembered()


async def test_declared_need_stays_what_it_is() -> None:
    rig = Rig(memory_mib=500)
    await rig.seen(3_000)
    rig.memory.remember(S, rig.entry)
    assert rig.need == Need(500, 0) and rig.remembered()
    await rig.needs.close()


async def test_where_memory_is_not_planned_nothing_is_remembered() -> None:
    rig = Rig({"fit_memory": False, "company": {"groups": {}}})
    await rig.seen(3_000)
    rig.memory.remember(S, rig.entry)
    rig.memory.running_out(rig.move({}), rig.entry)
    rig.memory.ran_out(rig.move({}), rig.entry)
    assert rig.need == Need() and not rig.remembered()


async def test_figure_of_an_old_revision_is_kept_but_not_told(rig: Rig) -> None:
    await rig.seen(3_000)
    old, after = rig.entry, config(memory_mib=700)
    specs = rig.catalog.change(after, diff(rig.config, after))
    rig.scheduler.handle(ConfigChanged(0.0, models=specs))
    rig.memory.remember(S, old)
    assert rig.need == Need(700, 0) and rig.remembered(old)


# --- out of memory --------------------------------------------------------------------------------------------------


async def test_unknown_engine_that_ran_out_needed_more_than_was_free(rig: Rig) -> None:
    rig.probe.show(used("GPU-a", {P1: 20_000}), used("GPU-b", {P2: 18_000}, index=1))
    await rig.watch.look_now()
    rig.memory.running_out(rig.move({}), rig.entry)
    assert rig.need == Need(24_000 - 512 - 18_000 + 1, 0)


async def test_known_need_is_left_for_the_scheduler_to_raise() -> None:
    rig = Rig(memory_mib=500)
    rig.memory.running_out(rig.move({A: 500}), rig.entry)
    assert rig.need == Need(500, 0)


async def test_raised_need_outlasts_the_run() -> None:
    rig = Rig(memory_mib=500)
    rig.scheduler.handle(ConfigChanged(0.0, needs={M: Need(625, 0)}))
    rig.memory.ran_out(rig.move({A: 500}), rig.entry)
    assert rig.needs.account_of(rig.entry).need == Need(625, 0)
    await rig.needs.close()


async def test_model_that_is_gone_meanwhile_is_forgotten(rig: Rig) -> None:
    entry = rig.entry
    rig.scheduler.handle(ConfigChanged(0.0, removed=(M,)))
    rig.memory.running_out(rig.move({}), entry)
    rig.memory.ran_out(rig.move({}), entry)
    assert not rig.remembered(entry)


async def test_error_has_the_numbers_of_every_device(rig: Rig) -> None:
    error = rig.memory.shortage(rig.move({A: 5_000, B: 6_000}), rig.entry, "cudaMalloc failed", "last lines")
    assert error.status == 507 and error.details == "last lines"
    assert "m ran out of memory while loading (cudaMalloc failed)." in error.message
    assert "5,000 MiB on GPU-a, where 23,488 of 24,000 MiB were free; 6,000 MiB on GPU-b" in error.message
    assert error.beside["memory"]["GPU-b"] == {"given_mib": 6_000, "free_mib": 23_488, "capacity_mib": 24_000}


async def test_error_of_an_engine_that_was_given_nothing_says_so(rig: Rig) -> None:
    error = rig.memory.shortage(rig.move({}), rig.entry, "out of memory", "")
    assert "its need is not known" in error.message and error.beside["memory"] == {}


# --- whether it is back ---------------------------------------------------------------------------------------------


async def test_memory_of_a_stopped_slot_is_waited_for(rig: Rig) -> None:
    await rig.seen(3_000)
    held = rig.memory.held_by(S)
    rig.owners.owners.clear()
    rig.probe.show(gpu("GPU-a", used_mib=3_000), gpu("GPU-b", 1))
    waiting = asyncio.create_task(rig.memory.back(S, held))
    looks = rig.probe.looks
    await until(lambda: rig.probe.looks > looks + 2)
    assert not waiting.done()
    rig.probe.show(gpu("GPU-a"), gpu("GPU-b", 1))
    async with asyncio.timeout(SOON_S):
        await waiting


async def test_memory_that_stays_away_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    rig = Rig(back_s=0.05)
    await rig.seen(3_000)
    held = rig.memory.held_by(S)
    rig.owners.owners.clear()
    rig.probe.show(gpu("GPU-a", used_mib=2_900), gpu("GPU-b", 1))
    async with asyncio.timeout(SOON_S):
        await rig.memory.back(S, held)
    assert "GPU-a=2900" in capsys.readouterr().err
    await rig.watch.close()
    await rig.needs.close()


async def test_where_no_processes_are_listed_memory_is_back_when_use_stops_falling(rig: Rig) -> None:
    rig.scheduler.state.ledger.hold(S, {A: 9_000})
    left = [8_000, 5_000, 2_000, 700, 700, 700]
    rig.probe.show(gpu("GPU-a", used_mib=8_000, processes=None), gpu("GPU-b", 1))
    await rig.watch.look_now()
    held = rig.memory.held_by(S)
    assert not held.seen and held.unseen == {A}

    rig.probe.on_look = lambda: rig.probe.show(gpu("GPU-a", used_mib=left.pop(0), processes=None), gpu("GPU-b", 1))
    async with asyncio.timeout(SOON_S):
        await rig.memory.back(S, held)
    assert left == [700], "looked until it did not fall any more, and no longer"


async def test_slot_that_used_nothing_is_not_waited_for(rig: Rig) -> None:
    looks = rig.probe.looks
    await rig.memory.back(S, rig.memory.held_by(S))
    assert rig.probe.looks == looks


async def test_what_a_slot_grows_by_while_it_serves_is_remembered_before_it_ends(rig: Rig) -> None:
    await rig.seen(5_000)
    rig.memory.remember(S, rig.entry)
    await rig.seen(7_000)
    rig.memory.grew(S, rig.entry)
    measured = rig.needs.account_of(rig.entry).measured
    assert measured is not None and measured.gpu_mib == 7_000 and rig.need.gpu_mib == 7_000


async def test_growth_of_an_outdated_slot_waits_for_its_end(rig: Rig) -> None:
    await rig.seen(5_000)
    old, changed = rig.entry, config(ttl_s=5, memory_mib=None, cmd="other ${PORT}")
    rig.catalog.change(changed, diff(rig.config, changed))
    rig.memory.grew(S, old)
    assert not rig.remembered(old)


@dataclass
class FakeLive:
    entry: str = "entry"


@dataclass
class Growing:
    now: float = 1_000.0
    peaks: dict[SlotId, Claim] = field(default_factory=dict)
    written: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = LiveSlots()
        self.slots.live[S] = cast(LiveSlot, FakeLive())
        watch = cast(MemoryWatch, SimpleNamespace(peak_of=lambda slot: self.peaks.get(slot, {})))
        loop = cast(SchedulerLoop, SimpleNamespace(clock=lambda: self.now))
        self.growth = Growth(self.slots, watch, cast(SlotMemory, self), loop)

    def grew(self, slot: SlotId, entry: Entry) -> None:
        self.written.append((slot, str(entry)))

    def seen(self, gpu_mib: int, host_mib: int = 0) -> int:
        """Look, and tell how often something was written down since the last look."""
        self.peaks[S], before = {A: gpu_mib, HOST: host_mib}, len(self.written)
        self.growth.look()
        return len(self.written) - before


def test_a_first_sight_and_much_growth_are_written_down_at_once() -> None:
    rig = Growing()
    rig.growth.look()
    assert rig.written == [], "it was never seen"
    assert rig.seen(10_000) == 1 and rig.written == [(S, "entry")]
    assert [rig.seen(10_000), rig.seen(10_101), rig.seen(10_101, 200)] == [0, 1, 1]


def test_a_little_growth_is_written_down_after_a_while() -> None:
    rig = Growing()
    rig.seen(10_000)
    rig.now += EVERY_S - 1
    assert [rig.seen(10_050), rig.seen(10_090)] == [0, 0]
    rig.now += 1
    assert [rig.seen(10_090), rig.seen(10_091)] == [1, 0]
    rig.now += EVERY_S
    assert rig.seen(10_090) == 0, "less is no growth"


@pytest.mark.parametrize("step_mib", [1, 17, 400])
def test_growing_all_the_time_writes_a_bounded_number_of_times(step_mib: int) -> None:
    rig = Growing()
    for mib in range(10_000, 20_001, step_mib):
        rig.seen(mib)
    # From one size to twice that one there are 70 steps of one percent.
    assert len(rig.written) <= 71


def test_what_has_gone_is_forgotten() -> None:
    rig = Growing()
    rig.seen(10_000)
    live = rig.slots.live.pop(S)
    assert rig.seen(20_000) == 0
    rig.slots.live[S] = live
    assert rig.seen(500) == 1
