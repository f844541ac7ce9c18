"""What must happen by a certain time: patience ends, budgets are kept, idle models go when their time is over.

Time is the one that was told. The clock may jump past a due time before the timer had a chance to fire, so something is
overdue only when it was seen to be due and a further second has passed.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

from greenroom.core import events as ev
from greenroom.core.effects import Reason, Rejection
from greenroom.core.model import (
    ARRIVING,
    LEGAL_MOVES,
    LeaseId,
    ModelId,
    ModelSpec,
    Move,
    MoveId,
    Outcome,
    RequestId,
    SlotId,
    Tier,
)
from greenroom.sim.records import Violation
from tests.chaos.checks.base import Check

GRACE_S = 1.0
ROUNDING_S = 1e-6


class Dues:
    """Due times by name. Setting a new time replaces the old one."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        self._seen: dict[str, float] = {}
        # Nothing is overdue before this time.
        self.quiet_until = inf

    def __contains__(self, who: str) -> bool:
        return who in self._due

    def set(self, who: str, at: float) -> None:
        self._due[who] = at
        self._seen.pop(who, None)
        heappush(self._heap, (at, who))
        self.quiet_until = min(self.quiet_until, at)

    def drop(self, who: str) -> None:
        if self._due.pop(who, None) is not None:
            self._seen.pop(who, None)

    def overdue(self, now: float) -> str | None:
        """One that has been due for a while, if there is any."""
        while self._heap and self._heap[0][0] <= now:
            at, who = heappop(self._heap)
            if self._due.get(who) == at:
                self._seen.setdefault(who, now)
        # A clock that was set back makes what was seen to be due wait once more, so these are asked for until they end.
        self.quiet_until = -inf if self._seen else self._heap[0][0] if self._heap else inf
        return next((who for who, since in self._seen.items() if now > since + GRACE_S), None)


class Patience(Check):
    """No request waits past its deadline, and no answer goes on when its budget is used up."""

    def __init__(self) -> None:
        self._gives_up: dict[str, float] = {}
        self._answer_by: dict[str, float] = {}
        self._waiting, self._running = Dues(), Dues()

    def request_arrived(self, event: ev.RequestArrived) -> None:
        limits = [at for at in (event.give_up_at, event.answer_by) if at is not None]
        if limits:
            self._gives_up[event.request] = min(limits)
            self._waiting.set(event.request, min(limits))
        if event.answer_by is not None:
            self._answer_by[event.request] = event.answer_by

    def lease_asked(self, event: ev.LeaseAsked) -> None:
        if event.give_up_at is not None:
            self._waiting.set(event.lease, event.give_up_at)

    def grant(self, request: RequestId | LeaseId, slot: SlotId, reason: Reason) -> None:
        self._waiting.drop(request)
        if request in self._answer_by:
            self._running.set(request, self._answer_by[request])

    def cut(self, request: RequestId, reason: Reason) -> None:
        self._running.drop(request)

    def serve_done(self, event: ev.ServeDone) -> None:
        self._running.drop(event.request)
        if event.lost_before_first_byte and event.request in self._gives_up:
            self._waiting.set(event.request, self._gives_up[event.request])

    def request_gone(self, event: ev.RequestGone) -> None:
        self._forget(event.request)

    def lease_gone(self, event: ev.LeaseGone) -> None:
        self._waiting.drop(event.lease)

    def reject(self, request: RequestId | LeaseId, rejection: Rejection, reason: Reason) -> None:
        self._forget(request)

    def _forget(self, who: str) -> None:
        self._waiting.drop(who)
        self._running.drop(who)

    def settled(self, event: ev.Event) -> None:
        now, waiting, running = event.now, self._waiting, self._running
        if now >= waiting.quiet_until and (late := waiting.overdue(now)) is not None:
            raise Violation(f"{late} still waits though its patience is over")
        if now >= running.quiet_until and (late := running.overdue(now)) is not None:
            raise Violation(f"{late} is still answered though its budget is used up")


class IdleGo(Check):
    """A slot goes when it was idle for as long as the latest request that spoke of it said, or else as its model says.

    And it does not go for that reason before.
    """

    def __init__(self) -> None:
        self.judged = 0
        self._said: dict[str, float] = {}
        self._keep_alive: dict[SlotId, float] = {}
        self._specs: dict[ModelId, ModelSpec] = {}
        self._moves: dict[MoveId, Move] = {}
        self._ready: dict[SlotId, ModelId] = {}
        self._busy: dict[SlotId, set[str]] = {}
        self._slot_of: dict[str, SlotId] = {}
        self._idle_since: dict[SlotId, float] = {}
        # Slots that became ready and have not been seen to stop being so.
        self._was_ready: set[SlotId] = set()
        self._now = 0.0
        self._dues = Dues()

    def config_changed(self, event: ev.ConfigChanged) -> None:
        self._now = event.now
        for model in event.removed:
            self._specs.pop(model, None)
        for spec in event.models:
            self._specs[spec.id] = spec
        for slot in self._ready:
            self._watch(slot)

    def tell(self, event: ev.Event) -> None:
        self._now = event.now

    def request_arrived(self, event: ev.RequestArrived) -> None:
        if event.keep_alive_s is not None:
            self._said[event.request] = event.keep_alive_s

    def move(self, move: Move, reason: Reason) -> None:
        if reason.why == "ttl":
            self._judge(move.slot)
        self._moves[move.id] = move
        self._dues.drop(move.slot)
        self._ready.pop(move.slot, None)

    def _judge(self, slot: SlotId) -> None:
        self.judged += 1
        stay_s = self._stay_s(slot)
        if stay_s is None or self._idle_since[slot] + stay_s > self._now + ROUNDING_S:
            raise Violation(f"{slot} leaves though it may stay for {stay_s} s from {self._idle_since[slot]} on")

    def move_done(self, event: ev.MoveDone) -> None:
        move = self._moves.pop(event.move, None)
        if move is None:
            return
        if event.outcome is Outcome.DONE and LEGAL_MOVES[move.kind][1] is Tier.READY:
            self._keep_alive.pop(move.slot, None)
            self._come(move, event.now)
        elif event.outcome is not Outcome.NO_LEASE or move.kind in ARRIVING:
            self._was_ready.discard(move.slot)
        elif move.slot in self._was_ready:
            # It was not touched. If it leaves for another reason, that move goes on.
            self._ready[move.slot] = move.model
            self._watch(move.slot)

    def _come(self, move: Move, now: float) -> None:
        self._ready[move.slot] = move.model
        self._was_ready.add(move.slot)
        self._idle_since[move.slot] = now
        self._watch(move.slot)

    def slots_lost(self, event: ev.SlotsLost) -> None:
        for slot in event.slots:
            self._ready.pop(slot, None)
            self._was_ready.discard(slot)
            self._dues.drop(slot)
            # One that falls while it moves does not arrive, whatever is said of its move.
            for move in [one for one in self._moves.values() if one.slot == slot]:
                del self._moves[move.id]

    def grant(self, request: RequestId | LeaseId, slot: SlotId, reason: Reason) -> None:
        self._slot_of[request] = slot
        self._busy.setdefault(slot, set()).add(request)
        self._dues.drop(slot)
        if request in self._said:
            self._keep_alive[slot] = self._said[request]

    def serve_done(self, event: ev.ServeDone) -> None:
        self._end(event.request, event.now)

    def request_gone(self, event: ev.RequestGone) -> None:
        self._end(event.request, event.now)

    def _end(self, request: str, now: float) -> None:
        slot = self._slot_of.pop(request, None)
        if slot is None:
            return
        busy = self._busy[slot]
        busy.discard(request)
        if not busy:
            del self._busy[slot]
            self._idle_since[slot] = now
            self._watch(slot)

    def _watch(self, slot: SlotId) -> None:
        model = self._ready.get(slot)
        if model is None or slot in self._busy:
            return
        stay_s = self._stay_s(slot)
        if stay_s is None:
            self._dues.drop(slot)
        else:
            self._dues.set(slot, self._idle_since[slot] + stay_s)

    def _stay_s(self, slot: SlotId) -> float | None:
        """None: for ever."""
        spec = self._specs.get(self._ready.get(slot, ModelId("")))
        if spec is None or spec.pinned:
            return None
        if (said := self._keep_alive.get(slot)) is not None:
            return None if said < 0 else said
        return spec.ttl_s or None

    def settled(self, event: ev.Event) -> None:
        if event.now >= self._dues.quiet_until and (late := self._dues.overdue(event.now)) is not None:
            raise Violation(f"{late} ({self._ready.get(SlotId(late))}) is idle though its ttl is over")
