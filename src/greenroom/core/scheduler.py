"""The scheduler: takes events, owns the state, asks for effects.

Each event updates what is known; then the scheduler settles: planned moves start, waiters are decided on again.
Questions (`outlook`, `explain`) change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

from greenroom.core import events as ev
from greenroom.core.apply import Actions
from greenroom.core.configuration import Configuration
from greenroom.core.decide import Join, Plan, Refuse, Serve, Swap, Wait, decide
from greenroom.core.effects import Effects, RejectCode, because
from greenroom.core.leases import Leases
from greenroom.core.model import ModelId, MoveKind, RequestId, Slot, Tier
from greenroom.core.moves import Moves
from greenroom.core.outlook import Outlook, eta_s, outlook
from greenroom.core.policy import Policy, PriorityThenArrival
from greenroom.core.stage import Stage
from greenroom.core.state import Grant, State, learn
from greenroom.core.timers import Timers
from greenroom.core.waitlist import Key, Waiter, WaiterKind

PolicyFactory = Callable[[ev.Limits], Policy]


_OF_REQUESTS = frozenset({ev.RequestArrived, ev.RequestGone, ev.ServeDone})


class Scheduler:
    def __init__(self, effects: Effects, policy: PolicyFactory = PriorityThenArrival) -> None:
        self.state = State(policy(ev.Limits()))
        self._stage = Stage(self.state, effects)
        self._act = Actions(self.state, effects, self._stage)
        configuration = Configuration(self.state, self._stage, self._act, policy)
        moves = Moves(self.state, effects, self._stage, self._act)
        leases = Leases(self.state, self._act)
        timers = Timers(self.state, self._stage, self._act)
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            ev.ConfigChanged: configuration.changed,
            ev.RequestArrived: self._on_request_arrived,
            ev.RequestGone: self._on_request_gone,
            ev.ServeDone: self._on_serve_done,
            ev.MoveAsked: moves.asked,
            ev.MoveDone: moves.done,
            ev.SlotsLost: moves.lost,
            ev.MemoryChanged: self._on_memory_changed,
            ev.LeaseAsked: leases.asked,
            ev.LeaseGone: leases.gone,
            ev.TimerFired: timers.fired,
            ev.ShutdownAsked: self._on_shutdown_asked,
        }

    def handle(self, event: ev.Event) -> None:
        self._handlers[type(event)](event)
        # Requests come and end often and open little: their handlers know what to settle.
        if type(event) not in _OF_REQUESTS:
            self._settle(event.now)

    # --- questions ------------------------------------------------------------------------------------------------

    def outlook(self, request: RequestId, now: float) -> Outlook | None:
        """Place and estimate of a waiting request; None if it does not wait."""
        return outlook(self.state, request, now)

    def explain(self, arrival: ev.RequestArrived) -> Plan:
        """What would happen if this request came now. Nothing changes."""
        return self._plan_for(arrival, self._waiter(arrival, sequence=2**62))

    # --- requests -------------------------------------------------------------------------------------------------

    def _waiter(self, event: ev.RequestArrived, sequence: int) -> Waiter:
        return Waiter(
            event.request,
            WaiterKind.REQUEST,
            self.state.policy.key(event.priority, sequence),
            event.candidates[0],
            event.candidates,
            event.priority,
            event.now,
            event.tenant,
            event.give_up_at,
        )

    def _on_request_arrived(self, event: ev.RequestArrived) -> None:
        if self.state.knows(event.request):
            self.state.counters.ignored += 1
            return
        waiter = self._waiter(event, self.state.next_number())
        plan = self._plan_for(event, waiter)
        self._act.carry_out(waiter, plan, event.now)
        if isinstance(plan, Swap):
            # The load belongs to the model: it has begun even if this caller cannot wait for it.
            if late := self._too_late(event, waiter, plan.model):
                self._act.refuse(waiter, late)
            # Who leaves for it may leave more room than it takes. Other plans open nothing for anybody else.
            self._settle(event.now)

    def _plan_for(self, event: ev.RequestArrived, waiter: Waiter) -> Plan:
        """What was decided for this newcomer, if waiting makes sense: there must be a place, and hope in time."""
        state, plan = self.state, decide(self.state, waiter, event.now)
        if isinstance(plan, Serve | Refuse):
            return plan
        if state.waitlist.depth >= state.limits.queue_depth_max:
            return Refuse(RejectCode.QUEUE_FULL, max(1.0, state.avg_wait_s or 0.0))
        # Who waits for what nobody has begun keeps the place that will begin it, however late that may be.
        is_begun = isinstance(plan, Join) or any(slot.is_serving for slot in state.slots_of(plan.model))
        return (self._too_late(event, waiter, plan.model) if is_begun else None) or plan

    def _too_late(self, event: ev.RequestArrived, waiter: Waiter, model: ModelId) -> Refuse | None:
        """The refusal of a caller who would have given up before its answer could begin."""
        if event.patient or event.give_up_at is None:
            return None
        wait_s = eta_s(self.state, waiter, model, event.now)
        too_late = wait_s is not None and event.now + wait_s > event.give_up_at
        return Refuse(RejectCode.EXPIRED, wait_s) if too_late else None

    def _on_request_gone(self, event: ev.RequestGone) -> None:
        waiter = self.state.waitlist.get(event.request)
        if grant := self._granted(event.request):
            self._end_grant(event.request, grant, event.now)
        elif waiter is not None and waiter.kind is WaiterKind.REQUEST:
            self._act.forget(event.request)
            self._settle(event.now)
        else:
            self.state.counters.ignored += 1

    def _on_serve_done(self, event: ev.ServeDone) -> None:
        grant = self._granted(event.request)
        if grant is None:
            self.state.counters.ignored += 1
            return
        if event.lost_before_first_byte:
            self._take_back(grant, event.now)
        elif not grant.is_cut:
            self._learn_from(grant, event.now)
        self._end_grant(event.request, grant, event.now)

    def _granted(self, request: RequestId) -> Grant | None:
        """The grant of a request. That of a lease is ended by `LeaseGone` alone."""
        grant = self.state.grants.get(request)
        return grant if grant is not None and grant.waiter.kind is WaiterKind.REQUEST else None

    def _learn_from(self, grant: Grant, now: float) -> None:
        """An answer that ended by itself shows that the model works, and how long it takes."""
        slot = self.state.slots[grant.slot]
        record = self.state.record_of(slot)
        if record is not None and not slot.lost:
            record.failures = 0
            record.service_s = learn(record.service_s, now - grant.waiter.granted_at)

    def _take_back(self, grant: Grant, now: float) -> None:
        """A grant lost before its first byte goes back to its place, once."""
        waiter = grant.waiter
        if waiter.came_back or grant.is_cut or waiter.model not in self.state.models:
            self._act.refuse(waiter, Refuse(RejectCode.LOST))
        else:
            waiter.came_back = True
            self._act.carry_out(waiter, Wait("came_back", waiter.model), now)

    def _end_grant(self, request: RequestId, grant: Grant, now: float) -> None:
        state, slot = self.state, self.state.slots[grant.slot]
        del state.grants[request]
        del slot.in_flight[request]
        slot.last_used = now
        state.counters.dones += 1
        if slot.is_idle:
            self._on_idle(slot, now)
        # A slot that stays busy opens nothing but its own room, for who names its model.
        hopeful = [head for head in state.waitlist.heads() if slot.model in head.candidates]
        if slot.is_idle or request in state.waitlist or any(head.model != slot.model for head in hopeful):
            self._settle(now)
        else:
            self._decide_on(hopeful, now)

    def _on_idle(self, slot: Slot, now: float) -> None:
        if slot.lost:
            self._stage.drop(slot)
        elif slot.is_going and slot.move is None:
            self._stage.go_on_leaving(slot, because("leaving", model=slot.model), now)
        else:
            self._stage.watch_idle(slot)

    # --- memory and the end ---------------------------------------------------------------------------------------

    def _on_memory_changed(self, event: ev.MemoryChanged) -> None:
        self.state.ledger.set_foreign(event.foreign_mib)
        for slot, seen in (event.seen or {}).items():
            self.state.ledger.observe(slot, seen)

    def _on_shutdown_asked(self, event: ev.ShutdownAsked) -> None:
        self.state.shutting_down = True
        for waiter in list(self.state.waitlist):
            self._act.refuse(waiter, Refuse(RejectCode.SHUTTING_DOWN))
        for slot in list(self.state.slots.values()):
            if slot.lease is None:
                self._stage.leave(slot, Tier.COLD, event.drain_s, because("shutdown"), event.now)

    # --- settling -------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Start what can start, then decide again on the first of every queue."""
        state = self.state
        if state.is_settled:
            return
        self._act.start_planned(now)
        state.blocked.clear()
        self._decide_on(state.waitlist.heads(), now)
        for model in [model for model in state.overtaken if not state.waitlist.count(model)]:
            del state.overtaken[model]

    def _decide_on(self, first: list[Waiter], now: float) -> None:
        """Decide on these, and on those behind them where they leave their queues, in the order in which they stand."""
        heads = [(waiter.key, waiter.model) for waiter in first]
        heapify(heads)
        while heads:
            key, model = heappop(heads)
            if follower := self._decide_again(key, model, now):
                heappush(heads, (follower.key, model))

    def _decide_again(self, key: Key, model: ModelId, now: float) -> Waiter | None:
        """Decide on this waiter; return the one behind it if that may fare differently."""
        state = self.state
        waiter = state.waitlist.at(model, key)
        plan = decide(state, waiter, now)
        self._act.carry_out(waiter, plan, now)
        stays = waiter.id in state.waitlist and waiter.model == model and waiter.wants is not MoveKind.PREPARE
        return None if stays else state.waitlist.after(model, key)
