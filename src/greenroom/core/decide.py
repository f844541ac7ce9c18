"""One decision tree: what should happen to this waiter now. Pure; used by arrivals, drains and `explain` alike.

The answer is a Plan. `apply.py` turns it into state changes and effects; nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from greenroom.core import placement
from greenroom.core.effects import RejectCode
from greenroom.core.model import (
    Claim,
    DeviceId,
    ModelId,
    ModelSpec,
    MoveKind,
    Outcome,
    Slot,
    SlotId,
    Tier,
)
from greenroom.core.policy import Blocked
from greenroom.core.state import ModelRecord, State
from greenroom.core.swapper import Eviction, Resident, Target
from greenroom.core.waitlist import Waiter, WaiterKind


@dataclass(frozen=True, slots=True)
class Serve:
    """Ready and free: use this slot now."""

    slot: SlotId


@dataclass(frozen=True, slots=True)
class Join:
    """Somebody already caused the load: wait for it, in the queue of that model."""

    slot: SlotId
    model: ModelId


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can be done now. `blocked` says whose leaving would help and bars later waiters from taking it."""

    why: str
    model: ModelId
    blocked: Blocked | None = None
    behind: ModelId | None = None


@dataclass(frozen=True, slots=True)
class Swap:
    """Start the move that brings the model, after the moves that make room. `claim` is its own when it is ready."""

    model: ModelId
    kind: MoveKind
    claim: Claim
    evict: tuple[Resident, ...]
    takes_on: tuple[DeviceId, ...]
    wakes: SlotId | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """This can only be answered by an error."""

    code: RejectCode
    retry_after_s: float | None = None
    needs_mib: int = 0
    free_mib: int = 0


Plan = Serve | Join | Wait | Swap | Refuse


def decide(state: State, waiter: Waiter, now: float) -> Plan:
    """The plan for this waiter: its own queue's model first, another candidate if that can serve at once.

    Another candidate is also turned to when its own model can only be refused.
    """
    own = _decide_for(state, waiter, waiter.model, now)
    if isinstance(own, Serve) or len(waiter.candidates) == 1:
        return own
    others = [_decide_for(state, waiter, model, now) for model in waiter.candidates if model != waiter.model]
    for plan in others:
        if isinstance(plan, Serve):
            return plan
    if isinstance(own, Refuse):
        return next((plan for plan in others if not isinstance(plan, Refuse)), own)
    return own


def _decide_for(state: State, waiter: Waiter, model: ModelId, now: float) -> Plan:
    if state.shutting_down:
        return Refuse(RejectCode.SHUTTING_DOWN)
    record = state.models.get(model)
    if record is None or record.is_lease != (waiter.kind is WaiterKind.LEASE):
        return Refuse(RejectCode.UNKNOWN_MODEL)
    slots = [slot for slot in state.slots_of(model) if slot.spec.revision == record.spec.revision and not slot.lost]
    # 1. Ready: serve, unless it is full or an earlier waiter needs it to leave.
    serving = [slot for slot in slots if slot.is_serving]
    if serving:
        return _decide_ready(state, waiter, model, serving)
    # 2. On its way: join.
    for slot in slots:
        if slot.is_arriving:
            return Join(slot.id, model)
    # 3. Failing or pausing: refuse or wait.
    if pause := _decide_pause(state, waiter, record, now):
        return pause
    # 4. On its way out, or to the green room: wait until it is there, then come back here.
    if any(slot.is_going or slot.move is not None or slot.planned is not None for slot in slots):
        return Wait("leaving", model)
    # 5. Cold or asleep: bring it.
    asleep = slots[0] if slots else None
    if waiter.wants is MoveKind.PREPARE and asleep is not None:
        return Serve(asleep.id)
    return _decide_swap(state, waiter, record, asleep)


def _decide_ready(state: State, waiter: Waiter, model: ModelId, serving: list[Slot]) -> Plan:
    # An operator's load asks only that the model be there.
    if waiter.kind in (WaiterKind.OP, WaiterKind.PRELOAD):
        return Serve(serving[0].id)
    free = [slot for slot in serving if slot.has_room]
    if free and not state.blocked:
        return Serve(min(free, key=_load).id)
    behind: Blocked | None = None
    for slot in sorted(free, key=_load):
        behind = _barred(state, waiter, model, frozenset({slot.id}), frozenset())
        if behind is None:
            return Serve(slot.id)
    return Wait("barred", model, behind=behind.model) if behind is not None else Wait("busy", model)


def _load(slot: Slot) -> int:
    return len(slot.in_flight)


def _decide_pause(state: State, waiter: Waiter, record: ModelRecord, now: float) -> Plan | None:
    if now >= record.retry_at:
        return None
    retry_after_s = record.retry_at - now
    if record.pausing is None:
        return Refuse(RejectCode.LOAD_FAILED, retry_after_s)
    if record.pausing is Outcome.STORE_DOWN and waiter.id not in state.waitlist:
        return Refuse(RejectCode.STORE_DOWN, retry_after_s)
    return Wait(record.pausing.value, record.spec.id)


def _decide_swap(state: State, waiter: Waiter, record: ModelRecord, asleep: Slot | None) -> Plan:
    spec, room, most = record.spec, state.room_mib(), state.most_mib(asleep)
    kind = _kind(waiter, spec, asleep)
    ways = _ways(state, record, kind, asleep, room, most)
    if not ways and asleep is not None:
        # It can never wake where it sleeps: bring it elsewhere, as if it were cold.
        return _decide_swap(state, waiter, record, None)
    if not ways:
        need = spec.need_asleep if kind is MoveKind.PREPARE and spec.need_asleep is not None else record.need
        return Refuse(RejectCode.TOO_LARGE, None, *placement.shortfall(spec, need, state.devices, most))
    # Ways on devices where an earlier waiter's place is kept are left out, unless there are no others.
    open_ways = [way for way in ways if not _barred(state, waiter, spec.id, frozenset(), _takes_on(way))] or ways
    target = Target(spec.id, tuple(way.wants for way in open_ways), waiter.priority)
    eviction = _eviction(state, waiter, target, asleep, room)
    if eviction is None:
        return Wait("no_room", spec.id, _blocked_by_moves(state, waiter, target, room))
    if eviction.is_blocked:
        return Wait("residents_busy", spec.id, _blocked(waiter, target, eviction.claim, eviction.victims, room))
    if eviction.victims and waiter.kind is WaiterKind.PRELOAD and not spec.pinned:
        return Wait("would_evict", spec.id)
    way = open_ways[target.options.index(eviction.claim)]
    victims = frozenset(victim.slot for victim in eviction.victims)
    if behind := _barred(state, waiter, spec.id, victims, _takes_on(way)):
        return Wait("barred", spec.id, behind=behind.model)
    wakes = asleep.id if asleep is not None else None
    return Swap(spec.id, kind, way.claim, eviction.victims, tuple(sorted(_takes_on(way))), wakes)


@dataclass(frozen=True, slots=True)
class Way:
    """A place where a model could be: its claim there when ready, and what its move wants beyond what it holds."""

    claim: Claim
    wants: Claim


def _takes_on(way: Way) -> frozenset[DeviceId]:
    return frozenset(device for device, mib in way.wants.items() if mib > 0)


def _kind(waiter: Waiter, spec: ModelSpec, asleep: Slot | None) -> MoveKind:
    if asleep is not None:
        return MoveKind.WAKE
    can_prepare = waiter.wants is MoveKind.PREPARE and spec.need_asleep is not None
    return MoveKind.PREPARE if can_prepare else MoveKind.LOAD


def _ways(
    state: State,
    record: ModelRecord,
    kind: MoveKind,
    asleep: Slot | None,
    room: Mapping[DeviceId, int],
    most: Mapping[DeviceId, int],
) -> list[Way]:
    """Every place where it can ever be; none if it is too large."""
    if asleep is not None:
        during = asleep.needs_for(kind)
        held = state.ledger.held_by(asleep.id)
        return [Way(asleep.claim, _less(during, held))] if _fits(during, most) else []
    claims = placement.options(record.spec, record.need, state.devices, room, most)
    if kind is MoveKind.LOAD:
        return [Way(claim, claim) for claim in claims]
    ways = [Way(claim, state.asleep_at(record.spec, claim)) for claim in claims]
    return [way for way in ways if _fits(way.wants, most)]


def _fits(claim: Claim, most: Mapping[DeviceId, int]) -> bool:
    return all(mib <= most.get(device, 0) for device, mib in claim.items())


def _less(claim: Claim, held: Claim) -> Claim:
    return {device: mib - held.get(device, 0) for device, mib in claim.items()}


def _eviction(
    state: State, waiter: Waiter, target: Target, but: Slot | None, room: Mapping[DeviceId, int]
) -> Eviction | None:
    """Let residents sleep if that makes enough room at once, else let them go cold if that does."""
    swapper, stay = state.policy.swapper, [slot for slot in state.slots.values() if _stays(slot, but)]
    found = swapper.eviction_for(target, [_resident(state, waiter, target, slot, True) for slot in stay], room)
    can_sleep = any(slot.can_sleep and slot.tier is Tier.READY for slot in stay)
    if not can_sleep or (found is not None and not found.is_blocked):
        return found
    colder = swapper.eviction_for(target, [_resident(state, waiter, target, slot, False) for slot in stay], room)
    return found if colder is None or (found is not None and colder.is_blocked) else colder


def _stays(slot: Slot, but: Slot | None) -> bool:
    """Holds memory, or will, and is not about to give it back."""
    return slot is not but and not slot.is_going and not slot.lost


def _resident(state: State, waiter: Waiter, target: Target, slot: Slot, may_sleep: bool) -> Resident:
    sleeps = may_sleep and slot.tier is Tier.READY and slot.can_sleep
    held = state.ledger.held_by(slot.id)
    # A holder of a lease leaves only for somebody more urgent, and only if it said that it can be asked to; it is
    # asked rather than waited for.
    holds_on = slot.lease is not None and slot.last_priority <= waiter.priority
    moving = slot.move is not None or slot.planned is not None
    return Resident(
        slot=slot.id,
        model=slot.model,
        gives_mib=_given(held, slot.claim_asleep) if sleeps else held,
        leaves_to=Tier.ASLEEP if sleeps else Tier.COLD,
        priority=slot.last_priority,
        last_used=slot.last_used,
        is_busy=slot.lease is None and (not slot.is_idle or _is_wanted(state, waiter, target.model, slot)),
        is_fixed=slot.spec.pinned or moving or holds_on,
    )


def _is_wanted(state: State, waiter: Waiter, model: ModelId, slot: Slot) -> bool:
    """Whether somebody waits for this idle slot who came later but may pass: warm waiters go first, within limits."""
    first = state.waitlist.first(slot.model)
    if first is None or first.kind is not WaiterKind.REQUEST or first.key < waiter.key or not slot.is_serving:
        return False
    ahead = Blocked(waiter.key, model, waiter.priority, frozenset({slot.id}), frozenset())
    return state.policy.may_pass(first, ahead, state.overtaken.get(model, 0))


def _given(held: Claim, kept: Claim) -> Claim:
    """What comes back per device; less than nothing on the host where a sleeping copy is put."""
    return {device: held.get(device, 0) - kept.get(device, 0) for device in sorted({*held, *kept})}


def _blocked_by_moves(state: State, waiter: Waiter, target: Target, room: Mapping[DeviceId, int]) -> Blocked | None:
    """Moves in flight will end, so its place is kept. Strangers' memory may never come back and bars nobody."""
    moving = any(slot.move is not None or slot.planned is not None for slot in state.slots.values())
    return _blocked(waiter, target, target.options[0], (), room) if moving else None


def _blocked(
    waiter: Waiter, target: Target, claim: Claim, victims: tuple[Resident, ...], room: Mapping[DeviceId, int]
) -> Blocked | None:
    """What bars later waiters. A preload is only a wish and bars nobody."""
    if waiter.kind is WaiterKind.PRELOAD:
        return None
    lacking = frozenset(device for device, mib in claim.items() if mib > room[device])
    slots = frozenset(victim.slot for victim in victims)
    return Blocked(waiter.key, target.model, waiter.priority, slots, lacking or frozenset(claim))


def _barred(
    state: State, waiter: Waiter, model: ModelId, slots: frozenset[SlotId], devices: frozenset[DeviceId]
) -> Blocked | None:
    """The earlier waiter that this one may not pass on its way to that model, if any."""
    for blocked in passed_by(state, waiter, model, slots, devices):
        if not state.policy.may_pass(waiter, blocked, state.overtaken.get(blocked.model, 0)):
            return blocked
    return None


def passed_by(
    state: State, waiter: Waiter, model: ModelId, slots: frozenset[SlotId], devices: frozenset[DeviceId]
) -> list[Blocked]:
    """Earlier waiters for other models whose slots or devices this one would take."""
    return [
        blocked
        for blocked in state.blocked.values()
        if blocked.key < waiter.key
        and blocked.model != model
        and (not slots.isdisjoint(blocked.slots) or not devices.isdisjoint(blocked.devices))
    ]
