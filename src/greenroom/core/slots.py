"""The one writer of slots: what they serve, how they move, and the memory that they hold or are promised.

Owns every change of a slot, of its holding in the ledger, and of the timers that watch it. Uses no waiters and never
decides. A swap is sequenced here: victims leave, the newcomer is promised their memory, and it starts when that memory
is really free.
"""

from __future__ import annotations

from typing import Final

from greenroom.core.decide import green_room
from greenroom.core.effects import Effects, OpOutcome, Reason, because
from greenroom.core.events import Timer, TimerKind
from greenroom.core.model import (
    ARRIVING,
    LEGAL_MOVES,
    NO_CLAIM,
    Claim,
    LeaseId,
    ModelId,
    ModelSpec,
    Move,
    MoveId,
    MoveKind,
    Outcome,
    RequestId,
    Slot,
    SlotId,
    TenantId,
    Tier,
)
from greenroom.core.state import State

_OVER: Final = because("over")
# Facts of a departure that still hold when it starts later.
_TOLD_AGAIN: Final = ("for_model", "for_request")


class SlotWriter:
    def __init__(self, state: State, effects: Effects) -> None:
        self._state = state
        self._effects = effects

    # --- timers ---------------------------------------------------------------------------------------------------

    def set_timer(self, timer: Timer, at: float, reason: Reason) -> None:
        self._state.timers[timer] = at
        self._effects.set_timer(timer, at, reason)

    def forget_timer(self, timer: Timer) -> None:
        if self._state.timers.pop(timer, None) is not None:
            self._effects.set_timer(timer, None, _OVER)

    def watch_idle(self, slot: Slot) -> None:
        """Set the idle timer. An earlier timer stays: when it fires, it takes later use into account."""
        idle_s = slot.idle_s
        if idle_s is not None and slot.is_serving and slot.is_idle:
            at = slot.last_used + idle_s
            if slot.looked_at is None or at < slot.looked_at:
                slot.looked_at = at
                self.set_timer(Timer(TimerKind.IDLE, slot.id), at, because("ttl", model=slot.model))

    def forget_idle(self, slot: Slot) -> None:
        slot.looked_at = None
        self.forget_timer(Timer(TimerKind.IDLE, slot.id))

    # --- serving --------------------------------------------------------------------------------------------------

    def take(self, slot: Slot, request: RequestId, priority: int, keep_alive_s: float | None, now: float) -> float:
        """Count one more answer in flight. Returns the slot's shared clock, from which the answer's time is charged."""
        share = slot.share(now)
        slot.in_flight[request] = None
        if slot.owes:
            slot.owes -= 1
        slot.last_used = now
        slot.last_priority = priority
        if keep_alive_s is not None:
            slot.keep_alive_s = keep_alive_s
        return share

    def give_back(self, slot: Slot, request: RequestId, now: float) -> float:
        """An answer has ended. Returns the slot's shared clock."""
        share = slot.share(now)
        del slot.in_flight[request]
        slot.last_used = now
        return share

    def after_last_answer(self, slot: Slot, now: float) -> None:
        """The slot is idle: drop it if it is lost, move it if it is leaving, else watch its idle time."""
        if slot.lost:
            self.drop(slot)
        elif slot.is_going and slot.move is None:
            self.go_on_leaving(slot, leaving(slot), now)
        else:
            self.watch_idle(slot)

    def look_at_idle(self, slot: Slot, now: float) -> None:
        """The idle timer has fired. If the slot was idle for long enough, it leaves."""
        idle_s, slot.looked_at = slot.idle_s, None
        if not slot.is_serving or not slot.is_idle or idle_s is None:
            return
        if slot.last_used + idle_s > now:
            self.watch_idle(slot)
        else:
            why = because("ttl", model=slot.model, ttl_s=idle_s)
            self.leave(slot, Tier.ASLEEP if slot.can_sleep else Tier.COLD, 0.0, why, now)

    # --- configured -----------------------------------------------------------------------------------------------

    def relabel(self, slot: Slot, spec: ModelSpec) -> None:
        """Take over a changed spec that needs no new process."""
        slot.spec = spec
        slot.concurrency = spec.at_once
        self.watch_idle(slot)

    def adopt(self, slot: Slot, spec: ModelSpec, waiting: int, now: float) -> None:
        """Make it a slot of another model, for which so many wait."""
        self._state.drop_slot(slot)
        slot.spec = spec
        self._state.add_slot(slot)
        if slot.is_serving:
            self.owe(slot, waiting, now)
        self.relabel(slot, spec)

    # --- coming ---------------------------------------------------------------------------------------------------

    def add(self, spec: ModelSpec, claim: Claim, lease: LeaseId | None) -> Slot:
        """Add a new slot. Its id is never reused."""
        state = self._state
        slot = Slot(SlotId(f"s{state.next_number()}"), spec, claim, state.asleep_at(spec, claim))
        slot.concurrency = spec.at_once
        slot.can_sleep = spec.need_asleep is not None
        slot.lease = lease
        state.add_slot(slot)
        return slot

    def plan(self, slot: Slot, kind: MoveKind) -> None:
        """Promise this slot the memory for the move. The move starts when that memory is free."""
        slot.planned = kind
        self._state.ledger.promise(slot.id, slot.needs_for(kind))

    def comes_for(self, slot: Slot, priority: int, tenant: TenantId | None, now: float) -> None:
        """Record the priority for which the slot comes and the tenant that pays for the swap."""
        slot.last_priority = priority
        slot.last_used = now
        slot.caused_by = tenant

    def is_charged(self, slot: Slot) -> None:
        """The swap has started and was charged."""
        slot.caused_by = None

    def start_if_free(self, slot: Slot, now: float) -> bool:
        """Start a planned move if its memory is free now. A lease has no engine: it is ready at once."""
        kind = slot.planned
        if kind is None or not self._may_start(slot, kind):
            return False
        slot.planned = None
        if slot.lease is None:
            self._start(slot, kind, because("asked_for", model=slot.model), now)
        else:
            slot.tier = Tier.READY
            self._state.ledger.hold(slot.id, slot.claim)
        return True

    def _may_start(self, slot: Slot, kind: MoveKind) -> bool:
        """True if the memory for this move is free now, and no other move is in its way."""
        state = self._state
        if kind is MoveKind.PREPARE and not green_room.can_take(state, slot.claim_asleep):
            return False
        return state.ledger.can_start(slot.id, slot.needs_for(kind)) and not state.must_wait_its_turn(slot)

    def waits_for_no_move(self, slot: Slot) -> bool:
        """True if it is planned, and no move has to end before it may start."""
        return slot.planned is not None and not self._state.must_wait_its_turn(slot)

    def call_off_if_in_time(self, slot: Slot) -> None:
        """Call the plan off if a victim is still busy. Evictions that have started proceed."""
        slots = self._state.slots.values()
        if slot.planned is not None and any(one.leaving_for == slot.id and not one.is_idle for one in slots):
            self.call_off(slot)

    def call_off(self, slot: Slot) -> None:
        """Drop this plan. Victims that are still busy stay; evictions that have started proceed."""
        self.unplan(slot)
        for other in self._state.slots.values():
            if other.leaving_for == slot.id and other.move is None and not other.is_idle:
                self._stays(other)

    def unplan(self, slot: Slot) -> None:
        """Take the promise back. A slot that is cold is removed."""
        slot.planned = None
        self._state.ledger.unpromise(slot.id)
        if slot.tier is Tier.COLD:
            self.remove(slot)

    def _start(self, slot: Slot, kind: MoveKind, reason: Reason, now: float) -> None:
        state = self._state
        if kind is not MoveKind.UNLOAD:
            state.ledger.hold(slot.id, slot.needs_for(kind), state.ledger.held_by(slot.id))
        arrives = {MoveKind.UNLOAD: NO_CLAIM, MoveKind.SLEEP: slot.claim_asleep, MoveKind.PREPARE: slot.claim_asleep}
        claim = arrives.get(kind, slot.claim)
        move_id = MoveId(f"m{state.next_number()}")
        slot.move = Move(move_id, kind, slot.id, slot.model, slot.spec.revision, claim, now, slot.leaving_for)
        state.moves[move_id] = slot
        self._effects.move(slot.move, reason)

    # --- moved ----------------------------------------------------------------------------------------------------

    def end_move(self, slot: Slot) -> bool:
        """The move has ended. Returns True if the process died during it."""
        fell, slot.move, slot.fell = slot.fell, None, False
        return fell

    def arrive(self, slot: Slot, move: Move, seen: Claim, now: float) -> None:
        """The slot has reached the tier of its move and holds the claim of that tier."""
        slot.tier = LEGAL_MOVES[move.kind][1]
        claim = move.claim
        if slot.tier is Tier.ASLEEP:
            host = self._state.ledger.host
            if any(on != host for on in slot.claim):
                # Host memory only: what stays on a GPU while asleep says nothing about the claim there when ready. And
                # only if the model computes on a GPU: on the host, the claim when ready may come from another
                # measurement.
                slot.sleeps_in({on: mib for on, mib in seen.items() if on == host})
            claim = slot.claim_asleep
        self._state.ledger.hold(slot.id, claim, seen)
        slot.last_used = now
        if slot.tier is Tier.READY:
            # `keep_alive_s` of the previous stay does not apply to this one.
            slot.keep_alive_s = None

    def owe(self, slot: Slot, waiting: int, now: float) -> None:
        """It is ready: so many waited for it and have a turn before it is closed for others."""
        slot.owes, slot.owes_since = waiting, now

    def owe_less(self, model: ModelId, arrived: float) -> None:
        """A waiter of this model left without a turn: none is owed to it any more."""
        for slot in self._state.slots_of(model):
            if slot.owes and arrived <= slot.owes_since:
                slot.owes -= 1

    def fall_back(self, slot: Slot, outcome: Outcome, now: float) -> None:
        """A move did not arrive. A cold slot is removed, a sleeping one leaves if told to, or if its wake failed."""
        if slot.tier is Tier.COLD:
            self.remove(slot)
            return
        self._state.ledger.hold(slot.id, slot.claim_asleep)
        has_failed = outcome in (Outcome.FAILED, Outcome.NO_MEMORY)
        if slot.is_going:
            why = leaving(slot)
        elif has_failed:
            why = slot.leaving_because = because("wake_ended", model=slot.model)
        else:
            return
        if has_failed:
            self._goes_to(slot, Tier.COLD)
        self.go_on_leaving(slot, why, now)

    def unload_instead(self, slot: Slot, now: float) -> None:
        """The sleep failed: unload the slot, so that it does not keep its memory."""
        slot.leaving_for = None
        self._goes_to(slot, Tier.COLD)
        self.go_on_leaving(slot, because("sleep_failed", model=slot.model), now)

    def fall(self, slot: Slot) -> None:
        """Its process died during a move. The MoveDone of that move is still to come."""
        slot.fell = True

    def lose(self, slot: Slot, left_in: Tier) -> None:
        """Its process died. A host copy that survives stays asleep."""
        if slot.planned is not None:
            self.call_off(slot)
        if left_in is Tier.ASLEEP and slot.can_sleep:
            # If it was leaving it is busy: it goes on leaving when its last answer is reported as ended.
            slot.tier = Tier.ASLEEP
            self._state.ledger.hold(slot.id, slot.claim_asleep)
        else:
            self.remove(slot)

    # --- going ----------------------------------------------------------------------------------------------------

    def evict(self, slot: Slot, to: Tier, newcomer: SlotId, reason: Reason, now: float) -> None:
        """Make a slot leave once its answers have ended, or recall a lease."""
        if slot.lease is None:
            slot.leaving_for = newcomer
            self.leave(slot, to, None, reason, now)
        else:
            self._goes_to(slot, Tier.COLD)
            self._effects.recall(slot.lease, now + slot.spec.grace_s, reason)

    def leave(self, slot: Slot, to: Tier, grace_s: float | None, reason: Reason, now: float) -> None:
        """Make this slot leave. Running answers are cut after `grace_s`; None waits for them to end."""
        if slot.planned is not None:
            self.call_off(slot)
        if slot.lost:
            self._cut_after(slot, grace_s, reason, now)
        elif slot.id in self._state.slots and (slot.tier is not to or slot.move is not None):
            self._leave(slot, to, grace_s, reason, now)

    def retire(self, slot: Slot, to: Tier, reason: Reason, now: float) -> None:
        """Make this slot leave for good when its answers have ended, however long they take."""
        slot.leaving_for = None
        self.leave(slot, to, None, reason, now)

    def _leave(self, slot: Slot, to: Tier, grace_s: float | None, reason: Reason, now: float) -> None:
        was_going = slot.is_going
        slot.leaving_because = reason
        if slot.leaving_to is not Tier.COLD:
            self._goes_to(slot, to)
        if grace_s is not None:
            # A leave with a time limit is for good: it no longer depends on the newcomer.
            slot.leaving_for = None
        self.forget_idle(slot)
        if not slot.is_idle:
            self._cut_after(slot, grace_s, reason, now)
        if slot.move is None:
            self.go_on_leaving(slot, reason, now)
        elif slot.move.kind in ARRIVING and not was_going:
            self._effects.abort(slot.move.id, reason)

    def go_on_leaving(self, slot: Slot, reason: Reason, now: float) -> None:
        """Take the next step of a leaving slot if it is idle. The end of its last answer calls this again."""
        assert slot.leaving_to is not None and slot.move is None
        if not slot.is_idle:
            return
        self.forget_timer(Timer(TimerKind.GRACE, slot.id))
        if slot.tier is slot.leaving_to:
            self._stays(slot)
            self._tell_leaving_ops(slot)
            return
        if slot.leaving_to is Tier.ASLEEP and not self._may_sleep(slot, now):
            self._goes_to(slot, Tier.COLD)
        kind = MoveKind.SLEEP if slot.leaving_to is Tier.ASLEEP else MoveKind.UNLOAD
        self._start(slot, kind, reason, now)

    def _may_sleep(self, slot: Slot, now: float) -> bool:
        fits = slot.can_sleep and self._state.ledger.can_start(slot.id, slot.needs_for(MoveKind.SLEEP))
        return fits and green_room.has_place(self._state, slot, now)

    def stay(self, slot: Slot) -> None:
        """It was told to leave but has not been touched: it stays and holds what it held before."""
        ledger, claim = self._state.ledger, slot.claim if slot.tier is Tier.READY else slot.claim_asleep
        ledger.hold(slot.id, claim, ledger.seen_of(slot.id))
        self._stays(slot)
        self.watch_idle(slot)

    def _goes_to(self, slot: Slot, to: Tier) -> None:
        slot.leaving_to = to
        self._state.ledger.leave(slot.id, slot.claim_asleep if to is Tier.ASLEEP else NO_CLAIM)

    def _stays(self, slot: Slot) -> None:
        slot.leaving_to = slot.leaving_for = None
        self._state.ledger.stay(slot.id)

    def trim(self, now: float) -> bool:
        """Evict sleepers that exceed the green room. True if any was: others may come into their memory."""
        if (limit_mib := self._state.limits.green_room_mib) is None:
            return False
        leaving = green_room.excess(self._state, limit_mib, now)
        for slot in leaving:
            self.leave(slot, Tier.COLD, None, because("green_room", model=slot.model), now)
        return bool(leaving)

    def _cut_after(self, slot: Slot, grace_s: float | None, reason: Reason, now: float) -> None:
        if grace_s is None:
            return
        timer, at = Timer(TimerKind.GRACE, slot.id), now + grace_s
        if grace_s <= 0:
            self.cut_all(slot, reason)
        elif at < self._state.timers.get(timer, at + 1):
            self.set_timer(timer, at, reason)

    def cut_all(self, slot: Slot, reason: Reason) -> None:
        """Cut every running answer, each at most once."""
        self.forget_timer(Timer(TimerKind.GRACE, slot.id))
        for request in list(slot.in_flight):
            self.cut(request, reason)

    def cut(self, request: RequestId, reason: Reason) -> None:
        """Cut this running answer, at most once."""
        grant = self._state.grants[request]
        if not grant.is_cut:
            grant.is_cut = True
            self._effects.cut(request, reason)

    # --- gone -----------------------------------------------------------------------------------------------------

    def empty(self, slot: Slot) -> None:
        """The holder has left: clear what is in flight and remove the slot."""
        slot.in_flight.clear()
        self.remove(slot)

    def remove(self, slot: Slot) -> None:
        """The slot is cold and holds nothing. Its id is never reused."""
        self._state.ledger.release(slot.id)
        slot.tier, slot.leaving_to, slot.leaving_for = Tier.COLD, None, None
        if slot.is_idle:
            self.drop(slot)
        else:
            # Its process is gone, but some answers have not been reported as ended: the last `ServeDone` drops it.
            slot.lost = True
        self._tell_leaving_ops(slot)

    def drop(self, slot: Slot) -> None:
        self.forget_idle(slot)
        self.forget_timer(Timer(TimerKind.GRACE, slot.id))
        self._state.drop_slot(slot)
        self._state.price_queue(slot.model)

    def _tell_leaving_ops(self, slot: Slot) -> None:
        """Answer an operator when all slots have left: done, or failed if one is not in the tier asked for."""
        for op_id, op in list(self._state.leaving_ops.items()):
            if slot.id in op.slots:
                del op.slots[slot.id]
                op.outcome = op.outcome if op.to in (Tier.COLD, slot.tier) else OpOutcome.FAILED
            if not op.slots:
                del self._state.leaving_ops[op_id]
                self._effects.answer(op_id, op.outcome, because("left", model=slot.model))


def leaving(slot: Slot) -> Reason:
    """The reason of a departure that had to wait: why the slot was told to leave, and for which model."""
    told = slot.leaving_because
    assert told is not None, f"{slot.id} was not told to leave"
    facts = {name: fact for name, fact in told.facts if name in _TOLD_AGAIN}
    return because("leaving", model=slot.model, cause=told.why, **facts)
