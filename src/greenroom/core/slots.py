"""The one writer of slots: what they serve, how they come and go, and the memory that they hold or are promised.

Owns every change of a slot, of its holding in the ledger, and the timers that watch it. Knows no waiters and never
decides. A swap is sequenced here: victims leave, the newcomer is promised their memory, and it starts when that is
really free.
"""

from __future__ import annotations

from collections import deque
from math import inf

from greenroom.core.decide import green_room
from greenroom.core.effects import Effects, OpOutcome, Reason, because
from greenroom.core.events import Timer, TimerKind
from greenroom.core.model import (
    ARRIVING,
    LEGAL_MOVES,
    NO_CLAIM,
    Claim,
    DeviceId,
    DeviceKind,
    LeaseId,
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

_OVER = because("over")


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
        """Have a look when it may have been idle for long enough. An earlier look is kept: it sees the later use."""
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
        """Count one more answer in flight. Returns the slot's shared clock, from which its time is charged."""
        share = slot.share(now)
        slot.in_flight[request] = None
        slot.last_used = now
        slot.last_priority = priority
        if keep_alive_s is not None:
            slot.keep_alive_s = keep_alive_s
        return share

    def count_overtake(self, slot: Slot, now: float) -> float:
        """Count a grant that passes those who wait for another model.

        Returns since when, after its batch, it was granted as often as others may be overtaken; -inf if it was not.
        """
        recent = slot.recent_grants
        recent.append(now)
        is_full = len(recent) == recent.maxlen and recent
        return recent[0] if is_full and recent[0] >= slot.batch_until else -inf

    def give_back(self, slot: Slot, request: RequestId, now: float) -> float:
        """An answer has ended. Returns the slot's shared clock."""
        share = slot.share(now)
        del slot.in_flight[request]
        slot.last_used = now
        return share

    def after_last_answer(self, slot: Slot, now: float) -> None:
        """It is idle: a lost one is dropped, a leaving one leaves, another is watched."""
        if slot.lost:
            self.drop(slot)
        elif slot.is_going and slot.move is None:
            self.go_on_leaving(slot, because("leaving", model=slot.model), now)
        else:
            self.watch_idle(slot)

    def look_at_idle(self, slot: Slot, now: float) -> None:
        """The time has come at which it may have been idle for long enough. If so it leaves."""
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
        """Its model's specification has changed in nothing that needs another process."""
        slot.spec = spec
        slot.concurrency = spec.concurrency or slot.concurrency
        self.watch_idle(slot)

    def set_overtakes_max(self, overtakes_max: int) -> None:
        """So many grants are remembered of each slot from now on."""
        for slot in self._state.slots.values():
            slot.recent_grants = deque(slot.recent_grants, overtakes_max)

    # --- coming ---------------------------------------------------------------------------------------------------

    def add(self, spec: ModelSpec, claim: Claim, lease: LeaseId | None) -> Slot:
        """A new slot. Its id is never used again."""
        state = self._state
        slot = Slot(SlotId(f"s{state.next_number()}"), spec, claim, state.asleep_at(spec, claim))
        slot.can_sleep = spec.need_asleep is not None
        slot.recent_grants = deque(maxlen=state.limits.overtakes_max)
        slot.lease = lease
        state.add_slot(slot)
        return slot

    def plan(self, slot: Slot, kind: MoveKind) -> None:
        """Promise this slot the memory for that move; it starts when the memory is free."""
        slot.planned = kind
        self._state.ledger.promise(slot.id, slot.needs_for(kind))

    def comes_for(self, slot: Slot, priority: int, tenant: TenantId | None, now: float) -> None:
        """For whom it comes: how urgent they are, and who pays for the swap."""
        slot.last_priority = priority
        slot.last_used = now
        slot.caused_by = tenant

    def is_charged(self, slot: Slot) -> None:
        """Its swap has begun and was paid for."""
        slot.caused_by = None

    def start_if_free(self, slot: Slot, now: float) -> bool:
        """Start a planned move if its memory is free now. A lease has no engine: it is there when its memory is."""
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

    def give_up_if_hopeless(self, slot: Slot) -> None:
        """Take back a promise when no memory is on its way any more that could keep it."""
        if slot.planned is not None and not self._is_room_coming(slot, slot.planned):
            self.call_off(slot)

    def call_off_if_in_time(self, slot: Slot) -> None:
        """Nobody waits for it any more: let those stay who are still busy. What has begun to leave has left for it."""
        slots = self._state.slots.values()
        if slot.planned is not None and any(one.leaving_for == slot.id and not one.is_idle for one in slots):
            self.call_off(slot)

    def call_off(self, slot: Slot) -> None:
        """Nothing comes of this plan: those who were still busy making room for it may stay."""
        self.unplan(slot)
        for other in self._state.slots.values():
            if other.leaving_for == slot.id and other.move is None and not other.is_idle:
                other.leaving_to = other.leaving_for = None

    def _may_start(self, slot: Slot, kind: MoveKind) -> bool:
        state = self._state
        if kind is MoveKind.PREPARE and not green_room.can_take(state, slot.claim_asleep):
            return False
        return state.ledger.can_start(slot.id, slot.needs_for(kind)) and not self._must_wait_its_turn(slot)

    def _must_wait_its_turn(self, slot: Slot) -> bool:
        """Engines that size themselves by free memory must not see it change under them."""
        sees = slot.spec.sizes_itself
        for other in self._state.moves.values():
            sees_it = sees or (other.spec.sizes_itself and other.move is not None and other.move.kind in ARRIVING)
            if sees_it and not self._gpus(slot).isdisjoint(self._gpus(other)):
                return True
        return False

    def _gpus(self, slot: Slot) -> set[DeviceId]:
        devices = self._state.ledger.devices
        return {device for device in slot.claim if device in devices and devices[device].kind is DeviceKind.GPU}

    def _is_room_coming(self, slot: Slot, kind: MoveKind) -> bool:
        wanted, ledger = slot.needs_for(kind), self._state.ledger
        return self._must_wait_its_turn(slot) or any(
            other.is_going and any(device in wanted for device in ledger.held_by(other.id))
            for other in self._state.slots.values()
        )

    def unplan(self, slot: Slot) -> None:
        """Take the promise back. What was not there yet is gone."""
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
        """Its move has ended. Returns whether its process went away meanwhile."""
        fell, slot.move, slot.fell = slot.fell, None, False
        return fell

    def arrive(self, slot: Slot, move: Move, seen: Claim, now: float) -> None:
        """It is where its move led, and holds the claim of that tier."""
        slot.tier = LEGAL_MOVES[move.kind][1]
        claim = move.claim
        if slot.tier is Tier.ASLEEP:
            on_hosts = self._on_hosts(slot.claim)
            if len(on_hosts) < len(slot.claim):
                # On a host alone: what is left on a GPU while it sleeps says nothing of what it takes there when ready.
                # And only where it computes elsewhere: on the host its claim when ready may be another measurement's.
                slot.sleeps_in(self._on_hosts(seen))
            claim = slot.claim_asleep
        self._state.ledger.hold(slot.id, claim, seen)
        slot.last_used = now
        if slot.tier is Tier.READY:
            # What was said of its last stay does not hold for this one.
            slot.ready_since, slot.keep_alive_s = now, None

    def _on_hosts(self, claim: Claim) -> Claim:
        devices = self._state.ledger.devices
        return {on: mib for on, mib in claim.items() if on in devices and devices[on].kind is DeviceKind.HOST}

    def answers_at_once(self, slot: Slot, count: int) -> None:
        slot.concurrency = max(1, slot.spec.concurrency or count)

    def begin_stay(self, slot: Slot, stays_until: float, batch_until: float) -> None:
        """While others wait it is left alone at least until the first, and serves its batch until the second."""
        slot.stays_until, slot.batch_until = stays_until, batch_until

    def fall_back(self, slot: Slot, outcome: Outcome, now: float) -> None:
        """A move that did not arrive leaves nothing, or the sleeping copy; that does not survive a failed wake."""
        if slot.tier is Tier.COLD:
            self.remove(slot)
            return
        self._state.ledger.hold(slot.id, slot.claim_asleep)
        if outcome in (Outcome.FAILED, Outcome.NO_MEMORY):
            slot.leaving_to = Tier.COLD
        if slot.is_going:
            self.go_on_leaving(slot, because("wake_ended", model=slot.model), now)

    def unload_instead(self, slot: Slot, now: float) -> None:
        """It could not fall asleep: what is left of it must not keep its memory."""
        slot.leaving_to, slot.leaving_for = Tier.COLD, None
        self.go_on_leaving(slot, because("sleep_failed", model=slot.model), now)

    def fall(self, slot: Slot) -> None:
        """Its process went away during a move, whose MoveDone still comes."""
        slot.fell = True

    def lose(self, slot: Slot, left_in: Tier) -> None:
        """Its process went away. A host copy that survives is left asleep."""
        if slot.planned is not None:
            self.call_off(slot)
        if left_in is Tier.ASLEEP and slot.can_sleep:
            # If it was going it is busy, and goes on when its last answer has been told to have ended.
            slot.tier = Tier.ASLEEP
            self._state.ledger.hold(slot.id, slot.claim_asleep)
        else:
            self.remove(slot)

    # --- going ----------------------------------------------------------------------------------------------------

    def evict(self, slot: Slot, to: Tier, newcomer: SlotId, reason: Reason, now: float) -> None:
        """Make a slot leave as soon as its answers have ended, or ask the holder of a lease to."""
        if slot.lease is None:
            slot.leaving_for = newcomer
            self.leave(slot, to, None, reason, now)
        else:
            slot.leaving_to = Tier.COLD
            self._effects.recall(slot.lease, now + slot.spec.grace_s, reason)

    def leave(self, slot: Slot, to: Tier, grace_s: float | None, reason: Reason, now: float) -> None:
        """Let this slot go. Running answers may go on for `grace_s`, then they are cut; None waits for their end."""
        if slot.planned is not None:
            self.call_off(slot)
        if slot.lost:
            self._cut_after(slot, grace_s, reason, now)
        elif slot.id in self._state.slots and (slot.tier is not to or slot.move is not None):
            self._leave(slot, to, grace_s, reason, now)

    def _leave(self, slot: Slot, to: Tier, grace_s: float | None, reason: Reason, now: float) -> None:
        was_going = slot.is_going
        if slot.leaving_to is not Tier.COLD:
            slot.leaving_to = to
        if grace_s is not None:
            # Whoever sets a limit wants it gone for good, whoever else it makes room for.
            slot.leaving_for = None
        self.forget_idle(slot)
        if not slot.is_idle:
            self._cut_after(slot, grace_s, reason, now)
        if slot.move is None:
            self.go_on_leaving(slot, reason, now)
        elif slot.move.kind in ARRIVING and not was_going:
            self._effects.abort(slot.move.id, reason)

    def go_on_leaving(self, slot: Slot, reason: Reason, now: float) -> None:
        """A leaving slot takes its next step if it is idle; the end of its last answer leads here again."""
        assert slot.leaving_to is not None and slot.move is None
        if not slot.is_idle:
            return
        self.forget_timer(Timer(TimerKind.GRACE, slot.id))
        if slot.tier is slot.leaving_to:
            slot.leaving_to = slot.leaving_for = None
            self._tell_leaving_ops(slot)
            return
        if slot.leaving_to is Tier.ASLEEP and not self._may_sleep(slot, now):
            slot.leaving_to = Tier.COLD
        kind = MoveKind.SLEEP if slot.leaving_to is Tier.ASLEEP else MoveKind.UNLOAD
        self._start(slot, kind, reason, now)

    def _may_sleep(self, slot: Slot, now: float) -> bool:
        fits = slot.can_sleep and self._state.ledger.can_start(slot.id, slot.needs_for(MoveKind.SLEEP))
        return fits and green_room.has_place(self._state, slot, now)

    def stay(self, slot: Slot) -> None:
        """It was to leave and was not touched: it is again what it was."""
        ledger, claim = self._state.ledger, slot.claim if slot.tier is Tier.READY else slot.claim_asleep
        ledger.hold(slot.id, claim, ledger.seen_of(slot.id))
        slot.leaving_to = slot.leaving_for = None
        self.watch_idle(slot)

    def trim(self, now: float) -> None:
        """Make those leave the green room for whom there is no place any more."""
        for slot in green_room.excess(self._state, now):
            self.leave(slot, Tier.COLD, None, because("green_room", model=slot.model), now)

    def _cut_after(self, slot: Slot, grace_s: float | None, reason: Reason, now: float) -> None:
        if grace_s is None:
            return
        timer, at = Timer(TimerKind.GRACE, slot.id), now + grace_s
        if grace_s <= 0:
            self.cut_all(slot, reason)
        elif at < self._state.timers.get(timer, at + 1):
            self.set_timer(timer, at, reason)

    def cut_all(self, slot: Slot, reason: Reason) -> None:
        """End every running answer, each once."""
        self.forget_timer(Timer(TimerKind.GRACE, slot.id))
        for request in list(slot.in_flight):
            self.cut(request, reason)

    def cut(self, request: RequestId, reason: Reason) -> None:
        """End this running answer, once."""
        grant = self._state.grants[request]
        if not grant.is_cut:
            grant.is_cut = True
            self._effects.cut(request, reason)

    # --- gone -----------------------------------------------------------------------------------------------------

    def empty(self, slot: Slot) -> None:
        """Its holder has left: nothing is in flight any more, and nothing is left of it."""
        slot.in_flight.clear()
        self.remove(slot)

    def remove(self, slot: Slot) -> None:
        """The slot is cold: nothing is left of it. Its id is never used again."""
        self._state.ledger.release(slot.id)
        slot.tier, slot.leaving_to, slot.leaving_for = Tier.COLD, None, None
        if slot.is_idle:
            self.drop(slot)
        else:
            # Its process is gone but its answers have not been told yet: `ServeDone` of the last one drops it.
            slot.lost = True
        self._tell_leaving_ops(slot)

    def drop(self, slot: Slot) -> None:
        self.forget_idle(slot)
        self.forget_timer(Timer(TimerKind.GRACE, slot.id))
        self._state.drop_slot(slot)
        self._state.price_queue(slot.model)

    def _tell_leaving_ops(self, slot: Slot) -> None:
        """Operators hear when the last slot has left, and whether all of them are where they should be."""
        for op_id, op in list(self._state.leaving_ops.items()):
            if slot.id in op.slots:
                del op.slots[slot.id]
                op.outcome = op.outcome if op.to in (Tier.COLD, slot.tier) else OpOutcome.FAILED
            if not op.slots:
                del self._state.leaving_ops[op_id]
                self._effects.answer(op_id, op.outcome, because("left", model=slot.model))
