"""Engines that grow while they serve: worth writing down at once, after a while, or not at all."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest

from greenroom.core.model import Claim, DeviceId, SlotId
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.memory.watch import EVERY_S, Growth, MemoryWatch
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.runtime.slots import LiveSlot, LiveSlots

GPU, HOST = DeviceId("gpu0"), DeviceId("host")
S = SlotId("s1")


@dataclass
class FakeLive:
    entry: str = "entry"


@dataclass
class Rig:
    now: float = 1_000.0
    peaks: dict[SlotId, Claim] = field(default_factory=dict)
    written: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = LiveSlots()
        self.slots.live[S] = cast(LiveSlot, FakeLive())
        watch = cast(MemoryWatch, SimpleNamespace(peak_of=lambda slot: self.peaks.get(slot, {})))
        loop = cast(SchedulerLoop, SimpleNamespace(clock=lambda: self.now))
        self.growth = Growth(self.slots, watch, self, loop)

    def grew(self, slot: SlotId, entry: Entry) -> None:
        self.written.append((slot, str(entry)))

    def seen(self, gpu_mib: int, host_mib: int = 0) -> int:
        """Look, and tell how often something was written down since the last look."""
        self.peaks[S], before = {GPU: gpu_mib, HOST: host_mib}, len(self.written)
        self.growth.look()
        return len(self.written) - before


def test_a_first_sight_and_much_growth_are_written_down_at_once() -> None:
    rig = Rig()
    rig.growth.look()
    assert rig.written == [], "it was never seen"
    assert rig.seen(10_000) == 1 and rig.written == [(S, "entry")]
    assert [rig.seen(10_000), rig.seen(10_101), rig.seen(10_101, 200)] == [0, 1, 1]


def test_a_little_growth_is_written_down_after_a_while() -> None:
    rig = Rig()
    rig.seen(10_000)
    rig.now += EVERY_S - 1
    assert [rig.seen(10_050), rig.seen(10_090)] == [0, 0]
    rig.now += 1
    assert [rig.seen(10_090), rig.seen(10_091)] == [1, 0]
    rig.now += EVERY_S
    assert rig.seen(10_090) == 0, "less is no growth"


@pytest.mark.parametrize("step_mib", [1, 17, 400])
def test_growing_all_the_time_writes_a_bounded_number_of_times(step_mib: int) -> None:
    rig = Rig()
    for mib in range(10_000, 20_001, step_mib):
        rig.seen(mib)
    # From one size to twice that one there are 70 steps of one percent.
    assert len(rig.written) <= 71


def test_what_has_gone_is_forgotten() -> None:
    rig = Rig()
    rig.seen(10_000)
    live = rig.slots.live.pop(S)
    assert rig.seen(20_000) == 0
    rig.slots.live[S] = live
    assert rig.seen(500) == 1
