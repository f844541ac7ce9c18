"""What every scheduler has to do and none decides: keep the tables of slots, memory, waiters and grants up to date.

Owns the reaction to every event: whose grant has ended, what a finished move means, what leaves because it was told
to. It grants, refuses and moves through the one writer of each table. It never looks for what else an event has made
possible: that is for the scheduler, `scheduler.py` or another.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from math import inf
from typing import Any, Final

from greenroom.core import events as ev
from greenroom.core.apply import Actions
from greenroom.core.configuration import Configuration, Rules
from greenroom.core.decide.arrival import called_off, decide, model_of, plan_for, too_late, waiter_for
from greenroom.core.decide.decision import excluded_beside, refusal
from greenroom.core.decide.estimate import eta_s, leases_in_way, room_s
from greenroom.core.decide.placement import Places
from greenroom.core.decide.plan import Plan, Refuse, Swap
from greenroom.core.effects import BUDGET_OVER, Effects, RejectCode, because
from greenroom.core.model import ModelId, ModelSpec, RequestId, Slot, SlotId, Tier, learn, lease_name
from greenroom.core.moves import Moves
from greenroom.core.queue.waitlist import Queue, Waiter, WaiterKind
from greenroom.core.slots import SlotWriter
from greenroom.core.state import Grant, LeaseRecord, ModelRecord, State
from greenroom.core.state_view import StateView

_AGAIN: Final = ev.Timer(ev.TimerKind.SWITCH, "")


class Dirty(Enum):
    """What an event may have made possible. A scheduler needs to settle that and no more.

    Handlers of request events return it, because these are frequent and open little. Every other event opens all.
    """

    NOTHING = "nothing"
    GREEN_ROOM = "green_room"  # a slot has begun to leave while nothing waits
    PLANS = "plans"  # plans of less urgent models were called off
    ALL = "all"


class Mechanism:
    """The tables and their upkeep. `rules` makes the order and the choice of evictions from the configured limits."""

    def __init__(self, effects: Effects, rules: Rules) -> None:
        self.state = State(rules(ev.Limits()))
        self.view = StateView(self.state)
        self.places = Places()
        self.slots = SlotWriter(self.state, effects)
        self.act = Actions(self.state, effects, self.slots, self.places)
        configuration = Configuration(self.state, self.slots, self.act, rules)
        self._moves = moves = Moves(self.state, effects, self.slots, self.act)
        self._handlers: dict[type[Any], Callable[[Any], object]] = {
            ev.RequestArrived: self.request_arrived,
            ev.RequestGone: self.request_gone,
            ev.ServeDone: self.serve_done,
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

    def take(self, event: ev.Event) -> None:
        """Update the tables for this event, whichever it is."""
        # Before it, because it may be that one of last resort is ready, which then serves all that wait for it.
        self._leave_last_resort(event.now)
        self._handlers[type(event)](event)
        self._leave_last_resort(event.now)

    def advance(self, now: float) -> None:
        """Start planned moves whose memory is free, and fill the free places of ready models."""
        self.act.start_planned(now)
        self.fill(now)
        self._choose(now)

    def ask_for(self, queue: Queue, now: float) -> list[tuple[Waiter, Plan]]:
        """Decide on its first waiter, on the next if that one has left, and on operators that want its model asleep."""
        asked, first = [], self.act.first_of(queue, now)
        while first is not None:
            asked.append((first, self.act.settle(first, now)))
            stays = first.id in self.state.waitlist and first.model == queue.model
            first = None if stays else self.act.first_of(queue, now)
        asked += [(waiter, self.act.settle(waiter, now)) for waiter in list(queue.preparing.values())]
        return asked

    def look_again_at(self, at: float) -> None:
        """Have an event come at this time, though nothing else happens; infinity: not any more."""
        if at == inf:
            self.slots.forget_timer(_AGAIN)
        elif at != self.state.timers.get(_AGAIN):
            self.slots.set_timer(_AGAIN, at, because("switch"))

    # --- requests -------------------------------------------------------------------------------------------------

    def request_arrived(self, event: ev.RequestArrived) -> Plan | None:
        """Decide on a new request. Returns its plan; None if its id is known already."""
        state, now = self.state, event.now
        if state.knows(event.request):
            state.counters.ignored += 1
            return None
        waiter = waiter_for(event, state.next_number())
        state.accounts.join(event.tenant)
        has_choice = len(event.candidates) > 1
        if not has_choice and (record := state.models.get(waiter.model)):
            record.warm_up(now, state.limits.recency_s)
        plan = plan_for(state, event, waiter, self.places)
        if has_choice and (model := model_of(state, plan)) is not None:
            # The candidate that it gets is the one that was asked for.
            state.models[model].warm_up(now, state.limits.recency_s)
        self.act.carry_out(waiter, plan, now)
        if isinstance(plan, Swap) and (late := too_late(state, event, waiter, plan.model)):
            # The load belongs to the model: it proceeds even if this request cannot wait for it.
            self.act.refuse(waiter, late)
        return plan

    def make_way(self, priority: int, now: float) -> bool:
        """Call off plans of less urgent models that have not started: their memory is planned anew. True if any was."""
        slots = called_off(self.state, priority, now)
        for slot in slots:
            self.slots.call_off(slot)
        return bool(slots)

    def request_gone(self, event: ev.RequestGone) -> Dirty | Slot:
        waiter = self.state.waitlist.get(event.request)
        if grant := self._granted(event.request):
            return self._end_grant(event.request, grant, event.now)
        if waiter is not None and waiter.kind is WaiterKind.REQUEST:
            self.act.forget(event.request)
            self.state.accounts.leave(waiter.tenant)
            return Dirty.ALL
        self.state.counters.ignored += 1
        return Dirty.NOTHING

    def serve_done(self, event: ev.ServeDone) -> Dirty | Slot:
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
            self.act.strike_last_resort(waiter)
        other = self.act.next_for(waiter, model, now)
        if state.shutting_down:
            self.act.refuse(waiter, Refuse(RejectCode.SHUTTING_DOWN))
        elif grant.is_cut or (
            other is None and (has_choice or was_busy or waiter.had_failure or model not in state.models)
        ):
            self.act.refuse(waiter, Refuse(RejectCode.LOST))
        elif other is None and slot.is_serving and waiter.give_up_at is not None and waiter.give_up_at <= now:
            self.act.refuse(waiter, Refuse(RejectCode.EXPIRED, eta_s(state, waiter, model, now)))
        else:
            self.act.put_back(waiter, model, other)

    def _end_grant(self, request: RequestId, grant: Grant, now: float) -> Dirty | Slot:
        """A served request has ended. If its slot stays, only the slot's own model has gained room."""
        state, slot, tenant = self.state, self.state.slots[grant.slot], grant.waiter.tenant
        used_s = self.slots.give_back(slot, request, now) - grant.share_from
        del state.grants[request]
        state.counters.dones += 1
        state.accounts.settle(tenant, used_s, grant.charged_s)
        if grant.waiter.answer_by is not None:
            self.slots.forget_timer(ev.Timer(ev.TimerKind.BUDGET, request))
        if slot.is_idle:
            self.slots.after_last_answer(slot, now)
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
        self.act.settle(waiter, event.now)

    def _on_lease_gone(self, event: ev.LeaseGone) -> None:
        """The holder has left, or no longer waits."""
        if event.lease not in self.state.leases:
            self.state.counters.ignored += 1
            return
        self.act.forget(event.lease)
        self.act.end_lease(event.lease)

    # --- timers ---------------------------------------------------------------------------------------------------

    def _on_timer_fired(self, event: ev.TimerFired) -> None:
        """A timer that fires early is set again; late or twice is harmless."""
        at = self.state.timers.pop(event.timer, None)
        if at is None:
            self.state.counters.ignored += 1
        elif event.now < at:
            self.slots.set_timer(event.timer, at, because("fired_early"))
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
                self.slots.cut_all(slot, because("grace_over", model=slot.model))
            case ev.TimerKind.BUDGET:
                self.slots.cut(RequestId(subject), BUDGET_OVER)
            case ev.TimerKind.IDLE:
                self.slots.look_at_idle(self.state.slots[SlotId(subject)], now)
            case _:
                """ev.TimerKind.SWITCH: nothing to do here; a round follows every timer."""

    def _expire(self, waiter_id: str, now: float) -> None:
        state, waiter = self.state, self.state.waitlist[waiter_id]
        record, eta = state.claimants[waiter.model], eta_s(state, waiter, waiter.model, now)
        if any(slot.is_serving or slot.is_arriving for slot in state.slots_of(waiter.model)):
            self.act.refuse(waiter, Refuse(RejectCode.EXPIRED, eta))
        elif beside := excluded_beside(state, waiter, now, self.places):
            self.act.refuse(waiter, Refuse(RejectCode.EXPIRED, eta, beside=beside))
        else:
            # It has waited for memory: report how much is missing.
            free, more_s = state.ledger.free_mib(frozenset()), room_s(state, waiter, waiter.model, now)
            leases = leases_in_way(state, waiter, waiter.model)
            late = refusal(state, RejectCode.EXPIRED, eta, record.spec, record.need, free, more_s, leases=leases)
            self.act.refuse(waiter, late)

    def _retry(self, model: ModelId, now: float) -> None:
        record = self.state.claimants[model]
        record.retry_at, record.pausing = -inf, None
        if isinstance(record, ModelRecord) and record.preload_again:
            self.act.preload(model, now)

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
            self.act.refuse(waiter, Refuse(RejectCode.SHUTTING_DOWN))
        for slot in list(self.state.slots.values()):
            if slot.lease is None:
                self.slots.leave(slot, Tier.COLD, event.drain_s, because("shutdown"), event.now)

    # --- settling -------------------------------------------------------------------------------------------------

    def _leave_last_resort(self, now: float) -> None:
        """Move requests that wait for a candidate of last resort to another one that can serve by now."""
        state = self.state
        for waiter in state.waitlist.choosing():
            if waiter.model not in waiter.preferred:
                plan = decide(state, waiter, now, self.places)
                if model_of(state, plan) in waiter.preferred:
                    self.act.carry_out(waiter, plan, now)

    def _choose(self, now: float) -> None:
        """Decide again on requests with several candidates, where one of these has room.

        Not for candidates of last resort, which may have room at any time: `decide` turns to them when others fail.
        """
        state = self.state
        waiting = state.waitlist.choosing()
        rooms = {model for model in {name for waiter in waiting for name in waiter.preferred} if state.has_room(model)}
        for waiter in waiting if rooms else ():
            if any(name in rooms and state.has_room(name) for name in waiter.preferred):
                self.act.settle(waiter, now)

    def fill(self, now: float) -> None:
        """Fill ready models that have room, or that operators wait for."""
        queues = self.state.waitlist.queues
        there = [slot for slot in self.state.at_rest() if slot.is_serving and slot.model in queues]
        for model in [slot.model for slot in there if slot.has_room or queues[slot.model].askers]:
            self.act.fill(model, now)


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
