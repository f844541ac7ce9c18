"""When a move may take memory: nothing of a crash is left there, it is granted, and it is really free.

Owns the order of these checks, the protocol by which grants are asked for (`Grants`), and the tasks that clean up after
crashed engines (`Cleanup`). Never decides what moves: the scheduler did.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from greenroom.core.model import Claim, DeviceId, Move, SlotId
from greenroom.runtime.memory.devices import HOST


class NoGrant(Exception):
    """This memory cannot be had now. Nothing has failed: the scheduler plans again."""


class Grants(Protocol):
    """Permission to use memory. `SharedSlots` asks the store that gateways share; `AlwaysGranted` needs none."""

    async def enter(self, move: Move) -> None:
        """Hold what this load needs. Raises NoGrant or StoreDown; `leave` follows in any case."""

    async def confirm(self, slot: SlotId) -> None:
        """The last check before an engine starts. Raises NoGrant if the grant was lost meanwhile, or StoreDown."""

    async def make_way(self, move: Move) -> None:
        """Called before an eviction touches its slot. Raises NoGrant if the eviction would be in vain."""

    async def leave(self, slot: SlotId) -> None:
        """The slot's processes have ended and its memory is back. Never raises; slots without a grant are ignored."""


class AlwaysGranted:
    """The GPUs of this gateway are not shared: what the scheduler decided is enough."""

    async def enter(self, move: Move) -> None:
        return

    async def confirm(self, slot: SlotId) -> None:
        return

    async def make_way(self, move: Move) -> None:
        return

    async def leave(self, slot: SlotId) -> None:
        return


class FreeMemory(Protocol):
    async def lacks(self, claim: Claim) -> Claim:
        """What of this claim is not really free, after a moment of waiting for it."""


class Admission:
    """What must hold before a move takes memory, and after it has given memory back."""

    def __init__(self, grants: Grants, cleanup: Cleanup, memory: FreeMemory) -> None:
        self.grants = grants
        self.cleanup = cleanup
        self._memory = memory

    @asynccontextmanager
    async def granted(self, move: Move) -> AsyncIterator[None]:
        """Hold the grant of this move; give it back if the block raises. Raises NoGrant or StoreDown."""
        try:
            await self.grants.enter(move)
            yield
        except BaseException:
            await self.grants.leave(move.slot)
            raise

    async def check_room(self, move: Move) -> None:
        """Raises NoGrant where memory that is free in the ledger is still used."""
        if missing := await self._memory.lacks(move.claim):
            said = " ".join(f"{device}={mib}" for device, mib in missing.items())
            raise NoGrant(f"memory is free on paper only, missing_mib: {said}")


class Cleanup:
    """Tasks that end what crashed engines left, and wait for their memory.

    A load waits only for the tasks on its own GPUs: a crash on one GPU must not hold up the others. It also waits where
    the GPUs of either are not known.
    """

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], frozenset[DeviceId]] = {}

    def start(self, work: Coroutine[Any, Any, None], devices: Iterable[DeviceId], name: str) -> None:
        """Run `work`, which cleans up on these devices."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = _gpus(devices)
        task.add_done_callback(self._tasks.pop)

    async def finished(self, devices: Iterable[DeviceId] = ()) -> None:
        """Wait until nothing is left on these devices; on any device if none is named."""
        mine = _gpus(devices)
        while waited_for := [task for task, others in self._tasks.items() if _may_meet(mine, others)]:
            await asyncio.wait(waited_for)


def _gpus(devices: Iterable[DeviceId]) -> frozenset[DeviceId]:
    return frozenset(devices) - {HOST}


def _may_meet(mine: frozenset[DeviceId], others: frozenset[DeviceId]) -> bool:
    return not mine or not others or not mine.isdisjoint(others)
