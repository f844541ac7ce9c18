"""Memory of slots around a move: which GPUs they may see, what they take, and when it is free again.

`SlotMemory` looks after engines with their own process. `HostedMemory` is for slots in workers, whose swap takes
milliseconds: it asks the driver how much is used and reads no process table, since workers say what their slots hold.
`MemoryOwners` lists what was given memory, from the scheduler's tables. Owns the numbers in the error of a load that
ran out of memory. Never decides what moves; the scheduler is told every new figure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from greenroom.core.events import ConfigChanged
from greenroom.core.model import NO_CLAIM, Claim, Device, DeviceId, DeviceKind, ModelId, Move, Need, SlotId
from greenroom.core.view import HoldingFacts, SchedulerView, SlotFacts
from greenroom.errors import LoadOutOfMemory
from greenroom.runtime.catalogue import Catalog, Entry
from greenroom.runtime.memory.devices import HOST, WORKER_GPU_MIB, none_there
from greenroom.runtime.memory.needs import Needs
from greenroom.runtime.memory.readings import THIS_MACHINE, GpuReading, HostProbe, Owner, Reading, away
from greenroom.runtime.memory.watch import MemoryWatch
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.runtime.slots import LiveSlots
from greenroom.runtime.timeouts import TIMEOUTS, MemoryTimeouts
from greenroom.runtime.workers.hosted_slots import HostedSlots
from greenroom.telemetry.logs import get_logger

_log = get_logger("memory")

# Memory that is on its way back is looked for this often.
AGAIN_S: Final = 0.003
# Memory of a killed process takes longer, and is looked for less often.
SETTLES_S: Final = 0.05
_BYTES_A_MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Held:
    """What a slot was last seen to use, and the reading that showed it. `unseen`: devices that show no processes."""

    at: Reading
    seen: Claim
    unseen: frozenset[DeviceId]

    def less(self, stays: Claim) -> Held:
        """The same without what stays there, and without the host: what a slot that falls asleep gives back."""
        seen = {device: mib - stays.get(device, 0) for device, mib in self.seen.items() if device != HOST}
        return replace(self, seen={device: mib for device, mib in seen.items() if mib > 0})


class SlotMemory:
    def __init__(
        self,
        loop: SchedulerLoop,
        catalog: Catalog,
        needs: Needs,
        watch: MemoryWatch,
        timeouts: MemoryTimeouts = TIMEOUTS.memory,
    ) -> None:
        self._timeouts = timeouts
        self._loop = loop
        self._state = loop.view
        self._catalog = catalog
        self._needs = needs
        self._watch = watch

    def gpus_for(self, entry: Entry, claim: Claim) -> tuple[DeviceId, ...] | None:
        """The GPUs that this engine may see; None if there are none to plan with."""
        return visible_gpus(entry, claim, self._state.ledger.devices.values())

    def sizes_of(self, gpus: tuple[DeviceId, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """MiB of each of these GPUs, and what of it was really free at the last look, just before a start."""
        total = tuple(self._state.ledger.devices[gpu].capacity_mib for gpu in gpus)
        used = {gpu.uuid: gpu.used_mib for gpu in self._watch.last.reading.gpus}
        return total, tuple(max(0, mib - used.get(gpu, 0)) for gpu, mib in zip(gpus, total, strict=True))

    def no_device(self, model: ModelId) -> str:
        """That this model may use only devices that are not there, and what to do; empty if that is not so."""
        entry, there = self._catalog.find(model), self._state.ledger.devices
        return "" if entry is None else none_there(entry, there, self._watch.last.reading.gpus)

    async def lacks(self, claim: Claim) -> Claim:
        """MiB of this claim that are not really free on GPUs, after waiting for them up to `room_s`."""
        gpus = {device: mib for device, mib in claim.items() if mib > 0 and device != HOST}
        return await self._watch.room_for(gpus, self._timeouts.room_s) if gpus else NO_CLAIM

    # --- what a slot takes ------------------------------------------------------------------------------------------

    async def look(self, slot: SlotId) -> Claim | None:
        """What this slot uses now that it is ready; None if that cannot be seen."""
        if self._watch.failure is not None:
            return None
        try:
            async with asyncio.timeout(self._timeouts.ready_look_s):
                await self._watch.look_now()
        except TimeoutError:
            return None
        return self._watch.seen_of(slot) or None

    def remember(self, slot: SlotId, entry: Entry) -> None:
        """Store the peak of this slot as the need of its model, and tell the scheduler."""
        peak, planned = self._watch.peak_of(slot), self._needs.account_of(entry).need
        # With `fit_memory: false` models take no room, whatever is measured.
        if not peak or not self._catalog.fits_memory or not self._needs.measured(entry, peak):
            return
        account = self._needs.account_of(entry)
        if self._catalog.revision(entry.id, entry.spec.revision) is not None:
            self._loop.post(ConfigChanged(self._loop.clock(), needs={entry.id: account.need}))
        need = account.need
        _log.info("need", model=entry.id, gpu_mib=need.gpu_mib, host_mib=need.host_mib, source=account.source)
        if planned.gpu_mib and not need.gpu_mib and self._watch.sees_pids:
            why = "its engine took no memory of the GPU that was planned for it, and may be a build for the CPU alone"
            _log.warning("model computes on the CPU", model=entry.id, planned_gpu_mib=planned.gpu_mib, why=why)

    def grew(self, slot: SlotId, entry: Entry) -> None:
        """A serving slot was seen to use more than is remembered. Reads nothing from disk."""
        if self._catalog.revision(entry.id, entry.spec.revision) is not None:
            self.remember(slot, entry)

    def running_out(self, move: Move, entry: Entry) -> None:
        """Called before the end of such a load is posted: an unknown need was more than is free now."""
        record, gpus = self._state.models.get(move.model), self.gpus_for(entry, move.claim) or ()
        if record is None or record.need.gpu_mib or not gpus or not self._catalog.fits_memory:
            return
        free = self._state.ledger.free_mib(frozenset({move.slot}))
        least = Need(max(max(0, free.get(gpu, 0)) for gpu in gpus) + 1, record.need.host_mib)
        self._loop.post(ConfigChanged(self._loop.clock(), needs={entry.id: least}))

    def ran_out(self, move: Move, entry: Entry) -> None:
        """A load ran out of memory and the scheduler has raised the need: store it, so that it outlasts a restart."""
        record = self._state.models.get(move.model)
        if record is not None and self._catalog.fits_memory:
            self._needs.no_memory(entry, record.need, move.claim)

    # --- whether it is back -----------------------------------------------------------------------------------------

    def held_by(self, slot: SlotId) -> Held:
        """What this slot holds, for `back` to wait for. Called before the slot is stopped."""
        claimed = self._state.ledger.held_by(slot)
        last = self._watch.last
        return Held(last.reading, self._watch.seen_of(slot), last.shares.unseen & frozenset(claimed))

    async def back(self, slot: SlotId, held: Held) -> None:
        """Wait, up to `back_s`, until the memory of a slot whose processes have ended is free again."""
        if self._watch.failure is not None:
            return
        back_s = self._timeouts.back_s
        missing = await self._watch.back(held.at, held.seen, back_s) if held.seen else NO_CLAIM
        if missing:
            said = " ".join(f"{device}={mib}" for device, mib in missing.items())
            _log.warning("memory has not come back", slot=slot, after_s=back_s, missing_mib=said)
        if held.unseen:
            await self._settled(held.unseen)

    async def slept(self, slot: SlotId, held: Held) -> None:
        """The same for a slot that fell asleep, which may keep more than planned: until use fell and falls no more."""
        deadline, whole_mib = self._loop.clock() + self._timeouts.back_s, sum(held.seen.values())
        left_mib = whole_mib
        while left_mib and self._watch.failure is None:
            before_mib = left_mib
            left_mib = sum((await self._watch.back(held.at, held.seen, self._timeouts.settled_s)).values())
            if self._loop.clock() >= deadline or whole_mib > left_mib >= before_mib:
                break
        if left_mib:
            _log.info("keeps more asleep than planned", slot=slot, beyond_mib=left_mib)
        if held.unseen:
            await self._settled(held.unseen)

    async def _settled(self, devices: frozenset[DeviceId]) -> None:
        deadline = self._loop.clock() + self._timeouts.back_s
        used = _used_mib(await self._watch.look_now(), devices)
        while self._watch.failure is None and self._loop.clock() < deadline:
            await asyncio.sleep(self._timeouts.settled_s)
            before, used = used, _used_mib(await self._watch.look_now(), devices)
            if used >= before:
                return

    # --- the error of a load that ran out of it ---------------------------------------------------------------------

    def shortage(self, move: Move, entry: Entry, complaint: str, details: str) -> LoadOutOfMemory:
        """The error of a load that ran out of memory: what it was given, what was free, and what to do."""
        ledger = self._state.ledger
        free = ledger.free_mib(frozenset({move.slot}))
        numbers = {
            str(device): {
                "given_mib": mib,
                "free_mib": max(0, free.get(device, 0)),
                "capacity_mib": ledger.devices[device].capacity_mib if device in ledger.devices else 0,
            }
            for device, mib in move.claim.items()
        }
        return LoadOutOfMemory(
            f"{entry.id} ran out of memory while loading ({complaint}). {_told(numbers)} "
            "Say what it needs with memory_mib, let it need less (a smaller ctx_size), or give it more devices.",
            details=details,
            beside={"memory": numbers},
        )


def _told(numbers: dict[str, dict[str, int]]) -> str:
    if not numbers:
        return "It was given no memory of its own, because its need is not known."
    each = (
        f"{said['given_mib']:,} MiB on {device}, where {said['free_mib']:,} of {said['capacity_mib']:,} MiB were free"
        for device, said in numbers.items()
    )
    return f"It was given {'; '.join(each)}."


def _used_mib(reading: Reading, devices: frozenset[DeviceId]) -> int:
    return sum(gpu.used_mib for gpu in reading.gpus if gpu.uuid in devices)


class HostedMemory:
    def __init__(
        self,
        loop: SchedulerLoop,
        table: HostedSlots,
        watch: MemoryWatch,
        host: HostProbe = THIS_MACHINE,
        timeouts: MemoryTimeouts = TIMEOUTS.memory,
    ) -> None:
        self._timeouts = timeouts
        self._host = host
        self._loop = loop
        self._state = loop.view
        self._table = table
        self._watch = watch

    def gpus_for(self, entry: Entry, slot: SlotId) -> tuple[DeviceId, ...] | None:
        """The GPUs on which this slot is ready; empty if it needs none. None if there are no GPUs to plan with. A slot
        that is being prepared has a place on GPUs, but no memory there yet."""
        claim, devices = self.claim_of(slot), self._state.ledger.devices
        gpus = visible_gpus(entry, claim, devices.values())
        is_spread = gpus is not None and all(gpu in claim for gpu in gpus)
        # One whose need is not known is not spread.
        return gpus if gpus is None or is_spread else gpus[:1]

    def claim_of(self, slot: SlotId) -> Claim:
        """What this slot was given for when it is ready."""
        there = self._state.slots.get(slot)
        return NO_CLAIM if there is None else there.claim

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

    async def glance(self, gpu: DeviceId) -> GpuReading | None:
        """The current use of this GPU; None if it cannot be seen."""
        return await self._watch.glance(gpu)

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
        """The same, after waiting for it up to `room_s`."""
        deadline = self._loop.clock() + self._timeouts.room_s
        while True:
            missing = await self.missing(claim)
            if not missing or self._loop.clock() >= deadline:
                return missing
            await asyncio.sleep(AGAIN_S)

    async def back(self, slot: SlotId, gpu: DeviceId, before: GpuReading | None, released_mib: int) -> None:
        """Wait until what a slot held `before` is free again. Returns early if other slots move meanwhile."""
        # Use that was never seen cannot be seen to end: a GPU that is only a budget shows none.
        if before is None or not 0 < released_mib <= before.used_mib:
            return
        stirs, deadline = dict(self._table.stirs), self._loop.clock() + self._timeouts.slept_s
        while (now := await self.glance(gpu)) is not None and (away_mib := away(before, now, released_mib)):
            if gpu in self._table.stirred_since(stirs):
                return
            if self._loop.clock() >= deadline:
                _log.warning(
                    "memory has not come back", slot=slot, gpu=gpu, after_s=self._timeouts.slept_s, missing_mib=away_mib
                )
                return
            await asyncio.sleep(AGAIN_S)

    async def gone(self, pid: int, gpus: Collection[DeviceId]) -> None:
        """Wait, up to `back_s`, until nothing of an ended process is seen on these GPUs."""
        deadline = self._loop.clock() + self._timeouts.back_s
        used_mib: int | None = None
        while gpus and self._loop.clock() < deadline:
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


def visible_gpus(entry: Entry, claim: Claim, devices: Iterable[Device]) -> tuple[DeviceId, ...] | None:
    """The GPUs that an engine may see, in the order of its claim. None if there are no GPUs to plan with."""
    gpus = [device.id for device in devices if device.kind is DeviceKind.GPU]
    if not gpus:
        return None
    # 1. The GPUs of its claim.
    if claimed := tuple(device for device in claim if device in gpus):
        return claimed
    # 2. Its need is unknown: it may use all GPUs that the operator allows, and is measured there for the next time.
    if _is_unknown(entry, claim):
        return tuple(gpu for gpu in gpus if not entry.spec.devices or gpu in entry.spec.devices)
    # 3. It is known to need none.
    return ()


def _is_unknown(entry: Entry, claim: Claim) -> bool:
    """Whether its GPU need is unknown. A command may have been measured when it had no GPU to use."""
    config = entry.config
    if config.device == "cpu" or config.memory_mib == 0:
        return False
    return not claim or (config.engine == "command" and config.memory_mib is None)


# --- what was given memory ------------------------------------------------------------------------------------------

# The pids of holders of leases, by the slot of each: only known processes of this machine.
LeasePids = Callable[[], Mapping[SlotId, int]]

# No slot id begins with this.
OTHER_WORD = "other gateway's "


class MemoryOwners:
    def __init__(
        self,
        state: SchedulerView,
        slots: LiveSlots,
        lease_pids: LeasePids,
        identity: str,
        hosted: HostedSlots | None = None,
    ) -> None:
        """`identity` is the common prefix of the identities of all slots of this run."""
        self._state = state
        self._slots = slots
        self.lease_pids = lease_pids
        self._identity = identity
        self._hosted = hosted or HostedSlots()

    def __call__(self) -> dict[str, Owner]:
        """Every slot and lease that holds memory now, also those of other gateways."""
        slots, ledger = self._state.slots, self._state.ledger
        lease_pids = self.lease_pids() if any(slot.lease is not None for slot in slots.values()) else {}
        ours: dict[str, Owner] = {
            slot_id: self._owner(slots[slot_id], holding, lease_pids)
            for slot_id, holding in ledger.holdings.items()
            if slot_id in slots
        }
        # Their use looks like strangers', and is in the ledger already.
        others = {f"{OTHER_WORD}{lease.id}": Owner(lease.claim, hidden=True) for lease in ledger.others}
        return {**ours, **others, **self._workers()}

    def _workers(self) -> dict[str, Owner]:
        """Processes in which slots live. A worker that cannot be seen counts with what is set aside for it."""
        own = {
            worker.id: {} if worker.key is None else dict.fromkeys(worker.key.gpus or (), WORKER_GPU_MIB)
            for worker in self._hosted.workers.values()
        }
        return {
            worker.id: Owner(own[worker.id], frozenset({worker.pid}), is_host=True)
            for worker in self._hosted.workers.values()
        }

    def by_identity(self, identity: str) -> str | None:
        """The slot with this identity. Each attempt to start it has its own number after a dot."""
        if not identity.startswith(self._identity):
            return None
        return identity[len(self._identity) :].rpartition(".")[0] or None

    def _owner(self, slot: SlotFacts, holding: HoldingFacts, lease_pids: Mapping[SlotId, int]) -> Owner:
        # On each device what was seen, or the claim where nothing was ever seen.
        held: Claim = {**holding.claim, **holding.seen}
        hosted = self._hosted.there.get(slot.id)
        if hosted is not None:
            worker = hosted.worker
            return Owner(held, host="" if worker is None else worker.id, told=hosted.told)
        if slot.lease is None:
            return Owner(held, self._roots(slot.id), hidden=self._is_hidden(slot.id))
        pid = lease_pids.get(slot.id)
        return Owner(held, hidden=True) if pid is None else Owner(held, frozenset({pid}), claim=holding.claim)

    def _roots(self, slot: SlotId) -> frozenset[int]:
        """The pid of a live slot. Processes of a slot that is being loaded are found by their identity."""
        live = self._slots.live.get(slot)
        pid = None if live is None or live.child is None else live.child.pid
        return frozenset() if pid is None else frozenset({pid})

    def _is_hidden(self, slot: SlotId) -> bool:
        """Whether the engine may run elsewhere, in a container of a daemon: it need not hold its port itself."""
        live = self._slots.live.get(slot)
        return live is not None and live.entry.config.listener == "any"
