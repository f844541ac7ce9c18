"""Bugs planted in the core one by one: the fault simulation must find every one of them.

    python -m tests.chaos.seeds.planted [NAME …]

plays seeds until one fails, and prints which checker found each bug at which seed. Each bug replaces one function or
method of the core, so that what is tested is the simulation, never a copy of the core.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from math import inf
from multiprocessing import get_context
from typing import Any

from greenroom.core import events, ledger, mechanism, model, state
from greenroom.core.apply import Actions, Rounds
from greenroom.core.configuration import Configuration
from greenroom.core.decide import arrival, placement, residents
from greenroom.core.decide.plan import Serve
from greenroom.core.effects import RejectCode
from greenroom.core.mechanism import Dirty, Mechanism
from greenroom.core.moves import Moves
from greenroom.core.policy import coordinator
from greenroom.core.policy.default import BoundedFirstCome
from greenroom.core.policy.swapper import Resident
from greenroom.core.queue.waiter import WEIGHT_MIN, Accounts
from greenroom.core.queue.waitlist import Queue, Waiter
from greenroom.core.slots import SlotWriter
from tests.chaos.many import outcome, task_storm_outcome
from tests.chaos.play import Failure, Played

# Seeds played before a bug counts as not found.
SEEDS_MAX = 200

# The original, and what takes its place.
Mutation = Callable[[Callable[..., Any]], Any]


@dataclass(frozen=True)
class Bug:
    """What is replaced, and by what."""

    owner: Any
    attribute: str
    mutation: Mutation


BUGS: dict[str, Bug] = {}


def planted(owner: Any, attribute: str) -> Callable[[Mutation], Mutation]:
    def register(mutation: Mutation) -> Mutation:
        BUGS[mutation.__name__] = Bug(owner, attribute, mutation)
        return mutation

    return register


def every(nth: int) -> Callable[[], bool]:
    """True at every n-th call."""
    calls = count(1)
    return lambda: next(calls) % nth == 0


def nothing(*_: Any, **__: Any) -> None:
    """What a forgotten call does."""


# --- choosing -------------------------------------------------------------------------------------------------------


@planted(arrival, "choose")
def cloud_too_early(original: Callable[..., int]) -> Any:
    """A remote model serves whatever no local one can serve at once."""

    def choose(options: list[arrival.Option], waiter: Waiter) -> int:
        best = original(options, waiter)
        spare = [place for place, one in enumerate(options) if one.is_last_resort and isinstance(one.plan, Serve)]
        return spare[0] if spare and not isinstance(options[best].plan, Serve) else best

    return choose


@planted(Actions, "next_for")
def cloud_after_the_first_loss(original: Callable[..., Any]) -> Any:
    """A request whose model was lost falls to the last of its candidates."""

    def next_for(self: Actions, waiter: Waiter, but: model.ModelId, *more: Any) -> model.ModelId | None:
        known = self._state.models
        return next((name for name in reversed(waiter.candidates) if name != but and name in known), None)

    return next_for


@planted(Actions, "strike_last_resort")
def cloud_for_the_busy(original: Callable[..., Any]) -> Any:
    return nothing


@planted(Mechanism, "_leave_last_resort")
def cloud_for_ever(original: Callable[..., Any]) -> Any:
    """A request that waits for a remote model stays there when a local one can serve again."""
    return nothing


# --- counting and granting --------------------------------------------------------------------------------------------


@planted(Mechanism, "request_gone")
def stranded_counter(original: Callable[..., None]) -> Any:
    def on_request_gone(self: Mechanism, event: events.RequestGone) -> Any:
        return Dirty.NOTHING if event.request in self.state.grants else original(self, event)

    return on_request_gone


@planted(Actions, "serve")
def double_grant(original: Callable[..., Any]) -> Any:
    is_time = every(50)

    def serve(self: Actions, waiter: Any, slot: model.Slot, now: float) -> Any:
        passed_since = original(self, waiter, slot, now)
        if waiter.id in self._state.grants and is_time():
            original(self, waiter, slot, now)
        return passed_since

    return serve


@planted(residents.Residents, "apart")
def both_configurations_at_once(original: Callable[..., Any]) -> Any:
    return lambda self, spec: frozenset()


@planted(model.Slot, "has_room")
def one_too_many_at_once(original: Any) -> Any:
    return property(lambda slot: len(slot.in_flight) <= slot.concurrency)


@planted(model.Slot, "is_serving")
def grant_to_leaving_slot(original: Any) -> Any:
    return property(lambda slot: slot.tier is model.Tier.READY and slot.move is None and not slot.lost)


@planted(Mechanism, "_take_back")
def taken_back_for_ever(original: Callable[..., None]) -> Any:
    def take_back(self: Mechanism, grant: state.Grant, was_busy: bool) -> None:
        grant.waiter.had_failure = False
        original(self, grant, was_busy)

    return take_back


@planted(Actions, "refuse")
def double_reject(original: Callable[..., None]) -> Any:
    is_time = every(20)

    def refuse(self: Actions, waiter: Any, plan: Any) -> None:
        original(self, waiter, plan)
        if waiter.kind.value == "request" and is_time():
            self._effects.reject(waiter.id, self._rejection(waiter, plan), None)  # type: ignore[arg-type]

    return refuse


@planted(Actions, "_rejection")
def wrong_reason(original: Callable[..., Any]) -> Any:
    def rejection(self: Actions, waiter: Any, plan: Any) -> Any:
        return replace(original(self, waiter, plan), code=RejectCode.QUEUE_FULL)

    return rejection


# --- order and fairness -----------------------------------------------------------------------------------------------


@planted(Actions, "first_of")
def order_swapped(original: Callable[..., Any]) -> Any:
    def first_of(self: Actions, queue: Any, now: float) -> Any:
        first = original(self, queue, now)
        same = [
            waiter for waiter in queue if first and (waiter.tenant, waiter.priority) == (first.tenant, first.priority)
        ]
        return [waiter for waiter in same if waiter.kind is first.kind][-1] if same else first

    return first_of


@planted(BoundedFirstCome, "turn")
def unfair_lift(original: Callable[..., Any]) -> Any:
    return lambda self, waiter, served_s, now: (waiter.priority, served_s, waiter.sequence)


@planted(Accounts, "charge")
def service_not_charged(original: Callable[..., None]) -> Any:
    return nothing


@planted(Accounts, "charge")
def weights_ignored(original: Callable[..., None]) -> Any:
    def charge(self: Accounts, tenant: Any, slot_s: float) -> None:
        original(self, tenant, slot_s * max(WEIGHT_MIN, self.weights.get(tenant, 1.0)))

    return charge


@planted(mechanism, "plan_for")
def queue_without_bound(original: Callable[..., Any]) -> Any:
    def plan_for(its: state.State, *asked: Any) -> Any:
        limits, its.limits = its.limits, replace(its.limits, queue_depth_max=10**9)
        try:
            return original(its, *asked)
        finally:
            its.limits = limits

    return plan_for


# --- waiting ----------------------------------------------------------------------------------------------------------


@planted(BoundedFirstCome, "takes_at")
def bound_broken(original: Callable[..., float]) -> Any:
    return lambda self, queue, resident, now: inf if resident.is_busy else original(self, queue, resident, now)


@planted(BoundedFirstCome, "takes_at")
def own_queue_before_all(original: Callable[..., float]) -> Any:
    def takes_at(self: BoundedFirstCome, queue: Queue, resident: Resident, now: float) -> float:
        return inf if resident.is_busy and resident.queue is not None else original(self, queue, resident, now)

    return takes_at


@planted(Rounds, "bring")
def lost_wake_up(original: Callable[..., None]) -> Any:
    is_time = every(7)
    return lambda self, now: None if is_time() else original(self, now)


@planted(Actions, "fill")
def room_not_given(original: Callable[..., None]) -> Any:
    is_time = every(20)
    return lambda self, model, now: -inf if is_time() else original(self, model, now)


# --- leaving ----------------------------------------------------------------------------------------------------------


@planted(SlotWriter, "go_on_leaving")
def evict_busy(original: Callable[..., None]) -> Any:
    def go_on_leaving(self: SlotWriter, slot: model.Slot, reason: Any, now: float) -> None:
        busy, slot.in_flight = slot.in_flight, {}
        try:
            original(self, slot, reason, now)
        finally:
            slot.in_flight = busy

    return go_on_leaving


@planted(residents, "_is_tied")
def pin_ignored(original: Callable[..., bool]) -> Any:
    return lambda slot: slot.move is not None or slot.planned is not None


@planted(Configuration, "_renew")
def revision_mixed_up(original: Callable[..., None]) -> Any:
    def renew(self: Configuration, old: Any, spec: model.ModelSpec, now: float) -> None:
        slots = list(self._state.slots_of(spec.id))
        if old is None or any(slot.is_going for slot in slots):
            original(self, old, spec, now)
            return
        old.spec = spec
        for slot in slots:
            slot.spec = spec

    return renew


@planted(SlotWriter, "look_at_idle")
def ttl_ignored(original: Callable[..., None]) -> Any:
    def look_at_idle(self: SlotWriter, slot: model.Slot, now: float) -> None:
        slot.looked_at = None

    return look_at_idle


@planted(SlotWriter, "_tell_leaving_ops")
def operator_forgotten(original: Callable[..., None]) -> Any:
    is_time = every(10)
    return lambda self, slot: None if is_time() else original(self, slot)


@planted(SlotWriter, "cut")
def budget_never_cuts(original: Callable[..., None]) -> Any:
    return lambda self, request, reason: None if reason.why == "budget" else original(self, request, reason)


# --- memory -----------------------------------------------------------------------------------------------------------


@planted(ledger.Ledger, "can_start")
def oversubscribed(original: Callable[..., bool]) -> Any:
    return lambda self, slot, claim: True


@planted(ledger.Ledger, "held_by")
def seen_memory_ignored(original: Callable[..., Any]) -> Any:
    def held_by(self: ledger.Ledger, slot: Any) -> Any:
        holding = self.holdings.get(slot)
        if holding is not None:
            holding.seen = {}
        return original(self, slot)

    return held_by


@planted(ledger.Ledger, "release")
def memory_not_released(original: Callable[..., None]) -> Any:
    is_time = every(10)

    def release(self: ledger.Ledger, slot: Any) -> None:
        if is_time():
            self.unpromise(slot)
        else:
            original(self, slot)

    return release


@planted(SlotWriter, "unplan")
def promise_leaked(original: Callable[..., None]) -> Any:
    def unplan(self: SlotWriter, slot: model.Slot) -> None:
        promised = self._state.ledger.promises.get(slot.id, {})
        original(self, slot)
        self._state.ledger.promise(slot.id, promised)

    return unplan


@planted(ledger.Ledger, "set_others")
def other_gateways_ignored(original: Callable[..., None]) -> Any:
    return nothing


@planted(Moves, "_refused_room")
def untouched_victim_forgotten(original: Callable[..., None]) -> Any:
    return lambda self, slot, now: self._slots.remove(slot)


@planted(placement, "_on_each")
def lease_without_all_its_gpus(original: Callable[..., Any]) -> Any:
    return lambda count, *more: original(count - 1, *more)


@planted(Configuration, "_set_need")
def measured_need_ignored(original: Callable[..., None]) -> Any:
    return nothing


@planted(SlotWriter, "trim")
def green_room_without_bound(original: Callable[..., None]) -> Any:
    return nothing


@planted(model.Slot, "sleeps_in")
def folded_copy_counted_too_small(original: Callable[..., None]) -> Any:
    return lambda self, seen: original(self, {device: mib // 2 for device, mib in seen.items()})


@planted(Actions, "_grant")
def keep_alive_ignored(original: Callable[..., None]) -> Any:
    def grant(self: Actions, waiter: Any, slot: model.Slot, now: float) -> Any:
        waiter.keep_alive_s = None
        return original(self, waiter, slot, now)

    return grant


@planted(model.Slot, "idle_s")
def stay_cut_short(original: Any) -> Any:
    return property(lambda slot: None if slot.spec.pinned else abs(slot.keep_alive_s or slot.spec.ttl_s) or None)


@planted(coordinator, "_may_go")
def coordinator_disturbs_the_urgent(original: Callable[..., bool]) -> Any:
    return lambda resident, target: not resident.is_fixed and not resident.is_busy


# --- setbacks and timers ----------------------------------------------------------------------------------------------


@planted(Moves, "_count_failure")
def back_off_never_ends(original: Callable[..., None]) -> Any:
    def count_failure(self: Moves, record: state.ModelRecord, now: float) -> None:
        original(self, record, now)
        record.retry_at = now + 1e9
        self._slots.forget_timer(events.Timer(events.TimerKind.RETRY, record.spec.id))

    return count_failure


@planted(Mechanism, "_retry")
def back_off_comes_back_with_the_clock(original: Callable[..., None]) -> Any:
    def retry(self: Mechanism, model: model.ModelId, now: float) -> None:
        record = self.state.models[model]
        retry_at = record.retry_at
        original(self, model, now)
        record.retry_at = retry_at

    return retry


@planted(SlotWriter, "set_timer")
def forgotten_timer(original: Callable[..., None]) -> Any:
    def set_timer(self: SlotWriter, timer: events.Timer, at: float, reason: Any) -> None:
        if timer.kind is not events.TimerKind.EXPIRE:
            original(self, timer, at, reason)
        else:
            self._state.timers[timer] = at

    return set_timer


@planted(Moves, "_lose")
def crash_not_noticed(original: Callable[..., None]) -> Any:
    is_time = every(3)
    return lambda self, slot, event: None if is_time() else original(self, slot, event)


@planted(Moves, "lost")
def fall_not_noticed(original: Callable[..., None]) -> Any:
    def lost(self: Moves, event: events.SlotsLost) -> None:
        original(self, event)
        for slot in self._state.slots.values():
            slot.fell = False

    return lost


# --- finding them -----------------------------------------------------------------------------------------------------


@contextmanager
def bug(name: str) -> Iterator[None]:
    """The core with this bug in it."""
    one = BUGS[name]
    original = one.owner.__dict__[one.attribute]
    setattr(one.owner, one.attribute, one.mutation(original))
    try:
        yield
    finally:
        setattr(one.owner, one.attribute, original)


def found(
    name: str, seeds: Sequence[int] = range(SEEDS_MAX), play: Callable[[int], Played | Failure] = outcome
) -> Failure | None:
    """The first of these seeds that shows the bug, and would show nothing without it."""
    for seed in seeds:
        # Planted anew for each seed, so that the seed alone shows it again.
        with bug(name):
            failure = play(seed)
        if isinstance(failure, Failure) and not isinstance(play(seed), Failure):
            return failure
    return None


def _found(name: str) -> tuple[str, Failure | None]:
    return name, found(name, play=task_storm_outcome if name.startswith("cloud_") else outcome)


def main(names: Sequence[str]) -> int:
    missed = []
    with get_context("spawn").Pool(os.cpu_count()) as pool:
        for name, failure in pool.imap_unordered(_found, names or list(BUGS)):
            if failure is None:
                missed.append(name)
                sys.stdout.write(f"{name:28} NOT FOUND in {SEEDS_MAX} seeds\n")
            else:
                what = f"{failure.checker}: {failure.what}"[:110]
                sys.stdout.write(f"{name:28} seed {failure.seed:3} event {failure.event:6}  {what}\n")
            sys.stdout.flush()
    total = len(names or BUGS)
    sys.stdout.write(f"{total - len(missed)} of {total} planted bugs found\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
