"""How long a request will wait, by what earlier moves and answers have taught.

Callers are told `eta_s` and `room_s` together; decisions go by `eta_s` and `least_s`. Changes nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from math import inf

from greenroom.core.decide import placement
from greenroom.core.model import Claim, DeviceId, LeaseId, ModelId, MoveKind, Need, Slot, Tier
from greenroom.core.queue.waitlist import Waiter
from greenroom.core.state import Claimant, State


def eta_s(state: State, waiter: Waiter, model: ModelId, now: float) -> float | None:
    """Seconds for its model's own move, the moves of models ahead of it, and the answers ahead of it in its queue.

    None if nothing was learned yet of that move, or of answers that it must wait for.
    """
    is_known = state.claimants[model].service_s is not None or _rounds(state, waiter, model) == 0
    return least_s(state, waiter, model, now) if is_known else None


def least_s(state: State, waiter: Waiter, model: ModelId, now: float) -> float | None:
    """The same, but answers of unknown length take no time: whatever exceeds a budget even so is late."""
    own = _move_left_s(state, model, now)
    if own is None:
        return None
    own += (state.claimants[model].service_s or 0.0) * _rounds(state, waiter, model)
    if any(slot.is_arriving or slot.is_serving for slot in state.slots_of(model)):
        return own
    return own + _others_s(state, waiter)


def room_s(state: State, waiter: Waiter, model: ModelId, now: float) -> float:
    """Seconds beyond `eta_s` that a request waits for loads under way, beside which its model does not fit.

    Until enough of them have ended; infinite if that is not known, if leases or undeclared processes hold the memory,
    or if the lease store is away. Decisions do not go by this.
    """
    if _is_coming(state, model):
        return 0.0
    record, wake = state.claimants[model], _wake(state, model)
    if state.store_is_down and record.need != Need():
        return inf
    room = _room_beside(state, model, _lasting_leases(state, waiter, model))
    if wake is None:
        soonest_s = _room_after_s(state, record, None, room, now)
    else:
        elsewhere_s = _elsewhere_s(state, waiter, record, room, now)
        soonest_s = min(_room_after_s(state, record, wake, room, now), elsewhere_s)
    return max(0.0, soonest_s - _others_s(state, waiter))


def leases_in_way(state: State, waiter: Waiter, model: ModelId) -> tuple[LeaseId, ...]:
    """The fewest leases, largest first, whose end would make room for this model if every model had left that may.

    None if it fits beside all leases, or not without them either. They are not recalled for it: when they end is not
    known.
    """
    leases = {} if _is_coming(state, model) else _lasting_leases(state, waiter, model)
    if not leases:
        return ()
    record, wake, without = state.claimants[model], _wake(state, model), _room_beside(state, model, {})
    may_load = wake is None or not record.spec.pinned
    ways = placement.options(record.spec, record.need, state.devices, without, without) if may_load else []
    on = {device for claim in (wake or {}, *ways) for device in claim}
    there = [lease for lease, claim in leases.items() if not claim.keys().isdisjoint(on)]
    largest = sorted(there, key=lambda lease: -sum(mib for device, mib in leases[lease].items() if device in on))

    def fits_without(count: int) -> bool:
        ended = set(largest[:count])
        room = _room_beside(state, model, {lease: claim for lease, claim in leases.items() if lease not in ended})
        return _has_room(state, record, wake, room) or (may_load and _has_room(state, record, None, room))

    counts = range(len(largest) + 1)
    fewest = bisect_left(counts, True, key=fits_without)
    return tuple(largest[:fewest]) if fewest in counts else ()


def _is_coming(state: State, model: ModelId) -> bool:
    return any(slot.is_arriving or slot.is_serving for slot in state.slots_of(model))


def _wake(state: State, model: ModelId) -> Claim | None:
    """What it takes to wake this model; None if it does not sleep, or can never wake where it sleeps."""
    asleep = next((slot for slot in state.slots_of(model)[:1] if slot.tier is Tier.ASLEEP), None)
    wake = None if asleep is None else asleep.needs_for(MoveKind.WAKE)
    return wake if wake is not None and placement.fits(wake, _most_mib(state, model)) else None


def _lasting_leases(state: State, waiter: Waiter, model: ModelId) -> dict[LeaseId, Claim]:
    """A model is as urgent as its most urgent waiter."""
    queue = state.waitlist.queues.get(model)
    return state.lasting_leases(waiter.priority if queue is None else min(waiter.priority, queue.priorities.first))


def _room_beside(state: State, model: ModelId, leases: Mapping[LeaseId, Claim]) -> dict[DeviceId, int]:
    """What could be free for this model if every model that may leave had left.

    Not what these leases hold, nor what undeclared processes hold: when that ends is not known.
    """
    room = _most_mib(state, model)
    for claim in (state.ledger.foreign, *leases.values()):
        _add(room, claim, -1)
    return room


def _most_mib(state: State, model: ModelId) -> dict[DeviceId, int]:
    own = state.slots_of(model)
    return state.most_mib(own[0] if own else None, stays=state.claimants[model].spec.version_of)


def _elsewhere_s(state: State, waiter: Waiter, record: Claimant, room: Mapping[DeviceId, int], now: float) -> float:
    """How much later than by a wake at once a sleeping model is ready that is loaded on another GPU.

    A load begins no sooner than the wait has cost as much as it costs more than a wake. Infinite if that is not known.
    """
    load_s, wake_s = record.learned_s.get(MoveKind.LOAD), record.learned_s.get(MoveKind.WAKE)
    if record.spec.pinned or load_s is None or wake_s is None:
        return inf
    queue, more_s = state.waitlist.queues.get(record.spec.id), max(0.0, load_s - wake_s)
    since = waiter.arrived if queue is None else min(queue.oldest, waiter.arrived)
    return max(since + more_s - now, _room_after_s(state, record, None, room, now)) + more_s


def _room_after_s(
    state: State, record: Claimant, wake: Claim | None, most: Mapping[DeviceId, int], now: float
) -> float:
    """Seconds until so many loads have ended that this wake fits beside the others, or that a load fits anywhere.

    Infinite if it does not fit even then.
    """
    # A model that is pinned stays when it has come: its memory is not waited for.
    loads = [slot for slot in state.slots.values() if slot.is_arriving and not slot.spec.pinned and slot.lease is None]
    room, soonest_s = dict(most), 0.0
    for slot in loads:
        _add(room, slot.claim, -1)
    # A move that takes longer than usual may take any time.
    ends = [(_move_left_s(state, slot.model, now) or inf, slot.claim) for slot in loads]
    for left_s, claim in sorted(ends, key=lambda end: end[0]):
        if _has_room(state, record, wake, room):
            return soonest_s
        soonest_s = left_s
        _add(room, claim, 1)
    return soonest_s if _has_room(state, record, wake, room) else inf


def _has_room(state: State, record: Claimant, wake: Claim | None, room: Mapping[DeviceId, int]) -> bool:
    if wake is not None:
        return placement.fits(wake, room)
    return bool(placement.options(record.spec, record.need, state.devices, room, room))


def _add(mib: dict[DeviceId, int], claim: Claim, times: int) -> None:
    for device in claim:
        mib[device] = mib.get(device, 0) + times * claim[device]


def _others_s(state: State, waiter: Waiter) -> float:
    """Swaps ahead of it: at most one per request ahead, and at most one per other model that is waited for."""
    ahead = min(state.waitlist.position(waiter) - 1, len(state.waitlist.queues) - 1)
    at_once = max(1, len(state.ledger.devices) - 1)
    return max(0, ahead) * (state.avg_swap_s or 0.0) / at_once


def _rounds(state: State, waiter: Waiter, model: ModelId) -> int:
    """Rounds of answers ahead of its own: as many as the model gives at once end in one."""
    record, waitlist = state.claimants[model], state.waitlist
    queue = waitlist.queues.get(model)
    queued = 0 if queue is None else queue.ahead_of(waiter)
    serving = [slot for slot in state.slots_of(model) if slot.is_serving]
    running = sum(len(slot.in_flight) for slot in serving)
    at_once = sum(slot.concurrency for slot in serving) or record.spec.at_once
    return (queued + running) // at_once


def _move_left_s(state: State, model: ModelId, now: float) -> float | None:
    """Seconds until this model is ready once its turn has come; None if nothing was learned yet."""
    record, slots = state.claimants[model], state.slots_of(model)
    for slot in slots:
        if slot.is_serving:
            return 0.0
        if slot.is_arriving and slot.move is not None:
            learned = record.learned_s.get(slot.move.kind)
            return None if learned is None else max(0.0, learned - (now - slot.move.started))
    own_s = record.learned_s.get(state.next_move(model))
    return None if own_s is None else own_s + max((_ends_in_s(record, slot, now) for slot in slots), default=0.0)


def _ends_in_s(record: Claimant, slot: Slot, now: float) -> float:
    """Seconds until its move out, or to the green room, has ended; 0 if nothing was learned of it."""
    if slot.move is None or slot.is_arriving:
        return 0.0
    return max(0.0, record.learned_s.get(slot.move.kind, 0.0) - (now - slot.move.started))
