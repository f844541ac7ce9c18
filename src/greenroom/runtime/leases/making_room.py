"""Makes room for leases that wait in a shared store, when the store orders this gateway to.

Owns the way from such an order to a lease that the scheduler plans like any other, and the price at which this gateway
offers to free memory. If no gateway can free enough alone, each frees what it can: the waiting lease gets it, and the
next gateway is ordered to free the rest. Never decides what is evicted: the scheduler does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from greenroom.core.effects import Rejection
from greenroom.core.events import Event, LeaseAsked, LeaseGone
from greenroom.core.model import DeviceId, DeviceKind, LeaseId, Need, Slot, SlotId
from greenroom.core.policy.swapper import Resident
from greenroom.core.view import SchedulerView
from greenroom.leases.records import Lease, LeaseAsk
from greenroom.telemetry.logs import get_logger

_log = get_logger("sharing")

MIB_A_GIB: Final = 1024
# Bounds what a policy may compute, so that a price is a number that JSON can hold.
PRICE_MAX: Final = 1e12


@dataclass(slots=True, eq=False)
class Room:
    """Memory on one device that our scheduler was asked to free for a waiting lease."""

    lease: LeaseId
    waiting: str
    device: DeviceId
    is_made: bool = False


class MakingRoom:
    """`on_made` is called when memory was freed, so that the store is told soon."""

    def __init__(
        self,
        state: SchedulerView,
        post: Callable[[Event], None],
        clock: Callable[[], float],
        on_made: Callable[[], None],
    ) -> None:
        self._state = state
        self._post = post
        self._clock = clock
        self._on_made = on_made
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

    def _movable(self) -> list[Resident]:
        return self._state.movable(self._clock())

    # --- orders -----------------------------------------------------------------------------------------------------

    @property
    def made(self) -> list[Room]:
        """Memory that was freed and is not handed over yet."""
        return [room for room in self._rooms.values() if room.is_made]

    def note(self, leases: Iterable[Lease], made: Iterable[Room]) -> None:
        """Take in all leases, which the scheduler knows already, and end rooms that were `made` before."""
        now, waiting = self._clock(), {lease.id: lease for lease in leases if lease.state == "waiting"}
        self._since = {id: self._since.get(id, now) for id in waiting}
        self._tries = {key: tries for key, tries in self._tries.items() if key[0] in waiting}
        over = [room for room in self._rooms.values() if room.waiting not in waiting]
        for room in (*over, *made):
            self._end(room)

    def follow(self, asks: Iterable[LeaseAsk], got: Mapping[str, Mapping[str, int]]) -> None:
        """Make room for these. For leases that are no longer ordered, only evictions that have started proceed."""
        named = {ask.id: ask for ask in asks}
        for room in list(self._rooms.values()):
            if room.waiting not in named and not self._state.slots_of_lease(room.lease):
                self._end(room)
        busy_for = {room.waiting for room in self._rooms.values()}
        for ask in named.values():
            if ask.id not in busy_for:
                self._make_room(ask, got.get(ask.id, {}))

    def into(self, newcomer: Slot) -> str | None:
        """The waiting lease for which this newcomer makes room; None if there is none."""
        room = None if newcomer.lease is None else self._rooms.get(newcomer.lease)
        return None if room is None else room.waiting

    def _make_room(self, ask: LeaseAsk, got: Mapping[str, int]) -> None:
        for device, mib in self._places(ask, got):
            self._number += 1
            room = Room(LeaseId(f"room:{self._number}:{ask.id}"), ask.id, device)
            self._rooms[room.lease] = room
            self._tries[ask.id, device] = self._tries.get((ask.id, device), 0) + 1
            now = self._clock()
            _log.info("making room", lease=ask.id, name=ask.name, gpu=device, mib=mib)
            since = self._since.get(ask.id, now)
            self._post(LeaseAsked(now, room.lease, Need(mib), ask.priority, (device,), waits_since=since))

    def _places(self, ask: LeaseAsk, got: Mapping[str, int]) -> list[tuple[DeviceId, int]]:
        """Where to free how much: first where the lease has memory, then where it was tried least, then most."""
        free, gives = self._state.ledger.free_mib(frozenset()), self._gives()
        lacks = ask.gpus - sum(mib >= ask.mib_on(device) for device, mib in got.items())
        found: list[tuple[tuple[bool, int, bool, int], DeviceId, int]] = []
        for device in self._state.devices:
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
            self._post(LeaseGone(self._clock(), room.lease))

    # --- told by the scheduler's effects ----------------------------------------------------------------------------

    def granted(self, lease: LeaseId, slot: SlotId) -> None:
        """The room is free. The lease that waits can have it, and the scheduler is told so before the room ends."""
        self._rooms[lease].is_made = True
        self._on_made()

    def rejected(self, lease: LeaseId, rejection: Rejection) -> None:
        self._rooms.pop(lease, None)

    def recalled(self, lease: LeaseId, deadline: float) -> None:
        """Ignored: room is handed over at the next heartbeat, whatever else is more urgent."""
