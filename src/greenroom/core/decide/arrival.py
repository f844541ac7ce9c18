"""What happens to a request that comes now, and which of its candidates it gets: position against warmth.

Also refuses what finds a full queue, or would be answered too late by what earlier moves and answers have taught. Pure:
arrivals, rounds and `explain` use the same.

A waiter names its candidates in order of preference, usually one. A later one is taken only if it is warm (ready,
coming, or asleep) and serves sooner by more than the waiter's `prefer_first_s`, or if those before it cannot serve, or
cannot serve within its budget. Candidates of last resort come after all of that: that another one is cold or busy is
no reason to take them.
"""

from __future__ import annotations

from math import inf
from typing import Final, NamedTuple

from greenroom.core.decide.decision import decide_for
from greenroom.core.decide.estimate import eta_s, least_s
from greenroom.core.decide.placement import Places
from greenroom.core.decide.plan import Join, Plan, Refuse, Serve, Swap, Wait, WaitReason
from greenroom.core.decide.residents import Residents
from greenroom.core.effects import RejectCode
from greenroom.core.events import Choice, RequestArrived
from greenroom.core.model import ModelId, Slot, TenantId
from greenroom.core.queue.waitlist import Waiter, WaiterKind
from greenroom.core.state import State

_BY_POSITION: Final = Choice()


class Option(NamedTuple):
    """One candidate. `begins_s` is when its answer could begin; infinite if that is not known.

    `is_late`: by what is known, the answer would not end within the waiter's budget.
    """

    model: ModelId
    plan: Plan
    begins_s: float
    is_late: bool
    is_last_resort: bool


def decide(state: State, waiter: Waiter, now: float, places: Places, residents: Residents | None = None) -> Plan:
    """The plan for this waiter: for its model, or for the candidate that it gets.

    `residents` may be passed if nothing has changed since they were made.
    """
    if len(waiter.candidates) == 1:
        return decide_for(state, waiter, waiter.model, now, places, residents)
    first = decide_for(state, waiter, waiter.candidates[0], now, places, residents)
    if isinstance(first, Serve) and waiter.answer_by is None and waiter.candidates[0] in waiter.preferred:
        return first
    options = weigh(state, waiter, now, places, residents)
    return options[choose(options, waiter)].plan


def weigh(state: State, waiter: Waiter, now: float, places: Places, residents: Residents | None = None) -> list[Option]:
    """Every candidate of this waiter, with the plan that it would get."""
    residents = residents or Residents(state, now, places)
    return [_option(state, waiter, model, now, places, residents) for model in waiter.candidates]


def choose(options: list[Option], waiter: Waiter) -> int:
    """The position of the candidate that it gets; if none can serve, of the one that it waits for or else the first."""
    choice = waiter.choice or _BY_POSITION
    usable = [place for place, one in enumerate(options) if not isinstance(one.plan, Refuse)]
    # One that waits for the store would be refused if it came now, so another candidate may have it.
    usable = [place for place in usable if not _waits_for_store(options[place].plan)] or usable
    if not usable:
        return next((place for place, one in enumerate(options) if one.model == waiter.model), 0)
    preferred = [place for place in usable if not options[place].is_last_resort]
    if not preferred or choice.pin_primary:
        return (preferred or usable)[0]
    in_time = [place for place in preferred if not options[place].is_late]
    spare = [place for place in usable if options[place].is_last_resort]
    if spare and not in_time:
        return spare[0]
    best, *others = in_time or preferred
    for place in others:
        if _is_warm(options[place].plan) and options[best].begins_s - options[place].begins_s > choice.prefer_first_s:
            best = place
    return best


def is_able(
    state: State, waiter: Waiter, model: ModelId, now: float, places: Places, residents: Residents | None = None
) -> bool:
    """False if this candidate can serve the waiter neither now nor after a wait. A store that is away comes back."""
    plan = decide_for(state, waiter, model, now, places, residents)
    return not isinstance(plan, Refuse) or plan.code is RejectCode.STORE_DOWN


def model_of(state: State, plan: Plan) -> ModelId | None:
    """The model that this plan is for; None if it refuses."""
    if isinstance(plan, Refuse):
        return None
    return state.slots[plan.slot].model if isinstance(plan, Serve) else plan.model


def _option(state: State, waiter: Waiter, model: ModelId, now: float, places: Places, residents: Residents) -> Option:
    plan = decide_for(state, waiter, model, now, places, residents)
    begins_s, is_late = _begins_s(state, waiter, model, plan, now), _is_late(state, waiter, model, plan, now)
    return Option(model, plan, begins_s, is_late, model not in waiter.preferred)


def _begins_s(state: State, waiter: Waiter, model: ModelId, plan: Plan, now: float) -> float:
    if isinstance(plan, Serve):
        return 0.0
    if isinstance(plan, Refuse):
        return inf
    estimate_s = eta_s(state, waiter, model, now)
    return inf if estimate_s is None else estimate_s


def _is_late(state: State, waiter: Waiter, model: ModelId, plan: Plan, now: float) -> bool:
    if waiter.answer_by is None or isinstance(plan, Refuse):
        return False
    record = state.models[model]
    if isinstance(plan, Serve) and now - record.tried_at >= TRY_AGAIN_S:
        # One request is let through now and then, so that something new is learned.
        return False
    begins_s = 0.0 if isinstance(plan, Serve) else least_s(state, waiter, model, now)
    return begins_s is not None and now + begins_s + (record.service_s or 0.0) > waiter.answer_by


def _is_warm(plan: Plan) -> bool:
    return isinstance(plan, Serve | Join) or _is_busy(plan) or (isinstance(plan, Swap) and plan.wakes is not None)


def _waits_for_store(plan: Plan) -> bool:
    return isinstance(plan, Wait) and plan.why is WaitReason.STORE_DOWN


def _is_busy(plan: Plan) -> bool:
    return isinstance(plan, Wait) and plan.why is WaitReason.BUSY


# --- a request that comes now ---------------------------------------------------------------------------------------

# How often one request over budget is let through to re-measure.
TRY_AGAIN_S: Final = 60.0
# With very many waiting models, one more request for one of them is decided on this much later, together with others.
DECIDED_LATER_S: Final = 0.1


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
    begins_s = least_s(state, waiter, model, event.now)
    if begins_s is None:
        return None
    begins, service_s = event.now + begins_s, state.models[model].service_s or 0.0
    gives_up = not event.patient and event.give_up_at is not None and begins > event.give_up_at
    over_budget = event.answer_by is not None and begins + service_s > event.answer_by
    return Refuse(RejectCode.EXPIRED, eta_s(state, waiter, model, event.now)) if gives_up or over_budget else None


def called_off(state: State, priority: int, now: float) -> list[Slot]:
    """Planned slots that give way to a new request of this priority. A pinned one does not: it would only come back."""
    promised = [state.slots[slot] for slot in state.ledger.promises]
    return [
        slot
        for slot in promised
        if slot.lease is None
        and not slot.spec.pinned
        and (queue := state.waitlist.queues.get(slot.model)) is not None
        and state.pacing.gives_way(slot.last_priority, queue, priority, now)
    ]
