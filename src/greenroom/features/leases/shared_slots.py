"""The leases of this gateway's slots in a shared store.

Owns which slot holds which lease, from before its engine starts until after its memory is back, and the pending claims
of newcomers for which slots are evicted. An outage of the store takes nothing away: when it is back, leases are renewed
or entered again, and ended ones are released. A lease that was lost is entered again at once; where the store refuses
that, `Sharing` finds out whether the slot must leave. Never decides what moves.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field, replace
from typing import Final

from greenroom.base.names import public_name
from greenroom.core.model import Claim, Move, MoveKind, SlotId, larger
from greenroom.core.view import SlotFacts
from greenroom.errors import LeaseDenied, StoreDown
from greenroom.features.leases.making_room import Heartbeat, MakingRoom, WaitingModels
from greenroom.leases.records import Lease
from greenroom.leases.shared.stored import Membership, SlotAsk
from greenroom.runtime.moves.admission import Grants, NoGrant
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.telemetry.logs import get_logger

_log = get_logger("sharing")

# The store drops a pending claim that is silent for this long; it is entered again at each heartbeat.
PENDING_S: Final = 15.0
# Renewals within one TTL.
RENEWALS: Final = 3
# An engine's use varies a little all the time; only a change of this size is sent to the store.
STEP_MIB: Final = 64


@dataclass(slots=True, eq=False)
class Entered:
    """One slot's lease. Without a token it is pending, or the store has not answered yet."""

    ask: SlotAsk
    token: int = 0
    heard_at: float = 0.0
    is_lost: bool = False
    # True if it was lost and cannot be held again, and if its slot leaves for that.
    is_refused: bool = False
    is_taken: bool = False
    # One call at a time: a `pend` that arrived after the `hold` would make it pending again.
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def id(self) -> str:
        return self.ask.id


class SharedSlots(Grants):
    def __init__(
        self,
        member: Membership,
        loop: SchedulerLoop,
        room: MakingRoom,
        waiting_models: WaitingModels,
        heartbeat: Heartbeat,
    ) -> None:
        self._store = member.store
        self._gateway = member.gateway
        self._loop = loop
        self._state = loop.view
        self._ttl_s = member.ttl_s
        self._holder = member.holder
        self._room = room
        self._waiting_models = waiting_models
        self._heartbeat = heartbeat
        self._entered: dict[SlotId, Entered] = {}
        # Slots that leave for a lease that waits in the store, with that lease.
        self._into: dict[SlotId, str] = {}
        # Releases that the store was not told of yet, with the lease that gets the memory.
        self._owed: dict[str, str | None] = {}
        self._renewed_at = 0.0

    # --- called by moves --------------------------------------------------------------------------------------------

    async def enter(self, move: Move) -> None:
        claim = _positive(move.claim)
        if not claim:
            return
        ask = self._ask(move.slot, move.model, claim)
        if (lease := self._waiting_models.adopted(move)) is not None:
            ask = replace(ask, id=lease.id)
        entered = self._entered.setdefault(move.slot, Entered(ask))
        if entered.id != ask.id:
            # It was pending under its own id, and its model holds another lease.
            pending = entered
            entered = self._entered[move.slot] = Entered(ask)
            await self._release(pending.id, None)
        try:
            await self._hold(entered, ask)
        except LeaseDenied as denied:
            self._heartbeat.hurry()
            raise NoGrant(denied.message) from None

    async def confirm(self, slot: SlotId) -> None:
        entered = self._entered.get(slot)
        if entered is None or self._loop.clock() < entered.heard_at + self._ttl_s:
            return
        # This process or the store was suspended: the memory may have been granted to another holder since.
        sent = self._loop.clock()
        renewed = await self._store.renew_all([(entered.id, entered.token)])
        if not renewed.get(entered.id):
            raise NoGrant(f"the lease of {slot} was lost before its engine started")
        entered.heard_at = sent

    async def make_way(self, move: Move) -> None:
        newcomer = None if move.makes_room_for is None else self._state.slots.get(move.makes_room_for)
        if newcomer is None:
            return
        if newcomer.lease is not None:
            if (waiting := self._room.into(newcomer)) is not None:
                self._into[move.slot] = waiting
            return
        try:
            await self._pend(newcomer)
        except (LeaseDenied, StoreDown) as error:
            self._heartbeat.hurry()
            raise NoGrant(error.message) from None

    async def leave(self, slot: SlotId) -> None:
        entered, into = self._entered.pop(slot, None), self._into.pop(slot, None)
        if entered is not None:
            await self._release(entered.id, into)

    # --- at each heartbeat ------------------------------------------------------------------------------------------

    async def keep_up(self, *, at_once: bool) -> None:
        """Renew held leases, enter lost ones again, release ended ones. Raises StoreDown."""
        for id, into in list(self._owed.items()):
            await self._store.release(id, into=into, kind="slot")
            self._owed.pop(id, None)
        if at_once or self._loop.clock() >= self._renewed_at + self._ttl_s / RENEWALS:
            await self._renew()
        for slot_id, entered in list(self._entered.items()):
            slot = self._state.slots.get(slot_id)
            if slot is not None and slot.planned is not None:
                await self._pend_again(slot)
            elif slot is None and not entered.token:
                # The plan was cancelled before anything was held.
                await self.leave(slot_id)
            elif entered.is_lost and not entered.is_taken:
                await self._hold_again(entered)
            elif slot is not None and entered.token:
                await self._resize(slot, entered)

    async def _renew(self) -> None:
        sent = self._loop.clock()
        held = {one.id: one for one in self._entered.values() if one.token}
        renewed = await self._store.renew_all([(one.id, one.token) for one in held.values()]) if held else {}
        for id, one in held.items():
            if renewed.get(id):
                one.heard_at, one.is_lost, one.is_refused = sent, False, False
            elif not one.is_lost:
                one.is_lost = True
                _log.warning("a model's lease was lost", lease=id, model=one.ask.name)
        self._renewed_at = sent

    async def _hold_again(self, entered: Entered) -> None:
        try:
            await self._hold(entered)
        except LeaseDenied:
            entered.is_refused = True
            return
        _log.info("a model's lease is held again", lease=entered.id, model=entered.ask.name)

    async def _pend_again(self, newcomer: SlotFacts) -> None:
        try:
            await self._pend(newcomer)
        except LeaseDenied as denied:
            # Its next step is refused too.
            _log.info("a swap cannot go on", slot=newcomer.id, why=denied.message)

    async def _resize(self, slot: SlotFacts, entered: Entered) -> None:
        """Tell the store what an engine uses where that differs from its claim."""
        uses = _positive(larger(slot.claim, self._state.ledger.held_by(slot.id)))
        known = entered.ask.claim
        if slot.move is not None or all(
            abs(uses.get(one, 0) - known.get(one, 0)) < STEP_MIB for one in {*uses, *known}
        ):
            return
        try:
            await self._hold(entered, replace(entered.ask, claim=uses))
        except LeaseDenied:
            # Other gateways see the use, and count it as a stranger's.
            return

    def forget_strays(self, leases: list[Lease]) -> None:
        """Release leases of this gateway that are unknown here: their answers were lost."""
        known = self.ids
        for lease in leases:
            if lease.gateway == self._gateway and lease.id not in known:
                self._owed.setdefault(lease.id, None)

    def give_up(self, slot: SlotId) -> Entered:
        """Another holder has the memory of this slot, which leaves: its lease is not entered again."""
        entered = self._entered[slot]
        entered.is_taken = True
        return entered

    async def close(self) -> None:
        """Release everything, as far as the store answers."""
        for slot in list(self._entered):
            await self.leave(slot)

    @property
    def ids(self) -> frozenset[str]:
        """The leases of our slots."""
        return frozenset(one.id for one in self._entered.values())

    @property
    def lost(self) -> list[Entered]:
        """Slots that run without a lease at present."""
        return [one for one in self._entered.values() if one.is_lost]

    def is_taken(self, slot: SlotId) -> bool:
        entered = self._entered.get(slot)
        return entered is not None and entered.is_taken

    def look_for(self, leases: list[Lease]) -> bool:
        """True if a lease of ours is missing among these, which are all there are: the next beat renews it."""
        there = {lease.id: lease.token for lease in leases}
        held = [one for one in self._entered.values() if one.token and not one.is_lost]
        is_missing = any(there.get(one.id) != one.token for one in held)
        if is_missing:
            self._renewed_at = -math.inf
        return is_missing

    def refused(self) -> dict[SlotId, Entered]:
        """Slots whose lost lease the store refuses to enter again, and which were not told to leave for that."""
        return {slot: one for slot, one in self._entered.items() if one.is_refused and not one.is_taken}

    # --- how --------------------------------------------------------------------------------------------------------

    def _ask(self, slot: SlotId, model: str, claim: dict[str, int]) -> SlotAsk:
        there = self._state.slots.get(slot)
        priority = 1 if there is None else there.last_priority
        id, name = f"{self._gateway}/{slot}", public_name(model)
        return SlotAsk(id, name, claim, priority=priority, ttl_s=self._ttl_s, holder=self._holder)

    async def _hold(self, entered: Entered, ask: SlotAsk | None = None) -> None:
        async with entered.asking:
            sent = self._loop.clock()
            lease = await self._store.hold(ask or entered.ask, gateway=self._gateway)
            entered.ask, entered.token = ask or entered.ask, lease.token
            entered.heard_at, entered.is_lost, entered.is_refused = sent, False, False

    async def _pend(self, newcomer: SlotFacts) -> None:
        """Enter the newcomer's claim before anything is evicted for it, and name our leaving slots as its victims."""
        claim = _positive(newcomer.needs_for(newcomer.planned or MoveKind.LOAD))
        if not claim:
            return
        ask = self._ask(newcomer.id, newcomer.model, claim)
        entered = self._entered.setdefault(newcomer.id, Entered(ask))
        async with entered.asking:
            victims = [one.id for slot, one in self._entered.items() if self._leaves(slot, newcomer)]
            if not entered.token:
                await self._store.pend(entered.ask, victims, gateway=self._gateway, pending_s=PENDING_S)

    def _leaves(self, slot_id: SlotId, newcomer: SlotFacts) -> bool:
        slot = self._state.slots.get(slot_id)
        if slot is None or slot.lost:
            # The scheduler counts this slot as gone already.
            return slot_id != newcomer.id
        return slot.is_going and slot.leaving_for in (None, newcomer.id)

    async def _release(self, id: str, into: str | None) -> None:
        self._owed[id] = into
        try:
            await self._store.release(id, into=into, kind="slot")
        except StoreDown:
            # It is sent with the next heartbeat that gets through.
            return
        self._owed.pop(id, None)


def _positive(claim: Claim) -> dict[str, int]:
    return {str(device): mib for device, mib in claim.items() if mib > 0}
