"""How long a waiter will wait, as far as is known: for the move of its model, for other models, in its queue.

Changes nothing. All figures are learned from earlier moves and answers.
"""

from __future__ import annotations

from greenroom.core.model import ModelId, MoveKind, Tier
from greenroom.core.queue.waitlist import Waiter
from greenroom.core.state import State

# How often one request over budget is let through to re-measure.
TRY_AGAIN_S = 60.0


def eta_s(state: State, waiter: Waiter, model: ModelId, now: float) -> float | None:
    """Seconds for its model's own move, the moves of models ahead of it, and the answers ahead of it in its queue."""
    own = _move_left_s(state, model, now)
    if own is None:
        return None
    own += _queue_s(state, waiter, model)
    if any(slot.is_arriving or slot.is_serving for slot in state.slots_of(model)):
        return own
    return own + _others_s(state, waiter)


def _others_s(state: State, waiter: Waiter) -> float:
    """Swaps ahead of it: at most one per request ahead, and at most one per other model that is waited for."""
    ahead = min(state.waitlist.position(waiter) - 1, len(state.waitlist.queues) - 1)
    at_once = max(1, len(state.ledger.devices) - 1)
    return max(0, ahead) * (state.avg_swap_s or 0.0) / at_once


def _queue_s(state: State, waiter: Waiter, model: ModelId) -> float:
    """Rounds of answers ahead of its own, each as long as an average answer of this model."""
    record, waitlist = state.claimants[model], state.waitlist
    queue = waitlist.queues.get(model)
    queued = 0 if queue is None else queue.ahead_of(waiter)
    serving = [slot for slot in state.slots_of(model) if slot.is_serving]
    running = sum(len(slot.in_flight) for slot in serving)
    at_once = sum(slot.concurrency for slot in serving) or record.spec.at_once
    return (record.service_s or 0.0) * ((queued + running) // at_once)


def _move_left_s(state: State, model: ModelId, now: float) -> float | None:
    """Seconds until this model is ready once its turn has come; None if nothing was learned yet."""
    record = state.claimants[model]
    for slot in state.slots_of(model):
        if slot.is_serving:
            return 0.0
        if slot.is_arriving and slot.move is not None:
            learned = record.learned_s.get(slot.move.kind)
            return None if learned is None else max(0.0, learned - (now - slot.move.started))
    asleep = any(slot.tier is Tier.ASLEEP for slot in state.slots_of(model))
    return record.learned_s.get(MoveKind.WAKE if asleep else MoveKind.LOAD)
