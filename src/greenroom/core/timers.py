"""What happens when a timer fires. A timer that fires early is set again; late or twice is harmless.

Owns the reaction to `TimerFired`: patience, idleness, back-off, budgets and grace.
"""

from __future__ import annotations

from math import inf

from greenroom.core.apply import Actions
from greenroom.core.decide.decision import Refuse, refusal
from greenroom.core.effects import BUDGET_OVER, RejectCode, because
from greenroom.core.events import TimerFired, TimerKind
from greenroom.core.model import ModelId, RequestId, SlotId
from greenroom.core.queue.outlook import eta_s
from greenroom.core.slots import SlotWriter
from greenroom.core.state import ModelRecord, State


class Timers:
    def __init__(self, state: State, slots: SlotWriter, act: Actions) -> None:
        self._state = state
        self._slots = slots
        self._act = act

    def fired(self, event: TimerFired) -> None:
        at = self._state.timers.pop(event.timer, None)
        if at is None:
            self._state.counters.ignored += 1
        elif event.now < at:
            self._slots.set_timer(event.timer, at, because("fired_early"))
        else:
            self._due(event.timer.kind, event.timer.subject, event.now)

    def _due(self, kind: TimerKind, subject: str, now: float) -> None:
        """Timers are deleted with their subjects, so the subject of a timer that fires exists."""
        match kind:
            case TimerKind.EXPIRE:
                self._expire(subject, now)
            case TimerKind.RETRY:
                self._retry(ModelId(subject), now)
            case TimerKind.GRACE:
                slot = self._state.slots[SlotId(subject)]
                self._slots.cut_all(slot, because("grace_over", model=slot.model))
            case TimerKind.BUDGET:
                self._slots.cut(RequestId(subject), BUDGET_OVER)
            case TimerKind.IDLE:
                self._slots.look_at_idle(self._state.slots[SlotId(subject)], now)
            case _:
                """TimerKind.SWITCH: nothing to do here; a round follows every timer."""

    def _expire(self, waiter_id: str, now: float) -> None:
        state, waiter = self._state, self._state.waitlist[waiter_id]
        record, eta = state.claimant(waiter.model), eta_s(state, waiter, waiter.model, now)
        if any(slot.is_serving or slot.is_arriving for slot in state.slots_of(waiter.model)):
            self._act.refuse(waiter, Refuse(RejectCode.EXPIRED, eta))
        else:
            # It has waited for memory: report how much is missing.
            free = state.ledger.free_mib(frozenset())
            self._act.refuse(waiter, refusal(state, RejectCode.EXPIRED, eta, record.spec, record.need, free))

    def _retry(self, model: ModelId, now: float) -> None:
        record = self._state.claimant(model)
        record.retry_at, record.pausing = -inf, None
        if isinstance(record, ModelRecord) and record.preload_again:
            self._act.preload(model, now)
