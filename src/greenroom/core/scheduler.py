"""The scheduler: takes events, owns the state, asks for effects.

Each event updates the state; then the scheduler settles: planned moves start, and waiters are decided on again. The
questions `outlook`, `explain` and `explanation` change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from math import inf
from typing import Any

from greenroom.core import events as ev
from greenroom.core.apply import Actions
from greenroom.core.configuration import Configuration
from greenroom.core.decide.decision import Join, Plan, Refuse, Serve, Swap, Wait, WaitReason, decide
from greenroom.core.decide.placement import Places
from greenroom.core.effects import Effects, RejectCode, because
from greenroom.core.explain import Explanation, explanation
from greenroom.core.leases import Leases
from greenroom.core.model import ModelId, RequestId, Slot, Tier
from greenroom.core.moves import Moves
from greenroom.core.policy.base import Policies
from greenroom.core.policy.registry import BUILT_IN, SWAPPERS, Swappers, make_policy
from greenroom.core.queue.outlook import Outlook, eta_s, outlook
from greenroom.core.queue.rounds import LOOK_SOON_S, Rounds
from greenroom.core.queue.waitlist import Waiter, WaiterKind
from greenroom.core.slots import SlotWriter
from greenroom.core.state import Grant, State, learn
from greenroom.core.timers import Timers
from greenroom.core.view import SchedulerView


class Dirty(Enum):
    """What an event may have made possible. The scheduler settles that and no more.

    Handlers of request events return it, because these are frequent and open little. Every other event settles all.
    """

    NOTHING = "nothing"
    GREEN_ROOM = "green_room"  # a slot has begun to leave while nothing waits
    PLANS = "plans"  # plans of less urgent models were called off
    ALL = "all"


# How often one request over budget is let through to re-measure.
TRY_AGAIN_S = 60.0


class Scheduler:
    def __init__(self, effects: Effects, policies: Policies = BUILT_IN, swappers: Swappers = SWAPPERS) -> None:
        self.state = State(make_policy(ev.Limits()))
        self.view = SchedulerView(self.state)
        self._slots = SlotWriter(self.state, effects)
        self._places = Places()
        self._act = Actions(self.state, effects, self._slots, self._places)
        self._rounds = Rounds(self.state, self._slots, self._act, self._places)
        configuration = Configuration(self.state, self._slots, self._act, policies, swappers)
        moves = Moves(self.state, effects, self._slots, self._act)
        leases = Leases(self.state, self._act)
        timers = Timers(self.state, self._slots, self._act)
        self._of_requests: dict[type[Any], Callable[[Any], Dirty | Slot]] = {
            ev.RequestArrived: self._on_request_arrived,
            ev.RequestGone: self._on_request_gone,
            ev.ServeDone: self._on_serve_done,
        }
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            ev.ConfigChanged: configuration.changed,
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
        """Update the state for this event, then settle what it has made possible."""
        of_request = self._of_requests.get(type(event))
        if of_request is None:
            self._handlers[type(event)](event)
            self._settle(event.now)
            self._slots.trim(event.now)
        else:
            self._settle_request(of_request(event), event.now)

    # --- questions ------------------------------------------------------------------------------------------------

    def outlook(self, request: RequestId, now: float) -> Outlook | None:
        """Position and estimate of a waiting request; None if it does not wait."""
        return outlook(self.state, request, now)

    def learned(self) -> dict[ModelId, ev.Learned]:
        """What a later run should know about each model from the start."""
        return {
            model: ev.Learned(dict(record.learned_s), record.service_s)
            for model, record in self.state.models.items()
            if record.learned_s or record.service_s is not None
        }

    def explain(self, arrival: ev.RequestArrived) -> Plan:
        """The plan if this request came now. Changes nothing."""
        return self._plan_for(arrival, self._waiter(arrival, sequence=2**62), Places())

    def explanation(self, arrival: ev.RequestArrived) -> Explanation:
        """The same in full: what it would wait behind, what it would evict and why, and how long it may take."""
        waiter = self._waiter(arrival, sequence=2**62)
        plan = self._plan_for(arrival, waiter, Places())
        is_too_late = isinstance(plan, Swap) and self._too_late(arrival, waiter, plan.model) is not None
        makes_way = isinstance(plan, Wait) and plan.why is not WaitReason.BUSY
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

    def _on_request_arrived(self, event: ev.RequestArrived) -> Dirty:
        state, now = self.state, event.now
        if state.knows(event.request):
            state.counters.ignored += 1
            return Dirty.NOTHING
        waiter = self._waiter(event, state.next_number())
        state.accounts.join(event.tenant)
        if record := state.models.get(waiter.model):
            record.warm_up(now, state.limits.recency_s)
        plan = self._plan_for(event, waiter, self._places)
        self._rounds.overtaken(self._act.carry_out(waiter, plan, now), now)
        if isinstance(plan, Swap):
            # The load belongs to the model: it proceeds even if this request cannot wait for it.
            if late := self._too_late(event, waiter, plan.model):
                self._act.refuse(waiter, late)
            # Its victims may free more room than it takes.
            return Dirty.ALL
        if isinstance(plan, Wait) and plan.why is not WaitReason.BUSY:
            self._rounds.joined(plan.until, now)
            if self._make_way(event.priority, now):
                return Dirty.PLANS
        return Dirty.NOTHING

    def _make_way(self, priority: int, now: float) -> bool:
        """Call off plans of less urgent models that have not started. Their memory is planned anew."""
        called_off = self._called_off(priority, now)
        for slot in called_off:
            self._slots.call_off(slot)
        return bool(called_off)

    def _called_off(self, priority: int, now: float) -> list[Slot]:
        """Planned slots of less urgent models that are not late."""
        state = self.state
        promised = [state.slots[slot] for slot in state.ledger.promises]
        return [
            slot
            for slot in promised
            if slot.lease is None
            and (queue := state.waitlist.queues.get(slot.model)) is not None
            and state.pacing.gives_way(slot.last_priority, queue, priority, now)
        ]

    def _plan_for(self, event: ev.RequestArrived, waiter: Waiter, places: Places) -> Plan:
        """The plan for a new request, or a refusal if the queue is full or its answer would come too late."""
        state, plan = self.state, self._first_plan(waiter, event.now, places)
        if isinstance(plan, Refuse) or (isinstance(plan, Serve) and event.answer_by is None):
            return plan
        if isinstance(plan, Serve):
            # One request is let through now and then. Otherwise one slow answer would lock out all requests with a
            # budget, because nothing new would be learned.
            model = state.slots[plan.slot].model
            is_known = event.now - state.models[model].tried_at < TRY_AGAIN_S
            return (self._too_late(event, waiter, model) if is_known else None) or plan
        if state.waitlist.depth >= state.limits.queue_depth_max:
            return Refuse(RejectCode.QUEUE_FULL, max(1.0, state.avg_wait_s or 0.0))
        # A request for a model that is neither ready nor loading stays queued even if it will be late: it causes the
        # load.
        is_begun = isinstance(plan, Join) or any(slot.is_serving for slot in state.slots_of(plan.model))
        return (self._too_late(event, waiter, plan.model) if is_begun else None) or plan

    def _first_plan(self, waiter: Waiter, now: float, places: Places) -> Plan:
        waitlist, model = self.state.waitlist, waiter.model
        can_wait = waitlist.has_many_models and model in waitlist.queues and len(waiter.candidates) == 1
        if can_wait and self._rounds.is_away(model, now) and not self.state.shutting_down:
            return Wait(WaitReason.MANY_MODELS, model, now + LOOK_SOON_S)
        return decide(self.state, waiter, now, places)

    def _too_late(self, event: ev.RequestArrived, waiter: Waiter, model: ModelId) -> Refuse | None:
        """The refusal if the caller would give up before its answer begins, or the answer would exceed its budget."""
        if event.answer_by is None and (event.patient or event.give_up_at is None):
            return None
        wait_s = eta_s(self.state, waiter, model, event.now)
        if wait_s is None:
            return None
        begins, service_s = event.now + wait_s, self.state.models[model].service_s or 0.0
        gives_up = not event.patient and event.give_up_at is not None and begins > event.give_up_at
        over_budget = event.answer_by is not None and begins + service_s > event.answer_by
        return Refuse(RejectCode.EXPIRED, wait_s) if gives_up or over_budget else None

    def _on_request_gone(self, event: ev.RequestGone) -> Dirty | Slot:
        waiter = self.state.waitlist.get(event.request)
        if grant := self._granted(event.request):
            return self._end_grant(event.request, grant, event.now)
        if waiter is not None and waiter.kind is WaiterKind.REQUEST:
            self._act.forget(event.request)
            self.state.accounts.leave(waiter.tenant)
            return Dirty.ALL
        self.state.counters.ignored += 1
        return Dirty.NOTHING

    def _on_serve_done(self, event: ev.ServeDone) -> Dirty | Slot:
        grant = self._granted(event.request)
        if grant is None:
            self.state.counters.ignored += 1
            return Dirty.NOTHING
        if event.lost_before_first_byte:
            self._take_back(grant, event.now)
        elif not grant.is_cut:
            self._learn_from(grant, event.now)
        return self._end_grant(event.request, grant, event.now)

    def _granted(self, request: RequestId) -> Grant | None:
        """The grant of a request. A lease's grant is ended by `LeaseGone` alone."""
        grant = self.state.grants.get(request)
        return grant if grant is not None and grant.waiter.kind is WaiterKind.REQUEST else None

    def _learn_from(self, grant: Grant, now: float) -> None:
        """An answer that ended by itself shows that the model works, and how long it takes."""
        slot = self.state.slots[grant.slot]
        record = self.state.record_of(slot)
        if record is not None and not slot.lost:
            record.failures = 0
            record.answered(now - grant.granted_at)
            record.tried_at = now
            record.share_s = learn(record.share_s, slot.share(now) - grant.share_from)

    def _take_back(self, grant: Grant, now: float) -> None:
        """Put a request that was lost before its first byte back in its place, once; else refuse it."""
        waiter = grant.waiter
        if self.state.shutting_down:
            self._act.refuse(waiter, Refuse(RejectCode.SHUTTING_DOWN))
        elif waiter.came_back or grant.is_cut or waiter.model not in self.state.models:
            self._act.refuse(waiter, Refuse(RejectCode.LOST))
        else:
            self._act.put_back(waiter)

    def _end_grant(self, request: RequestId, grant: Grant, now: float) -> Dirty | Slot:
        """A served request has ended. If its slot stays, only the slot's own model has gained room."""
        state, slot, tenant = self.state, self.state.slots[grant.slot], grant.waiter.tenant
        used_s = self._slots.give_back(slot, request, now) - grant.share_from
        del state.grants[request]
        state.counters.dones += 1
        state.accounts.charge(tenant, used_s - grant.charged_s)
        if grant.waiter.answer_by is not None:
            self._slots.forget_timer(ev.Timer(ev.TimerKind.BUDGET, request))
        if slot.is_idle:
            self._slots.after_last_answer(slot, now)
        came_back = request in state.waitlist
        if not came_back:
            state.accounts.leave(tenant)
        if state.is_settled:
            return Dirty.NOTHING if slot.is_serving else Dirty.GREEN_ROOM
        return Dirty.ALL if came_back or not slot.is_serving or state.waitlist.choosy else slot

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
                self._slots.leave(slot, Tier.COLD, event.drain_s, because("shutdown"), event.now)

    # --- settling -------------------------------------------------------------------------------------------------

    def _settle_request(self, dirty: Dirty | Slot, now: float) -> None:
        """Settle what a request event has made possible. A slot means room in that slot alone."""
        moved = True
        if isinstance(dirty, Slot):
            self._rounds.overtaken(self._act.fill(dirty.model, now), now)
            # An idle slot may be evicted for another model.
            moved = dirty.is_idle
            if moved:
                self._rounds.bring(now)
        elif dirty is Dirty.ALL:
            self._settle(now)
        elif dirty is Dirty.PLANS:
            # The more urgent models first; slots that need not leave after all then serve their own queues.
            self._rounds.bring(now)
            self._rounds.overtaken(self._fill(now), now)
        else:
            moved = dirty is Dirty.GREEN_ROOM
        if self._rounds.is_due:
            self._rounds.bring(now)
            moved = True
        if moved:
            self._slots.trim(now)

    def _settle(self, now: float) -> None:
        """Start planned moves, fill free places, then see which waiting models may come."""
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

    def _fill(self, now: float) -> float:
        """Fill ready models that have room, or that operators wait for. Returns the latest value of `Actions.fill`."""
        queues = self.state.waitlist.queues
        there = [slot for slot in self.state.slots.values() if slot.spec.id in queues and slot.is_serving]
        models = [slot.model for slot in there if slot.has_room or queues[slot.model].askers]
        return max([self._act.fill(model, now) for model in models], default=-inf)
