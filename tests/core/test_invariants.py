"""The checks themselves: every property is noticed when it does not hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from greenroom.core.events import Timer, TimerKind
from greenroom.core.invariants import check
from greenroom.core.model import DeviceId, ModelId, MoveKind, Need, OpId, Outcome, RequestId, SlotId, Tier
from greenroom.core.state import LeavingOp, State
from tests.core.queue.test_order import ready

from .world import World, model


def a_world() -> World:
    """a serves, b loads, c waits for both."""
    world = World([model("a", 3_000), model("b", 3_000), model("c", 8_000)])
    ready(world, "a")
    world.arrive("served", "a", budget_s=500.0)
    world.arrive("loads", "b")
    world.arrive("waits", "c", within_s=100.0)
    check(world.scheduler, world.now)
    check(world.scheduler)
    return world


def serving(state: State) -> SlotId:
    return next(slot.id for slot in state.slots.values() if slot.in_flight)


def loading(state: State) -> SlotId:
    return next(slot.id for slot in state.slots.values() if slot.move)


def serve_a_waiting_request(state: State) -> None:
    state.grants[RequestId("waits")] = state.grants[RequestId("served")]
    state.slots[serving(state)].in_flight[RequestId("waits")] = None
    state.counters.grants += 1


def cool_down(state: State) -> None:
    slot = state.slots[serving(state)]
    slot.tier = Tier.COLD
    state.ledger.release(slot.id)


def leave_without_going(state: State) -> None:
    slot = state.slots[serving(state)]
    slot.leaving_to = Tier.COLD
    slot.in_flight.clear()
    state.grants.clear()
    state.counters.dones = state.counters.grants
    del state.timers[Timer(TimerKind.BUDGET, "served")]


def keep_on_no_device(state: State) -> None:
    slot = state.slots[serving(state)]
    slot.leaving_to, slot.claim_asleep = Tier.ASLEEP, {DeviceId("gone"): 5}
    state.ledger.leave(slot.id, {})


def sleep_in_more_than_it_holds(state: State) -> None:
    slot = state.slots[serving(state)]
    slot.tier, slot.claim_asleep = Tier.ASLEEP, {DeviceId("host"): 5}


BREAKS: dict[str, tuple[Callable[[State], object], str]] = {
    "the sums of memory are wrong": (lambda s: s.ledger._taken_mib.clear(), "MiB left and not"),
    "the sums of what stays are wrong": (lambda s: s.ledger._stays_mib.clear(), "there is room for"),
    "the sums of what is held are wrong": (lambda s: s.ledger._held_mib.clear(), "MiB of gpu0, not 0"),
    "a sleeper holds less than it sleeps in": (sleep_in_more_than_it_holds, "sleeps in .* and holds only"),
    "memory is kept on a device that is gone": (keep_on_no_device, "there is room for .*'gone': -5"),
    "a slot that stays counts as gone": (lambda s: s.ledger.leave(serving(s), {}), "leave and not"),
    "what a slot was seen to take is not counted": (
        lambda s: setattr(s.ledger.holdings[serving(s)], "seen", {DeviceId("gpu0"): 5_000}),
        "and not",
    ),
    "requests are counted wrongly": (lambda s: setattr(s.waitlist, "depth", 7), "7 requests wait and not 2"),
    "a request has no position": (lambda s: s.waitlist._callers.clear(), "is at position"),
    "a slot is not found by its device": (lambda s: s.ledger._slots_on.clear(), "slots on"),
    "a grant is forgotten": (lambda s: s.grants.clear(), "in flight"),
    "a count is wrong": (lambda s: setattr(s.counters, "dones", 9), "grants minus dones"),
    "a move is unknown": (lambda s: s.moves.clear(), "moves of slots"),
    "memory is not held": (lambda s: s.ledger.release(serving(s)), "ledger holds"),
    "memory is promised to no slot": (lambda s: s.ledger.promise(SlotId("s?"), {}), "promised"),
    "a served one waits": (serve_a_waiting_request, "waits and is served"),
    "a model is gone": (lambda s: s.drop_model(ModelId("c")), "waits for no model"),
    "a model has no name": (lambda s: s.claimants.pop(ModelId("a")), "are not the models and leases"),
    "all is over": (lambda s: setattr(s, "shutting_down", True), "shutting down"),
    "a timer is for nothing": (lambda s: s.timers.update({Timer(TimerKind.IDLE, "s?"): 1.0}), "set for nothing"),
    "a timer is missing": (lambda s: s.timers.clear(), "never give up"),
    "an idle slot is not looked at": (lambda s: setattr(s.slots[serving(s)], "looked_at", 9.0), "is not looked at"),
    "a budget is not watched": (lambda s: s.timers.pop(Timer(TimerKind.BUDGET, "served")), "may go on for ever"),
    "a queue is forgotten": (lambda s: s.waitlist.queues.pop(ModelId("c")), "there are queues"),
    "devices are kept for no model": (lambda s: s.kept.update({ModelId("x"): frozenset()}), "kept for"),
    "an operator waits for nothing": (
        lambda s: s.leaving_ops.update({OpId("o"): LeavingOp(Tier.COLD, {SlotId("s?"): None})}),
        "slots that have left",
    ),
    "a model's slots are forgotten": (lambda s: s.slots_by_model.clear(), "slots by model"),
    "a ready slot loads": (lambda s: setattr(s.slots[loading(s)], "tier", Tier.READY), "moves by"),
    "a cold slot serves": (cool_down, "cold and serves"),
    "a slot is lost without answers": (
        lambda s: setattr(s.slots[loading(s)], "lost", True),
        "has no answer",
    ),
    "a slot fell without a move": (lambda s: setattr(s.slots[serving(s)], "fell", True), "fell"),
    "an idle slot leaves and does not": (leave_without_going, "should have left"),
}


@pytest.mark.parametrize(("spoil", "says"), BREAKS.values(), ids=list(BREAKS))
def test_a_broken_property_is_named(spoil: Callable[[State], object], says: str) -> None:
    world = a_world()
    spoil(world.scheduler.state)
    with pytest.raises(AssertionError, match=says):
        check(world.scheduler)


def test_a_lost_wake_up_is_noticed() -> None:
    world = a_world()
    world.arrive("queued", "a")
    slot = world.scheduler.state.slots[serving(world.scheduler.state)]
    slot.concurrency = 2
    with pytest.raises(AssertionError, match="queued waits though it could have Serve"):
        check(world.scheduler, world.now)


def test_a_model_that_could_come_is_noticed_unless_it_will_be_looked_at() -> None:
    world = a_world()
    world.scheduler.state.models[ModelId("c")].need = Need(100)
    assert Timer(TimerKind.SWITCH, "") in world.scheduler.state.timers
    check(world.scheduler, world.now)
    del world.scheduler.state.timers[Timer(TimerKind.SWITCH, "")]
    with pytest.raises(AssertionError, match="waits though it could have Swap"):
        check(world.scheduler, world.now)


def test_a_budget_whose_answer_was_cut_is_over() -> None:
    world = World([model("a")], plays=False)
    world.arrive("r", "a", budget_s=10.0)
    world.end_move(world.moves[0].id, Outcome.DONE)
    world.run(10.0)
    assert world.calls_by_id["r"].was_cut and not world.timers
    check(world.scheduler, world.now)


def test_a_leaving_slot_that_moves_and_stays_is_noticed() -> None:
    world = World([model("a", 3_000)])
    ready(world, "a")
    world.ask("o", MoveKind.UNLOAD, "a")
    (slot,) = world.scheduler.state.slots.values()
    slot.leaving_to = None
    with pytest.raises(AssertionError, match="goes though it stays"):
        check(world.scheduler)
