"""What moves of hosted slots must know of memory: quickly, because a swap is a matter of milliseconds.

Owns the short looks before and after a worker maps or unmaps memory. They ask the driver what is used, and nobody's
process table whose it is: workers say what their slots hold. Never decides who goes where.
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
from greenroom.runtime.memory.probes.base import GpuReading
from greenroom.runtime.memory.probes.host import THIS_MACHINE, HostProbe
from greenroom.runtime.memory.watch import MemoryWatch
from greenroom.runtime.workers.hosted_slots import HostedSlots
from greenroom.telemetry.logs import get_logger

_log = get_logger("memory")

# Memory that is on its way back is looked for this often.
AGAIN_S: Final = 0.003
# What is free by the ledger and not by the probe is waited for this long before a move is planned anew.
ROOM_S: Final = 5.0
# A worker answers when the driver has its memory; that the driver shows it takes milliseconds. Then go on regardless:
# whoever comes next looks himself.
BACK_S: Final = 2.0
# The memory of a process that was killed is back within a second as a rule, and is looked for this often.
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
        """The GPU this slot is placed on when it is ready; none where it needs none. None: there are none to plan with.

        A slot that is being prepared has no memory of a GPU yet, but its place.
        """
        there = self._state.slots.get(slot)
        gpus = visible_gpus(entry, NO_CLAIM if there is None else there.claim, self._state.ledger.devices.values())
        return gpus if gpus is None else gpus[:1]

    @property
    def host_max_bytes(self) -> int | None:
        """No arena may be larger: what models may use of the host at all."""
        host = self._state.ledger.devices.get(HOST)
        return None if host is None else host.usable_mib * _BYTES_A_MIB

    @property
    def host_free_bytes(self) -> int:
        """Host memory that could be had now, within the limits of our cgroup. At least 1."""
        return max(1, self._host.look().available_mib * _BYTES_A_MIB)

    def knows(self, slot: SlotId) -> bool:
        """Whether the scheduler still counts with this slot."""
        return slot in self._state.slots

    async def glance(self, gpu: DeviceId | None) -> GpuReading | None:
        """What of this GPU is used now; None where that cannot be seen."""
        return None if gpu is None else await self._watch.glance(gpu)

    async def missing(self, claim: Claim) -> Claim:
        """What of this claim is not really free on GPUs now."""
        found: dict[DeviceId, int] = {}
        for gpu in (device for device, mib in claim.items() if mib > 0 and device != HOST):
            seen = await self.glance(gpu)
            free_mib = claim[gpu] if seen is None else max(0, seen.total_mib - seen.used_mib)
            if claim[gpu] > free_mib:
                found[gpu] = claim[gpu] - free_mib
        return found

    async def lacks(self, claim: Claim) -> Claim:
        """The same after a moment of waiting for it."""
        deadline = self._clock() + ROOM_S
        while True:
            missing = await self.missing(claim)
            if not missing or self._clock() >= deadline:
                return missing
            await asyncio.sleep(AGAIN_S)

    async def back(self, slot: SlotId, gpu: DeviceId | None, before: GpuReading | None, released_mib: int) -> None:
        """Wait until what a slot held `before` is free again. Where others move meanwhile, one look is enough."""
        # What was never seen to be used cannot be seen to come back: a GPU that is a budget only shows nothing.
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
        """Wait until nothing of an ended process is seen on these GPUs, but not for ever."""
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
                # Whose memory it is cannot be seen: it is back when it does not get less any longer.
                return
            used_mib = sum(gpu.used_mib for gpu in mine)
            await asyncio.sleep(SETTLES_S)
