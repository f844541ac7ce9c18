"""The watch over memory, with a probe that says what the test says and processes that are only numbers."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from greenroom.core.events import Event, MemoryChanged
from greenroom.core.model import Claim, DeviceId, SlotId
from greenroom.errors import ProbeFailed
from greenroom.runtime.memory.devices import HOST
from greenroom.runtime.memory.readings import GpuReading, Owner, Reading
from greenroom.runtime.memory.watch import GONE_KEPT_MAX, HOST_STEP_MIB, MemoryWatch
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.runtime.timeouts import TIMEOUTS, MemoryTimeouts
from greenroom.runtime.workers.hosted_slots import HostedSlot, HostedSlots
from tests.runtime.memory.readings import gpu, reading, used
from tests.waiting import until

A, B = DeviceId("GPU-a"), DeviceId("GPU-b")
S1, S2 = SlotId("s1"), SlotId("s2")
SOON_S = 30.0
# Numbers that are no processes, so that only `roots` says whose they are.
P1, P2, P3 = 2**30 + 1, 2**30 + 2, 2**30 + 3


class FakeProbe:
    kind = "fake"

    def __init__(self) -> None:
        self.now: Reading | Exception = reading(gpu())
        # Looks that have begun, and those that have ended.
        self.asked = self.looks = 0
        self.closed = False
        self.on_look: Callable[[], None] = lambda: None
        self.gate = threading.Event()
        self.gate.set()

    def show(self, *gpus: GpuReading) -> None:
        self.now = reading(*gpus)

    def look(self) -> Reading:
        self.asked += 1
        self.gate.wait(SOON_S)
        self.looks += 1
        self.on_look()
        if isinstance(self.now, Exception):
            raise self.now
        return self.now

    def glance(self, uuid: str) -> GpuReading | None:
        return self.look().gpu(uuid)

    def close(self) -> None:
        self.closed = True


class FakeOwners:
    def __init__(self) -> None:
        self.owners: dict[str, Owner] = {}

    def own(self, slot: str, claim: Claim, *pids: int, **facts: Any) -> None:
        self.owners[slot] = Owner(claim, frozenset(pids), **facts)

    def __call__(self) -> dict[str, Owner]:
        return dict(self.owners)

    def by_identity(self, identity: str) -> str | None:
        return None


class Rig:
    def __init__(self, every_s: float = 1_000.0, timeouts: MemoryTimeouts = TIMEOUTS.memory) -> None:
        self.probe, self.owners = FakeProbe(), FakeOwners()
        self.posted: list[Event] = []
        clock = asyncio.get_running_loop().time
        self.loop = cast(SchedulerLoop, SimpleNamespace(post=self.posted.append, clock=clock))
        self.hosted = HostedSlots()
        first = reading(gpu())
        self.watch = MemoryWatch(self.probe, self.owners, self.loop, every_s, first, self.hosted, timeouts)

    def told(self) -> MemoryChanged:
        """The one event since this was last asked."""
        (event,) = self.posted
        assert isinstance(event, MemoryChanged)
        self.posted.clear()
        return event


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    rig.probe.gate.set()
    await rig.watch.close()


async def test_what_slots_and_strangers_use_is_told_in_one_event(rig: Rig) -> None:
    rig.owners.own(S1, {A: 500}, P1)
    rig.owners.own(S2, {B: 100}, P2)
    rig.probe.show(used("GPU-a", {P1: 400, P3: 7_000}), used("GPU-b", {P2: 100}, index=1))
    assert await rig.watch.look_now() == rig.probe.now
    event = rig.told()
    assert event.foreign_mib == {A: 7_000}
    assert event.seen == {S1: {A: 400}, S2: {B: 100}}
    assert rig.watch.seen_of(S1) == {A: 400}


async def test_nothing_is_told_when_nothing_changed(rig: Rig) -> None:
    rig.owners.own(S1, {A: 500}, P1)
    rig.probe.show(used("GPU-a", {P1: 400, P3: 10}))
    await rig.watch.look_now()
    rig.told()
    await rig.watch.look_now()
    assert rig.posted == []


async def test_only_what_changed_is_told(rig: Rig) -> None:
    rig.owners.own(S1, {A: 500}, P1)
    rig.owners.own(S2, {A: 500}, P2)
    rig.probe.show(used("GPU-a", {P1: 400, P2: 300, P3: 10}))
    await rig.watch.look_now()
    rig.told()
    rig.probe.show(used("GPU-a", {P1: 400, P2: 301, P3: 10}))
    await rig.watch.look_now()
    event = rig.told()
    assert (event.foreign_mib, event.seen) == ({}, {S2: {A: 301}})


async def test_a_stranger_that_left_is_told_too(rig: Rig) -> None:
    rig.probe.show(used("GPU-a", {P3: 7_000}))
    await rig.watch.look_now()
    rig.told()
    rig.probe.show(gpu())
    await rig.watch.look_now()
    assert rig.told().foreign_mib == {A: 0}


async def test_a_slot_whose_processes_left_the_gpu_is_told_to_use_nothing(rig: Rig) -> None:
    rig.owners.own(S1, {A: 500}, P1)
    rig.probe.show(used("GPU-a", {P1: 400}))
    await rig.watch.look_now()
    rig.told()
    rig.probe.show(gpu())
    await rig.watch.look_now()
    assert rig.told().seen == {S1: {}}


async def test_the_most_a_slot_ever_used_is_remembered_also_when_it_has_gone(rig: Rig) -> None:
    rig.owners.own(S1, {A: 500}, P1)
    for mib in (300, 450, 350):
        rig.probe.show(used("GPU-a", {P1: mib}))
        await rig.watch.look_now()
    assert rig.watch.seen_of(S1) == {A: 350}
    rig.owners.owners.clear()
    await rig.watch.look_now()
    assert rig.watch.seen_of(S1) == {}
    assert rig.watch.peak_of(S1) == {A: 450}


async def test_slots_that_have_gone_are_forgotten_in_time(rig: Rig) -> None:
    for number in range(GONE_KEPT_MAX + 2):
        rig.owners.owners.clear()
        rig.owners.own(f"s{number}", {A: 500}, P1)
        rig.probe.show(used("GPU-a", {P1: 100 + number}))
        await rig.watch.look_now()
    known = [bool(rig.watch.peak_of(SlotId(f"s{number}"))) for number in range(GONE_KEPT_MAX + 2)]
    assert known == [False] + [True] * (GONE_KEPT_MAX + 1)


async def test_what_a_slot_on_the_host_uses_is_measured_there(rig: Rig) -> None:
    rig.owners.own(S1, {HOST: 5_000}, os.getpid())
    rig.owners.own(S2, {A: 5_000}, P2)
    await rig.watch.look_now()
    assert rig.watch.seen_of(S1).keys() == {HOST}
    assert rig.watch.seen_of(S1)[HOST] > 1
    assert rig.watch.seen_of(S2) == {}


async def test_small_changes_on_the_host_are_no_news(rig: Rig) -> None:
    async def told_of(device: DeviceId, mib: int) -> bool:
        """Whether it is told that a hosted slot, which says itself what it uses, uses so much."""
        rig.hosted.there[S1] = cast(HostedSlot, SimpleNamespace(id=S1, told={device: mib}))
        rig.posted.clear()
        await rig.watch.look_now()
        return bool(rig.posted)

    rig.owners.own(S1, {HOST: 1, A: 1})
    assert await told_of(HOST, 1_000)
    assert not await told_of(HOST, 1_000 + HOST_STEP_MIB - 1)
    assert await told_of(HOST, 1_000 + HOST_STEP_MIB)
    assert await told_of(A, 1_000)
    assert await told_of(A, 999)


async def test_gpus_whose_processes_are_hidden_are_told_of(rig: Rig) -> None:
    await rig.watch.look_now()
    assert rig.watch.sees_pids
    rig.owners.own(S1, {A: 500})
    rig.probe.show(gpu(used_mib=800, processes=None))
    await rig.watch.look_now()
    assert not rig.watch.sees_pids
    assert rig.told().foreign_mib == {A: 300}


async def test_the_start_tells_of_strangers(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    first = reading(used("GPU-a", {os.getpid(): 7_000, P1: 5}))
    watch = MemoryWatch(rig.probe, rig.owners, rig.loop, 5.0, first)
    watch.tell_first()
    assert rig.told().foreign_mib == {A: 7_005}
    assert watch.last.shares.strangers == {A: {os.getpid(): 7_000, P1: 5}}
    assert list(watch.last.names) == [os.getpid()]
    assert rig.probe.looks == 0
    said = capsys.readouterr().err
    assert f"pid={os.getpid()}" in said and "mib=7000" in said


# --- when it looks --------------------------------------------------------------------------------------------------


async def test_it_looks_at_the_start_and_again_and_again() -> None:
    rig = Rig(every_s=0.01)
    rig.watch.start()
    await until(lambda: rig.probe.looks >= 3)
    await rig.watch.close()
    assert rig.probe.closed


async def test_it_looks_soon_when_something_has_happened(rig: Rig) -> None:
    rig.watch.start()
    await until(lambda: rig.probe.looks == 1)
    rig.watch.nudge()
    rig.watch.nudge()
    await until(lambda: rig.probe.looks == 2)


async def test_looks_do_not_overtake_each_other(rig: Rig) -> None:
    rig.probe.gate.clear()
    together: list[int] = []
    rig.probe.on_look = lambda: together.append(rig.probe.asked - rig.probe.looks)
    looks = [asyncio.create_task(rig.watch.look_now()) for _ in range(3)]
    await until(lambda: rig.probe.asked == 1)
    rig.probe.gate.set()
    await asyncio.gather(*looks)
    assert together == [0, 0, 0], "each began when the one before had ended"


async def test_a_look_that_was_given_up_is_not_taken_for_a_new_one(rig: Rig) -> None:
    rig.probe.gate.clear()
    given_up = asyncio.create_task(rig.watch.look_now())
    await until(lambda: rig.probe.asked == 1)
    given_up.cancel()
    await asyncio.wait((given_up,))
    rig.probe.gate.set()
    rig.probe.show(used("GPU-a", {P3: 7_000}))
    await rig.watch.look_now()
    assert rig.probe.looks == 2
    assert rig.told().foreign_mib == {A: 7_000}


# --- what goes wrong ------------------------------------------------------------------------------------------------


async def test_a_probe_that_fails_is_told_of_once_and_the_last_look_is_kept(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    rig.probe.show(used("GPU-a", {P3: 7_000}))
    good = await rig.watch.look_now()
    rig.posted.clear()
    rig.probe.now = ProbeFailed("the driver is gone")
    assert await rig.watch.look_now() == good
    assert await rig.watch.look_now() == good
    assert rig.watch.failure == "the driver is gone"
    assert rig.posted == []
    assert capsys.readouterr().err.count("cannot be looked at") == 1
    rig.probe.show(gpu())
    await rig.watch.look_now()
    assert rig.watch.failure is None
    assert rig.told().foreign_mib == {A: 0}
    assert "can be looked at again" in capsys.readouterr().err


async def test_a_driver_that_hangs_costs_one_thread_and_nothing_else() -> None:
    rig = Rig(timeouts=MemoryTimeouts(look_s=0.05))
    rig.probe.gate.clear()
    before = threading.active_count()
    for _ in range(3):
        await rig.watch.look_now()
    assert rig.watch.failure is not None and "has not answered" in rig.watch.failure
    assert threading.active_count() <= before + 1
    rig.probe.gate.set()

    async def is_well() -> bool:
        # On a busy machine a look that goes well may be late as well.
        await rig.watch.look_now()
        return rig.watch.failure is None

    await until(is_well)
    await rig.watch.close()


async def test_a_bug_in_a_probe_does_not_end_the_watch() -> None:
    rig = Rig(every_s=0.01)
    rig.probe.now = ZeroDivisionError("a bug")
    rig.watch.start()
    await until(lambda: rig.probe.looks >= 2)
    rig.probe.show(used("GPU-a", {P3: 7_000}))
    await until(lambda: bool(rig.posted))
    await rig.watch.close()


async def test_a_gpu_that_vanishes_keeps_its_figures_and_is_told_of_once(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    both = used("GPU-a", {P3: 7_000}), gpu("GPU-b", 1)
    rig.probe.show(*both)
    await rig.watch.look_now()
    rig.posted.clear()
    rig.probe.show(both[1])
    await rig.watch.look_now()
    await rig.watch.look_now()
    assert rig.posted == []
    assert capsys.readouterr().err.count("GPU is no longer seen") == 1
    rig.probe.show(*both)
    await rig.watch.look_now()
    assert capsys.readouterr().err.count("GPU is seen again") == 1


# --- memory that comes back -----------------------------------------------------------------------------------------


async def test_room_is_waited_for_until_it_is_really_there(rig: Rig) -> None:
    rig.probe.show(used("GPU-a", {P3: 20_000}))
    waiting = asyncio.create_task(rig.watch.room_for({A: 5_000, HOST: 9}, SOON_S))
    await until(lambda: rig.probe.looks >= 2)
    assert not waiting.done()
    rig.probe.show(used("GPU-a", {P3: 19_000}))
    assert await waiting == {}


async def test_room_that_does_not_come_is_told_and_the_scheduler_knows_of_the_stranger(rig: Rig) -> None:
    rig.probe.show(used("GPU-a", {P3: 20_000}))
    assert await rig.watch.room_for({A: 5_000}, 0.0) == {A: 1_000}
    assert rig.told().foreign_mib == {A: 20_000}


async def test_room_on_a_gpu_that_cannot_be_seen_is_taken_for_granted(rig: Rig) -> None:
    assert await rig.watch.room_for({B: 99_000}, SOON_S) == {}
    rig.probe.now = ProbeFailed("gone")
    assert await rig.watch.room_for({A: 99_000}, SOON_S) == {}


# --- processes in which several live --------------------------------------------------------------------------------


def host_two(rig: Rig, first_mib: int, second_mib: int) -> None:
    """Two slots in one worker, by its word."""
    rig.owners.own("worker1", {}, P1, is_host=True)
    for slot, mib in ((S1, first_mib), (S2, second_mib)):
        rig.owners.own(slot, {A: 1_000}, host="worker1", told={A: mib})
        rig.hosted.there[slot] = cast(HostedSlot, SimpleNamespace(id=slot, told={A: mib}))


async def test_slots_of_a_worker_are_told_by_its_word_and_its_own_use_as_foreign(rig: Rig) -> None:
    host_two(rig, 500, 200)
    rig.watch.set_aside_mib = {A: 100}
    rig.probe.show(used("GPU-a", {P1: 1_000, P2: 40}))
    await rig.watch.look_now()
    told = rig.told()
    assert told.seen == {S1: {A: 500}, S2: {A: 200}}
    assert told.foreign_mib == {A: 40 + 200}, "strangers, and what the worker uses beyond what is set aside for it"
    assert rig.watch.last.shares.strangers == {A: {P2: 40}}


async def test_what_is_looked_at_while_memory_changes_hands_says_nothing_of_others(rig: Rig) -> None:
    host_two(rig, 0, 200)
    rig.probe.show(used("GPU-a", {P1: 300}))
    await rig.watch.look_now()
    assert rig.told().foreign_mib == {A: 100}
    rig.probe.gate.clear()
    looking = asyncio.create_task(rig.watch.look_now())
    await asyncio.sleep(0)
    with rig.hosted.stirring(A):
        rig.probe.show(used("GPU-a", {P1: 1_300}))
        rig.hosted.there[S1] = cast(HostedSlot, SimpleNamespace(id=S1, told={A: 1_000}))
    rig.probe.gate.set()
    await looking
    told = rig.told()
    assert (told.foreign_mib, told.seen) == ({}, {S1: {A: 1_000}}), "the worker's own is as it was, and slots as said"


async def test_a_glance_posts_no_event_and_waits_for_no_look(rig: Rig) -> None:
    rig.probe.show(used("GPU-a", {P1: 300}))
    glance = await rig.watch.glance(A)
    assert glance is not None and glance.used_mib == 300 and not rig.posted
    assert await rig.watch.glance(B) is None
    rig.probe.now = ProbeFailed("gone")
    assert await rig.watch.glance(A) is None
    await rig.watch.look_now()
    looks = rig.probe.looks
    assert await rig.watch.glance(A) is None and rig.probe.looks == looks, "a probe that fails is not asked"


async def test_a_glance_at_a_driver_that_hangs_is_given_up() -> None:
    rig = Rig(timeouts=MemoryTimeouts(glance_s=0.05))
    rig.probe.gate.clear()
    assert await rig.watch.glance(A) is None
    rig.probe.gate.set()
    await rig.watch.close()
