"""What engines that crashed have left: processes that are being ended, and memory that is not back yet.

Owns the tasks that see to it, and who must wait for which of them. A load waits for remains on its own GPUs only: a
crash on one must not hold up the others. Where one of the two is on no GPU that is known, it waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

from greenroom.core.model import DeviceId, Move, SlotId
from greenroom.runtime.memory.devices import HOST


class NoGrant(Exception):
    """This memory is not to be had now. Nobody has failed: the scheduler plans again."""


class Grants(Protocol):
    async def enter(self, move: Move) -> None:
        """Hold what this load needs. Raises NoGrant or StoreDown; `leave` follows in any case."""

    async def confirm(self, slot: SlotId) -> None:
        """The last word before an engine starts. Raises NoGrant if what was held is not held any more, or StoreDown."""

    async def make_way(self, move: Move) -> None:
        """Asked before a slot is touched that is to leave. Raises NoGrant if it would leave in vain."""

    async def leave(self, slot: SlotId) -> None:
        """Its processes have ended and its memory is back. Never raises; may be said of who holds nothing."""


class AlwaysGranted:
    """Nobody else uses these GPUs by our rules."""

    async def enter(self, move: Move) -> None:
        return

    async def confirm(self, slot: SlotId) -> None:
        return

    async def make_way(self, move: Move) -> None:
        return

    async def leave(self, slot: SlotId) -> None:
        return


class Cleanup:
    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], frozenset[DeviceId]] = {}

    def clear_up(self, work: Coroutine[Any, Any, None], devices: Iterable[DeviceId], name: str) -> None:
        """See to what is left on these devices."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = _gpus(devices)
        task.add_done_callback(self._tasks.pop)

    async def cleared_up(self, devices: Iterable[DeviceId] = ()) -> None:
        """Wait until nothing is left on these devices; anywhere, if none is named."""
        mine = _gpus(devices)
        while waited_for := [task for task, others in self._tasks.items() if _may_meet(mine, others)]:
            await asyncio.wait(waited_for)


def _gpus(devices: Iterable[DeviceId]) -> frozenset[DeviceId]:
    return frozenset(devices) - {HOST}


def _may_meet(mine: frozenset[DeviceId], others: frozenset[DeviceId]) -> bool:
    return not mine or not others or not mine.isdisjoint(others)
