"""Leases that wait stand in line, and passing the line costs little however many leases are held."""

from __future__ import annotations

import asyncio

from greenroom.core.model import SlotId
from greenroom.runtime.leases.entry import LeaseEntry, is_behind, may_ask
from tests.runtime.leases.leasing_rig import ask


def entry(name: str, *, is_held: bool = False, is_asked: bool = False, **said: object) -> LeaseEntry:
    settled = asyncio.get_running_loop().create_future()
    return LeaseEntry(ask(name, **said), settled, slot=SlotId(name) if is_held else None, is_asked=is_asked)  # type: ignore[arg-type]


async def test_only_the_first_waiter_of_a_device_asks_and_the_most_urgent_asks_first() -> None:
    first, second = entry("first", devices=("gpu0",)), entry("second", devices=("gpu0",))
    elsewhere, urgent = entry("elsewhere", devices=("gpu1",)), entry("urgent", devices=("gpu0",), priority=0)
    line = [entry("held", is_held=True), first, second, elsewhere, urgent]
    assert may_ask(line) == [urgent, first, elsewhere]
    assert is_behind(second, line) and not is_behind(urgent, line)


async def test_those_that_are_held_are_not_passed_again_for_each_that_waits() -> None:
    looked_at: list[str] = []

    class Counted(LeaseEntry):
        @property
        def is_waiting(self) -> bool:
            looked_at.append(self.id)
            return super().is_waiting

    plain = [entry(f"h{number}", is_held=True) for number in range(300)]
    held = [Counted(one.ask, one.settled, slot=one.slot) for one in plain]
    waiting = [entry(f"w{number}", is_asked=number == 0) for number in range(300)]
    assert may_ask([*held, *waiting]) == []
    assert len(looked_at) <= 2 * len(held)
