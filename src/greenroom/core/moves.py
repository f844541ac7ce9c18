"""How operators start moves, and how every move ends: arrival, setback, departure, loss.

Owns the reaction to `MoveAsked`, `MoveDone` and `SlotsLost`, and to leases that other holders have taken. The scheduler
settles afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import inf
from typing import Final

from greenroom.core.apply import Actions
from greenroom.core.decide import placement
from greenroom.core.decide.decision import refusal
from greenroom.core.decide.plan import Refuse
from greenroom.core.effects import Effects, OpOutcome, RejectCode, because
from greenroom.core.events import MoveAsked, MoveDone, SlotsLost, Timer, TimerKind
from greenroom.core.model import (
    ARRIVING,
    LEGAL_MOVES,
    NO_CLAIM,
    ModelId,
    Move,
    MoveKind,
    Outcome,
    Slot,
    SlotId,
    Tier,
    learn,
)
from greenroom.core.queue.waitlist import Waiter, WaiterKind
from greenroom.core.slots import SlotWriter, leaving
from greenroom.core.state import Claimant, LeavingOp, ModelRecord, State

# 5 s · 2ⁿ would overflow for a model that fails for weeks. The cap is reached long before this exponent.
BACKOFF_EXPONENT_MAX: Final = 30


class Moves:
    def __init__(self, state: State, effects: Effects, slots: SlotWriter, act: Actions) -> None:
        self._state = state
        self._effects = effects
        self._slots = slots
        self._act = act

    # --- asked by an operator ---------------------------------------------------------------------------------------

    def asked(self, event: MoveAsked) -> None:
        record = self._state.models.get(event.model)
        if self._state.knows(event.op):
            self._state.counters.ignored += 1
        elif record is None:
            self._effects.answer(event.op, OpOutcome.UNKNOWN_MODEL, because("unknown", model=event.model))
        elif event.kind in (MoveKind.PREPARE, MoveKind.SLEEP) and record.spec.need_asleep is None:
            self._effects.answer(event.op, OpOutcome.REFUSED, because("cannot_sleep", model=event.model))
        elif event.kind in ARRIVING:
            self._ask_to_come(event, record)
        else:
            self._ask_to_leave(event, record)

    def _ask_to_come(self, event: MoveAsked, record: ModelRecord) -> None:
        state = self._state
        # An operator's request overrides the back-off.
        record.retry_at, record.pausing = -inf, None
        # A newcomer that can never fit makes no other model leave.
        for model in event.evict if self._could_fit(record, event.evict) else ():
            why = because("evicted", model=model, for_model=event.model)
            for slot in [slot for slot in state.slots_of(model) if slot.lease is None]:
                self._slots.leave(slot, Tier.COLD, slot.spec.grace_s, why, event.now)
        number, priority = state.next_number(), record.spec.priority
        waiter = Waiter(
            event.op, WaiterKind.OP, number, event.model, (event.model,), priority, event.now, wants=event.kind
        )
        self._act.settle(waiter, event.now)

    def _could_fit(self, record: ModelRecord, evict: Collection[ModelId]) -> bool:
        state = self._state
        most = state.most_mib(None, evict)
        has_slot = any(True for _ in state.slots_of(record.spec.id))
        return has_slot or bool(placement.options(record.spec, record.need, state.devices, most, most))

    def _ask_to_leave(self, event: MoveAsked, record: ModelRecord) -> None:
        to = LEGAL_MOVES[event.kind][1]
        grace_s = record.spec.grace_s if event.grace_s is None else event.grace_s
        # A model that an operator unloads is not preloaded again when its back-off ends.
        record.preload_again = False
        self._act.reject_waiters(event.model, Refuse(RejectCode.UNLOADED), event.now)
        why = because("asked", model=event.model)
        for slot in list(self._state.slots_of(event.model)):
            self._slots.leave(slot, to, grace_s, why, event.now)
        left = [slot for slot in self._state.slots_of(event.model) if slot.is_going]
        # Slots of an older version may be on their way to cold while the new one is told to sleep.
        left = [slot for slot in left if slot.leaving_to is to] or left
        if left:
            self._state.leaving_ops[event.op] = LeavingOp(to, {slot.id: None for slot in left})
        else:
            self._effects.answer(event.op, OpOutcome.DONE, because("was_not_there", model=event.model))

    # --- ended ------------------------------------------------------------------------------------------------------

    def done(self, event: MoveDone) -> None:
        slot = self._state.moves.pop(event.move, None)
        if slot is None or slot.move is None:
            self._state.counters.ignored += 1
            return
        move, fell = slot.move, self._slots.end_move(slot)
        outcome = Outcome.FAILED if fell and event.outcome is Outcome.DONE else event.outcome
        if move.kind not in ARRIVING and outcome is Outcome.NO_LEASE and not fell:
            self._refused_room(slot, event.now)
        elif move.kind is MoveKind.UNLOAD:
            self._slots.remove(slot)
        elif outcome is Outcome.DONE:
            self._arrived(slot, move, event)
        elif move.kind is MoveKind.SLEEP:
            self._slots.unload_instead(slot, event.now)
        else:
            self._setback(slot, outcome, event.now)

    def _arrived(self, slot: Slot, move: Move, event: MoveDone) -> None:
        self._slots.arrive(slot, move, event.seen or NO_CLAIM, event.now)
        took_s = event.now - move.started if event.took_s is None else event.took_s
        if record := self._state.record_of(slot):
            record.learned_s[move.kind] = learn(record.learned_s.get(move.kind), took_s)
            if move.kind in ARRIVING:
                record.memory_retries, record.preload_again, record.retry_at = 0, False, -inf
            self._state.price_queue(slot.model)
        if slot.tier is Tier.READY:
            self._slots.owe(slot, self._state.waitlist.count(slot.model), event.now)
            self._state.avg_swap_s = learn(self._state.avg_swap_s, took_s)
        if slot.is_going:
            self._slots.go_on_leaving(slot, leaving(slot), event.now)
        elif slot.tier is Tier.READY:
            # Its waiters are served first: nothing may evict it between ready and first byte.
            self._act.fill(slot.model, event.now)
            self._slots.watch_idle(slot)

    def _refused_room(self, slot: Slot, now: float) -> None:
        """The store refused a lease to the newcomer that this slot was to make room for. The newcomer retries later."""
        newcomer = self._state.slots.get(slot.leaving_for) if slot.leaving_for is not None else None
        if slot.leaving_for is None:
            # It leaves on its own account, so no lease is involved.
            self._slots.go_on_leaving(slot, leaving(slot), now)
            return
        self._slots.stay(slot)
        if newcomer is not None and newcomer.planned is not None:
            # A plan always belongs to the model's current revision: a new revision calls older plans off.
            self._slots.call_off(newcomer)
            self._pause(self._state.claimants[newcomer.model], Outcome.NO_LEASE, now)

    def _setback(self, slot: Slot, outcome: Outcome, now: float) -> None:
        """A load, wake or prepare did not arrive. It has not failed if the slot was already leaving."""
        record, was_going = self._state.record_of(slot), slot.is_going
        self._slots.fall_back(slot, outcome, now)
        if record is None or was_going or outcome is Outcome.ABORTED:
            return
        if outcome in (Outcome.NO_LEASE, Outcome.STORE_DOWN):
            self._pause(record, outcome, now)
        elif outcome is Outcome.NO_MEMORY and record.memory_retries == 0:
            record.memory_retries = 1
            self._raise_need(record)
        else:
            self._count_failure(record, now)
            self._act.reject_waiters(slot.model, self._load_failed(record, outcome, now), now)

    def _load_failed(self, record: ModelRecord, outcome: Outcome, now: float) -> Refuse:
        state, retry_after_s = self._state, record.retry_at - now
        if outcome is not Outcome.NO_MEMORY:
            return Refuse(RejectCode.LOAD_FAILED, retry_after_s)
        return refusal(state, RejectCode.LOAD_FAILED, retry_after_s, record.spec, record.need, state.ledger.room_mib())

    def _pause(self, record: Claimant, outcome: Outcome, now: float) -> None:
        """Retry after `replan_s`. No waiter is rejected: the engine is not at fault."""
        record.pausing = outcome
        record.retry_at = now + self._state.limits.replan_s
        self._slots.set_timer(Timer(TimerKind.RETRY, record.spec.id), record.retry_at, because(outcome.value))

    def _raise_need(self, record: ModelRecord) -> None:
        """Raise the need for the next load, but not beyond what could ever be free."""
        state, raised = self._state, record.need.raised(self._state.limits.need_raise)
        most = state.most_mib(None)
        record.need = placement.bounded(record.spec, raised, state.devices, most).or_more(record.need)

    def _count_failure(self, record: ModelRecord, now: float) -> None:
        limits = self._state.limits
        record.pausing, record.memory_retries = None, 0
        pause_s = min(limits.backoff_s * 2 ** min(record.failures, BACKOFF_EXPONENT_MAX), limits.backoff_max_s)
        record.failures += 1
        record.retry_at = now + pause_s
        record.preload_again = record.spec.preload
        why = because("back_off", failures=record.failures)
        self._slots.set_timer(Timer(TimerKind.RETRY, record.spec.id), record.retry_at, why)

    # --- lost -------------------------------------------------------------------------------------------------------

    def lost(self, event: SlotsLost) -> None:
        for slot_id in event.slots:
            slot = self._state.slots.get(slot_id)
            if slot is None or slot.lost or slot.lease is not None:
                self._state.counters.ignored += 1
            elif slot.move is not None:
                # Its MoveDone is still to come, and is not trusted if it reports success.
                self._slots.fall(slot)
            elif slot.tier is not Tier.COLD:
                self._lose(slot, event)
            # A slot that has not started has nothing to lose.

    def _lose(self, slot: Slot, event: SlotsLost) -> None:
        record, was_going = self._state.record_of(slot), slot.is_going
        self._slots.lose(slot, event.left_in)
        if record is not None and not was_going:
            self._count_crash(record, event.now)

    def _count_crash(self, record: ModelRecord, now: float) -> None:
        """A crash backs off only if no answer has ended since the last failure; a first crash does not."""
        if record.failures > 0:
            self._count_failure(record, now)
        else:
            record.failures = 1
        if record.spec.preload:
            self._act.preload(record.spec.id, now)

    # --- taken ------------------------------------------------------------------------------------------------------

    def taken(self, slots: Iterable[SlotId], now: float) -> None:
        """Another holder was granted the memory of these slots: they leave at once. Preloaded models wait to return."""
        for slot_id in slots:
            slot = self._state.slots.get(slot_id)
            if slot is None or slot.lease is not None:
                self._state.counters.ignored += 1
                continue
            self._slots.leave(slot, Tier.COLD, 0.0, because("lease_lost", model=slot.model), now)
            record = self._state.record_of(slot)
            if record is not None and record.spec.preload:
                self._act.preload(record.spec.id, now)
