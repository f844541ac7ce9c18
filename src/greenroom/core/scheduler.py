"""The scheduler that Greenroom comes with: fair, with rounds. Events in, effects out.

`mechanism.py` keeps the tables up to date for each event; then this settles what the event has made possible: planned
moves start, and waiters are decided on again, by the rules of a policy.
"""

from __future__ import annotations

from greenroom.core import events as ev
from greenroom.core.apply import Rounds
from greenroom.core.decide.plan import Plan, Serve, Swap, Wait, WaitReason
from greenroom.core.effects import Effects
from greenroom.core.mechanism import Dirty, Mechanism
from greenroom.core.model import Slot
from greenroom.core.policy import BUILT_IN, SWAPPERS, Swappers, make_policy
from greenroom.core.policy.base import Policies


class DefaultScheduler:
    def __init__(self, effects: Effects, policies: Policies = BUILT_IN, swappers: Swappers = SWAPPERS) -> None:
        self._mechanism = mechanism = Mechanism(effects, lambda limits: make_policy(limits, policies, swappers))
        self.state = mechanism.state
        self.view = mechanism.view
        self._slots = mechanism.slots
        self._rounds = Rounds(self.state, mechanism.slots, mechanism.act, mechanism.places)

    def handle(self, event: ev.Event) -> None:
        """Update the tables for this event, then settle what it has made possible."""
        mechanism, now = self._mechanism, event.now
        # Hot path: these come first, and by name, so that the compiled calls are direct.
        if isinstance(event, ev.RequestArrived):
            plan = mechanism.request_arrived(event)
            if not isinstance(plan, Serve):
                self._settle_request(self._arrived(event, plan), now)
        elif isinstance(event, ev.ServeDone):
            self._settle_request(mechanism.serve_done(event), now)
        elif isinstance(event, ev.RequestGone):
            self._settle_request(mechanism.request_gone(event), now)
        else:
            mechanism.take(event)
            self._settle(now)
            self._trim(now)

    def _arrived(self, event: ev.RequestArrived, plan: Plan | None) -> Dirty:
        if isinstance(plan, Swap):
            # Its victims may free more room than it takes.
            return Dirty.ALL
        if isinstance(plan, Wait) and plan.why is not WaitReason.BUSY:
            self._rounds.joined(plan.until, event.now)
            if self._mechanism.make_way(event.priority, event.now):
                return Dirty.PLANS
        return Dirty.NOTHING

    def _settle_request(self, dirty: Dirty | Slot, now: float) -> None:
        """Settle what a request event has made possible. A slot means room in that slot alone."""
        moved = True
        if dirty is Dirty.NOTHING:
            moved = False
        elif isinstance(dirty, Slot):
            self._mechanism.act.fill(dirty.model, now)
            # An idle slot may be evicted for another model.
            moved = dirty.is_idle
            if moved:
                self._rounds.bring(now)
        elif dirty is Dirty.ALL:
            self._settle(now)
        elif dirty is Dirty.PLANS:
            # The more urgent models first; slots that need not leave after all then serve their own queues.
            self._rounds.bring(now)
            self._mechanism.fill(now)
        # Dirty.GREEN_ROOM: nothing waits.
        if moved:
            self._trim(now)

    def _trim(self, now: float) -> None:
        """Evict sleepers that exceed the green room, and see which waiting models may come into their memory."""
        while self._slots.trim(now):
            self._settle(now)

    def _settle(self, now: float) -> None:
        """Start planned moves, fill free places, then see which waiting models may come."""
        if self.state.is_settled:
            self._rounds.rest(now)
            return
        self._mechanism.advance(now)
        self._rounds.bring(now)
