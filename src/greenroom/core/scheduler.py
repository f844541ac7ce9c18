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
from greenroom.core.apply import Actions, Rounds
from greenroom.core.configuration import Configuration
from greenroom.core.decide.arrival import (
    Option,
    called_off,
    choose,
    decide,
    is_able,
    model_of,
    plan_for,
    too_late,
    waiter_for,
    weigh,
)
from greenroom.core.decide.decision import excluded_beside, refusal
from greenroom.core.decide.estimate import eta_s, leases_in_way, room_s
from greenroom.core.decide.placement import Places
from greenroom.core.decide.plan import Plan, Refuse, Swap, Wait, WaitReason
from greenroom.core.decide.residents import Residents
from greenroom.core.effects import BUDGET_OVER, Effects, RejectCode, because
from greenroom.core.explain import Explanation, Outlook, as_told, explanation, outlook
from greenroom.core.model import ModelId, ModelSpec, RequestId, Slot, SlotId, Tier, learn, lease_name
from greenroom.core.moves import Moves
from greenroom.core.policy import BUILT_IN, SWAPPERS, Swappers, make_policy
from greenroom.core.policy.base import Policies
from greenroom.core.queue.waitlist import Waiter, WaiterKind
from greenroom.core.slots import SlotWriter
from greenroom.core.state import Grant, LeaseRecord, ModelRecord, State
from greenroom.core.view import SchedulerView


class Dirty(Enum):
    """What an event may have made possible. The scheduler settles that and no more.

    Handlers of request events return it, because these are frequent and open little. Every other event settles all.
    """

    NOTHING = "nothing"
    GREEN_ROOM = "green_room"  # a slot has begun to leave while nothing waits
    PLANS = "plans"  # plans of less urgent models were called off
    ALL = "all"


# The number of a request that is only asked about: it would come after all others.
_LAST = 2**62


class Scheduler:
    def __init__(self, effects: Effects, policies: Policies = BUILT_IN, swappers: Swappers = SWAPPERS) -> None:
        self.state = State(make_policy(ev.Limits()))
        self.view = SchedulerView(self.state)
        self._slots = SlotWriter(self.state, effects)
        self._places = Places()
        self._act = Actions(self.state, effects, self._slots, self._places)
        self._rounds = Rounds(self.state, self._slots, self._act, self._places)
        configuration = Configuration(self.state, self._slots, self._act, policies, swappers)
        self._moves = moves = Moves(self.state, effects, self._slots, self._act)
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            ev.ConfigChanged: configuration.changed,
            ev.VersionPromoted: configuration.promoted,
            ev.MoveAsked: moves.asked,
            ev.MoveDone: moves.done,
            ev.SlotsLost: moves.lost,
            ev.MemoryChanged: self._on_memory_changed,
            ev.LeaseAsked: self._on_lease_asked,
            ev.LeaseGone: self._on_lease_gone,
            ev.TimerFired: self._on_timer_fired,
            ev.ShutdownAsked: self._on_shutdown_asked,
        }

    def handle(self, event: ev.Event) -> None:
        """Update the state for this event, then settle what it has made possible."""
        # Hot path: these come first, and by name, so that the compiled calls are direct.
        if isinstance(event, ev.RequestArrived):
            self._settle_request(self._on_request_arrived(event), event.now)
        elif isinstance(event, ev.ServeDone):
            self._settle_request(self._on_serve_done(event), event.now)
        elif isinstance(event, ev.RequestGone):
            self._settle_request(self._on_request_gone(event), event.now)
        else:
            # Before it, because it may be that one of last resort is ready, which then serves all that wait for it.
            self._leave_last_resort(event.now)
            self._handlers[type(event)](event)
            self._leave_last_resort(event.now)
            self._settle(event.now)
            self._slots.trim(event.now)

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
        return plan_for(self.state, arrival, waiter_for(arrival, _LAST), Places())

    def explanation(self, arrival: ev.RequestArrived) -> Explanation:
        """The same in full: what it would wait behind, what it would evict and why, and how long it may take."""
        return explanation(self.state, arrival, waiter_for(arrival, _LAST), Places())

    def weigh(self, arrival: ev.RequestArrived) -> tuple[list[Option], int]:
        """Its candidates as they are now, and the position of the one that it would get. Changes nothing."""
        waiter = waiter_for(arrival, _LAST)
        options = weigh(self.state, waiter, arrival.now, Places())
        return [as_told(self.state, waiter, one, arrival.now) for one in options], choose(options, waiter)

    def candidates_left(self, request: RequestId, now: float) -> tuple[ModelId, ...]:
        """The models that a request can still turn to if the one that it was granted fails. Changes nothing."""
        if (grant := self._granted(request)) is None:
            return ()
        state, waiter, places = self.state, grant.waiter, self._places
        residents = Residents(state, now, places)
        others = (name for name in waiter.candidates if name != state.slots[grant.slot].model)
        return tuple(name for name in others if is_able(state, waiter, name, now, places, residents))

    # --- requests -------------------------------------------------------------------------------------------------

    def _on_request_arrived(self, event: ev.RequestArrived) -> Dirty:
        state, now = self.state, event.now
        if state.knows(event.request):
            state.counters.ignored += 1
            return Dirty.NOTHING
        waiter = waiter_for(event, state.next_number())
        state.accounts.join(event.tenant)
        has_choice = len(event.candidates) > 1
        if not has_choice and (record := state.models.get(waiter.model)):
            record.warm_up(now, state.limits.recency_s)
        plan = plan_for(state, event, waiter, self._places)
        if has_choice and (model := model_of(state, plan)) is not None:
            # The candidate that it gets is the one that was asked for.
            state.models[model].warm_up(now, state.limits.recency_s)
        self._act.carry_out(waiter, plan, now)
        if isinstance(plan, Swap):
            # The load belongs to the model: it proceeds even if this request cannot wait for it.
            if late := too_late(state, event, waiter, plan.model):
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
        slots = called_off(self.state, priority, now)
        for slot in slots:
            self._slots.call_off(slot)
        return bool(slots)

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
            self._take_back(grant, event.was_busy, event.now)
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

    def _take_back(self, grant: Grant, was_busy: bool, now: float) -> None:
        """Put a request that was lost before its first byte back in its place, once; else refuse it.

        One with other candidates turns to the next that can serve it instead, and gets each once. A busy model is not
        asked again, and leads to no candidate of last resort. One that may not wait any longer is not put back for a
        slot that is still there: it would be granted that slot again.
        """
        state, waiter, slot = self.state, grant.waiter, self.state.slots[grant.slot]
        model = slot.model
        has_choice = len(waiter.candidates) > 1
        if was_busy:
            self._act.strike_last_resort(waiter)
        other = self._act.next_for(waiter, model, now)
        if state.shutting_down:
            self._act.refuse(waiter, Refuse(RejectCode.SHUTTING_DOWN))
        elif grant.is_cut or (
            other is None and (has_choice or was_busy or waiter.had_failure or model not in state.models)
        ):
            self._act.refuse(waiter, Refuse(RejectCode.LOST))
        elif other is None and slot.is_serving and waiter.give_up_at is not None and waiter.give_up_at <= now:
            self._act.refuse(waiter, Refuse(RejectCode.EXPIRED, eta_s(state, waiter, model, now)))
        else:
            self._act.put_back(waiter, model, other)

    def _end_grant(self, request: RequestId, grant: Grant, now: float) -> Dirty | Slot:
        """A served request has ended. If its slot stays, only the slot's own model has gained room."""
        state, slot, tenant = self.state, self.state.slots[grant.slot], grant.waiter.tenant
        used_s = self._slots.give_back(slot, request, now) - grant.share_from
        del state.grants[request]
        state.counters.dones += 1
        state.accounts.settle(tenant, used_s, grant.charged_s)
        if grant.waiter.answer_by is not None:
            self._slots.forget_timer(ev.Timer(ev.TimerKind.BUDGET, request))
        if slot.is_idle:
            self._slots.after_last_answer(slot, now)
        came_back = request in state.waitlist
        if not came_back:
            state.accounts.leave(tenant)
        if state.is_settled:
            return Dirty.NOTHING if slot.is_serving else Dirty.GREEN_ROOM
        if came_back or state.waitlist.with_choice:
            return Dirty.ALL
        if slot.is_serving:
            return slot
        # A slot that leaves opens nothing before its last answer has ended.
        return Dirty.ALL if slot.is_idle else Dirty.NOTHING

    # --- leases ---------------------------------------------------------------------------------------------------

    def _on_lease_asked(self, event: ev.LeaseAsked) -> None:
        """A lease has its own record and one waiter, and is ready as soon as its memory is free."""
        state, name = self.state, lease_name(event.lease)
        if state.knows(event.lease):
            state.counters.ignored += 1
            return
        state.add_lease(event.lease, LeaseRecord(_spec_of(event), event.need))
        number = state.next_number()
        since = event.now if event.waits_since is None else event.waits_since
        waiter = Waiter(
            event.lease, WaiterKind.LEASE, number, name, (name,), event.priority, since, give_up_at=event.give_up_at
        )
        self._act.settle(waiter, event.now)

    def _on_lease_gone(self, event: ev.LeaseGone) -> None:
        """The holder has left, or no longer waits."""
        if event.lease not in self.state.leases:
            self.state.counters.ignored += 1
            return
        self._act.forget(event.lease)
        self._act.end_lease(event.lease)

    # --- timers ---------------------------------------------------------------------------------------------------

    def _on_timer_fired(self, event: ev.TimerFired) -> None:
        """A timer that fires early is set again; late or twice is harmless."""
        at = self.state.timers.pop(event.timer, None)
        if at is None:
            self.state.counters.ignored += 1
        elif event.now < at:
            self._slots.set_timer(event.timer, at, because("fired_early"))
        else:
            self._due(event.timer.kind, event.timer.subject, event.now)

    def _due(self, kind: ev.TimerKind, subject: str, now: float) -> None:
        """Timers are deleted with their subjects, so the subject of a timer that fires exists."""
        match kind:
            case ev.TimerKind.EXPIRE:
                self._expire(subject, now)
            case ev.TimerKind.RETRY:
                self._retry(ModelId(subject), now)
            case ev.TimerKind.GRACE:
                slot = self.state.slots[SlotId(subject)]
                self._slots.cut_all(slot, because("grace_over", model=slot.model))
            case ev.TimerKind.BUDGET:
                self._slots.cut(RequestId(subject), BUDGET_OVER)
            case ev.TimerKind.IDLE:
                self._slots.look_at_idle(self.state.slots[SlotId(subject)], now)
            case _:
                """ev.TimerKind.SWITCH: nothing to do here; a round follows every timer."""

    def _expire(self, waiter_id: str, now: float) -> None:
        state, waiter = self.state, self.state.waitlist[waiter_id]
        record, eta = state.claimants[waiter.model], eta_s(state, waiter, waiter.model, now)
        if any(slot.is_serving or slot.is_arriving for slot in state.slots_of(waiter.model)):
            self._act.refuse(waiter, Refuse(RejectCode.EXPIRED, eta))
        elif beside := excluded_beside(state, waiter, now, self._places):
            self._act.refuse(waiter, Refuse(RejectCode.EXPIRED, eta, beside=beside))
        else:
            # It has waited for memory: report how much is missing.
            free, more_s = state.ledger.free_mib(frozenset()), room_s(state, waiter, waiter.model, now)
            leases = leases_in_way(state, waiter, waiter.model)
            late = refusal(state, RejectCode.EXPIRED, eta, record.spec, record.need, free, more_s, leases=leases)
            self._act.refuse(waiter, late)

    def _retry(self, model: ModelId, now: float) -> None:
        record = self.state.claimants[model]
        record.retry_at, record.pausing = -inf, None
        if isinstance(record, ModelRecord) and record.preload_again:
            self._act.preload(model, now)

    # --- memory and the end ---------------------------------------------------------------------------------------

    def _on_memory_changed(self, event: ev.MemoryChanged) -> None:
        self.state.ledger.set_foreign(event.foreign_mib)
        for slot, seen in (event.seen or {}).items():
            self.state.ledger.observe(slot, seen)
        if event.leases is not None:
            self.state.ledger.set_others(event.leases)
        if event.store_is_down is not None:
            self.state.store_is_down = event.store_is_down
        self._moves.taken(event.taken, event.now)

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
        if dirty is Dirty.NOTHING:
            moved = False
        elif isinstance(dirty, Slot):
            self._act.fill(dirty.model, now)
            # An idle slot may be evicted for another model.
            moved = dirty.is_idle
            if moved:
                self._rounds.bring(now)
        elif dirty is Dirty.ALL:
            self._settle(now)
        elif dirty is Dirty.PLANS:
            # The more urgent models first; slots that need not leave after all then serve their own queues.
            self._rounds.bring(now)
            self._fill(now)
        # Dirty.GREEN_ROOM: nothing waits.
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
        self._choose(now)
        self._rounds.bring(now)

    def _leave_last_resort(self, now: float) -> None:
        """Move requests that wait for a candidate of last resort to another one that can serve by now."""
        state = self.state
        for waiter in state.waitlist.choosing():
            if waiter.model not in waiter.preferred:
                plan = decide(state, waiter, now, self._places)
                if model_of(state, plan) in waiter.preferred:
                    self._act.carry_out(waiter, plan, now)

    def _choose(self, now: float) -> None:
        """Decide again on requests with several candidates, where one of these has room.

        Not for candidates of last resort, which may have room at any time: `decide` turns to them when others fail.
        """
        state = self.state
        waiting = state.waitlist.choosing()
        rooms = {model for model in {name for waiter in waiting for name in waiter.preferred} if state.has_room(model)}
        for waiter in waiting if rooms else ():
            if any(name in rooms and state.has_room(name) for name in waiter.preferred):
                self._act.settle(waiter, now)

    def _fill(self, now: float) -> None:
        """Fill ready models that have room, or that operators wait for."""
        queues = self.state.waitlist.queues
        there = [slot for slot in self.state.at_rest() if slot.is_serving and slot.model in queues]
        for model in [slot.model for slot in there if slot.has_room or queues[slot.model].askers]:
            self._act.fill(model, now)


def _spec_of(event: ev.LeaseAsked) -> ModelSpec:
    """The lease as a spec for placement and eviction. A lease that cannot be recalled is pinned."""
    return ModelSpec(
        lease_name(event.lease),
        need=event.need,
        devices=event.devices,
        gpus=max(1, event.gpus),
        priority=event.priority,
        grace_s=event.grace_s,
        pinned=not event.preemptible,
    )
