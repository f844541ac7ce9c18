"""The scheduler: takes events, owns the state, asks for effects.

Each event updates what is known; then the scheduler settles: planned moves start, waiters are decided on again.
Questions (`outlook`, `explain`) change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from greenroom.core import events as ev
from greenroom.core.apply import Actions
from greenroom.core.configuration import Configuration
from greenroom.core.decide.decision import Join, Plan, Refuse, Serve, Swap, Wait, decide
from greenroom.core.decide.placement import Places
from greenroom.core.effects import Effects, RejectCode, because
from greenroom.core.explain import Explanation, explanation
from greenroom.core.leases import Leases
from greenroom.core.model import ModelId, Need, RequestId, Slot, Tier
from greenroom.core.moves import Moves
from greenroom.core.policy.base import Policies
from greenroom.core.policy.registry import BUILT_IN, SWAPPERS, Swappers, make_policy
from greenroom.core.queue.outlook import Outlook, eta_s, outlook
from greenroom.core.queue.rounds import LOOK_SOON_S, RANKED_MANY, Rounds
from greenroom.core.queue.waitlist import Waiter, WaiterKind
from greenroom.core.slots import Stage
from greenroom.core.state import Grant, State, learn
from greenroom.core.timers import Timers

_OF_REQUESTS = frozenset({ev.RequestArrived, ev.RequestGone, ev.ServeDone})

# How long what is known of answers keeps out those whose budget is shorter.
TRY_AGAIN_S = 60.0


class Scheduler:
    def __init__(self, effects: Effects, policies: Policies = BUILT_IN, swappers: Swappers = SWAPPERS) -> None:
        self.state = State(make_policy(ev.Limits()))
        self._stage = Stage(self.state, effects)
        self._places = Places()
        self._act = Actions(self.state, effects, self._stage, self._places)
        self._rounds = Rounds(self.state, self._stage, self._act, self._places)
        configuration = Configuration(self.state, self._stage, self._act, policies, swappers)
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
        elif self.state.ask_again:
            self._rounds.bring(event.now)
        if self.state.trim_again:
            self._stage.trim(event.now)

    # --- questions ------------------------------------------------------------------------------------------------

    def outlook(self, request: RequestId, now: float) -> Outlook | None:
        """Place and estimate of a waiting request; None if it does not wait."""
        return outlook(self.state, request, now)

    def learned(self) -> dict[ModelId, ev.Learned]:
        """What a later run should know of each model from the start."""
        return {
            model: ev.Learned(dict(record.learned_s), record.service_s)
            for model, record in self.state.models.items()
            if not record.is_lease and (record.learned_s or record.service_s is not None)
        }

    def needs(self) -> dict[ModelId, Need]:
        """What each model's next load is planned with; more than it was given if it ran out of memory."""
        return {model: record.need for model, record in self.state.models.items() if not record.is_lease}

    def explain(self, arrival: ev.RequestArrived) -> Plan:
        """What would happen if this request came now. Nothing changes."""
        return self._plan_for(arrival, self._waiter(arrival, sequence=2**62))

    def explanation(self, arrival: ev.RequestArrived) -> Explanation:
        """The same in full: whom it would wait behind, whom it would evict and why, and how long it may take."""
        waiter = self._waiter(arrival, sequence=2**62)
        plan = self._plan_for(arrival, waiter)
        is_too_late = isinstance(plan, Swap) and self._too_late(arrival, waiter, plan.model) is not None
        makes_way = isinstance(plan, Wait) and plan.why != "busy"
        called_off = self._called_off(arrival.priority, arrival.now) if makes_way else []
        return explanation(self.state, waiter, plan, arrival.now, is_too_late, tuple(slot.model for slot in called_off))

    # --- requests -------------------------------------------------------------------------------------------------

    def _waiter(self, event: ev.RequestArrived, sequence: int) -> Waiter:
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

    def _on_request_arrived(self, event: ev.RequestArrived) -> None:
        state, now = self.state, event.now
        if state.knows(event.request):
            state.counters.ignored += 1
            return
        waiter = self._waiter(event, state.next_number())
        state.accounts.join(event.tenant)
        if record := state.models.get(waiter.model):
            record.warm_up(now, state.limits.recency_s)
        plan = self._plan_for(event, waiter)
        self._act.carry_out(waiter, plan, now)
        if isinstance(plan, Swap):
            # The load belongs to the model: it has begun even if this caller cannot wait for it.
            if late := self._too_late(event, waiter, plan.model):
                self._act.refuse(waiter, late)
            # Who leaves for it may leave more room than it takes.
            self._settle(now)
        elif isinstance(plan, Wait) and plan.why != "busy":
            state.oldest_cold = min(state.oldest_cold, now)
            self._rounds.look_again_at(min(plan.until, self._rounds.looks_at), now)
            if self._make_way(event.priority, now):
                # First the more urgent; those who need not leave after all then go on with their own.
                self._rounds.bring(now)
                self._fill(now)

    def _make_way(self, priority: int, now: float) -> bool:
        """Call off what is planned but not begun for the less urgent: the places are given anew."""
        called_off = self._called_off(priority, now)
        for slot in called_off:
            self._stage.call_off(slot)
        return bool(called_off)

    def _called_off(self, priority: int, now: float) -> list[Slot]:
        """Who was promised memory for somebody less urgent than this, and is not late."""
        state = self.state
        promised = [state.slots[slot] for slot in state.ledger.promises]
        return [
            slot
            for slot in promised
            if slot.last_priority > priority
            and slot.lease is None
            and (queue := state.waitlist.queues.get(slot.model)) is not None
            and queue.late_at > now
        ]

    def _plan_for(self, event: ev.RequestArrived, waiter: Waiter) -> Plan:
        """What was decided for this newcomer, if waiting makes sense: there must be a place, and hope in time."""
        state, plan = self.state, self._first_plan(waiter, event.now)
        if isinstance(plan, Refuse) or (isinstance(plan, Serve) and event.answer_by is None):
            return plan
        if isinstance(plan, Serve):
            # One is let through now and then, whatever is expected: else one slow answer would lock out everybody with
            # a budget, because nothing new would ever be learned.
            model = state.slots[plan.slot].model
            is_known = event.now - state.models[model].tried_at < TRY_AGAIN_S
            return (self._too_late(event, waiter, model) if is_known else None) or plan
        if state.waitlist.depth >= state.limits.queue_depth_max:
            return Refuse(RejectCode.QUEUE_FULL, max(1.0, state.avg_wait_s or 0.0))
        # Who waits for what nobody has begun keeps the place that will begin it, however late that may be.
        is_begun = isinstance(plan, Join) or any(slot.is_serving for slot in state.slots_of(plan.model))
        return (self._too_late(event, waiter, plan.model) if is_begun else None) or plan

    def _first_plan(self, waiter: Waiter, now: float) -> Plan:
        queues, model = self.state.waitlist.queues, waiter.model
        in_crowd = len(queues) > RANKED_MANY and model in queues and len(waiter.candidates) == 1
        if in_crowd and self._rounds.is_away(model, now) and not self.state.shutting_down:
            return Wait("crowd", model, now + LOOK_SOON_S)
        return decide(self.state, waiter, now, self._places)

    def _too_late(self, event: ev.RequestArrived, waiter: Waiter, model: ModelId) -> Refuse | None:
        """The refusal of a caller who would have given up before its answer could begin, or end within its budget."""
        if event.answer_by is None and (event.patient or event.give_up_at is None):
            return None
        wait_s = eta_s(self.state, waiter, model, event.now)
        if wait_s is None:
            return None
        begins, service_s = event.now + wait_s, self.state.models[model].service_s or 0.0
        gives_up = not event.patient and event.give_up_at is not None and begins > event.give_up_at
        over_budget = event.answer_by is not None and begins + service_s > event.answer_by
        return Refuse(RejectCode.EXPIRED, wait_s) if gives_up or over_budget else None

    def _on_request_gone(self, event: ev.RequestGone) -> None:
        waiter = self.state.waitlist.get(event.request)
        if grant := self._granted(event.request):
            self._end_grant(event.request, grant, event.now)
        elif waiter is not None and waiter.kind is WaiterKind.REQUEST:
            self._act.forget(event.request)
            self.state.accounts.leave(waiter.tenant)
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
            record.answered(now - grant.waiter.granted_at)
            record.tried_at = now
            record.share_s = learn(record.share_s, slot.share(now) - grant.share_from)

    def _take_back(self, grant: Grant, now: float) -> None:
        """A grant lost before its first byte goes back to its place, once."""
        waiter = grant.waiter
        if self.state.shutting_down:
            self._act.refuse(waiter, Refuse(RejectCode.SHUTTING_DOWN))
        elif waiter.came_back or grant.is_cut or waiter.model not in self.state.models:
            self._act.refuse(waiter, Refuse(RejectCode.LOST))
        else:
            waiter.came_back = True
            self._act.carry_out(waiter, Wait("came_back", waiter.model), now)

    def _end_grant(self, request: RequestId, grant: Grant, now: float) -> None:
        state, slot, tenant = self.state, self.state.slots[grant.slot], grant.waiter.tenant
        used_s = slot.share(now) - grant.share_from
        del state.grants[request]
        del slot.in_flight[request]
        slot.last_used = now
        state.counters.dones += 1
        state.accounts.charge(tenant, used_s - grant.charged_s)
        if grant.waiter.answer_by is not None:
            self._stage.forget_timer(ev.Timer(ev.TimerKind.BUDGET, request))
        if slot.is_idle:
            self._on_idle(slot, now)
        came_back = request in state.waitlist
        if not came_back:
            state.accounts.leave(tenant)
        if state.is_settled:
            return
        if came_back or not slot.is_serving or state.waitlist.choosy:
            self._settle(now)
            return
        # A slot that stays opens nothing but its own room; one that is left idle may give way to another.
        self._act.fill(slot.model, now)
        if slot.is_idle:
            self._rounds.bring(now)

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
        if event.leases is not None:
            self.state.ledger.set_others(event.leases)
        if event.store_is_down is not None:
            self.state.store_is_down = event.store_is_down

    def _on_shutdown_asked(self, event: ev.ShutdownAsked) -> None:
        self.state.shutting_down = True
        for waiter in list(self.state.waitlist):
            self._act.refuse(waiter, Refuse(RejectCode.SHUTTING_DOWN))
        for slot in list(self.state.slots.values()):
            if slot.lease is None:
                self._stage.leave(slot, Tier.COLD, event.drain_s, because("shutdown"), event.now)

    # --- settling -------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Start what can start, fill what has room, then see which waiting models may come."""
        state = self.state
        if state.is_settled:
            self._rounds.rest(now)
            return
        self._act.start_planned(now)
        self._fill(now)
        for waiter in list(state.waitlist.choosy.values()):
            if any(state.has_room(model) for model in waiter.candidates):
                self._act.settle(waiter, now)
        self._rounds.bring(now)

    def _fill(self, now: float) -> None:
        """Those who ask only that the model be there need no room."""
        queues = self.state.waitlist.queues
        there = [slot for slot in self.state.slots.values() if slot.spec.id in queues and slot.is_serving]
        for model in [slot.model for slot in there if slot.has_room or queues[slot.model].askers]:
            self._act.fill(model, now)
