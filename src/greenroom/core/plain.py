"""The plain scheduler: whatever waits comes in the order of arrival, and nothing else counts.

The second implementation of `contract.py`. A request is as urgent as any other, of whichever priority and tenant it is.
The model of the oldest one comes next: others leave for it as soon as no older request waits for them, and their
running answers end first. It is easy to foresee, and swaps more often than `scheduler.py`, which weighs what a swap
costs. The tables and the decision about one waiter are shared (`mechanism.py`, `decide/`).

It asks for every waiting model after every event, so it suits machines with few models.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Final

from greenroom.core import events as ev
from greenroom.core.decide.arrival import Option
from greenroom.core.decide.plan import Wait
from greenroom.core.effects import Effects
from greenroom.core.explain import Explanation
from greenroom.core.mechanism import Mechanism
from greenroom.core.policy.base import Turn
from greenroom.core.policy.coresidency import coresidency_under
from greenroom.core.policy.swapper import ByMemory, Resident, Swapper
from greenroom.core.queue.waitlist import PriorityClass, Queue, Waiter, WaiterKind
from greenroom.core.state_view import StateView

# The priority of every request.
EQUAL: Final = 1


class InOrder:
    """The order of arrival, as the shared decision asks for it."""

    def __init__(self, limits: ev.Limits) -> None:
        self.swapper: Swapper = ByMemory(None if limits.company is None else coresidency_under(limits.company))

    def priority_class(self, priority: int) -> PriorityClass:
        return PriorityClass(deadline_s=0.0, lift_s=0.0)

    def turn(self, waiter: Waiter, served_s: float, now: float) -> Turn:
        # A preload makes no room for itself, so it does not go before those that do.
        return (float(waiter.kind is WaiterKind.PRELOAD), waiter.sequence)

    def rank(self, queue: Queue, now: float) -> Turn:
        return (queue.oldest,)

    def takes_at(self, queue: Queue, resident: Resident, now: float) -> float:
        own = resident.queue
        if own is None or own.oldest > queue.oldest:
            return now
        # Of two that sleep and came at the same time, neither may keep the other waiting.
        return now if resident.is_asleep and own.oldest == queue.oldest else inf

    def loss(self, resident: Resident, now: float) -> float:
        """The least recently used leaves first."""
        return 1.0 / (1.0 + max(0.0, now - resident.last_used))


class PlainScheduler:
    def __init__(self, effects: Effects) -> None:
        self._mechanism = mechanism = Mechanism(effects, InOrder)
        self.state = mechanism.state
        self.view = EqualView(mechanism.state)

    def handle(self, event: ev.Event) -> None:
        """Update the tables for this event, then bring what waits, the oldest first."""
        mechanism, now = self._mechanism, event.now
        mechanism.take(_as_equal(event) if isinstance(event, ev.RequestArrived) else event)
        mechanism.advance(now)
        # Each change may make room for an older one, so it begins anew.
        while (until := self._bring(now)) is None or mechanism.slots.trim(now):
            pass
        mechanism.look_again_at(until)

    def _bring(self, now: float) -> float | None:
        """Ask for every waiting model that is away, up to the first for which something can be done.

        Returns None if there was one, and otherwise when asking again may help.
        """
        state, until = self.state, inf
        state.kept.clear()
        for queue in sorted(state.waitlist.queues.values(), key=lambda queue: state.policy.rank(queue, now)):
            for waiter, plan in self._mechanism.ask_for(queue, now) if state.is_away(queue, now) else ():
                if not isinstance(plan, Wait):
                    return None
                until = min(until, plan.until)
                if waiter.kind is WaiterKind.REQUEST and plan.on and (state.moves or state.ledger.promises):
                    # Nothing younger comes where it waits for moves to end. Without any, what is in its way may stay
                    # for ever.
                    state.kept[plan.model] = plan.on
        return until


class EqualView(StateView):
    """Questions about a request that might come, as urgent as any other."""

    def explanation(self, arrival: ev.RequestArrived) -> Explanation:
        return super().explanation(_as_equal(arrival))

    def weigh(self, arrival: ev.RequestArrived) -> tuple[list[Option], int]:
        return super().weigh(_as_equal(arrival))


def _as_equal(arrival: ev.RequestArrived) -> ev.RequestArrived:
    return replace(arrival, priority=EQUAL)
