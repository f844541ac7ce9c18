"""What a caller can be told of a request that waits, or that would come now: position, estimate, explanation.

Changes nothing. Explanations are built from the plan that a real arrival would get (`decide/arrival.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from greenroom.core.decide.arrival import Option as Option
from greenroom.core.decide.arrival import called_off, plan_for, too_late
from greenroom.core.decide.estimate import eta_s, leases_in_way, room_s
from greenroom.core.decide.placement import Places
from greenroom.core.decide.plan import Join as Join
from greenroom.core.decide.plan import Plan as Plan
from greenroom.core.decide.plan import Refuse as Refuse
from greenroom.core.decide.plan import Serve as Serve
from greenroom.core.decide.plan import Swap as Swap
from greenroom.core.decide.plan import Wait as Wait
from greenroom.core.decide.plan import WaitReason
from greenroom.core.events import RequestArrived
from greenroom.core.model import LeaseId, ModelId, RequestId, SlotId, Tier
from greenroom.core.policy.swapper import Resident
from greenroom.core.queue.waitlist import Waiter
from greenroom.core.state import State


@dataclass(frozen=True, slots=True)
class Outlook:
    position: int
    eta_s: float | None


def outlook(state: State, request: RequestId, now: float) -> Outlook | None:
    """Position and estimate of a waiting request; None if it does not wait."""
    waiter = state.waitlist.get(request)
    if waiter is None:
        return None
    return Outlook(state.waitlist.position(waiter), _estimate_s(state, waiter, waiter.model, now))


def _estimate_s(state: State, waiter: Waiter, model: ModelId, now: float) -> float | None:
    """How long it may take until this model answers the request; None if that is not known."""
    own_s, more_s = eta_s(state, waiter, model, now), room_s(state, waiter, model, now)
    return None if own_s is None or more_s == inf else own_s + more_s


def as_told(state: State, waiter: Waiter, option: Option, now: float) -> Option:
    """This candidate with the time that a caller is told: decisions go by its own move and the queue alone."""
    if isinstance(option.plan, Serve | Refuse):
        return option
    estimate_s = _estimate_s(state, waiter, option.model, now)
    return option._replace(begins_s=inf if estimate_s is None else estimate_s)


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

    The end of `leases`, of any gateway, would make room for it. `is_too_late`: its model would be loaded, but the
    request would give up first. `calls_off` are less urgent models with plans that would be dropped.
    """

    plan: Plan
    position: int
    eta_s: float | None
    behind: tuple[ModelId, ...] = ()
    evict: tuple[Victim, ...] = ()
    leases: tuple[LeaseId, ...] = ()
    is_too_late: bool = False
    calls_off: tuple[ModelId, ...] = ()


def explanation(state: State, arrival: RequestArrived, waiter: Waiter, places: Places) -> Explanation:
    """What this request would wait behind, what it would evict and why, and how long it may take."""
    plan, now = plan_for(state, arrival, waiter, places), arrival.now
    if isinstance(plan, Serve):
        return Explanation(plan, 0, 0.0)
    if isinstance(plan, Refuse):
        return Explanation(plan, 0, None)
    estimate_s = _estimate_s(state, waiter, plan.model, now)
    behind = plan.behind if isinstance(plan, Wait) and plan.behind else _before(state, waiter, plan.model)
    evict = tuple(_victim(one, waiter, now) for one in plan.evict) if isinstance(plan, Swap) else ()
    may_wait = arrival.give_up_at is None or arrival.give_up_at > now
    is_late = isinstance(plan, Swap) and (not may_wait or too_late(state, arrival, waiter, plan.model) is not None)
    makes_way = isinstance(plan, Wait) and plan.why is not WaitReason.BUSY
    calls_off = tuple(slot.model for slot in called_off(state, arrival.priority, now)) if makes_way else ()
    no_room = isinstance(plan, Wait) and plan.why is WaitReason.NO_ROOM
    leases = leases_in_way(state, waiter, plan.model) if no_room else ()
    position = state.waitlist.position(waiter)
    return Explanation(plan, position, estimate_s, behind, evict, leases, is_late, calls_off)


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
