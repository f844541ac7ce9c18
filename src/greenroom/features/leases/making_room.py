"""Memory that crosses gateways: `MakingRoom` frees ours for others, `WaitingModels` waits for theirs.

When the store orders it, `MakingRoom` turns a lease that waits there into one that the scheduler plans like any other.
It also says at which price this gateway would free memory. If no gateway can free enough alone, each frees what it
can: the waiting lease gets it, and the next gateway is ordered to free the rest.

A model of ours waits in the store like any program, if it would not fit even with all of our slots evicted, but would
if those of other gateways were evicted too. Its granted lease is kept until a load takes it over. Never decides what is
evicted: the scheduler does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from greenroom.base.repeated import Repeated
from greenroom.core.effects import Rejection
from greenroom.core.events import LeaseAsked, LeaseGone
from greenroom.core.model import DeviceId, DeviceKind, LeaseId, ModelId, Move, Need, SlotId, lease_name
from greenroom.core.view import KeptOut, Movable, SlotFacts
from greenroom.errors import GreenroomError, LeaseDenied
from greenroom.leases.records import Lease, LeaseAsk
from greenroom.leases.shared.stored import Membership
from greenroom.runtime.memory.watch import MemoryWatch
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.telemetry.logs import get_logger

_log = get_logger("sharing")

MIB_A_GIB: Final = 1024
# Bounds what a policy may compute, so that a price is a number that JSON can hold.
PRICE_MAX: Final = 1e12


class Heartbeat(Repeated):
    """Tells the store of this gateway, and follows what it answers. `version` is that of the leases as they were last
    read; None: the next beat reads them, whatever it is."""

    version: int | None = None

    def hurry(self) -> None:
        """Beat soon: something happened that the store should know, or may answer to."""
        self.version = None
        self.wake()


@dataclass(slots=True, eq=False)
class Room:
    """Memory on one device that our scheduler was asked to free for a waiting lease."""

    lease: LeaseId
    waiting: str
    device: DeviceId
    is_made: bool = False


class MakingRoom:
    def __init__(self, loop: SchedulerLoop, memory: MemoryWatch, heartbeat: Heartbeat) -> None:
        self._loop = loop
        self._state = loop.view
        self._memory = memory
        self._heartbeat = heartbeat
        self._rooms: dict[LeaseId, Room] = {}
        self._number = 0
        # When each waiting lease was first seen here, and how often each device was tried for it.
        self._since: dict[str, float] = {}
        self._tries: dict[tuple[str, DeviceId], int] = {}

    # --- what it would cost -----------------------------------------------------------------------------------------

    def prices(self) -> dict[str, float]:
        """The loss for each GiB freed, on each device where a slot could be evicted."""
        loss: dict[DeviceId, float] = {}
        mib: dict[DeviceId, int] = {}
        for resident in self._movable():
            for device, gives in resident.gives_mib.items():
                if gives > 0:
                    loss[device] = loss.get(device, 0.0) + max(0.0, resident.loss)
                    mib[device] = mib.get(device, 0) + gives
        return {str(device): min(PRICE_MAX, loss[device] * MIB_A_GIB / mib[device]) for device in mib}

    def _movable(self) -> Sequence[Movable]:
        return self._state.movable(self._loop.clock())

    # --- orders -----------------------------------------------------------------------------------------------------

    @property
    def made(self) -> list[Room]:
        """Memory that was freed and is not handed over yet."""
        return [room for room in self._rooms.values() if room.is_made]

    def note(self, leases: Iterable[Lease], made: Iterable[Room]) -> None:
        """Take in all leases, which the scheduler has already, and end rooms that were `made` before."""
        now, waiting = self._loop.clock(), {lease.id: lease for lease in leases if lease.state == "waiting"}
        self._since = {id: self._since.get(id, now) for id in waiting}
        self._tries = {key: tries for key, tries in self._tries.items() if key[0] in waiting}
        over = [room for room in self._rooms.values() if room.waiting not in waiting]
        for room in (*over, *made):
            self._end(room)

    def follow(self, asks: Iterable[LeaseAsk], got: Mapping[str, Mapping[str, int]]) -> None:
        """Make room for these. For leases that are no longer ordered, only evictions that have started proceed."""
        named = {ask.id: ask for ask in asks}
        for room in list(self._rooms.values()):
            if room.waiting not in named and not self._state.slots_of(lease_name(room.lease)):
                self._end(room)
        busy_for = {room.waiting for room in self._rooms.values()}
        for ask in named.values():
            if ask.id not in busy_for:
                self._make_room(ask, got.get(ask.id, {}))

    def into(self, newcomer: SlotFacts) -> str | None:
        """The waiting lease for which this newcomer makes room; None if there is none."""
        room = None if newcomer.lease is None else self._rooms.get(newcomer.lease)
        return None if room is None else room.waiting

    def _make_room(self, ask: LeaseAsk, got: Mapping[str, int]) -> None:
        for device, mib in self._places(ask, got):
            self._number += 1
            room = Room(LeaseId(f"room:{self._number}:{ask.id}"), ask.id, device)
            self._rooms[room.lease] = room
            self._tries[ask.id, device] = self._tries.get((ask.id, device), 0) + 1
            now = self._loop.clock()
            _log.info("making room", lease=ask.id, name=ask.name, gpu=device, mib=mib)
            since = self._since.get(ask.id, now)
            self._memory.post_and_look(
                LeaseAsked(now, room.lease, Need(mib), ask.priority, (device,), waits_since=since)
            )

    def _places(self, ask: LeaseAsk, got: Mapping[str, int]) -> list[tuple[DeviceId, int]]:
        """Where to free how much: first where the lease has memory, then where it was tried least, then most."""
        free, gives = self._state.ledger.free_mib(frozenset()), self._gives()
        lacks = ask.gpus - sum(mib >= ask.mib_on(device) for device, mib in got.items())
        found: list[tuple[tuple[bool, int, bool, int], DeviceId, int]] = []
        for device in self._state.ledger.devices.values():
            if device.kind is not DeviceKind.GPU or (ask.devices and device.id not in ask.devices):
                continue
            has, is_free = got.get(device.id, 0), max(0, free[device.id])
            wants = ask.mib_on(device.id) - has
            mib = min(wants, is_free + gives.get(device.id, 0))
            if mib > is_free:
                order = (has == 0, self._tries.get((ask.id, device.id), 0), mib < wants, -mib)
                found.append((order, device.id, mib))
        return [(device, mib) for _, device, mib in sorted(found)[: max(0, lacks)]]

    def _gives(self) -> dict[DeviceId, int]:
        gives: dict[DeviceId, int] = {}
        for resident in self._movable():
            for device, mib in resident.gives_mib.items():
                gives[device] = gives.get(device, 0) + max(0, mib)
        return gives

    def _end(self, room: Room) -> None:
        if self._rooms.pop(room.lease, None) is not None:
            self._memory.post_and_look(LeaseGone(self._loop.clock(), room.lease))

    # --- told by the scheduler's effects ----------------------------------------------------------------------------

    def granted(self, lease: LeaseId, slot: SlotId) -> None:
        """The room is free. The lease that waits can have it, and the scheduler is told so before the room ends."""
        self._rooms[lease].is_made = True
        self._heartbeat.hurry()

    def rejected(self, lease: LeaseId, rejection: Rejection) -> None:
        self._rooms.pop(lease, None)

    def recalled(self, lease: LeaseId, deadline: float) -> None:
        """Ignored: room is handed over at the next heartbeat, whatever else is more urgent."""


# Our own scheduler finds room for a request within this, if it can.
AFTER_S: Final = 1.0
# Models of ours that wait in the store at once.
WANTS_MAX: Final = 8
# A wait in the store ends with the queue of the model; this is only a bound.
LINE_S: Final = 3_600.0
# A load takes over a granted lease at once, or not at all. Then it is released, and the model asks again later.
UNUSED_S: Final = 15.0
REST_S: Final = 5.0


@dataclass(slots=True, eq=False)
class Want:
    model: ModelId
    id: str
    task: asyncio.Task[Lease]
    lease: Lease | None = None
    held_at: float = 0.0


class WaitingModels:
    def __init__(self, member: Membership, loop: SchedulerLoop, heartbeat: Heartbeat) -> None:
        self._store = member.store
        self._gateway = member.gateway
        self._loop = loop
        self._state = loop.view
        self._ttl_s = member.ttl_s
        self._holder = member.holder
        self._heartbeat = heartbeat
        self._wants: dict[ModelId, Want] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._number = 0
        # Models that did not use their lease, and when they may ask again.
        self._rests_until: dict[ModelId, float] = {}

    @property
    def held(self) -> frozenset[str]:
        """Ids of granted leases that no slot has taken over yet."""
        return frozenset(want.id for want in self._wants.values() if want.lease is not None)

    def adopted(self, move: Move) -> Lease | None:
        """The lease that was granted for this model, if any; it belongs to the slot from now on."""
        want = self._wants.get(move.model)
        if want is None or want.lease is None:
            return None
        del self._wants[move.model]
        return want.lease

    def follow(self) -> None:
        """Ask for leases for the models that need one, and give up the others."""
        now = self._loop.clock()
        needy = self._state.kept_out_by_others(AFTER_S, now)
        for want in list(self._wants.values()):
            if want.model not in needy if want.lease is None else self._is_useless(want, now):
                self._give_up(want)
                if want.lease is not None:
                    self._rests_until[want.model] = now + REST_S
        self._rests_until = {model: at for model, at in self._rests_until.items() if at > now}
        for model, one in needy.items():
            is_new = model not in self._wants and model not in self._rests_until
            if is_new and len(self._wants) < WANTS_MAX:
                self._stand(model, one)

    async def renew(self) -> None:
        """Raises StoreDown."""
        held = [want.lease for want in self._wants.values() if want.lease is not None]
        if held:
            await self._store.renew_all([(lease.id, lease.token) for lease in held])

    async def close(self) -> None:
        for want in list(self._wants.values()):
            self._give_up(want)
        if self._leaving:
            await asyncio.wait(self._leaving)

    def _is_useless(self, want: Want, now: float) -> bool:
        """Whether no request waits for the model any more, or no load took the lease over in time."""
        is_waited_for = self._state.is_waited_for(want.model)
        is_coming = any(slot.is_arriving for slot in self._state.slots_of(want.model))
        return now >= want.held_at + UNUSED_S or not (is_waited_for or is_coming)

    # --- the line ---------------------------------------------------------------------------------------------------

    def _stand(self, model: ModelId, needy: KeptOut) -> None:
        place = {str(device): mib for device, mib in needy.place.items()}
        is_split = len(place) > 1
        self._number += 1
        ask = LeaseAsk(
            id=f"{self._gateway}/line{self._number}",
            name=model,
            mib=max(place.values()),
            gpus=len(place),
            # On one GPU any will do that it may use; a split one names its share of each.
            devices=tuple(place) if is_split else tuple(str(device) for device in needy.spec.devices),
            shares=place if is_split else {},
            priority=needy.priority,
            ttl_s=self._ttl_s,
            wait_s=LINE_S,
            holder=self._holder,
        )
        _log.info("standing in line for a model", model=model, lease=ask.id, mib=sum(place.values()))
        task = asyncio.get_running_loop().create_task(self._store.acquire(ask, kind="slot"), name=f"line {model}")
        want = self._wants[model] = Want(model, ask.id, task)
        task.add_done_callback(lambda _: self._settled(want))

    def _settled(self, want: Want) -> None:
        if want.task.cancelled():
            return
        error = want.task.exception()
        if error is None:
            want.lease, want.held_at = want.task.result(), self._loop.clock()
            if self._wants.get(want.model) is want:
                # The scheduler learns of the room.
                self._heartbeat.hurry()
            else:
                self._release_later(want.id)
            return
        if self._wants.get(want.model) is want:
            del self._wants[want.model]
        if not isinstance(error, LeaseDenied):
            _log.warning("standing in line failed", model=want.model, error=str(error))

    def _give_up(self, want: Want) -> None:
        del self._wants[want.model]
        if want.lease is None:
            # A cancelled `acquire` is forgotten by the store.
            want.task.cancel()
        else:
            self._release_later(want.id)

    def _release_later(self, id: str) -> None:
        task = asyncio.get_running_loop().create_task(self._release(id), name=f"leave line {id}")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _release(self, id: str) -> None:
        try:
            await self._store.release(id, kind="slot")
        except GreenroomError:
            # It is no longer renewed, and expires.
            return
