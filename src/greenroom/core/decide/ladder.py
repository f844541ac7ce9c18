"""Which of its candidates a waiter gets: position against warmth. Pure; used by arrivals, rounds and `explain` alike.

A waiter names its candidates in order of preference, usually one. A later one is taken only if it is warm (ready,
coming, or asleep) and serves sooner by more than the waiter's `prefer_first_s`, or if those before it cannot serve, or
cannot serve within its budget. Candidates of last resort come after all of that: that another one is cold or busy is
no reason to take them.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from greenroom.core.decide.decision import Join, Plan, Refuse, Serve, Swap, Wait, WaitReason, decide_for
from greenroom.core.decide.estimate import TRY_AGAIN_S, eta_s
from greenroom.core.decide.placement import Places
from greenroom.core.decide.residents import Residents
from greenroom.core.effects import RejectCode
from greenroom.core.events import Choice
from greenroom.core.model import ModelId
from greenroom.core.queue.waitlist import Waiter
from greenroom.core.state import State

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
    begins_s = _begins_s(state, waiter, model, plan, now)
    is_late = _is_late(state, waiter, model, plan, begins_s, now)
    return Option(model, plan, begins_s, is_late, model not in waiter.preferred)


def _begins_s(state: State, waiter: Waiter, model: ModelId, plan: Plan, now: float) -> float:
    if isinstance(plan, Serve):
        return 0.0
    if isinstance(plan, Refuse) or (_is_busy(plan) and state.models[model].service_s is None):
        return inf
    estimate_s = eta_s(state, waiter, model, now)
    return inf if estimate_s is None else estimate_s


def _is_late(state: State, waiter: Waiter, model: ModelId, plan: Plan, begins_s: float, now: float) -> bool:
    if waiter.answer_by is None or begins_s == inf:
        return False
    record = state.models[model]
    if isinstance(plan, Serve) and now - record.tried_at >= TRY_AGAIN_S:
        # One request is let through now and then, so that something new is learned.
        return False
    return now + begins_s + (record.service_s or 0.0) > waiter.answer_by


def _is_warm(plan: Plan) -> bool:
    return isinstance(plan, Serve | Join) or _is_busy(plan) or (isinstance(plan, Swap) and plan.wakes is not None)


def _is_busy(plan: Plan) -> bool:
    return isinstance(plan, Wait) and plan.why is WaitReason.BUSY
