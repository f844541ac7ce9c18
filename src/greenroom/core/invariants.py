"""What must hold after every event. Recomputed from scratch, so that no incremental count can hide its own error.

Raises AssertionError naming the property. Used by tests and by the simulator; cheap enough for small setups only.
"""

from __future__ import annotations

from typing import Protocol

from greenroom.core.apply import ASKED_MAX
from greenroom.core.decide import green_room, placement
from greenroom.core.decide.decision import decide_for
from greenroom.core.decide.placement import Places
from greenroom.core.decide.plan import Join, Refuse, Swap, Wait
from greenroom.core.decide.residents import Residents
from greenroom.core.events import Timer, TimerKind
from greenroom.core.model import LEGAL_MOVES, MoveKind, RequestId, Slot, Tier, larger
from greenroom.core.queue.waitlist import Waiter, WaiterKind
from greenroom.core.state import State


class Tabled(Protocol):
    """A scheduler whose tables are a `State`."""

    @property
    def state(self) -> State: ...


def check(scheduler: Tabled, now: float | None = None) -> None:
    """Check everything visible in the state; given the time of the last event, also that no wake-up was lost."""
    state = scheduler.state
    _grants_and_slots_agree(state)
    _moves_and_slots_agree(state)
    _memory_is_held_for_every_slot(state)
    _free_memory_is_the_rest(state)
    waiters = list(state.waitlist)
    _waiters_are_not_served(state, waiters)
    _tables_hold_only_what_is_there(state, waiters)
    _no_version_drives_out_its_model(state)
    for slot in state.slots.values():
        _slot_is_sane(slot)
        _idle_slot_is_looked_at(slot)
    _leaving_slots_make_room(state)
    if (limit_mib := state.limits.green_room_mib) is not None:
        excess = green_room.excess(state, limit_mib, 0.0)
        assert not excess, f"{excess} should have left the green room"
    if now is not None:
        _no_wake_up_was_lost(state, now)


def _grants_and_slots_agree(state: State) -> None:
    """In-flight equals grants minus dones, and every grant names a slot that counts it."""
    counted = {request: slot.id for slot in state.slots.values() for request in slot.in_flight}
    granted = {request: grant.slot for request, grant in state.grants.items()}
    assert counted == granted, f"in flight {counted} but granted {granted}"
    assert state.counters.grants - state.counters.dones == len(granted), "grants minus dones is not in-flight"


def _moves_and_slots_agree(state: State) -> None:
    """A slot has at most one move, and every move is known to its slot."""
    by_slot = {slot.move.id: slot.id for slot in state.slots.values() if slot.move is not None}
    known = {move: slot.id for move, slot in state.moves.items()}
    assert by_slot == known, f"moves of slots {by_slot} but moves known {known}"


def _memory_is_held_for_every_slot(state: State) -> None:
    """The ledger holds exactly the slots that are not cold or that move, and promises exactly what is planned."""
    there = {slot.id for slot in state.slots.values() if slot.tier is not Tier.COLD or slot.move is not None}
    assert set(state.ledger.holdings) == there, f"ledger holds {set(state.ledger.holdings)} but slots are {there}"
    planned = {slot.id for slot in state.slots.values() if slot.planned is not None}
    assert set(state.ledger.promises) == planned, f"promised {set(state.ledger.promises)} but planned {planned}"
    for slot in green_room.sleepers(state):
        held = state.ledger.held_by(slot.id)
        assert placement.fits(slot.claim_asleep, held), f"{slot.id} sleeps in {slot.claim_asleep} and holds only {held}"


def _free_memory_is_the_rest(state: State) -> None:
    """The sums that the ledger keeps equal a count from scratch."""
    ledger = state.ledger
    held = {slot: larger(holding.claim, holding.seen) for slot, holding in ledger.holdings.items()}
    for slot, claim in held.items():
        assert ledger.held_by(slot) == claim, f"{slot} holds {claim} and not {ledger.held_by(slot)}"
    for device, free_mib in ledger.free_mib(frozenset()).items():
        taken_mib = sum(
            max(held.get(slot, {}).get(device, 0), ledger.promises.get(slot, {}).get(device, 0))
            for slot in {*held, *ledger.promises}
        )
        counted_mib = ledger.usable_mib(device) - taken_mib
        assert free_mib == counted_mib, f"{device} has {counted_mib} MiB left and not {free_mib}"
        held_mib = sum(claim.get(device, 0) for claim in held.values())
        assert ledger.held_on(device) == held_mib, f"{held_mib} MiB of {device}, not {ledger.held_on(device)}"
        there = {slot for slot, claim in held.items() if device in claim}
        assert {*ledger.slots_on(device)} == there, f"slots on {device} are {there}"


def _leaving_slots_make_room(state: State) -> None:
    """Plans may use what leaving slots hold, but for what these keep asleep."""
    ledger = state.ledger
    going = [slot for slot in state.slots.values() if slot.leaving_to is not None]
    assert set(ledger.leaving) == {slot.id for slot in going}, f"{set(ledger.leaving)} leave and not {going}"
    room = ledger.free_mib(without=[slot.id for slot in going])
    for slot in [slot for slot in going if slot.leaving_to is Tier.ASLEEP]:
        for device, mib in slot.claim_asleep.items():
            room[device] = room.get(device, 0) - mib
    assert ledger.room_mib() == room, f"there is room for {room} and not {ledger.room_mib()}"


def _waiters_are_not_served(state: State, waiters: list[Waiter]) -> None:
    for waiter in waiters:
        assert waiter.id not in state.grants, f"{waiter.id} waits and is served"
        assert waiter.model in state.claimants, f"{waiter.id} waits for no model"
        assert not state.shutting_down, f"{waiter.id} waits though all is shutting down"


def _tables_hold_only_what_is_there(state: State, waiters: list[Waiter]) -> None:
    """No table refers to a waiter, slot or model that has left."""
    subjects: dict[TimerKind, set[str]] = {
        TimerKind.EXPIRE: {waiter.id for waiter in waiters if waiter.give_up_at is not None},
        TimerKind.RETRY: {*state.claimants},
        TimerKind.IDLE: {*state.slots},
        TimerKind.GRACE: {*state.slots},
        TimerKind.BUDGET: {request for request, grant in state.grants.items() if grant.waiter.answer_by is not None},
        TimerKind.SWITCH: {""} if state.waitlist else set(),
    }
    tenants = [waiter.tenant for waiter in waiters if waiter.kind is WaiterKind.REQUEST]
    for tenant in tenants:
        assert state.waitlist.depth_of(tenant) == tenants.count(tenant), f"places of {tenant} are counted wrongly"
    _positions_are_in_order(state, waiters)
    for timer in state.timers:
        assert timer.subject in subjects[timer.kind], f"{timer} is set for nothing"
    for waiter_id in subjects[TimerKind.EXPIRE]:
        assert Timer(TimerKind.EXPIRE, waiter_id) in state.timers, f"{waiter_id} will never give up"
    for slot in state.slots.values():
        assert state.timers.get(Timer(TimerKind.IDLE, slot.id)) == slot.looked_at, f"{slot.id} is not looked at"
    for request in subjects[TimerKind.BUDGET]:
        timer, grant = Timer(TimerKind.BUDGET, request), state.grants[RequestId(request)]
        assert timer in state.timers or grant.is_cut, f"{request} may go on for ever"
    waited_for = {waiter.model for waiter in waiters}
    queues = set(state.waitlist.queues)
    assert waited_for == queues, f"there are queues for {queues} but {waited_for} are waited for"
    assert waited_for.issuperset(state.kept), f"kept for {set(state.kept)} but {waited_for} are waited for"
    for op_id, op in state.leaving_ops.items():
        assert op.slots.keys() <= state.slots.keys() and op.slots, f"{op_id} waits for slots that have left"
    named = {*state.models, *(record.spec.id for record in state.leases.values())}
    assert named == set(state.claimants), f"claimants {set(state.claimants)} are not the models and leases {named}"
    by_model = {slot.id for model, slots in state.slots_by_model.items() for slot in slots if slot.model == model}
    assert by_model == set(state.slots) and all(state.slots_by_model.values()), "slots by model are not all slots"


def _positions_are_in_order(state: State, waiters: list[Waiter]) -> None:
    """Requests have positions from 1 on, by priority and then arrival."""
    callers = sorted((one.priority, one.sequence, one) for one in waiters if one.kind is WaiterKind.REQUEST)
    assert state.waitlist.depth == len(callers), f"{state.waitlist.depth} requests wait and not {len(callers)}"
    for position, (_, _, waiter) in enumerate(callers, 1):
        assert state.waitlist.position(waiter) == position, f"{waiter.id} is at position {position}"


def _no_wake_up_was_lost(state: State, now: float) -> None:
    """No lost wake-up: no head of a flow could be served, brought or refused already.

    Preloads and refusals may come a little later, when a move ends; a timer wakes a model that pauses. The time at
    which a model may come shifts a little as rates decay, so a timer that looks again is enough. With more waiting
    models than one round asks for, those of lower rank wait for their turn.
    """
    looked_at = Timer(TimerKind.SWITCH, "") in state.timers or len(state.waitlist.queues) > ASKED_MAX
    # Nothing changes between these questions, so all of them use the same residents.
    places = Places()
    residents = Residents(state, now, places)
    for head in [head for queue in state.waitlist.queues.values() for head in queue.heads()]:
        if head.kind is WaiterKind.PRELOAD or Timer(TimerKind.RETRY, head.model) in state.timers:
            continue
        # Estimates change all the time: a waiter chooses another candidate only when one gets room or its own fails.
        plan = decide_for(state, head, head.model, now, places, residents)
        bad_news_later = isinstance(plan, Refuse) and (state.moves or state.ledger.promises)
        later = bad_news_later or (isinstance(plan, Swap) and looked_at)
        assert later or isinstance(plan, Wait | Join), f"{head.id} waits though it could have {plan}"


def _no_version_drives_out_its_model(state: State) -> None:
    """A model serves on while its next version comes."""
    for slot in state.slots.values():
        newcomer = state.slots.get(slot.leaving_for) if slot.leaving_for is not None else None
        assert newcomer is None or newcomer.spec.version_of != slot.model, f"{slot.id} leaves for its next version"


def _idle_slot_is_looked_at(slot: Slot) -> None:
    if slot.is_serving and slot.is_idle and slot.idle_s is not None:
        due = slot.last_used + slot.idle_s
        assert slot.looked_at is not None and slot.looked_at <= due, f"{slot.id} is idle and is not looked at in time"


def _slot_is_sane(slot: Slot) -> None:
    if slot.move is not None:
        sources, _ = LEGAL_MOVES[slot.move.kind]
        assert slot.tier in sources, f"{slot.id} is {slot.tier} and moves by {slot.move.kind}"
        assert slot.planned is None, f"{slot.id} moves and is planned"
        if slot.move.kind in (MoveKind.UNLOAD, MoveKind.SLEEP):
            assert slot.is_going and not slot.in_flight, f"{slot.id} goes though it stays or is busy"
    assert slot.move is not None or not slot.fell, f"{slot.id} fell and this was not noticed"
    if slot.lost:
        assert slot.in_flight, f"{slot.id} is lost and has no answer that could end"
        assert slot.move is None and slot.planned is None and not slot.is_going, f"{slot.id} is lost and moves"
    elif slot.tier is Tier.COLD:
        assert not slot.in_flight, f"{slot.id} is cold and serves"
        assert slot.move is not None or slot.planned is not None, f"{slot.id} is cold and going nowhere"
    elif slot.is_going and slot.move is None:
        assert slot.in_flight, f"{slot.id} should have left by now"
