"""What engines that crashed have left: processes that are being ended, and memory that is not back yet.

Owns the tasks that see to it, and who must wait for which of them. A load waits for remains on its own GPUs only: a
crash on one must not hold up the others. Where one of the two is on no GPU that is known, it waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from greenroom.core.model import DeviceId
from greenroom.runtime.memory.devices import HOST


class Remains:
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
