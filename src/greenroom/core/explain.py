"""What happens to a request that comes now, and what its caller can be told: position, estimate, explanation.

Changes nothing: the scheduler carries the plan of an arrival out. Explanations are built from the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.core.decide.decision import Join as Join
from greenroom.core.decide.decision import Plan as Plan
from greenroom.core.decide.decision import Refuse as Refuse
from greenroom.core.decide.decision import Serve as Serve
from greenroom.core.decide.decision import Swap as Swap
from greenroom.core.decide.decision import Wait as Wait
from greenroom.core.decide.decision import WaitReason, decide, is_away
from greenroom.core.decide.placement import Places
from greenroom.core.effects import RejectCode
from greenroom.core.events import RequestArrived
from greenroom.core.model import DeviceId, ModelId, MoveKind, OtherLease, RequestId, Slot, SlotId, Tier
from greenroom.core.policy.swapper import Resident
from greenroom.core.queue.waitlist import Waiter, WaiterKind
from greenroom.core.state import State

# How often one request over budget is let through to re-measure.
TRY_AGAIN_S = 60.0
# With very many waiting models, one more request for one of them is decided on this much later, together with others.
DECIDED_LATER_S = 0.1


# --- arrivals -------------------------------------------------------------------------------------------------------


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
    if state.waitlist.depth >= state.limits.queue_depth_max:
        return Refuse(RejectCode.QUEUE_FULL, max(1.0, state.avg_wait_s or 0.0))
    # A request for a model that is neither ready nor loading stays queued even if it will be late: it causes the load.
    is_begun = isinstance(plan, Join) or any(slot.is_serving for slot in state.slots_of(plan.model))
    return (too_late(state, event, waiter, plan.model) if is_begun else None) or plan


def _first_plan(state: State, waiter: Waiter, now: float, places: Places) -> Plan:
    waitlist, model = state.waitlist, waiter.model
    can_wait = waitlist.has_many_models and model in waitlist.queues and len(waiter.candidates) == 1
    if can_wait and is_away(state, model, now) and not state.shutting_down:
        return Wait(WaitReason.MANY_MODELS, model, now + DECIDED_LATER_S)
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


# --- estimates ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outlook:
    position: int
    eta_s: float | None


def outlook(state: State, request: RequestId, now: float) -> Outlook | None:
    """Position and estimate of a waiting request; None if it does not wait."""
    waiter = state.waitlist.get(request)
    if waiter is None:
        return None
    return Outlook(state.waitlist.position(waiter), eta_s(state, waiter, waiter.model, now))


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


# --- explanations ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Victim:
    """A resident that would be evicted, to which tier, and why it rather than another."""

    slot: SlotId
    model: ModelId
    leaves_to: Tier
    is_busy: bool
    why: str
    loss: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """`position` is the place in the queue; 0 if the request would not wait.

    `held` are leases of other gateways on the devices it waits for, or that a refusal names. `is_too_late`: its model
    would be loaded, but the request would give up first. `calls_off` are less urgent models with plans that would be
    dropped.
    """

    plan: Plan
    position: int
    eta_s: float | None
    behind: tuple[ModelId, ...] = ()
    evict: tuple[Victim, ...] = ()
    held: tuple[OtherLease, ...] = ()
    is_too_late: bool = False
    calls_off: tuple[ModelId, ...] = ()


def explanation(state: State, arrival: RequestArrived, waiter: Waiter, places: Places) -> Explanation:
    """What this request would wait behind, what it would evict and why, and how long it may take."""
    plan, now = plan_for(state, arrival, waiter, places), arrival.now
    if isinstance(plan, Serve):
        return Explanation(plan, 0, 0.0)
    if isinstance(plan, Refuse):
        return Explanation(plan, 0, None, held=_held(state, plan))
    estimate_s = eta_s(state, waiter, plan.model, now)
    behind = plan.behind if isinstance(plan, Wait) and plan.behind else _before(state, waiter, plan.model)
    evict = tuple(_victim(one, waiter, now) for one in plan.evict) if isinstance(plan, Swap) else ()
    is_too_late = isinstance(plan, Swap) and too_late(state, arrival, waiter, plan.model) is not None
    makes_way = isinstance(plan, Wait) and plan.why is not WaitReason.BUSY
    calls_off = tuple(slot.model for slot in called_off(state, arrival.priority, now)) if makes_way else ()
    position, held = state.waitlist.position(waiter), _held(state, plan)
    return Explanation(plan, position, estimate_s, behind, evict, held, is_too_late, calls_off)


def _held(state: State, plan: Plan) -> tuple[OtherLease, ...]:
    """The leases that a refusal names; else those on the devices where the request waits for memory."""
    if isinstance(plan, Refuse):
        return tuple(lease for lease in state.ledger.others if lease.holder in plan.held_by)
    on: frozenset[DeviceId] = plan.on if isinstance(plan, Wait) else frozenset()
    return tuple(lease for lease in state.ledger.others if not on.isdisjoint(lease.claim))


def _before(state: State, waiter: Waiter, model: ModelId) -> tuple[ModelId, ...]:
    """Other models with a waiter of the same or a higher priority."""
    return tuple(
        name
        for name, queue in state.waitlist.queues.items()
        if name != model and any(head.priority <= waiter.priority for head in queue.heads())
    )


def _victim(resident: Resident, waiter: Waiter, now: float) -> Victim:
    rank = (
        "less urgent"
        if resident.priority > waiter.priority
        else "as urgent"
        if resident.priority == waiter.priority
        else "more urgent"
    )
    busy = "its running answers end first" if resident.is_busy else f"idle for {now - resident.last_used:.1f} s"
    why = f"{rank}, {busy}, asked for {resident.rate * 60:.2f} times a minute, {resident.reload_s:.1f} s to bring back"
    return Victim(resident.slot, resident.model, resident.leaves_to, resident.is_busy, why, resident.loss)
