"""A Plan becomes state changes and effects. Everything the scheduler does to its state on purpose is done here.

Owns who waits and who is served. How slots come and go is `stage.py`'s. Never decides: what should happen was decided
before.
"""

from __future__ import annotations

from greenroom.core.decide import Join, Plan, Refuse, Serve, Swap, Wait, passed_by
from greenroom.core.effects import Effects, OpOutcome, RejectCode, Rejection, because
from greenroom.core.events import Timer, TimerKind
from greenroom.core.model import DeviceId, LeaseId, ModelId, OpId, RequestId, Slot, SlotId
from greenroom.core.policy import Blocked
from greenroom.core.stage import Stage
from greenroom.core.state import Grant, State, learn
from greenroom.core.waitlist import Waiter, WaiterKind

# Preloads wait behind everybody.
PRELOAD_PRIORITY = 1_000_000

_READY = because("ready")
_OPS = {
    RejectCode.UNKNOWN_MODEL: OpOutcome.UNKNOWN_MODEL,
    RejectCode.TOO_LARGE: OpOutcome.TOO_LARGE,
    RejectCode.SHUTTING_DOWN: OpOutcome.CANCELLED,
    RejectCode.UNLOADED: OpOutcome.CANCELLED,
    RejectCode.REMOVED: OpOutcome.CANCELLED,
}


def wish_for(model: ModelId) -> RequestId:
    """The id under which a preload waits."""
    return RequestId(f"preload:{model}")


class Actions:
    def __init__(self, state: State, effects: Effects, stage: Stage) -> None:
        self._state = state
        self._effects = effects
        self._stage = stage

    def carry_out(self, waiter: Waiter, plan: Plan, now: float) -> None:
        """Do what was decided for this waiter, which may stand in the waitlist or be about to."""
        match plan:
            case Serve(slot):
                self.serve(waiter, self._state.slots[slot], now)
            case Join(_, model):
                self._keep_waiting(waiter, model)
            case Wait(_, model, blocked):
                self._keep_waiting(waiter, model)
                if blocked is not None:
                    self._block(blocked)
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
            waitlist.remove(waiter.id)
        elif waiter.give_up_at is not None:
            self._stage.set_timer(Timer(TimerKind.EXPIRE, waiter.id), waiter.give_up_at, because("patience"))
        waiter.model = model
        waitlist.add(waiter)

    def _block(self, blocked: Blocked) -> None:
        """Of several who wait for one model the first counts."""
        known = self._state.blocked.get(blocked.model)
        if known is None or blocked.key < known.key:
            self._state.blocked[blocked.model] = blocked

    def forget(self, waiter_id: str) -> None:
        """This one no longer waits, if it did."""
        if self._state.waitlist.remove(waiter_id) is not None:
            self._stage.forget_timer(Timer(TimerKind.EXPIRE, waiter_id))

    def preload(self, model: ModelId, now: float) -> None:
        """Wish for this model: it comes as soon as there is room. Only a pinned one makes others leave."""
        state, wish = self._state, wish_for(model)
        if wish in state.waitlist or state.shutting_down or now < state.models[model].retry_at:
            return
        key = state.policy.key(PRELOAD_PRIORITY, state.next_number())
        state.waitlist.add(Waiter(wish, WaiterKind.PRELOAD, key, model, (model,), PRELOAD_PRIORITY, now))

    # --- refused --------------------------------------------------------------------------------------------------

    def refuse(self, waiter: Waiter, plan: Refuse) -> None:
        self.forget(waiter.id)
        why = because(plan.code.value, model=waiter.model)
        match waiter.kind:
            case WaiterKind.OP:
                self._effects.answer(OpId(waiter.id), _OPS.get(plan.code, OpOutcome.FAILED), why)
            case WaiterKind.REQUEST:
                self._effects.reject(RequestId(waiter.id), self._rejection(waiter, plan), why)
            case WaiterKind.LEASE:
                self.end_lease(waiter.model)
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
        )

    def reject_waiters(self, model: ModelId, refusal: Refuse) -> None:
        """End everybody who waits for this model, except those who named another that may still serve them."""
        state = self._state
        for waiter in state.waitlist.of(model):
            waiter.candidates = tuple(name for name in waiter.candidates if name != model)
            other = next((name for name in waiter.candidates if name in state.models), None)
            if other is not None:
                self._keep_waiting(waiter, other)
            else:
                self.refuse(waiter, refusal)

    def end_lease(self, model: ModelId) -> None:
        """Nothing is left of this lease: neither its record nor what it holds or was promised."""
        state = self._state
        del state.models[model]
        for slot in list(state.slots_of(model)):
            for request in slot.in_flight:
                del state.grants[request]
                state.counters.dones += 1
            slot.in_flight.clear()
            self._stage.remove(slot)

    # --- served ---------------------------------------------------------------------------------------------------

    def serve(self, waiter: Waiter, slot: Slot, now: float) -> None:
        state = self._state
        waited = waiter.id in state.waitlist
        if waited:
            self.forget(waiter.id)
        if waiter.kind is WaiterKind.OP:
            self._effects.answer(OpId(waiter.id), OpOutcome.DONE, because("there", slot=slot.id))
            return
        if waiter.kind is WaiterKind.PRELOAD:
            return
        if state.blocked:
            self._count_overtakes(waiter, slot.model, frozenset({slot.id}), frozenset())
        self._grant(waiter, slot, now)
        reason = because("ready", waited_s=round(now - waiter.arrived, 3)) if waited else _READY
        self._effects.grant(RequestId(waiter.id), slot.id, reason)

    def _grant(self, waiter: Waiter, slot: Slot, now: float) -> None:
        state, request = self._state, RequestId(waiter.id)
        if waiter.kind is WaiterKind.REQUEST:
            state.avg_wait_s = learn(state.avg_wait_s, now - waiter.arrived)
        slot.in_flight[request] = None
        slot.last_used = now
        slot.last_priority = waiter.priority
        waiter.granted_at = now
        state.grants[request] = Grant(slot.id, waiter)
        state.counters.grants += 1

    def _count_overtakes(
        self, waiter: Waiter, model: ModelId, slots: frozenset[SlotId], devices: frozenset[DeviceId]
    ) -> None:
        for blocked in passed_by(self._state, waiter, model, slots, devices):
            self._state.overtaken[blocked.model] = self._state.overtaken.get(blocked.model, 0) + 1
            self._state.counters.overtakes += 1

    # --- swapped in -----------------------------------------------------------------------------------------------

    def _swap(self, waiter: Waiter, plan: Swap, now: float) -> None:
        state = self._state
        victims = frozenset(victim.slot for victim in plan.evict)
        self._count_overtakes(waiter, plan.model, victims, frozenset(plan.takes_on))
        state.overtaken.pop(plan.model, None)
        state.blocked.pop(plan.model, None)
        for victim in plan.evict:
            why = because("evicted", model=victim.model, for_model=plan.model, for_request=str(waiter.id))
            self._stage.evict(state.slots[victim.slot], victim.leaves_to, why, now)
        slot = state.slots[plan.wakes] if plan.wakes is not None else self._new_slot(waiter, plan)
        slot.last_priority = waiter.priority
        slot.last_used = now
        self._stage.plan(slot, plan.kind)
        self._start(slot, now)

    def _new_slot(self, waiter: Waiter, plan: Swap) -> Slot:
        state, spec = self._state, self._state.models[plan.model].spec
        slot = Slot(SlotId(f"s{state.next_number()}"), spec, plan.claim, state.asleep_at(spec, plan.claim))
        slot.can_sleep = spec.need_asleep is not None
        slot.lease = LeaseId(waiter.id) if waiter.kind is WaiterKind.LEASE else None
        state.add_slot(slot)
        return slot

    def start_planned(self, now: float) -> None:
        """Start every planned move whose memory is free now; give up those for which none is on its way any more."""
        for slot in [slot for slot in self._state.slots.values() if slot.planned is not None]:
            self._start(slot, now)
            self._stage.give_up_if_hopeless(slot)

    def _start(self, slot: Slot, now: float) -> None:
        if self._stage.start_if_free(slot, now) and slot.lease is not None:
            waiter = self._state.waitlist.get(slot.lease)
            assert waiter is not None, "a lease that no longer waits has no plan"
            self.serve(waiter, slot, now)
