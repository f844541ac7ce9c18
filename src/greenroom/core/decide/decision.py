"""One decision tree: what should happen to this waiter now, for one model. Pure.

The answer is a Plan, which `apply.py` carries out. Nothing here changes anything. `arrival.py` chooses among the models
of a waiter that has several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Final, NamedTuple

from greenroom.core.decide import green_room, placement
from greenroom.core.decide.placement import Places, Ways, way_to
from greenroom.core.decide.plan import Join, Plan, Refuse, Serve, Swap, Wait, WaitReason
from greenroom.core.decide.residents import Residents
from greenroom.core.effects import RejectCode
from greenroom.core.model import (
    Claim,
    DeviceId,
    LeaseId,
    ModelId,
    ModelSpec,
    MoveKind,
    Need,
    Outcome,
    Slot,
    Tier,
)
from greenroom.core.policy.swapper import ByMemory, Eviction, Resident, Target
from greenroom.core.queue.waitlist import Queue, Waiter, WaiterKind
from greenroom.core.state import Claimant, State

# Outcomes after which loads pause without refusing waiters.
_PAUSES: Final = {Outcome.NO_LEASE: WaitReason.NO_LEASE, Outcome.STORE_DOWN: WaitReason.STORE_DOWN}


def decide_for(
    state: State, waiter: Waiter, model: ModelId, now: float, places: Places, residents: Residents | None = None
) -> Plan:
    """The plan for this waiter if it gets this model. `residents` may be passed if nothing changed since."""
    if state.shutting_down:
        return Refuse(RejectCode.SHUTTING_DOWN)
    is_lease = waiter.kind is WaiterKind.LEASE
    record: Claimant | None = state.leases.get(LeaseId(waiter.id)) if is_lease else state.models.get(model)
    if record is None:
        return Refuse(RejectCode.UNKNOWN_MODEL)
    if record.spec.held:
        return Wait(WaitReason.HELD, model)
    slots = [slot for slot in state.slots_of(model) if slot.spec.revision == record.spec.revision and not slot.lost]
    # 1. Ready: serve, unless it is full.
    if slots and (serving := [slot for slot in slots if slot.is_serving]):
        return _decide_ready(waiter, model, serving)
    # 2. On its way: join.
    for slot in slots:
        if slot.is_arriving:
            return Join(slot.id, model)
    # 3. Failing or pausing: refuse or wait.
    if pause := _decide_pause(state, waiter, record, now):
        return pause
    # 4. On its way out, or to the green room: wait until it is there, then come back here.
    if slots and any(slot.is_going or slot.move is not None or slot.planned is not None for slot in slots):
        return Wait(WaitReason.LEAVING, model)
    # 5. Cold or asleep: bring it.
    asleep = slots[0] if slots else None
    if waiter.wants is MoveKind.PREPARE and asleep is not None:
        return Serve(asleep.id)
    return _decide_swap(state, waiter, record, asleep, residents or Residents(state, now, places), now)


def _decide_ready(waiter: Waiter, model: ModelId, serving: list[Slot]) -> Plan:
    # An operator's load only asks that the model be ready.
    if waiter.kind in (WaiterKind.OP, WaiterKind.PRELOAD):
        return Serve(serving[0].id)
    slot = freest(serving)
    return Wait(WaitReason.BUSY, model) if slot is None else Serve(slot.id)


def freest(serving: list[Slot]) -> Slot | None:
    """The slot with room that answers fewest; None if all are full."""
    found: Slot | None = None
    for slot in serving:
        if slot.has_room and (found is None or len(slot.in_flight) < len(found.in_flight)):
            found = slot
    return found


def _decide_pause(state: State, waiter: Waiter, record: Claimant, now: float) -> Plan | None:
    if now >= record.retry_at:
        return None
    retry_after_s = record.retry_at - now
    if record.pausing is None:
        return Refuse(RejectCode.LOAD_FAILED, retry_after_s)
    if record.pausing is Outcome.STORE_DOWN and waiter.id not in state.waitlist:
        return Refuse(RejectCode.STORE_DOWN, retry_after_s)
    return Wait(_PAUSES[record.pausing], record.spec.id)


def _decide_swap(
    state: State, waiter: Waiter, record: Claimant, asleep: Slot | None, residents: Residents, now: float
) -> Plan:
    spec, most = record.spec, _most_mib(state, record.spec, asleep, residents)
    kind = _kind(waiter, spec, asleep)
    ways = _ways(state, record, kind, asleep, residents, most)
    if not ways and asleep is not None:
        # It can never wake where it sleeps: load it elsewhere, as if it were cold.
        return _decide_swap(state, waiter, record, None, residents, now)
    if not ways:
        if kind is MoveKind.PREPARE and spec.need_asleep is not None:
            within = green_room.within(state, most)
            return refusal(state, RejectCode.TOO_LARGE, None, spec, spec.need_asleep, within)
        pinned = _pinned_in_way(state, record, residents)
        return refusal(state, RejectCode.TOO_LARGE, None, spec, record.need, most, pinned=pinned)
    if state.store_is_down and all(way.on for way in ways.each):
        # A waiter that is queued stays queued; a new one is refused, so that its caller can go elsewhere.
        waits = waiter.id in state.waitlist
        return Wait(WaitReason.STORE_DOWN, spec.id) if waits else Refuse(RejectCode.STORE_DOWN, state.limits.replan_s)
    open_ways = state.open_ways(ways, spec.id) if state.kept else ways
    if not open_ways:
        return Wait(WaitReason.KEPT_FOR_OTHERS, spec.id, behind=state.keepers(ways.each[0].on, spec.id))
    if kind is MoveKind.PREPARE and not green_room.can_take(state, open_ways.wants[0]):
        return Wait(WaitReason.GREEN_ROOM, spec.id)
    will_be_ready = kind is not MoveKind.PREPARE and waiter.kind is not WaiterKind.LEASE and not spec.is_remote
    queue = _queue(state, waiter, spec.id)
    if kind is MoveKind.LOAD and state.next_move(spec.id) is MoveKind.WAKE:
        # In place of a wake it costs what a load costs.
        queue = queue.priced((record.move_s(MoveKind.LOAD), queue.service_s, queue.at_once))
    urgency = _urgency(waiter, queue)
    apart, rank = residents.apart(spec), residents.rank
    target = Target(spec.id, open_ways.wants, urgency.priority, will_be_ready, apart, spec.version_of, rank)
    eviction, until = _eviction(state, queue, urgency, target, asleep, residents, now)
    if asleep is not None and (eviction is None or eviction.is_blocked):
        # Wait for the wake until that has cost as much as a load costs more than it. A queue does not count preloads.
        more_s = record.move_s(MoveKind.LOAD) - record.move_s(MoveKind.WAKE)
        load_from = min(queue.oldest, waiter.arrived) + more_s
        if now < load_from:
            until = min(until, load_from)
        else:
            _, until_here = _willing(state, urgency, queue, residents.at(open_ways.on, but=asleep), now)
            may_close = eviction is None and now + more_s < until_here
            elsewhere = _load_elsewhere(state, waiter, record, asleep, residents, now, may_close)
            if isinstance(elsewhere, Swap):
                return elsewhere
            until = min(until, elsewhere)
    if eviction is None:
        is_request = urgency.kind is WaiterKind.REQUEST
        keeps = _keeps(state, urgency, queue, target, open_ways, asleep, residents, now) if is_request else frozenset()
        if not _has_rules(state, target):
            return Wait(WaitReason.NO_ROOM, spec.id, until, open_ways.on, keeps=keeps)
        there = residents.those(may_sleep=False, but=asleep)
        if pinned := _excluded_by(state, target, [one for one in there if state.slots[one.slot].spec.pinned], most):
            return Refuse(RejectCode.EXCLUDED, beside=pinned)
        willing, _ = _willing(state, urgency, queue, there, now)
        beside = _excluded_by(state, target, _marked(there, willing, residents), most)
        return Wait(
            WaitReason.EXCLUDED if beside else WaitReason.NO_ROOM,
            spec.id,
            until,
            open_ways.on,
            beside=beside,
            keeps=keeps,
        )
    way = open_ways.each[target.options.index(eviction.claim)]
    return Swap(spec.id, kind, way.claim, eviction.victims, asleep.id if asleep is not None else None)


def _load_elsewhere(
    state: State, waiter: Waiter, record: Claimant, asleep: Slot, residents: Residents, now: float, may_close: bool
) -> Swap | float:
    """A load on other devices in place of a wake that cannot begin; or else when asking again may help.

    A model wakes only where it sleeps. If it is loaded elsewhere, its sleeping copy leaves. Busy models elsewhere are
    closed for it only if `may_close`: if none may be closed soon where it sleeps.
    """
    if record.spec.pinned or len(residents.ways(record).each) < 2:
        return inf
    plan = _decide_swap(state, waiter, record, None, residents, now)
    if isinstance(plan, Wait) and may_close:
        return plan.until
    if not isinstance(plan, Swap) or (not may_close and any(victim.is_busy for victim in plan.evict)):
        return inf
    copy = next(one for one in residents.those(may_sleep=False, but=None) if one.slot == asleep.id)
    return replace(plan, evict=(*(one for one in plan.evict if one.slot != asleep.id), copy))


def _most_mib(state: State, spec: ModelSpec, asleep: Slot | None, residents: Residents) -> dict[DeviceId, int]:
    """What could ever be free for it: beside a coming version, its model stays like one that is pinned."""
    if spec.version_of is None and not (asleep is not None and spec.pinned):
        return residents.most_mib
    return state.most_mib(asleep, stays=spec.version_of)


def refusal(
    state: State,
    code: RejectCode,
    retry_after_s: float | None,
    spec: ModelSpec,
    need: Need,
    mib: Mapping[DeviceId, int],
    room_s: float = 0.0,
    pinned: tuple[ModelId, ...] = (),
    leases: tuple[LeaseId, ...] = (),
) -> Refuse:
    """A refusal for lack of memory, in numbers: what is needed, what there is, and which other gateways hold some."""
    figures, held_by = placement.shortfall(spec, need, state.devices, mib), state.holders(spec.devices)
    return Refuse(code, retry_after_s, *figures, held_by=held_by, room_s=room_s, pinned=pinned, leases=leases)


def _pinned_in_way(state: State, record: Claimant, residents: Residents) -> tuple[ModelId, ...]:
    """Pinned models without which it would fit; none if it would not fit even then."""
    own = (record.spec.id, record.spec.version_of)
    pinned = [(slot.model, claim) for slot, claim in state.fixed(None) if slot.model not in own]
    names = dict.fromkeys(model for model, _ in pinned)
    ways = residents.ways_within(record, state.most_mib(None, names, record.spec.version_of))
    most = state.most_mib(None, stays=record.spec.version_of)
    short = {device for way in ways.each for device, mib in way.wants.items() if mib > most.get(device, 0)}
    held = [(model, {device for device, mib in claim.items() if mib > 0}) for model, claim in pinned]
    return tuple(dict.fromkeys(model for model, devices in held if not short.isdisjoint(devices)))


def _kind(waiter: Waiter, spec: ModelSpec, asleep: Slot | None) -> MoveKind:
    if asleep is not None:
        return MoveKind.WAKE
    can_prepare = waiter.wants is MoveKind.PREPARE and spec.need_asleep is not None
    return MoveKind.PREPARE if can_prepare else MoveKind.LOAD


def _ways(
    state: State,
    record: Claimant,
    kind: MoveKind,
    asleep: Slot | None,
    residents: Residents,
    most: Mapping[DeviceId, int],
) -> Ways:
    """Every placement that could ever hold it; none if it is too large."""
    if asleep is not None:
        during = asleep.needs_for(kind)
        held = state.ledger.held_by(asleep.id)
        return Ways([way_to(asleep.claim, _less(during, held))] if placement.fits(during, most) else [])
    if kind is MoveKind.LOAD and record.spec.version_of is not None:
        return residents.ways_within(record, most)
    ways = residents.ways(record)
    if kind is MoveKind.LOAD:
        return ways
    # It may take the same asleep on any GPU, and wakes where it sleeps: the best place comes first.
    best_first = sorted(ways.each, key=lambda way: residents.rank(way.claim))
    to_sleep = [way_to(way.claim, state.asleep_at(record.spec, way.claim)) for way in best_first]
    within = green_room.within(state, most)
    return Ways([way for way in to_sleep if placement.fits(way.wants, within)])


def _less(claim: Claim, held: Claim) -> Claim:
    return {device: mib - held.get(device, 0) for device, mib in claim.items()}


class Urgency(NamedTuple):
    """The kind and priority that count when residents are asked to leave."""

    kind: WaiterKind
    priority: int


def _urgency(waiter: Waiter, queue: Queue) -> Urgency:
    """A model is as urgent as its most urgent waiter; otherwise a late request would hold up an urgent one.

    An operator's prepare, a preload and a lease count for themselves alone.
    """
    if waiter.wants is MoveKind.PREPARE or waiter.kind in (WaiterKind.PRELOAD, WaiterKind.LEASE):
        return Urgency(waiter.kind, waiter.priority)
    return Urgency(WaiterKind.OP if queue.operators else WaiterKind.REQUEST, queue.priorities.first)


def _eviction(
    state: State, queue: Queue, urgency: Urgency, target: Target, but: Slot | None, residents: Residents, now: float
) -> tuple[Eviction | None, float]:
    """Evict residents to sleep if that frees enough, else to cold; and when more of them may be asked to leave."""
    swapper, room = state.policy.swapper, residents.room_mib
    there, until = _judged(state, queue, urgency, target, True, but, residents, now)
    found = swapper.eviction_for(target, there, room)
    if found is not None and not found.is_blocked:
        return found, until
    if not residents.some_wake_slowly and Tier.ASLEEP not in [one.leaves_to for one in there if not one.is_fixed]:
        # A model that may not even be put to sleep yet may not be unloaded either: it would be away for longer.
        return found, until
    there, until_cold = _judged(state, queue, urgency, target, False, but, residents, now)
    colder = swapper.eviction_for(target, there, room)
    use_colder = colder is not None and (found is None or not colder.is_blocked)
    return colder if use_colder else found, min(until, until_cold)


def _judged(
    state: State,
    queue: Queue,
    urgency: Urgency,
    target: Target,
    may_sleep: bool,
    but: Slot | None,
    residents: Residents,
    now: float,
) -> tuple[list[Resident], float]:
    """The residents that matter, fixed where they may not leave for this queue yet; and when the next of them may."""
    if _all_matter(state, target):
        there = residents.those(may_sleep, but)
        willing, until = _willing(state, urgency, queue, there, now)
        return _marked(there, willing, residents), until
    awake, until = _willing(state, urgency, queue, residents.awake(may_sleep, but), now)
    if not residents.could_free(target.options, awake):
        # Most questions end here: too little may leave.
        return [], until
    sleepers = residents.sleepers_for(target.options, awake, but)
    sleepers, until_them = _willing(state, urgency, queue, sleepers, now)
    return awake + sleepers, min(until, until_them)


def _marked(there: list[Resident], willing: list[Resident], residents: Residents) -> list[Resident]:
    """All of them, fixed but for the willing."""
    leave = frozenset(willing)
    return [one if one in leave or one.is_fixed else residents.fixed(one) for one in there]


def _all_matter(state: State, target: Target) -> bool:
    """True if not only residents that free memory matter: to coresidency rules, or to a swapper that is not ours."""
    return _has_rules(state, target) or type(state.policy.swapper) is not ByMemory


def _keeps(
    state: State,
    urgency: Urgency,
    queue: Queue,
    target: Target,
    ways: Ways,
    asleep: Slot | None,
    residents: Residents,
    now: float,
) -> frozenset[DeviceId]:
    """Devices where this model, if it has waited too long, could come soon if no other model came there meanwhile."""
    if not residents.may_keep or (soon := now + state.pacing.keeps_for_s(queue, now)) <= now:
        return frozenset()
    residents.may_keep = False
    for way in ways.each:
        there = residents.at(way.wants, but=asleep)
        leaving = [one for one in there if not _stays(state, urgency, queue, one, soon, now)]
        room_mib = {
            device: residents.room_mib.get(device, 0) + sum(one.gives_mib.get(device, 0) for one in leaving)
            for device in way.wants
        }
        if placement.fits(way.wants, room_mib):
            if not _all_matter(state, target):
                return way.on
            # Only coresidency concerns residents that stay, or that are elsewhere.
            judged = residents.those(may_sleep=False, but=asleep) if _has_rules(state, target) else leaving
            then = [one.fixed(_stays(state, urgency, queue, one, soon, now)) for one in judged]
            only = replace(target, options=(way.wants,))
            found = state.policy.swapper.eviction_for(only, then, residents.room_mib)
            return frozenset() if found is None else way.on
    return frozenset()


def _has_rules(state: State, target: Target) -> bool:
    """True if coresidency rules, or other configurations of the same thing, may exclude it beside some residents."""
    return state.limits.company is not None or bool(target.apart)


def _stays(state: State, urgency: Urgency, queue: Queue, resident: Resident, soon: float, now: float) -> bool:
    """True if it may not leave for this queue by then. One that is on its way serves those that wait for it first."""
    if not resident.cannot_leave:
        return _askable_at(state, urgency, queue, resident, now) > soon
    own = state.waitlist.queues.get(resident.model)
    if own is not None and now + own.waiting * own.service_s / own.at_once > soon:
        return True
    return state.slots[resident.slot].spec.pinned


def excluded_beside(state: State, waiter: Waiter, now: float, places: Places) -> tuple[ModelId, ...]:
    """Models beside which the coresidency rules exclude the model that this waiter waits for; none if they do not."""
    has_rules = state.limits.company is not None or bool(state.claimants[waiter.model].spec.exclusive)
    plan = decide_for(state, waiter, waiter.model, now, places) if has_rules else None
    return plan.beside if isinstance(plan, Wait) else ()


def _excluded_by(
    state: State, target: Target, residents: list[Resident], most: Mapping[DeviceId, int]
) -> tuple[ModelId, ...]:
    """A smallest set of these residents' models beside which the coresidency rules exclude the target, memory aside."""
    swapper, ready = state.policy.swapper, [one for one in residents if one.counts_as_ready]
    if swapper.eviction_for(target, ready, most) is not None:
        return ()
    for one in tuple(ready):
        others = [other for other in ready if other is not one]
        if swapper.eviction_for(target, others, most) is None:
            ready = others
    return tuple(one.model for one in ready)


def _queue(state: State, waiter: Waiter, model: ModelId) -> Queue:
    """The model's queue as it is with this waiter in it."""
    queue = state.waitlist.queues.get(model)
    if queue is not None and waiter.id in state.waitlist and waiter.model == model:
        return queue
    return (queue or Queue(model, state.policy.priority_class)).joined_by(waiter, state.prices(model))


def _willing(
    state: State, urgency: Urgency, queue: Queue, there: list[Resident], now: float
) -> tuple[list[Resident], float]:
    """Those of these residents that may leave for this queue now; and when the next of them may."""
    until, takes_at, found = inf, state.policy.takes_at, []
    by_policy = urgency.kind is WaiterKind.REQUEST
    stays = state.claimants[queue.model].spec.version_of
    for resident in there:
        if resident.cannot_leave:
            continue
        if by_policy and resident.counts_as_ready and resident.model != stays:
            at = takes_at(queue, resident, now)
        else:
            at = _askable_at(state, urgency, queue, resident, now)
        if at <= now:
            found.append(resident)
        elif at < until:
            until = at
    return found, until


def _askable_at(state: State, urgency: Urgency, queue: Queue, resident: Resident, now: float) -> float:
    slot = state.slots[resident.slot]
    if slot.model == state.claimants[queue.model].spec.version_of:
        # It serves on while its next version comes.
        return inf
    if slot.lease is not None:
        # A lease is recalled only for something more urgent.
        return now if slot.last_priority > urgency.priority else inf
    if urgency.kind is WaiterKind.PRELOAD:
        # A preload evicts no model, unless its own model is pinned.
        return now if state.models[queue.model].spec.pinned and not resident.is_busy else inf
    if urgency.kind is WaiterKind.OP and not resident.is_busy:
        return now
    return state.policy.takes_at(queue, resident, now)
