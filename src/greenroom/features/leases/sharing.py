"""Shares GPUs with other gateways through one store, by a heartbeat.

Owns the heartbeat, what is known of other gateways, and whether the store answers. At each beat this gateway publishes
what its devices offer and what freeing memory would cost, renews its leases, and learns whether it must make room. An
outage of the store stops new loads and nothing else. Used only if `leases.store` is configured.

`SharedLeasing` hands leases to other programs: asked of this gateway, granted and kept by the store. Without a store a
gateway has `LocalLeasing`, which keeps leases itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from greenroom.config.part import Part
from greenroom.core.events import MemoryChanged
from greenroom.core.model import DeviceId, DeviceKind, LeaseId, OtherLease, SlotId
from greenroom.errors import ConfigError, LeaseDenied, LeaseUnknown, StoreDown
from greenroom.features.leases.entry import LeasableMemory, devices_meant
from greenroom.features.leases.holders import DeadHolders, Recalls
from greenroom.features.leases.journal import JournalWriter
from greenroom.features.leases.local import LocalLeasing
from greenroom.features.leases.making_room import Heartbeat, MakingRoom, WaitingModels
from greenroom.features.leases.shared_slots import Entered, SharedSlots
from greenroom.leases.records import Lease, LeaseAsk, holder_of
from greenroom.leases.shared.stored import Membership, PublishReply, SharedStore, SlotAsk
from greenroom.runtime.memory.devices import DeviceNames
from greenroom.runtime.memory.watch import MemoryWatch
from greenroom.runtime.observer import Hub
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.runtime.shell import Shell
from greenroom.telemetry.logs import get_logger

_log = get_logger("sharing")

# The store drops a gateway that is silent for three seconds.
BEAT_S: Final = 0.5
# Beats are at least this far apart.
GAP_S: Final = 0.05
# A store that is down is tried again after about this; with jitter, so that gateways do not all retry at once.
RETRY_S: Final = 1.0
# The longest waits for the store at the start and at shutdown.
FIRST_BEAT_MAX_S: Final = 3.0
CLOSE_MAX_S: Final = 5.0


class Sharing:
    def __init__(self, member: Membership, loop: SchedulerLoop, memory: MemoryWatch, hub: Hub) -> None:
        self._store = member.store
        self._gateway = member.gateway
        self._loop = loop
        self._state = loop.view
        self._memory = memory
        self._hub = hub
        self._pause_s = BEAT_S
        self.heartbeat = heartbeat = Heartbeat(self._beat, "sharing GPUs", lambda: self._pause_s, _log.failed)
        self.room = MakingRoom(loop, memory, heartbeat)
        self.waiting_models = WaitingModels(member, loop, heartbeat)
        self.slots = SharedSlots(member, loop, self.room, self.waiting_models, heartbeat)
        self._dead = DeadHolders(heartbeat)
        self._recalls = Recalls(loop, hub)
        # Why the store cannot be used, and since when; None while it answers.
        self.failure: str | None = "it was not asked yet"
        self.since = loop.clock()
        # For this long the store grants nothing new, because it may have lost its data.
        self.grace_left_s = 0.0
        # All leases in the store, as they were last read.
        self.leases: list[Lease] = []

    @property
    def is_up(self) -> bool:
        return self.failure is None

    @property
    def slots_without_lease(self) -> int:
        return len(self.slots.lost)

    # --- life -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Tell the scheduler that nothing is granted until the store has answered."""
        self._memory.post_and_look(MemoryChanged(self._loop.clock(), {}, store_is_down=True))

    async def open(self) -> None:
        """Make the first beat, then start the heartbeat. A store that is down is logged and tried again."""
        try:
            async with asyncio.timeout(FIRST_BEAT_MAX_S):
                await self.beat()
        except (StoreDown, TimeoutError) as error:
            self._went_down(error.message if isinstance(error, StoreDown) else "it does not answer in time")
        self.heartbeat.wake()
        self.heartbeat.start()

    async def close(self) -> None:
        """Release everything, as far as the store answers; the rest expires there."""
        await self.heartbeat.cancel()
        self._dead.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_MAX_S):
                await self.waiting_models.close()
                await self.slots.close()
        await self._store.close()

    async def _beat(self) -> None:
        self._pause_s = BEAT_S
        try:
            await self.beat()
        except StoreDown as error:
            # After a first failure at once: this process may have stood still, and its leases may be gone.
            self._pause_s = 0.0 if self.is_up else RETRY_S * random.uniform(0.5, 1.0)
            self._went_down(error.message)
        finally:
            await asyncio.sleep(GAP_S)

    # --- one beat ---------------------------------------------------------------------------------------------------

    async def beat(self) -> None:
        """Tell the store of this gateway, and follow what it answers. Raises StoreDown."""
        self._store.beat()
        was_down = self.failure is not None
        orders = await self._publish()
        await self.slots.keep_up(at_once=was_down or orders.grace_left_s > 0)
        await self.waiting_models.renew()
        if was_down or orders.version != self.heartbeat.version:
            await self._read(orders.version)
        await self._give_way()
        self._recalls.look()
        await self._release_dead()
        self.room.follow(orders.make_room, {lease.id: lease.claim for lease in self.leases})
        self._came_up(orders)
        self.waiting_models.follow()

    async def _publish(self) -> PublishReply:
        return await self._store.publish(self._gateway, self._usable(), self.room.prices())

    def _usable(self) -> dict[str, int]:
        """MiB to plan with on each device: without its margin and without what is used without a lease. That is the use
        of strangers, and of our engines that leave because another holder was granted their memory. A device that is
        gone offers 0."""
        seen = {DeviceId(gpu.uuid) for gpu in self._memory.reading.gpus}
        return {
            str(device.id): max(0, device.usable_mib - self._unleased_mib(device.id))
            if device.kind is DeviceKind.HOST or device.id in seen
            else 0
            for device in self._state.ledger.devices.values()
        }

    def _unleased_mib(self, device: DeviceId) -> int:
        taken = [entered for entered in self.slots.lost if entered.is_taken]
        taken_mib = sum(entered.ask.claim.get(device, 0) for entered in taken)
        return self._state.ledger.foreign.get(device, 0) + taken_mib

    async def _read(self, version: int) -> None:
        made = self.room.made
        # Set before the read: a `hurry` meanwhile resets it, and the next beat reads again.
        self.heartbeat.version = version
        try:
            self.leases = await self._store.leases()
        except BaseException:
            self.heartbeat.version = None
            raise
        self._recalls.note(self.leases)
        self.slots.forget_strays(self.leases)
        self._dead.watch(lease for lease in self.leases if lease.gateway != self._gateway)
        self._tell_others()
        if self.slots.look_for(self.leases):
            self.heartbeat.wake()
        # The scheduler has the new leases by now, so that their memory never seems free in between.
        self.room.note(self.leases, made)

    def _tell_others(self, without: frozenset[str] = frozenset()) -> None:
        ours = without | self.waiting_models.held | self.slots.ids
        others = tuple(
            OtherLease(LeaseId(lease.id), lease.name, claim, lease.priority, lease.preemptible, lease.kind == "slot")
            for lease in self.leases
            if lease.gateway != self._gateway and lease.id not in ours and (claim := _claim(lease))
        )
        if others != self._state.ledger.others:
            self._memory.post_and_look(MemoryChanged(self._loop.clock(), {}, leases=others))
            # Their use was counted as strangers' before, or is from now on.
            self._memory.nudge()

    async def _give_way(self) -> None:
        """Have slots leave, pinned or not, whose memory was granted to others while their leases were not renewed."""
        if not self.slots.refused():
            return
        # Engines of other holders are leases by now: they must not be counted as strangers too.
        await self._memory.look_now()
        taken = {slot: names for slot, one in self.slots.refused().items() if (names := self._holders_instead(one))}
        for slot, names in taken.items():
            entered = self.slots.give_up(slot)
            facts = {"slot": slot, "model": entered.ask.name, "lease": entered.id, "holders": names}
            _log.warning("another holder was granted the memory of a model, which leaves", **facts)
            self._hub.publish("lease_lost", facts)
        if taken:
            self._memory.post_and_look(MemoryChanged(self._loop.clock(), {}, taken=tuple(taken)))

    def _holders_instead(self, entered: Entered) -> list[str]:
        """Who was granted what this slot uses. Empty if it only has to ask again. By our own figures: another gateway
        may offer less, because it counts this very engine as a stranger's."""
        ledger, over = self._state.ledger, set()
        for device, mib in _claim(entered.ask).items():
            granted_mib = sum(lease.claim.get(device, 0) for lease in self.leases)
            if granted_mib + mib > ledger.devices[device].usable_mib - ledger.foreign.get(device, 0):
                over.add(device)
        return [one.holder for one in ledger.others if any(one.claim.get(device, 0) for device in over)]

    async def _release_dead(self) -> None:
        """Release the leases of dead holders, after the memory that they still use is counted as strangers'."""
        dead = [lease for lease in self.leases if lease.id in self._dead.found]
        if not dead:
            return
        self._tell_others(without=frozenset(lease.id for lease in dead))
        await self._memory.look_now()
        await self._publish()
        for lease in dead:
            _log.info("the holder of a lease has ended", lease=lease.id, name=lease.name)
            await self._store.release(lease.id, lease.token, kind=lease.kind)
        self.leases = [lease for lease in self.leases if lease not in dead]
        self._dead.watch(lease for lease in self.leases if lease.gateway != self._gateway)

    # --- whether it answers -----------------------------------------------------------------------------------------

    def _came_up(self, orders: PublishReply) -> None:
        self.grace_left_s = orders.grace_left_s
        if self.failure is None:
            return
        self.failure, self.since = None, self._loop.clock()
        _log.info("the lease store answers", grace_left_s=round(orders.grace_left_s, 1))
        self._hub.publish("lease_store", {"up": True})
        self._memory.post_and_look(MemoryChanged(self._loop.clock(), {}, store_is_down=False))

    def _went_down(self, why: str) -> None:
        if self.failure is None:
            self.since = self._loop.clock()
        if self.failure != why:
            _log.warning("the lease store cannot be used: what is loaded goes on, nothing new is loaded", why=why)
            self._hub.publish("lease_store", {"up": False, "why": why})
            self._memory.post_and_look(MemoryChanged(self._loop.clock(), {}, store_is_down=True))
        self.failure = why


def _claim(lease: Lease | SlotAsk) -> dict[DeviceId, int]:
    return {DeviceId(device): lease.claim[device] for device in sorted(lease.claim) if lease.claim[device] > 0}


# The last owner of memory may take this long to stop using it.
ROOM_S = 10.0


class SharedLeasing(Part):
    """`room_for` waits until memory is really free and returns what is missing; `known` are all leases in the store,
    as they were last read."""

    name = "the lease store"
    lists_slots = True

    def __init__(
        self,
        store: SharedStore,
        *,
        wait_max_s: float,
        memory: LeasableMemory,
        sharing: Sharing,
    ) -> None:
        self._memory = memory
        self.sharing = sharing
        self._store = store
        self._wait_max_s = wait_max_s

    def known(self) -> Sequence[Lease]:
        return self.sharing.leases

    async def acquire(self, ask: LeaseAsk, asker: str = "") -> Lease:
        devices, call = devices_meant(ask, self._memory.names), asker or secrets.token_hex(8)
        ask = replace(ask, wait_s=min(ask.wait_s, self._wait_max_s), devices=devices)
        lease = await self._store.acquire(ask, call)
        try:
            missing = await self._memory.watch.room_for(
                {DeviceId(device): mib for device, mib in lease.claim.items()}, ROOM_S
            )
        except BaseException:
            await self._take_back(lease.id, call)
            raise
        if missing:
            await self._take_back(lease.id, call)
            said = ", ".join(f"{mib:,} MiB on {device}" for device, mib in missing.items())
            raise LeaseDenied(
                f"{ask.name} was granted memory that another process still uses: {said}.", retry_after_s=ROOM_S
            )
        return lease

    async def unheard(self, id: str, asker: str) -> None:
        await self._store.unheard(id, asker)

    async def _take_back(self, id: str, asker: str) -> None:
        """Give back a lease that the caller is not told of. If the store is down, the lease expires there."""
        with contextlib.suppress(StoreDown):
            await self.unheard(id, asker)

    async def renew(self, id: str, token: int) -> Lease:
        return await self._store.renew(id, token)

    async def release(self, id: str, token: int | None = None) -> None:
        await self._store.release(id, token)

    async def leases(self) -> list[Lease]:
        return await self._store.leases()

    async def find(self, id: str) -> Lease:
        found = [lease for lease in await self._store.leases() if lease.id == id]
        if not found:
            raise LeaseUnknown(f"There is no lease {id}. GET /api/v1/leases lists those there are.")
        return found[0]

    @property
    def room(self) -> MakingRoom:
        """Takes the scheduler's decisions on leases."""
        return self.sharing.room

    @property
    def grants(self) -> SharedSlots:
        """Asked by moves before they take memory."""
        return self.sharing.slots

    def owners(self) -> dict[SlotId, int]:
        """None: the holders' processes are known by the store alone."""
        return {}

    def begin(self) -> None:
        """Wait for the store: memory that is leased there is in use."""
        self.sharing.begin()

    async def close(self) -> None:
        await self.sharing.close()


def make_leasing(shell: Shell, watch: MemoryWatch, names: DeviceNames) -> LocalLeasing | SharedLeasing:
    """Raises ConfigError if the client of the shared store is not installed."""
    section, loop, hub = shell.config.leases, shell.loop, shell.hub
    memory, wait_max_s, url = LeasableMemory(loop, names, watch), section.wait_max_s, section.store
    if url is None:
        return LocalLeasing(loop, JournalWriter(shell.state_dir.path), memory, hub, wait_max_s=wait_max_s)
    try:
        # Imported only if used: it is slow to import.
        from greenroom.features.leases.renewer import RenewerProcess
        from greenroom.leases.shared.redis_store import RedisStore
    except ImportError as error:
        raise ConfigError("leases.store needs the client of Redis: pip install 'greenroom[redis]'.") from error
    host, ttl_s = section.host or os.uname().nodename, section.ttl_s
    store = RedisStore(url, host, ttl_s=ttl_s, renewer=RenewerProcess(url, host, ttl_s))
    member = Membership(store, shell.state_dir.run_name, ttl_s, holder_of(os.getpid()))
    sharing = Sharing(member, loop, watch, hub)
    return SharedLeasing(store, wait_max_s=wait_max_s, memory=memory, sharing=sharing)
