"""What happens to a request that comes now: the decision tree, a full queue, and answers that would come too late.

Changes nothing: the scheduler carries the plan out, and explanations are built from the same plan.
"""

from __future__ import annotations

from greenroom.core.decide.decision import Join, Plan, Refuse, Serve, Wait, WaitReason
from greenroom.core.decide.estimate import TRY_AGAIN_S, eta_s
from greenroom.core.decide.ladder import decide
from greenroom.core.decide.placement import Places
from greenroom.core.effects import RejectCode
from greenroom.core.events import RequestArrived
from greenroom.core.model import ModelId, Slot, TenantId
from greenroom.core.queue.waitlist import Waiter, WaiterKind
from greenroom.core.state import State

# With very many waiting models, one more request for one of them is decided on this much later, together with others.
DECIDED_LATER_S = 0.1


def waiter_for(event: RequestArrived, sequence: int) -> Waiter:
    """The waiter that this request would be."""
    give_up_at = event.give_up_at
    if event.answer_by is not None:
        give_up_at = event.answer_by if give_up_at is None else min(give_up_at, event.answer_by)
    return Waiter(
        event.request,
        WaiterKind.REQUEST,
        sequence,
        event.candidates[0],
        event.candidates,
        event.priority,
        event.now,
        event.tenant,
        give_up_at,
        event.answer_by,
        keep_alive_s=event.keep_alive_s,
        choice=event.choice,
    )


def plan_for(state: State, event: RequestArrived, waiter: Waiter, places: Places) -> Plan:
    """The plan for a new request, or a refusal if the queue is full or its answer would come too late."""
    plan = _first_plan(state, waiter, event.now, places)
    if isinstance(plan, Refuse) or (isinstance(plan, Serve) and event.answer_by is None):
        return plan
    if isinstance(plan, Serve):
        # One request is let through now and then. Otherwise one slow answer would lock out all requests with a
        # budget, because nothing new would be learned.
        model = state.slots[plan.slot].model
        is_known = event.now - state.models[model].tried_at < TRY_AGAIN_S
        return (too_late(state, event, waiter, model) if is_known else None) or plan
    if (full := _full(state, event.tenant)) is not None:
        return Refuse(full, max(1.0, state.avg_wait_s or 0.0))
    # A request for a model that is neither ready nor loading stays queued even if it will be late: it causes the load.
    is_begun = isinstance(plan, Join) or any(slot.is_serving for slot in state.slots_of(plan.model))
    return (too_late(state, event, waiter, plan.model) if is_begun else None) or plan


def _full(state: State, tenant: TenantId) -> RejectCode | None:
    """Why one more request of this tenant may not wait; None if it may."""
    limits, waitlist = state.limits, state.waitlist
    if waitlist.depth >= limits.queue_depth_max:
        return RejectCode.QUEUE_FULL
    if (depth_max := limits.tenant_depths.get(tenant)) is not None:
        return RejectCode.TENANT_QUEUE_FULL if waitlist.depth_of(tenant) >= depth_max else None
    if limits.tenant_depth_max is None:
        return None
    depth = waitlist.depth_of(tenant)
    if limits.others_share_depth:
        depth = waitlist.depth - sum(waitlist.depth_of(named) for named in limits.tenant_depths)
    return RejectCode.TENANT_QUEUE_FULL if depth >= limits.tenant_depth_max else None


def _first_plan(state: State, waiter: Waiter, now: float, places: Places) -> Plan:
    if state.waitlist.has_many_models and len(waiter.candidates) == 1 and not state.shutting_down:
        queue = state.waitlist.queues.get(waiter.model)
        if queue is not None and state.is_away(queue, now):
            return Wait(WaitReason.MANY_MODELS, waiter.model, now + DECIDED_LATER_S)
    return decide(state, waiter, now, places)


def too_late(state: State, event: RequestArrived, waiter: Waiter, model: ModelId) -> Refuse | None:
    """The refusal if the caller would give up before its answer begins, or the answer would exceed its budget."""
    if event.answer_by is None and (event.patient or event.give_up_at is None):
        return None
    wait_s = eta_s(state, waiter, model, event.now)
    if wait_s is None:
        return None
    begins, service_s = event.now + wait_s, state.models[model].service_s or 0.0
    gives_up = not event.patient and event.give_up_at is not None and begins > event.give_up_at
    over_budget = event.answer_by is not None and begins + service_s > event.answer_by
    return Refuse(RejectCode.EXPIRED, wait_s) if gives_up or over_budget else None


def called_off(state: State, priority: int, now: float) -> list[Slot]:
    """Planned slots that give way to a new request of this priority."""
    promised = [state.slots[slot] for slot in state.ledger.promises]
    return [
        slot
        for slot in promised
        if slot.lease is None
        and (queue := state.waitlist.queues.get(slot.model)) is not None
        and state.pacing.gives_way(slot.last_priority, queue, priority, now)
    ]
