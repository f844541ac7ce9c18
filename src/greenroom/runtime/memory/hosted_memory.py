"""Quick looks at memory for moves of hosted slots: a swap takes milliseconds.

Owns the looks before and after a worker maps or unmaps memory. They ask the driver how much is used, and read no
process table: workers say what their slots hold. Never decides what moves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Final

from greenroom.core.model import NO_CLAIM, Claim, DeviceId, SlotId
from greenroom.core.view import SchedulerView
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.memory.attribution import away
from greenroom.runtime.memory.devices import HOST, visible_gpus
from greenroom.runtime.memory.probes.base import THIS_MACHINE, GpuReading, HostProbe
from greenroom.runtime.memory.watch import MemoryWatch
from greenroom.runtime.workers.hosted_slots import HostedSlots
from greenroom.telemetry.logs import get_logger

_log = get_logger("memory")

# Memory that is on its way back is looked for this often.
AGAIN_S: Final = 0.003
# Memory that is free in the ledger but not really is waited for this long; then the move is planned again.
ROOM_S: Final = 5.0
# After a worker has answered, the driver shows its memory as free within milliseconds. Then the move goes on
# regardless: the next one looks again.
BACK_S: Final = 2.0
# The memory of a killed process is usually back within a second. It is polled at the second interval.
GONE_S: Final = 10.0
SETTLES_S: Final = 0.05
_BYTES_A_MIB: Final = 1024 * 1024


class HostedMemory:
    def __init__(
        self,
        state: SchedulerView,
        table: HostedSlots,
        watch: MemoryWatch,
        clock: Callable[[], float],
        host: HostProbe = THIS_MACHINE,
    ) -> None:
        self._host = host
        self._state = state
        self._table = table
        self._watch = watch
        self._clock = clock

    def gpus_for(self, entry: Entry, slot: SlotId) -> tuple[DeviceId, ...] | None:
        """The GPU on which this slot is ready; empty if it needs none. None if there are no GPUs to plan with.

        A slot that is being prepared has a place on a GPU, but no memory there yet.
        """
        there = self._state.slots.get(slot)
        gpus = visible_gpus(entry, NO_CLAIM if there is None else there.claim, self._state.ledger.devices.values())
        return gpus if gpus is None else gpus[:1]

    @property
    def host_max_bytes(self) -> int | None:
        """The largest arena: all that models may use of the host."""
        host = self._state.ledger.devices.get(HOST)
        return None if host is None else host.usable_mib * _BYTES_A_MIB

    @property
    def host_free_bytes(self) -> int:
        """Host memory that is available now, within the limits of our cgroup. At least 1."""
        return max(1, self._host.look().available_mib * _BYTES_A_MIB)

    def knows(self, slot: SlotId) -> bool:
        """Whether the scheduler still has this slot."""
        return slot in self._state.slots

    async def glance(self, gpu: DeviceId | None) -> GpuReading | None:
        """The current use of this GPU; None if it cannot be seen."""
        return None if gpu is None else await self._watch.glance(gpu)

    async def missing(self, claim: Claim) -> Claim:
        """MiB of this claim that are not really free on GPUs now."""
        found: dict[DeviceId, int] = {}
        for gpu in (device for device, mib in claim.items() if mib > 0 and device != HOST):
            seen = await self.glance(gpu)
            free_mib = claim[gpu] if seen is None else max(0, seen.total_mib - seen.used_mib)
            if claim[gpu] > free_mib:
                found[gpu] = claim[gpu] - free_mib
        return found

    async def lacks(self, claim: Claim) -> Claim:
        """The same, after waiting for it up to `ROOM_S`."""
        deadline = self._clock() + ROOM_S
        while True:
            missing = await self.missing(claim)
            if not missing or self._clock() >= deadline:
                return missing
            await asyncio.sleep(AGAIN_S)

    async def back(self, slot: SlotId, gpu: DeviceId | None, before: GpuReading | None, released_mib: int) -> None:
        """Wait until what a slot held `before` is free again. Returns early if other slots move meanwhile."""
        # Use that was never seen cannot be seen to end: a GPU that is only a budget shows none.
        if gpu is None or before is None or not 0 < released_mib <= before.used_mib:
            return
        stirs, deadline = dict(self._table.stirs), self._clock() + BACK_S
        while (now := await self.glance(gpu)) is not None and (away_mib := away(before, now, released_mib)):
            if gpu in self._table.stirred_since(stirs):
                return
            if self._clock() >= deadline:
                _log.warning("memory has not come back", slot=slot, gpu=gpu, after_s=BACK_S, missing_mib=away_mib)
                return
            await asyncio.sleep(AGAIN_S)

    async def gone(self, pid: int, gpus: Collection[DeviceId]) -> None:
        """Wait, up to `GONE_S`, until nothing of an ended process is seen on these GPUs."""
        deadline = self._clock() + GONE_S
        used_mib: int | None = None
        while gpus and self._clock() < deadline:
            now = await self._watch.look_now()
            if self._watch.failure is not None:
                return
            mine = [gpu for gpu in now.gpus if DeviceId(gpu.uuid) in gpus]
            if all(gpu.processes is not None for gpu in mine):
                if not any(pid in (gpu.processes or ()) for gpu in mine):
                    return
            elif used_mib is not None and sum(gpu.used_mib for gpu in mine) >= used_mib:
                # Processes cannot be seen: the memory is back when use no longer falls.
                return
            used_mib = sum(gpu.used_mib for gpu in mine)
            await asyncio.sleep(SETTLES_S)
