"""Carries out plans, of one waiter or of all that wait: changes the state and calls effects.

Owns how waiters join, leave, are granted and are refused (`Actions`); in which order waiting models are asked for, when
the next round of that is due, and the devices kept for models that have waited too long (`Rounds`). `slots.py` writes
the slots. Decisions are `decide`'s.
"""

from __future__ import annotations

from math import inf
from typing import Final

from greenroom.core.decide.arrival import decide, is_able
from greenroom.core.decide.decision import freest
from greenroom.core.decide.placement import Places
from greenroom.core.decide.plan import Join, Plan, Refuse, Serve, Swap, Wait
from greenroom.core.decide.residents import Residents
from greenroom.core.effects import Effects, OpOutcome, RejectCode, Rejection, because
from greenroom.core.events import Timer, TimerKind
from greenroom.core.model import DeviceId, LeaseId, ModelId, Move, OpId, RequestId, Slot, learn
from greenroom.core.queue.index import LEADING_MIN
from greenroom.core.queue.waitlist import Queue, Waiter, WaiterKind
from greenroom.core.slots import SlotWriter
from greenroom.core.state import Grant, State

# A preload is less urgent than every request.
PRELOAD_PRIORITY: Final = 1_000_000

_READY: Final = because("ready")
_OPS: Final = {
    RejectCode.UNKNOWN_MODEL: OpOutcome.UNKNOWN_MODEL,
    RejectCode.TOO_LARGE: OpOutcome.TOO_LARGE,
    RejectCode.EXCLUDED: OpOutcome.EXCLUDED,
    RejectCode.SHUTTING_DOWN: OpOutcome.CANCELLED,
    RejectCode.UNLOADED: OpOutcome.CANCELLED,
    RejectCode.REMOVED: OpOutcome.CANCELLED,
    RejectCode.STORE_DOWN: OpOutcome.STORE_DOWN,
}


def preload_id(model: ModelId) -> RequestId:
    """The id of a model's preload in the waitlist."""
    return RequestId(f"preload:{model}")


class Actions:
    def __init__(self, state: State, effects: Effects, slots: SlotWriter, places: Places) -> None:
        self._state = state
        self._effects = effects
        self._slots = slots
        self._places = places

    def settle(self, waiter: Waiter, now: float) -> Plan:
        """Decide on this waiter now, and carry out the plan."""
        plan = decide(self._state, waiter, now, self._places)
        self.carry_out(waiter, plan, now)
        return plan

    def carry_out(self, waiter: Waiter, plan: Plan, now: float) -> None:
        """Carry out the plan for this waiter, queued or not."""
        match plan:
            case Serve():
                self.serve(waiter, self._state.slots[plan.slot], now)
            case Join() | Wait():
                self._keep_waiting(waiter, plan.model)
            case Swap():
                self._keep_waiting(waiter, plan.model)
                self._swap(waiter, plan, now)
            case _:
                self.refuse(waiter, plan)

    # --- waiting --------------------------------------------------------------------------------------------------

    def _keep_waiting(self, waiter: Waiter, model: ModelId) -> None:
        waitlist = self._state.waitlist
        if waiter.id in waitlist:
            if model == waiter.model:
                return
            waitlist.remove(waiter.id, self._state.accounts)
        elif waiter.give_up_at is not None:
            self._slots.set_timer(Timer(TimerKind.EXPIRE, waiter.id), waiter.give_up_at, because("patience"))
        waitlist.add(waiter, model)
        self._state.price_queue(model)

    def put_back(self, waiter: Waiter, model: ModelId, other: ModelId | None) -> None:
        """Queue a request again that was lost at this model: for another one, or else for the same."""
        self._state.waitlist.mark_failed(waiter)
        if other is not None:
            self._state.waitlist.strike(waiter, model)
        self._keep_waiting(waiter, other or model)

    def next_for(self, waiter: Waiter, but: ModelId, now: float, residents: Residents | None = None) -> ModelId | None:
        """The candidate that this waiter turns to when `but` has failed; None if no other one can serve it.

        `residents` may be passed if no slot has changed since they were made.
        """
        if len(waiter.candidates) == 1:
            return None
        state, places = self._state, self._places
        residents = residents or Residents(state, now, places)
        for name in (*waiter.preferred, *waiter.candidates):
            if name != but and is_able(state, waiter, name, now, places, residents):
                return name
        return None

    def strike_last_resort(self, waiter: Waiter) -> None:
        """Remove its candidates of last resort."""
        for name in waiter.choice.last_resort if waiter.choice is not None else ():
            self._state.waitlist.strike(waiter, name)

    def forget(self, waiter_id: str, served_at: float | None = None) -> bool:
        """Remove this waiter from its queue. Returns False if it does not wait."""
        waiter = self._state.waitlist.remove(waiter_id, self._state.accounts, served_at)
        if waiter is None:
            return False
        if served_at is None:
            self._slots.owe_less(waiter.model, waiter.arrived)
        if waiter.give_up_at is not None:
            self._slots.forget_timer(Timer(TimerKind.EXPIRE, waiter_id))
        return True

    def preload(self, model: ModelId, now: float) -> None:
        """Queue a preload of this model. It loads when there is room; only a pinned model evicts others."""
        state, request = self._state, preload_id(model)
        if request in state.waitlist or state.shutting_down or now < state.models[model].retry_at:
            return
        number = state.next_number()
        state.waitlist.add(Waiter(request, WaiterKind.PRELOAD, number, model, (model,), PRELOAD_PRIORITY, now))
        state.price_queue(model)

    # --- refused --------------------------------------------------------------------------------------------------

    def refuse(self, waiter: Waiter, plan: Refuse) -> None:
        self.forget(waiter.id)
        beside = {"beside": ", ".join(plan.beside)} if plan.beside else {}
        why = because(plan.code.value, model=waiter.model, **beside)
        match waiter.kind:
            case WaiterKind.OP:
                self._effects.answer(OpId(waiter.id), _OPS.get(plan.code, OpOutcome.FAILED), why)
            case WaiterKind.REQUEST:
                if waiter.id not in self._state.grants:
                    self._state.accounts.leave(waiter.tenant)
                self._effects.reject(RequestId(waiter.id), self._rejection(waiter, plan), why)
            case WaiterKind.LEASE:
                self.end_lease(LeaseId(waiter.id))
                self._effects.reject(LeaseId(waiter.id), self._rejection(waiter, plan), why)

    def _rejection(self, waiter: Waiter, plan: Refuse) -> Rejection:
        state = self._state
        return Rejection(
            plan.code,
            waiter.model,
            plan.retry_after_s,
            state.waitlist.depth,
            state.avg_wait_s or 0.0,
            plan.needs_mib,
            plan.free_mib,
            plan.capacity_mib,
            plan.held_by,
            plan.beside,
            plan.room_s,
            plan.pinned,
            plan.leases,
        )

    def reject_waiters(self, model: ModelId, refusal: Refuse, now: float) -> None:
        """Reject the waiters of this model. One that another candidate can serve moves to that queue instead.

        If the model is to leave, any other one will do: it may fit once this one is gone.
        """
        state, leaves = self._state, refusal.code in (RejectCode.REMOVED, RejectCode.UNLOADED)
        residents: Residents | None = None
        for waiter in state.waitlist.of(model):
            if leaves:
                other = waiter.next_of(state.models, model)
            else:
                residents = residents or Residents(state, now, self._places)
                other = self.next_for(waiter, model, now, residents)
            state.waitlist.strike(waiter, model)
            if other is not None:
                self._keep_waiting(waiter, other)
            else:
                self.refuse(waiter, refusal)

    def end_lease(self, lease: LeaseId) -> None:
        """Delete this lease: its record, its memory and its promise."""
        state, name = self._state, self._state.drop_lease(lease).spec.id
        self._slots.forget_timer(Timer(TimerKind.RETRY, name))
        for slot in list(state.slots_of(name)):
            for request in slot.in_flight:
                del state.grants[request]
                state.counters.dones += 1
            self._slots.empty(slot)

    # --- next -----------------------------------------------------------------------------------------------------

    def first_of(self, queue: Queue, now: float) -> Waiter | None:
        """The next waiter of this queue; None if all of its waiters only want the model asleep."""
        turn, served_s, level_s = self._state.policy.turn, self._state.accounts.by_tenant, self._state.accounts.level_s
        return queue.first(lambda waiter: turn(waiter, served_s.get(waiter.tenant, level_s), now), now)

    def fill(self, model: ModelId, now: float) -> None:
        """Give free places of this model's slots to its waiters."""
        queue = self._state.waitlist.queues.get(model)
        if queue is None or not (serving := self._state.serving(model)):
            return
        # Operators and preloads only ask that the model be ready.
        for waiter in queue.asking():
            self.serve(waiter, serving[0], now)
        while queue.waiting and (slot := freest(serving)) is not None:
            first = self.first_of(queue, now)
            assert first is not None, "operators that want it asleep have been told that it is there"
            self.serve(first, slot, now)

    # --- served ---------------------------------------------------------------------------------------------------

    def serve(self, waiter: Waiter, slot: Slot, now: float) -> None:
        """Grant it this slot, or answer an operator."""
        waited = self.forget(waiter.id, now)
        if waiter.kind is WaiterKind.OP:
            self._effects.answer(OpId(waiter.id), OpOutcome.DONE, because("there", slot=slot.id))
            return
        if waiter.kind is WaiterKind.PRELOAD:
            return
        self._grant(waiter, slot, now)
        reason = because("ready", waited_s=round(max(0.0, now - waiter.arrived), 3)) if waited else _READY
        self._effects.grant(RequestId(waiter.id), slot.id, reason)

    def _grant(self, waiter: Waiter, slot: Slot, now: float) -> None:
        state, request = self._state, RequestId(waiter.id)
        share_from = self._slots.take(slot, request, waiter.priority, waiter.keep_alive_s, now)
        grant = state.grants[request] = Grant(slot.id, waiter, now, share_from)
        state.counters.grants += 1
        if waiter.kind is WaiterKind.REQUEST:
            state.avg_wait_s = learn(state.avg_wait_s, max(0.0, now - waiter.arrived))
            record = state.models[slot.model]
            grant.charged_s = record.share_s or record.service_s or 0.0
            state.accounts.serve(waiter.tenant, grant.charged_s)
            if waiter.answer_by is not None:
                record.tried_at = now
                self._slots.set_timer(Timer(TimerKind.BUDGET, request), waiter.answer_by, because("budget"))

    # --- swapped in -----------------------------------------------------------------------------------------------

    def _swap(self, waiter: Waiter, plan: Swap, now: float) -> None:
        state = self._state
        slot = state.slots[plan.wakes] if plan.wakes is not None else self._new_slot(waiter, plan)
        # First: a slot that is about to wake frees its place in the green room for the victims.
        self._slots.plan(slot, plan.kind)
        for victim in plan.evict:
            facts = {"loss": round(victim.loss, 4), "idle_s": round(now - victim.last_used, 1)}
            why = because("evicted", model=victim.model, for_model=plan.model, for_request=str(waiter.id), **facts)
            self._slots.evict(state.slots[victim.slot], victim.leaves_to, slot.id, why, now)
        # The model comes for its whole queue, so its plan gets the priority of the most urgent waiter.
        priority = min(waiter.priority, state.waitlist.queues[plan.model].priorities.first)
        self._slots.comes_for(slot, priority, waiter.tenant if waiter.kind is WaiterKind.REQUEST else None, now)
        state.counters.swaps += 1
        self._start(slot, now)

    def _new_slot(self, waiter: Waiter, plan: Swap) -> Slot:
        lease = LeaseId(waiter.id) if waiter.kind is WaiterKind.LEASE else None
        return self._slots.add(self._state.claimants[plan.model].spec, plan.claim, lease)

    def _charge(self, slot: Slot, move: Move) -> None:
        """Charge the tenant that caused the swap. Only a move that has started is charged: a plan may be called off."""
        state, tenant = self._state, slot.caused_by
        if tenant is not None and (record := state.record_of(slot)):
            state.accounts.charge(tenant, record.move_s(move.kind))
        self._slots.is_charged(slot)

    def start_planned(self, now: float) -> None:
        """Start every planned move that has its memory free; call off plans that are hopeless or no longer wanted."""
        state, going_from = self._state, self._state.ledger.going_from()
        # Nothing below frees memory, so that a plan that does not fit now does not fit later either.
        startable = set(state.ledger.startable())
        for slot, promised in [(state.slots[slot], promised) for slot, promised in state.ledger.promises.items()]:
            if slot.id in startable:
                self._start(slot, now)
            if slot.model not in state.waitlist.queues:
                self._slots.call_off_if_in_time(slot)
                # Victims that were still busy stay.
                going_from = state.ledger.going_from()
            if going_from.isdisjoint(promised) and self._slots.waits_for_no_move(slot):
                self._slots.call_off(slot)
                going_from = state.ledger.going_from()

    def _start(self, slot: Slot, now: float) -> None:
        if not self._slots.start_if_free(slot, now):
            return
        if slot.move is not None:
            self._charge(slot, slot.move)
        if slot.lease is not None:
            waiter = self._state.waitlist.get(slot.lease)
            assert waiter is not None, "a lease that no longer waits has no plan"
            self.serve(waiter, slot, now)


# --- rounds ---------------------------------------------------------------------------------------------------------

# How many models one round asks for in order of rank, and how many more that might fit. Others wait. With very many
# waiting models a round asks for fewer.
ASKED_MAX: Final = 16
# With more waiting models than this, the next deadline also sets the timer, because a round may not ask for all.
INSIST_MANY: Final = 4
# With very many waiting models there is a round at least this often, so that no rank grows old.
ROUND_WITH_MANY_S: Final = 0.5
# While a model waits for a busy one there is a round at least this often: what is served meanwhile may let it come
# sooner than the policy said.
ROUND_S: Final = 5.0
_SWITCH: Final = Timer(TimerKind.SWITCH, "")


class Rounds:
    """Asks, in order of rank, which waiting models may come now; the others are asked for again in the next round."""

    def __init__(self, state: State, slots: SlotWriter, act: Actions, places: Places) -> None:
        self._state = state
        self._places = places
        self._slots = slots
        self._act = act

    def joined(self, until: float, now: float) -> None:
        """A request now waits for a model that is not ready; asking again may help at `until`."""
        self.look_again_at(min(until, self.looks_at), now)

    def rest(self, now: float) -> None:
        """Nothing waits: cancel the timer and release kept devices."""
        self._state.kept.clear()
        self.look_again_at(inf, now)

    def bring(self, now: float) -> None:
        """Ask, in order of rank, whether each waiting model that is not ready may come now.

        The first few are always asked for. After them only models that need less memory than every model that had to
        wait for the same devices, or that use other devices: so a busy device does not block the models behind.
        """
        state = self._state
        state.kept.clear()
        few = LEADING_MIN if state.waitlist.has_many_models else ASKED_MAX
        ranking, until = self._ranked(now)
        residents, asked = Residents(state, now, self._places, may_keep=True), 0
        least: dict[tuple[DeviceId, ...], int] = {}
        for model in ranking:
            record = state.claimants[model]
            devices, mib = record.spec.devices, record.need.gpu_mib + record.need.host_mib
            smallest = least.get(devices)
            if asked >= few and smallest is not None and mib >= smallest:
                continue
            # An earlier decision of this round may have emptied the queue or brought the model.
            queue = state.waitlist.queues.get(model)
            if queue is None or not state.is_away(queue, now):
                continue
            if asked >= few + ASKED_MAX:
                break
            asked += 1
            until_this, then = self._ask_for(queue, residents, now)
            until = min(until, until_this)
            if then is residents:
                least[devices] = mib if smallest is None else min(mib, smallest)
            residents = then
        self.look_again_at(until, now)

    def _ranked(self, now: float) -> tuple[list[ModelId], float]:
        """Models that are away, in order of rank, and when the next round is due in any case."""
        state = self._state
        queues = state.waitlist.ranking(state.policy.rank, state.is_away, now)
        models = [queue.model for queue in queues]
        if state.waitlist.has_many_models:
            return models, now + ROUND_WITH_MANY_S
        deadlines = (queue.deadline_at for queue in queues if queue.deadline_at > now)
        return models, min(deadlines, default=inf) if len(queues) > INSIST_MANY else inf

    def _ask_for(self, queue: Queue, residents: Residents, now: float) -> tuple[float, Residents]:
        """Decide on the first of this queue, on the next if that one has left, and on operators that want it asleep.

        Returns when to ask again, and the residents from then on: the same object if nothing has changed.
        """
        if self._is_kept_out(queue, residents, now):
            return inf, residents
        until, first = inf, self._act.first_of(queue, now)
        while first is not None:
            plan, residents = self._decide_on(first, residents, now)
            stays = first.id in self._state.waitlist and first.model == queue.model
            if stays and isinstance(plan, Wait):
                if plan.keeps:
                    self._state.kept[queue.model] = plan.keeps
                until = plan.until
            first = None if stays else self._act.first_of(queue, now)
        for waiter in list(queue.preparing.values()):
            plan, residents = self._decide_on(waiter, residents, now)
            until = min(until, plan.until) if isinstance(plan, Wait) else until
        return until, residents

    def _is_kept_out(self, queue: Queue, residents: Residents, now: float) -> bool:
        """True if every device that it could use is kept for others, so that asking would change nothing.

        Nothing is kept for the model itself yet: a round asks for each model once.
        """
        state, record = self._state, self._state.claimants[queue.model]
        if not state.kept or queue.preparing or state.waitlist.with_choice or record.retry_at > now:
            return False
        if queue.model in state.slots_by_model or record.spec.version_of is not None:
            # A coming version may also have to be refused because its own model stays where it is.
            return False
        ways = residents.ways(record)
        return bool(ways) and not state.open_ways(ways, queue.model)

    def _decide_on(self, waiter: Waiter, residents: Residents, now: float) -> tuple[Plan, Residents]:
        plan = decide(self._state, waiter, now, self._places, residents)
        self._act.carry_out(waiter, plan, now)
        if isinstance(plan, Wait):
            return plan, residents
        if isinstance(plan, Swap):
            return plan, residents.after_swap(self._state.claimants[plan.model].spec)
        return plan, Residents(self._state, now, self._places, residents.may_keep)

    @property
    def looks_at(self) -> float:
        """When the next round is due if nothing happens."""
        return self._state.timers.get(_SWITCH, inf)

    def look_again_at(self, at: float, now: float) -> None:
        """Schedule a round; infinity: only when something happens."""
        at = min(at, now + ROUND_S) if at < inf else inf
        if at == self.looks_at:
            return
        if at == inf:
            self._slots.forget_timer(_SWITCH)
        else:
            self._slots.set_timer(_SWITCH, max(at, now), because("switch"))
