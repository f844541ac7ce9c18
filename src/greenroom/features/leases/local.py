"""Leases for other programs, kept by the gateway itself: the store that is used if no other is configured.

Owns what the scheduler does not know of a lease: its token, its holder, its expiry, and the journal. The scheduler
decides which lease gets memory and what is evicted for it: it is told by `LeaseAsked` and `LeaseGone`, and answers by
`granted`, `rejected` and `recalled`. Never ends a process of a holder.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from greenroom.config.part import Part
from greenroom.core.effects import Rejection
from greenroom.core.events import LeaseAsked, LeaseGone
from greenroom.core.model import DeviceId, LeaseId, Need, SlotId
from greenroom.errors import BadRequest, GreenroomError, LeaseDenied, LeaseLost, LeaseUnknown
from greenroom.features.leases.entry import (
    SEVERAL,
    LeasableMemory,
    LeaseEntry,
    ask_again,
    devices_meant,
    is_behind,
    lasts_s,
    may_ask,
    must_journal_renewal,
    never_free,
    not_free,
    not_written,
    refusal,
)
from greenroom.features.leases.holders import Holders
from greenroom.features.leases.journal import JournalWriter, Kept
from greenroom.leases import records as holders
from greenroom.leases.records import Lease, LeaseAsk, core_id
from greenroom.runtime.clocks import Standstill
from greenroom.runtime.moves.admission import Grants
from greenroom.runtime.observer import Hub
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.telemetry.logs import get_logger

_log = get_logger("leases")

# Leases held or waiting at once; each is a line in the journal and a claim to plan around.
LEASES_MAX = 1_000
# Lost leases that are remembered, so that their holders are told why.
LOST_MAX = 1_000
# Between the grant and the answer there is one look at memory and one write to disk.
HAND_OVER_MAX_S = 30.0


class LocalLeasing(Part):
    """The leases that this gateway keeps itself."""

    lists_slots = False
    writes = True
    sharing = None
    grants = Grants()

    def __init__(
        self,
        loop: SchedulerLoop,
        journal: JournalWriter,
        memory: LeasableMemory,
        hub: Hub,
        *,
        wait_max_s: float,
        wall: Callable[[], float] = time.time,
        leases_max: int = LEASES_MAX,
    ) -> None:
        self._loop = loop
        self._journal = journal
        self._memory = memory
        self._hub = hub
        self._wait_max_s = wait_max_s
        self._wall = wall
        self._leases_max = leases_max
        self._holders = Holders()
        self._standstill = Standstill()
        self._entries: dict[str, LeaseEntry] = {}
        self._by_core_id: dict[LeaseId, LeaseEntry] = {}
        self._lost: OrderedDict[str, str] = OrderedDict()
        self._handing_over: set[asyncio.Task[None]] = set()

    # --- what holders ask -------------------------------------------------------------------------------------------

    async def acquire(self, ask: LeaseAsk, asker: str = SEVERAL) -> Lease:
        """Ask for memory and wait for it up to `wait_s`. A call that is cancelled gives up. `asker` names this call for
        `unheard`. Raises LeaseDenied, LeaseTaken or BadRequest."""
        ask = replace(ask, wait_s=min(ask.wait_s, self._wait_max_s), devices=devices_meant(ask, self._memory.names))
        entry = self._entries.get(ask.id) or self._begin(ask)
        entry.check_same(ask)
        entry.askers += 1
        try:
            await self._settled(entry, ask)
            entry.told_to = asker if entry.told_to in (None, asker) else SEVERAL
        finally:
            entry.askers -= 1
            self._end_if_unheard_of(entry)
        return self._heard(entry)

    async def unheard(self, id: str, asker: str) -> None:
        """This call's caller left before the answer. Gives the lease back, unless another call was told of it."""
        entry = self._entries.get(id)
        if entry is not None and asker != SEVERAL and entry.told_to == asker:
            entry.told_to = None
            self._end_if_unheard_of(entry)

    def _end_if_unheard_of(self, entry: LeaseEntry) -> None:
        if not entry.askers and entry.told_to is None:
            self._end(entry, "given up")

    async def _settled(self, entry: LeaseEntry, ask: LeaseAsk) -> None:
        """Wait until it is held. Raises the error that says why it is not."""
        await asyncio.wait((entry.settled,), timeout=ask.wait_s)
        if not entry.is_waiting:
            await asyncio.wait((entry.settled,), timeout=HAND_OVER_MAX_S)
        if not entry.settled.done():
            raise not_free(ask, self._memory.free_mib())
        entry.settled.result()

    async def renew(self, id: str, token: int) -> Lease:
        """The holder lives. Raises LeaseLost or LeaseUnknown."""
        entry = self._entries.get(id)
        if entry is None or not entry.is_held:
            raise self._not_held(id)
        if token != entry.token:
            raise LeaseLost(f"The lease {id} was granted anew since; this token is an old one.")
        return self._heard(entry)

    async def release(self, id: str, token: int | None = None) -> None:
        """Give it back, or stop waiting for it. An unknown lease, or one under another token, is left alone."""
        entry = self._entries.get(id)
        if entry is None or token not in (None, entry.token):
            return
        if token is None:
            # An operator did this, without the token: the holder must learn that it is lost, and not ask again.
            self._remember_lost(id, "it was released by an operator")
        self._end(entry, "released", LeaseDenied(f"The lease {id} was withdrawn while it was waited for."))

    async def leases(self) -> list[Lease]:
        return self.known()

    def known(self) -> list[Lease]:
        now = self._loop.clock()
        return [entry.shown(now) for entry in self._entries.values()]

    async def find(self, id: str) -> Lease:
        """This lease as it is now. Raises LeaseLost or LeaseUnknown."""
        entry = self._entries.get(id)
        if entry is None:
            raise self._not_held(id)
        return entry.shown(self._loop.clock())

    def owners(self) -> dict[SlotId, int]:
        """Pids of this machine that hold leases, by the scheduler's slot of each lease."""
        held = [entry for entry in self._entries.values() if entry.is_held and entry.slot is not None]
        return {
            entry.slot: entry.ask.holder.pid
            for entry in held
            if entry.slot is not None and entry.ask.holder is not None and holders.is_here(entry.ask.holder)
        }

    def _begin(self, ask: LeaseAsk) -> LeaseEntry:
        if len(self._entries) >= self._leases_max:
            raise LeaseDenied(f"{self._leases_max:,} leases are held or waited for already.", retry_after_s=30.0)
        if ask.holder is not None and holders.has_ended(ask.holder):
            raise BadRequest(f"There is no process {ask.holder.pid} that began when it is said to have.", param="pid")
        now = self._loop.clock()
        entry = LeaseEntry(ask, asyncio.get_running_loop().create_future(), give_up_at=now + ask.wait_s)
        # A non-blocking acquire never evicts and never jumps the queue.
        waits = is_behind(entry, self._entries.values())
        if not ask.wait_s and (waits or not self._is_free_now(ask)):
            raise never_free(ask, self._memory) or not_free(ask, self._memory.free_mib())
        self._lost.pop(ask.id, None)
        self._put(entry)
        if not waits:
            self._ask_scheduler(entry)
        return entry

    def _move_up(self) -> None:
        """A lease stopped waiting: ask the scheduler for those that queued behind it."""
        for entry in may_ask(self._entries.values()):
            # Asking for one can end another.
            if self._is_known(entry) and not entry.is_asked:
                self._ask_scheduler(entry)

    def _is_free_now(self, ask: LeaseAsk) -> bool:
        free = self._memory.free_mib()
        usable = [mib for device, mib in free.items() if not ask.devices or device in ask.devices]
        return sum(mib >= ask.mib for mib in usable) >= ask.gpus

    def _put(self, entry: LeaseEntry) -> None:
        self._entries[entry.id] = self._by_core_id[core_id(entry.id)] = entry
        # No call may be left to retrieve the error.
        entry.settled.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _ask_scheduler(self, entry: LeaseEntry) -> None:
        ask = entry.ask
        entry.is_asked = True
        devices = tuple(DeviceId(device) for device in ask.devices)
        self._memory.watch.post_and_look(
            LeaseAsked(
                self._loop.clock(),
                core_id(ask.id),
                Need(ask.mib),
                ask.priority,
                devices,
                ask.preemptible,
                ask.grace_s,
                entry.give_up_at,
                ask.gpus,
            )
        )

    def _heard(self, entry: LeaseEntry) -> Lease:
        now = self._loop.clock()
        self._lasts(entry, entry.ask.ttl_s, now)
        if must_journal_renewal(entry.ask.ttl_s, now - entry.written_at):
            entry.written_at = now
            self._journal.heard(entry.id, self._wall())
        return entry.shown(now)

    def _not_held(self, id: str) -> LeaseLost:
        if (why := self._lost.get(id)) is not None:
            return LeaseLost(f"The lease {id} is lost: {why}.")
        return LeaseUnknown(f"There is no lease {id}. GET /api/v1/leases lists those there are.")

    # --- told by the scheduler's effects ----------------------------------------------------------------------------

    def granted(self, lease: LeaseId, slot: SlotId) -> None:
        entry = self._by_core_id[lease]
        entry.slot = slot
        entry.claim = {str(device): mib for device, mib in self._memory.claim_of(slot).items()}
        self._move_up()
        if entry.token:
            # A lease of an earlier run, which is in the journal.
            self._hold(entry)
            return
        entry.token = self._journal.next_token(self._wall())
        task = asyncio.get_running_loop().create_task(self._hand_over(entry), name=f"lease {entry.id}")
        self._handing_over.add(task)
        task.add_done_callback(self._handing_over.discard)

    def rejected(self, lease: LeaseId, rejection: Rejection) -> None:
        entry = self._by_core_id[lease]
        self._forget(entry)
        if entry.token:
            self._journal.ended(entry.id)
        entry.settle(refusal(entry.ask, rejection, self._memory.free_mib()))
        self._move_up()

    def recalled(self, lease: LeaseId, deadline: float) -> None:
        """Ask the holder to leave: it is told when it renews or looks."""
        entry = self._by_core_id[lease]
        entry.recall_at = deadline
        entry.overdue = asyncio.get_running_loop().call_at(deadline, self._report_overdue, entry)
        _log.info(
            "lease recalled", lease=entry.id, name=entry.ask.name, grace_s=round(deadline - self._loop.clock(), 3)
        )

    def _report_overdue(self, entry: LeaseEntry) -> None:
        _log.warning("lease is overdue: its holder was asked to leave and stays", lease=entry.id, name=entry.ask.name)
        self._hub.publish("lease_overdue", {"lease": entry.id, "name": entry.ask.name})

    async def _hand_over(self, entry: LeaseEntry) -> None:
        """A granted lease is held once its memory is really free and it is in the journal."""
        error = await self._not_there(entry) or await self._not_written(entry)
        if not self._is_known(entry):
            return
        if error is None:
            self._hold(entry)
        else:
            self._end(entry, "not held", error)

    async def _not_there(self, entry: LeaseEntry) -> GreenroomError | None:
        """Memory that is free in the ledger may still be used by its last owner. Returns the error if it is."""
        left_s = 0.0 if entry.give_up_at is None else max(0.0, entry.give_up_at - self._loop.clock())
        claim = {DeviceId(device): mib for device, mib in entry.claim.items()}
        return (
            not_free(entry.ask, self._memory.free_mib()) if await self._memory.watch.room_for(claim, left_s) else None
        )

    async def _not_written(self, entry: LeaseEntry) -> GreenroomError | None:
        try:
            await self._journal.granted(Kept(entry.ask, entry.token, dict(entry.claim), self._wall()))
        except OSError as error:
            return not_written(entry.ask, error)
        return None

    # --- held -------------------------------------------------------------------------------------------------------

    def _hold(self, entry: LeaseEntry) -> None:
        now = self._loop.clock()
        entry.is_held = True
        self._standstill.watch()
        self._lasts(entry, entry.ask.ttl_s if entry.lasts_s is None else entry.lasts_s, now)
        # The first renewal of a lease of an earlier run must be journaled.
        entry.written_at = now if entry.lasts_s is None else -math.inf
        self._look_later(entry)
        if entry.ask.holder is not None:
            self._holders.watch(entry.id, entry.ask.holder, lambda: self._on_holder_ended(entry))
        entry.settle()
        shown = {"lease": entry.id, "name": entry.ask.name, "claim": dict(entry.claim)}
        _log.info("lease held", **shown)
        self._hub.publish("lease", shown)

    def _on_holder_ended(self, entry: LeaseEntry) -> None:
        if self._is_known(entry):
            self._lose(entry, "its holder has ended")

    def _lasts(self, entry: LeaseEntry, lasts_s: float, now: float) -> None:
        entry.expires_at, entry.stood_still_s = now + lasts_s, self._standstill.total_s

    def _look_later(self, entry: LeaseEntry) -> None:
        entry.watch = asyncio.get_running_loop().call_at(entry.expires_at, self._look, entry, entry.expires_at)

    def _look(self, entry: LeaseEntry, due: float) -> None:
        """Lose it if it was not renewed in time. Timers round to milliseconds and may be early. Time in which this
        process stood still does not count: renewals that came in it are not read yet."""
        now, stood_still_s = max(self._loop.clock(), due), self._standstill.total_s
        entry.expires_at += stood_still_s - entry.stood_still_s
        entry.stood_still_s = stood_still_s
        if entry.expires_at > now:
            self._look_later(entry)
        else:
            self._lose(entry, f"its holder was not heard of for {entry.ask.ttl_s:g} s")

    def _lose(self, entry: LeaseEntry, why: str) -> None:
        _log.warning("lease lost", lease=entry.id, name=entry.ask.name, why=why)
        self._remember_lost(entry.id, why)
        self._end(entry, why)

    def _remember_lost(self, id: str, why: str) -> None:
        self._lost[id] = why
        while len(self._lost) > LOST_MAX:
            self._lost.popitem(last=False)

    # --- over -------------------------------------------------------------------------------------------------------

    def _end(self, entry: LeaseEntry, why: str, error: GreenroomError | None = None) -> None:
        """Forget it, whether it was held or waiting."""
        if not self._is_known(entry):
            return
        self._forget(entry)
        if entry.token:
            self._journal.ended(entry.id)
        if entry.is_asked:
            self._memory.watch.post_and_look(LeaseGone(self._loop.clock(), core_id(entry.id)))
        self._move_up()
        entry.settle(error or LeaseDenied(f"The lease {entry.id} was given up."))
        self._hub.publish("lease_gone", {"lease": entry.id, "name": entry.ask.name, "why": why})

    def _is_known(self, entry: LeaseEntry) -> bool:
        return self._entries.get(entry.id) is entry

    def _forget(self, entry: LeaseEntry) -> None:
        del self._entries[entry.id], self._by_core_id[core_id(entry.id)]
        entry.forget_timers()
        self._holders.forget(entry.id)

    # --- start and end ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Enter the leases of an earlier run again, before anything else is planned. Those of dead holders are lost."""
        for kept in self._journal.open():
            entry = ask_again(kept, asyncio.get_running_loop().create_future(), lasts_s(kept, self._wall()))
            self._put(entry)
            if holders.has_ended(kept.ask.holder):
                self._lose(entry, "its holder has ended")
                continue
            self._ask_scheduler(entry)
            if not entry.is_held:
                self._lose(entry, "its memory could not be had again after a restart")

    @property
    def room(self) -> LocalLeasing:
        """Takes the scheduler's decisions on leases."""
        return self

    async def close(self) -> None:
        """Stop. Held leases are left to the next run."""
        for entry in self._entries.values():
            entry.forget_timers()
        for task in self._handing_over:
            task.cancel()
        self._holders.close()
        self._standstill.close()
        await self._journal.close()
