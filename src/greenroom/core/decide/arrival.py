"""What happens to a request that comes now, and which of its candidates it gets: position against warmth.

Also refuses what finds a full queue, or would be answered too late by what earlier moves and answers have taught. Pure:
arrivals, rounds and `explain` use the same.

A waiter names its candidates in order of preference, usually one. A later one is taken only if it is warm (ready,
coming, or asleep) and serves sooner by more than the waiter's `prefer_first_s`, or if those before it cannot serve, or
cannot serve within its budget. Candidates of last resort come after all of that: that another one is cold or busy is
no reason to take them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import NamedTuple

from greenroom.core.decide import placement
from greenroom.core.decide.decision import decide_for
from greenroom.core.decide.placement import Places
from greenroom.core.decide.plan import Join, Plan, Refuse, Serve, Swap, Wait, WaitReason
from greenroom.core.decide.residents import Residents
from greenroom.core.effects import RejectCode
from greenroom.core.events import Choice, RequestArrived
from greenroom.core.model import Claim, DeviceId, LeaseId, ModelId, MoveKind, Slot, TenantId, Tier
from greenroom.core.queue.waitlist import Waiter, WaiterKind
from greenroom.core.state import Claimant, State

_BY_POSITION = Choice()


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
    least_s = 0.0 if isinstance(plan, Serve) else _least_s(state, waiter, model, now)
    return least_s is not None and now + least_s + (record.service_s or 0.0) > waiter.answer_by


def _is_warm(plan: Plan) -> bool:
    return isinstance(plan, Serve | Join) or _is_busy(plan) or (isinstance(plan, Swap) and plan.wakes is not None)


def _is_busy(plan: Plan) -> bool:
    return isinstance(plan, Wait) and plan.why is WaitReason.BUSY


# --- a request that comes now ---------------------------------------------------------------------------------------

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
    least_s = _least_s(state, waiter, model, event.now)
    if least_s is None:
        return None
    begins, service_s = event.now + least_s, state.models[model].service_s or 0.0
    gives_up = not event.patient and event.give_up_at is not None and begins > event.give_up_at
    over_budget = event.answer_by is not None and begins + service_s > event.answer_by
    return Refuse(RejectCode.EXPIRED, eta_s(state, waiter, model, event.now)) if gives_up or over_budget else None


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


# --- how long it will wait ------------------------------------------------------------------------------------------

# How often one request over budget is let through to re-measure.
TRY_AGAIN_S = 60.0


def eta_s(state: State, waiter: Waiter, model: ModelId, now: float) -> float | None:
    """Seconds for its model's own move, the moves of models ahead of it, and the answers ahead of it in its queue.

    None if nothing was learned yet of that move, or of answers that it must wait for.
    """
    is_known = state.claimants[model].service_s is not None or _rounds(state, waiter, model) == 0
    return _least_s(state, waiter, model, now) if is_known else None


def _least_s(state: State, waiter: Waiter, model: ModelId, now: float) -> float | None:
    """The same, but answers of unknown length take no time: whatever exceeds a budget even so is late."""
    own = _move_left_s(state, model, now)
    if own is None:
        return None
    own += (state.claimants[model].service_s or 0.0) * _rounds(state, waiter, model)
    if any(slot.is_arriving or slot.is_serving for slot in state.slots_of(model)):
        return own
    return own + _others_s(state, waiter)


def room_s(state: State, waiter: Waiter, model: ModelId, now: float) -> float:
    """Seconds beyond `eta_s` that a request waits for loads under way, beside which its model does not fit.

    Until enough of them have ended; infinite if that is not known, or if leases hold the memory. Decisions do not go by
    this.
    """
    if _is_coming(state, model):
        return 0.0
    record, wake = state.claimants[model], _wake(state, model)
    room = _room_beside(state, model, _lasting_leases(state, waiter, model))
    if wake is None:
        soonest_s = _room_after_s(state, record, None, room, now)
    else:
        elsewhere_s = _elsewhere_s(state, waiter, record, room, now)
        soonest_s = min(_room_after_s(state, record, wake, room, now), elsewhere_s)
    return max(0.0, soonest_s - _others_s(state, waiter))


def leases_in_way(state: State, waiter: Waiter, model: ModelId) -> tuple[LeaseId, ...]:
    """Leases beside which this model does not fit, even if every model that may leave had left; none if it fits.

    They are not recalled for it: when they end is not known.
    """
    leases = {} if _is_coming(state, model) else _lasting_leases(state, waiter, model)
    if not leases:
        return ()
    record, wake, room = state.claimants[model], _wake(state, model), _room_beside(state, model, leases)
    may_load = wake is None or not record.spec.pinned
    if _has_room(state, record, wake, room) or (may_load and _has_room(state, record, None, room)):
        return ()
    without = _room_beside(state, model, {})
    loads = placement.options(record.spec, record.need, state.devices, without, without) if may_load else []
    on = {device for claim in (wake or {}, *loads) for device in claim}
    return tuple(lease for lease, claim in leases.items() if not claim.keys().isdisjoint(on))


def _is_coming(state: State, model: ModelId) -> bool:
    return any(slot.is_arriving or slot.is_serving for slot in state.slots_of(model))


def _wake(state: State, model: ModelId) -> Claim | None:
    """What it takes to wake this model; None if it does not sleep, or can never wake where it sleeps."""
    asleep = next((slot for slot in state.slots_of(model)[:1] if slot.tier is Tier.ASLEEP), None)
    wake = None if asleep is None else asleep.needs_for(MoveKind.WAKE)
    return wake if wake is not None and placement.fits(wake, _room_beside(state, model, {})) else None


def _lasting_leases(state: State, waiter: Waiter, model: ModelId) -> dict[LeaseId, Claim]:
    """A model is as urgent as its most urgent waiter."""
    queue = state.waitlist.queues.get(model)
    return state.lasting_leases(waiter.priority if queue is None else min(waiter.priority, queue.priorities.first))


def _room_beside(state: State, model: ModelId, leases: Mapping[LeaseId, Claim]) -> dict[DeviceId, int]:
    """What could be free for this model beside these leases if every model that may leave had left."""
    own = state.slots_of(model)
    room = state.most_mib(own[0] if own else None, stays=state.claimants[model].spec.version_of)
    for claim in leases.values():
        _add(room, claim, -1)
    return room


def _elsewhere_s(state: State, waiter: Waiter, record: Claimant, room: Mapping[DeviceId, int], now: float) -> float:
    """How much later than by a wake at once a sleeping model is ready that is loaded on another GPU.

    A load begins no sooner than the wait has cost as much as it costs more than a wake. Infinite if that is not known.
    """
    load_s, wake_s = record.learned_s.get(MoveKind.LOAD), record.learned_s.get(MoveKind.WAKE)
    if record.spec.pinned or load_s is None or wake_s is None:
        return inf
    queue, more_s = state.waitlist.queues.get(record.spec.id), max(0.0, load_s - wake_s)
    since = waiter.arrived if queue is None else min(queue.oldest, waiter.arrived)
    return max(since + more_s - now, _room_after_s(state, record, None, room, now)) + more_s


def _room_after_s(
    state: State, record: Claimant, wake: Claim | None, most: Mapping[DeviceId, int], now: float
) -> float:
    """Seconds until so many loads have ended that this wake fits beside the others, or that a load fits anywhere.

    Infinite if it does not fit even then.
    """
    # A model that is pinned stays when it has come: its memory is not waited for.
    loads = [slot for slot in state.slots.values() if slot.is_arriving and not slot.spec.pinned and slot.lease is None]
    room, soonest_s = dict(most), 0.0
    for slot in loads:
        _add(room, slot.claim, -1)
    # A move that takes longer than usual may take any time.
    ends = [(_move_left_s(state, slot.model, now) or inf, slot.claim) for slot in loads]
    for left_s, claim in sorted(ends, key=lambda end: end[0]):
        if _has_room(state, record, wake, room):
            return soonest_s
        soonest_s = left_s
        _add(room, claim, 1)
    return soonest_s if _has_room(state, record, wake, room) else inf


def _has_room(state: State, record: Claimant, wake: Claim | None, room: Mapping[DeviceId, int]) -> bool:
    if wake is not None:
        return placement.fits(wake, room)
    return bool(placement.options(record.spec, record.need, state.devices, room, room))


def _add(mib: dict[DeviceId, int], claim: Claim, times: int) -> None:
    for device in claim:
        mib[device] = mib.get(device, 0) + times * claim[device]


def _others_s(state: State, waiter: Waiter) -> float:
    """Swaps ahead of it: at most one per request ahead, and at most one per other model that is waited for."""
    ahead = min(state.waitlist.position(waiter) - 1, len(state.waitlist.queues) - 1)
    at_once = max(1, len(state.ledger.devices) - 1)
    return max(0, ahead) * (state.avg_swap_s or 0.0) / at_once


def _rounds(state: State, waiter: Waiter, model: ModelId) -> int:
    """Rounds of answers ahead of its own: as many as the model gives at once end in one."""
    record, waitlist = state.claimants[model], state.waitlist
    queue = waitlist.queues.get(model)
    queued = 0 if queue is None else queue.ahead_of(waiter)
    serving = [slot for slot in state.slots_of(model) if slot.is_serving]
    running = sum(len(slot.in_flight) for slot in serving)
    at_once = sum(slot.concurrency for slot in serving) or record.spec.at_once
    return (queued + running) // at_once


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
