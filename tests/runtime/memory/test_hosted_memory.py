"""Short looks around moves of hosted slots, with a probe that says what the test says."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from greenroom.core.model import DeviceId, SlotId
from greenroom.runtime.memory.devices import HOST
from greenroom.runtime.memory.readings import GpuReading, HostProbe, Reading
from greenroom.runtime.memory.slot_memory import HostedMemory
from greenroom.runtime.memory.watch import MemoryWatch
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.runtime.timeouts import TIMEOUTS, MemoryTimeouts
from greenroom.runtime.workers.hosted_slots import HostedSlots
from tests.api.management_rig import FakeGateway
from tests.runtime.memory.readings import gpu, reading, used

A = DeviceId("GPU-a")
S = SlotId("s1")


class FakeWatch:
    """Shows one GPU after the other; the last one again and again."""

    def __init__(self, *seen: GpuReading | None) -> None:
        self.glances = 0
        self.failure: str | None = None
        self._seen: Iterator[GpuReading | None] = itertools.chain(seen, itertools.repeat(seen[-1]))

    async def glance(self, gpu: DeviceId) -> GpuReading | None:
        self.glances += 1
        return next(self._seen)

    async def look_now(self) -> Reading:
        self.glances += 1
        seen = next(self._seen)
        self.failure = "gone" if seen is None else None
        return reading() if seen is None else reading(seen)


def memory(
    watch: FakeWatch, table: HostedSlots | None = None, timeouts: MemoryTimeouts = TIMEOUTS.memory
) -> HostedMemory:
    return HostedMemory(real_time(), table or HostedSlots(), cast(MemoryWatch, watch), timeouts=timeouts)


def real_time() -> SchedulerLoop:
    return SchedulerLoop(FakeGateway().loop.scheduler, asyncio.get_running_loop().time)


IMPATIENT = MemoryTimeouts(room_s=0.05, back_s=0.05, slept_s=0.05)


def full(mib: int) -> GpuReading:
    return gpu(used_mib=mib)


async def test_what_is_free_on_the_host_is_what_the_cgroup_leaves(tmp_path: Path) -> None:
    write = {
        "meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {50 << 20} kB\n",
        "self/cgroup": "0::/box\n",
        "box/memory.max": f"{8 << 30}\n",
        "box/memory.current": f"{3 << 30}\n",
    }
    for name, text in write.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    watch = cast(MemoryWatch, FakeWatch(full(1)))
    made = HostedMemory(real_time(), HostedSlots(), watch, HostProbe(tmp_path, tmp_path))
    assert made.host_free_bytes == 5 << 30


@pytest.mark.parametrize("shown", [(1_000,), (9_000, 5_000, 1_000)], ids=["back", "on its way"])
async def test_memory_is_looked_at_until_it_is_back(shown: tuple[int, ...]) -> None:
    watch = FakeWatch(*map(full, shown))
    await memory(watch).back(S, A, full(9_000), 8_000)
    assert watch.glances == len(shown)


async def test_memory_that_does_not_come_back_is_not_waited_for_for_ever() -> None:
    watch = FakeWatch(full(9_000))
    await memory(watch, timeouts=IMPATIENT).back(S, A, full(9_000), 8_000)
    assert watch.glances > 1


@pytest.mark.parametrize("before", [None, full(0)])
async def test_what_was_never_seen_is_not_waited_for(before: GpuReading | None) -> None:
    watch = FakeWatch(full(9_000))
    await memory(watch).back(S, A, before, 8_000)
    await memory(watch).back(S, A, full(9_000), 0)
    assert watch.glances == 0


async def test_memory_is_not_waited_for_while_another_slot_moves() -> None:
    table = HostedSlots()
    watch = FakeWatch(full(9_000))
    with table.stirring(A):
        await memory(watch, table).back(S, A, full(9_000), 8_000)
    assert watch.glances == 1


async def test_room_is_waited_for_and_what_is_missing_is_told() -> None:
    assert await memory(FakeWatch(full(20_000), full(10_000))).lacks({A: 8_000, HOST: 10**9}) == {}
    assert await memory(FakeWatch(full(20_000)), timeouts=IMPATIENT).lacks({A: 8_000}) == {A: 4_000}
    assert await memory(FakeWatch(None)).lacks({A: 8_000}) == {}
    watch = FakeWatch(full(0))
    assert await memory(watch).lacks({HOST: 8_000}) == {} and watch.glances == 0


@pytest.mark.parametrize(
    "shown",
    [
        pytest.param((used("GPU-a", {7: 100}), used("GPU-a", {7: 100}), used("GPU-a", {})), id="no GPU shows it"),
        pytest.param(
            tuple(gpu(used_mib=mib, processes=None) for mib in (900, 500, 500)), id="unseen, and memory gets no less"
        ),
    ],
)
async def test_a_process_is_gone_when_its_memory_is(shown: tuple[GpuReading, ...]) -> None:
    watch = FakeWatch(*shown)
    await memory(watch).gone(7, {A})
    assert watch.glances == 3


async def test_a_process_that_stays_or_cannot_be_seen_is_not_waited_for_for_ever() -> None:
    await memory(FakeWatch(used("GPU-a", {7: 100})), timeouts=IMPATIENT).gone(7, {A})
    watch = FakeWatch(None)
    await memory(watch).gone(7, {A})
    assert watch.glances == 1
