"""The scheduler: takes events, owns the state, asks for effects.

Each event updates what is known; then the scheduler settles: planned moves start, waiters are decided on again.
Questions (`outlook`, `explain`) change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from greenroom.core import events as ev
from greenroom.core.apply import Actions
from greenroom.core.cast import Cast
from greenroom.core.configuration import Configuration
from greenroom.core.decide import Join, Plan, Refuse, Serve, Swap, Wait, decide
from greenroom.core.effects import Effects, RejectCode, because
from greenroom.core.explain import Explanation, explanation
from greenroom.core.leases import Leases
from greenroom.core.model import DeviceId, ModelId, RequestId, Slot, Tier
from greenroom.core.moves import Moves
from greenroom.core.outlook import Outlook, eta_s, outlook
from greenroom.core.policies import BUILT_IN, SWAPPERS, Swappers, make_policy
from greenroom.core.policy import Policies
from greenroom.core.stage import Stage
from greenroom.core.state import Grant, State, learn
from greenroom.core.timers import Timers
from greenroom.core.waitlist import Queue, Waiter, WaiterKind

_OF_REQUESTS = frozenset({ev.RequestArrived, ev.RequestGone, ev.ServeDone})

# How many models that are not ready are looked at in one round, the first in rank. Others wait for their turn there.
ASKED_MAX = 16
# How long what is known of answers keeps out those whose budget is shorter.
TRY_AGAIN_S = 60.0
# With more waiting models than this there is a crowd: their order is kept for a moment, because it takes a microsecond
# for each of them; fewer are looked at in a round; and one more request for a model that is waited for already is
# looked at a little later, together with others.
RANKED_MANY = 64
ASKED_IN_CROWD = 4
LOOK_SOON_S = 0.1
RANKED_FRESH_S = 0.002  # For each of them: the more there are, the less a moment matters.
_SWITCH = ev.Timer(ev.TimerKind.SWITCH, "")


@dataclass(slots=True)
class Ranking:
    """The order in which models that are not ready come, as of some time."""

    models: list[ModelId] = field(default_factory=list)
    made_at: float = -inf
    deadline_at: float = inf

    def is_fresh(self, now: float, queues: int) -> bool:
        return 0.0 <= now - self.made_at < queues * RANKED_FRESH_S and now < self.deadline_at


class Scheduler:
    def __init__(self, effects: Effects, policies: Policies = BUILT_IN, swappers: Swappers = SWAPPERS) -> None:
        self.state = State(make_policy(ev.Limits()))
        self._ranking = Ranking()
        self._stage = Stage(self.state, effects)
        self._act = Actions(self.state, effects, self._stage)
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
            self._bring(event.now)

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

    def explain(self, arrival: ev.RequestArrived) -> Plan:
        """What would happen if this request came now. Nothing changes."""
        return self._plan_for(arrival, self._waiter(arrival, sequence=2**62))

    def explanation(self, arrival: ev.RequestArrived) -> Explanation:
        """The same in full: whom it would wait behind, whom it would evict and why, and how long it may take."""
        waiter = self._waiter(arrival, sequence=2**62)
        return explanation(self.state, waiter, self._plan_for(arrival, waiter), arrival.now)

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
            if event.priority <= 0:
                self._ranking.made_at = -inf
            self._ask_again_at(min(plan.until, self._switch_at), now)
            if self._make_way(event.priority, now):
                # First the more urgent; those who need not leave after all then go on with their own.
                self._bring(now)
                self._fill(now)

    def _make_way(self, priority: int, now: float) -> bool:
        """Call off what is planned but not begun for the less urgent, unless it is late: the places are given anew."""
        state, called_off = self.state, False
        for slot in [state.slots[slot] for slot in state.ledger.promises]:
            queue = state.waitlist.queues.get(slot.model)
            if slot.last_priority > priority and queue is not None and queue.late_at > now and slot.lease is None:
                self._stage.call_off(slot)
                called_off = True
        return called_off

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
        if in_crowd and self._is_away(model, now) and not self.state.shutting_down:
            return Wait("crowd", model, now + LOOK_SOON_S)
        return decide(self.state, waiter, now)

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
            self._bring(now)

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
        """Start what can start, fill what has room, then see which waiting models may come."""
        state = self.state
        if state.is_settled:
            self._rest(now)
            return
        self._act.start_planned(now)
        self._fill(now)
        for waiter in list(state.waitlist.choosy.values()):
            if any(state.has_room(model) for model in waiter.candidates):
                self._act.carry_out(waiter, decide(state, waiter, now), now)
        self._bring(now)

    def _fill(self, now: float) -> None:
        queues = self.state.waitlist.queues
        for model in [slot.model for slot in self.state.slots.values() if slot.model in queues]:
            self._act.fill(model, now)

    def _rest(self, now: float) -> None:
        """Nobody waits: nothing is to be looked at later."""
        state = self.state
        state.ask_again, state.oldest_cold = False, inf
        state.kept.clear()
        self._ask_again_at(inf, now)

    def _bring(self, now: float) -> None:
        """Ask for each waiting model that is not ready, the first in rank first, whether it may come now.

        The first few are asked for in any case. Further down only those may fare better who want less than anybody that
        had to wait for the same devices, or want others: so nobody is hidden behind those who wait for a busy device.
        """
        state = self.state
        state.ask_again = False
        state.kept.clear()
        ranking, cast, asked, until = self._ranked(now), Cast(state, now), 0, self._ranking.deadline_at
        few = ASKED_IN_CROWD if len(state.waitlist.queues) > RANKED_MANY else ASKED_MAX
        least: dict[tuple[DeviceId, ...], int] = {}
        for model in ranking:
            queue = state.waitlist.queues.get(model)
            if queue is None:
                continue
            record = state.models[model]
            devices, mib = record.spec.devices, record.need.gpu_mib + record.need.host_mib
            if asked >= few and mib >= least.get(devices, inf):
                continue
            if not self._is_away(model, now):
                continue
            if asked >= few + ASKED_MAX:
                break
            until_this, changed = self._ask_for(queue, cast, now)
            until, asked = min(until, until_this), asked + 1
            if changed:
                cast = Cast(state, now)
            else:
                least[devices] = min(mib, least.get(devices, mib))
        self._ask_again_at(until, now)

    def _ranked(self, now: float) -> list[ModelId]:
        """Those who are away, in the order in which they may come.

        With very many the order is kept for a moment, because making it takes longer than all else.
        """
        state, ranking, queues = self.state, self._ranking, len(self.state.waitlist.queues)
        if queues <= RANKED_MANY or not ranking.is_fresh(now, queues):
            policy = state.policy
            cold = [queue for queue in state.waitlist.queues.values() if self._is_away(queue.model, now)]
            cold.sort(key=lambda queue: policy.rank(queue, now))
            later = (queue.deadline_at for queue in cold if queue.deadline_at > now)
            ranking.models, ranking.made_at = [queue.model for queue in cold], now
            ranking.deadline_at = min(later, default=inf) if len(cold) > ASKED_IN_CROWD else inf
            state.oldest_cold = min((queue.oldest for queue in cold), default=inf)
        return ranking.models

    def _is_away(self, model: ModelId, now: float) -> bool:
        """Neither ready nor on its way in or out, nor pausing."""
        record = self.state.models[model]
        if record.pausing is not None and now < record.retry_at:
            return False
        return not any(
            slot.is_serving or slot.is_going or slot.move is not None or slot.planned is not None
            for slot in self.state.slots_of(model)
            if slot.spec.revision == record.spec.revision and not slot.lost
        )

    def _ask_for(self, queue: Queue, cast: Cast, now: float) -> tuple[float, bool]:
        """Decide on the first of this queue, and on the next if that one left; and on those who want it asleep.

        Returns when to ask again, and whether anything has changed.
        """
        until, changed, first = inf, False, self._act.first_of(queue, now)
        while first is not None:
            plan = self._decide_on(first, None if changed else cast, now)
            changed = changed or not isinstance(plan, Wait)
            stays = first.id in self.state.waitlist and first.model == queue.model
            if stays and isinstance(plan, Wait):
                self._keep_devices(queue, plan, now)
                until = plan.until
            first = None if stays else self._act.first_of(queue, now)
        for waiter in list(queue.preparing.values()):
            plan = self._decide_on(waiter, None if changed else cast, now)
            changed = changed or not isinstance(plan, Wait)
            until = min(until, plan.until) if isinstance(plan, Wait) else until
        return until, changed

    def _decide_on(self, waiter: Waiter, cast: Cast | None, now: float) -> Plan:
        plan = decide(self.state, waiter, now, cast)
        self._act.carry_out(waiter, plan, now)
        return plan

    def _keep_devices(self, queue: Queue, plan: Wait, now: float) -> None:
        """Who has been late for as long again, and only needs time or the end of a move, has its devices kept.

        Not before: what is kept serves nobody, and smaller models could have been fitted in.
        """
        if 2 * queue.late_at - queue.oldest <= now and (plan.until < inf or self.state.moves):
            self.state.kept[queue.model] = plan.on

    @property
    def _switch_at(self) -> float:
        return self.state.timers.get(_SWITCH, inf)

    def _ask_again_at(self, at: float, now: float) -> None:
        if at == self._switch_at:
            return
        if at == inf:
            self._stage.forget_timer(_SWITCH)
        else:
            self._stage.set_timer(_SWITCH, max(at, now), because("switch"))
