"""When one model gives way to another: residency, batch, overtaking, deadlines, rent or buy, lingering, kept devices.

Loads take 5 s and departures 1 s, so a swap on an idle GPU takes 6 s; minimum residency is 10 s, a batch 25 s.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest

from greenroom.core.decide.decision import Wait, WaitReason
from greenroom.core.events import Limits
from greenroom.core.model import DeviceId, ModelId, MoveKind, Need, TenantId, Tier
from greenroom.core.queue.waitlist import MODELS_FEW

from .test_order import ready
from .world import Call, Engine, Fate, World, gpu, host, model

SWAP_S = 6.0
NEVER_S = (1e6, 1e6, 1e6)


def stream(world: World, name: str, every_s: float, until_s: float, takes_s: float = 1.0) -> None:
    """From now on a request every so often."""
    for number in range(int((until_s - world.now) / every_s)):
        world.later(number * every_s, partial(world.arrive, f"{name}-{number}", name, takes_s=takes_s))


def two(concurrency: int = 2, **limits: object) -> World:
    """Two models that do not fit together; both have been loaded before, a at last, and its residency is over."""
    specs = [model("a", 6_000, concurrency=concurrency), model("b", 6_000, concurrency=concurrency)]
    world = World(specs, limits=Limits(**limits))  # type: ignore[arg-type]
    ready(world, "b", "a")
    world.run(10.0)
    return world


def switched_after_s(world: World, at_most_s: float = 1_000.0) -> float:
    """Let time pass until the next swap is decided on; says how long that took."""
    begun, swapped = world.now, world.scheduler.state.counters.swaps
    while world.scheduler.state.counters.swaps == swapped:
        assert world.now < begun + at_most_s, "nobody was asked to leave"
        world.run(0.1)
    return world.now - begun


def swaps(world: World) -> int:
    return sum(1 for kind in world.kinds() if kind.startswith("load"))


# --- the batch and overtaking ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("overtakes_max", [0, 1, 3, 8, 20])
def test_after_the_batch_warm_ones_overtake_a_cold_one_exactly_so_often(overtakes_max: int) -> None:
    """A resident in such demand that switching never pays, and nobody insists: only the gated batch ends it."""
    world = two(overtakes_max=overtakes_max, deadlines_s=NEVER_S, recency_s=30.0)
    batch_until = world.moves[-1].started + 5.0 + 25.0
    stream(world, "a", 0.4, world.now + 60.0)
    world.run(0.1)
    cold = world.arrive("cold", "b", takes_s=1.0)
    world.run()
    after = [
        call
        for call in world.calls_by_id.values()
        if call.candidates == ("a",) and batch_until <= call.granted_at < cold.granted_at
    ]
    assert len(after) == overtakes_max
    assert all(call.fate is Fate.SERVED for call in world.calls_by_id.values()), "and nobody else starves"


def test_who_came_after_the_batch_is_overtaken_as_often_as_one_who_came_before() -> None:
    world = two(overtakes_max=5, deadlines_s=NEVER_S, recency_s=30.0)
    stream(world, "a", 0.4, world.now + 60.0)
    world.run(30.1)
    cold = world.arrive("cold", "b", takes_s=1.0)
    world.run()
    calls = world.calls_by_id.values()
    passed = [call for call in calls if cold.arrived < call.granted_at < cold.granted_at]
    assert len(passed) == 5


def test_grants_of_the_batch_are_not_counted_as_overtaking() -> None:
    world = two(overtakes_max=2, deadlines_s=NEVER_S, recency_s=30.0)
    batch_until = world.moves[-1].started + 30.0
    stream(world, "a", 0.4, world.now + 60.0)
    world.run(0.1)
    world.arrive("cold", "b", takes_s=1.0)
    world.run()
    cold = world.calls_by_id["cold"]
    before = [call for call in world.calls_by_id.values() if cold.arrived < call.granted_at < batch_until]
    assert len(before) > 10


# --- residency and deadlines ----------------------------------------------------------------------------------------


def test_no_deadline_shortens_the_minimum_residency() -> None:
    """The urgent one is late before the resident has been there for twice the time that bringing it back takes."""
    world = two(deadlines_s=(1.0, 1.0, 1.0))
    world.arrive("change", "b", takes_s=0.0)
    world.run(SWAP_S)
    ready_at, stays_s = world.now, 10.0
    stream(world, "b", 0.4, world.now + 60.0)
    world.run(1.0)
    urgent = world.arrive("urgent", "a", takes_s=1.0, priority=0, tenant="other")
    assert 1.0 + world.scheduler.state.policy.priority_class(0).late_s < stays_s / 2
    world.run(8.9)
    assert world.scheduler.state.counters.swaps == 3, "b, a, b: nothing has been asked to leave"
    world.run()
    assert ready_at + stays_s + SWAP_S <= urgent.granted_at <= ready_at + stays_s + 1.0 + SWAP_S


@pytest.mark.parametrize("priority", [0, 1, *(pytest.param(one, marks=pytest.mark.slow) for one in (2, -3, 7))])
def test_who_insists_ends_a_batch_that_would_go_on_for_ever(priority: int) -> None:
    """Between its deadline, or when switching pays, and when it is late; priorities beyond are like the nearest."""
    world = two(concurrency=3, batch_swaps=1e6, recency_s=30.0)
    stream(world, "a", 0.4, world.now + 600.0)
    world.run(0.1)
    cold = world.arrive("cold", "b", takes_s=1.0, priority=priority)
    late_s = {0: 10.0, 1: 120.0, 2: 480.0}[min(max(priority, 0), 2)]
    assert switched_after_s(world) <= late_s + 0.2
    world.run()
    assert cold.granted_at - cold.arrived <= late_s + 1.0 + SWAP_S


def test_age_lifts_the_order_but_not_the_deadline() -> None:
    """After 120 s the low one stands in the highest class; it still insists only after its own 240 s."""
    world = two(batch_swaps=1e6, recency_s=30.0, residency_swaps=1e6)
    stream(world, "a", 0.4, world.now + 100.0)
    world.run(0.1)
    world.arrive("cold", "b", takes_s=1.0, priority=2)
    world.run(61.0)
    queue = world.scheduler.state.waitlist.queues[ModelId("b")]
    assert round(queue.deadline_at - queue.oldest, 6) == 240.0 and round(queue.lift_at - queue.oldest, 6) == 120.0


def test_an_idle_resident_of_a_higher_class_keeps_its_minimum_residency_and_a_lower_one_does_not() -> None:
    for priority, stays in ((0, True), (1, False), (2, False)):
        world = World([model("a", 6_000), model("b", 6_000)], limits=Limits(recency_s=1e9))
        world.arrive("first", "a", takes_s=0.0, priority=priority)
        world.run(5.5)
        world.arrive("cold", "b", takes_s=1.0)
        world.run(1.0)
        assert (world.scheduler.state.counters.swaps == 1) is stays, priority
        world.run()
        assert world.fate("cold") is Fate.SERVED


# --- rent or buy ----------------------------------------------------------------------------------------------------


def busy_until_it_pays(*cold: int, recency_s: float = 1e9) -> float:
    """How long a resident that is never idle is kept from those who wait, who have these priorities."""
    world = two(concurrency=3, recency_s=recency_s, batch_swaps=1e6)
    stream(world, "a", 0.4, world.now + 600.0)
    world.run(0.1)
    for number, priority in enumerate(cold):
        world.arrive(f"cold-{number}", "b", takes_s=1.0, priority=priority)
    return switched_after_s(world)


def test_nobody_is_switched_before_the_others_have_waited_together_as_long_as_the_swap_takes() -> None:
    for waiters in (1, 3):
        assert busy_until_it_pays(*[1] * waiters) * waiters >= 5.0


def test_more_who_wait_are_never_kept_longer() -> None:
    assert busy_until_it_pays(1, 1, 1) <= busy_until_it_pays(1)


def test_urgent_ones_are_kept_less_long_than_low_ones() -> None:
    urgent_s, normal_s, low_s = (busy_until_it_pays(priority) for priority in (0, 1, 2))
    assert urgent_s < normal_s <= low_s


def test_a_resident_in_demand_is_never_given_up_sooner_than_one_that_is_hardly_asked_for() -> None:
    assert busy_until_it_pays(1, recency_s=30.0) >= busy_until_it_pays(1)


def test_a_resident_whose_own_people_wait_is_dearer() -> None:
    """Forty of them would wait while it is away."""
    world = two(concurrency=1, recency_s=1e9, deadlines_s=NEVER_S)
    for number in range(40):
        world.arrive(f"a-{number}", "a", takes_s=1.0)
    world.arrive("cold", "b", takes_s=1.0)
    world.run(6.0)
    assert world.scheduler.state.counters.swaps == 2
    world.run()
    assert world.fate("cold") is Fate.SERVED


# --- lingering ------------------------------------------------------------------------------------------------------


def test_a_model_in_demand_lingers_for_its_next_request_and_one_that_is_not_goes_at_once() -> None:
    for recency_s, lingers in ((10.0, True), (1e9, False)):
        world = two(recency_s=recency_s)
        stream(world, "a", 0.5, world.now + 10.0, takes_s=0.1)
        world.run(10.0)
        assert world.tier("a") is Tier.READY and not world.moving
        world.arrive("cold", "b", takes_s=1.0)
        assert (world.scheduler.state.counters.swaps == 2) is lingers
        world.run(5.0)
        assert world.scheduler.state.counters.swaps == 3, "no longer than the swap it may save"


def test_a_lingering_model_serves_its_next_request_without_a_swap() -> None:
    world = two(recency_s=10.0)
    stream(world, "a", 0.5, world.now + 10.0, takes_s=0.1)
    world.run(10.0)
    world.arrive("cold", "b", takes_s=1.0)
    world.run(1.0)
    assert world.arrive("again", "a", takes_s=0.1).fate is Fate.GRANTED
    world.run()
    assert world.fate("cold") is Fate.SERVED and swaps(world) == 3


# --- nobody starves -------------------------------------------------------------------------------------------------


def waits_for_stage(world: World, name: str) -> list[float]:
    """How long somebody waited for this model each time until it served again."""
    calls = sorted((c for c in world.calls_by_id.values() if c.candidates == (name,)), key=lambda c: c.granted_at)
    return [call.granted_at - max(call.arrived, before.granted_at) for before, call in pairwise(calls)]


def test_a_saturating_stream_on_two_models_lets_both_be_served_within_the_bound() -> None:
    """Each gets more requests than a whole GPU could serve; the last of them have to wait for all before them."""
    world = two(concurrency=1)
    stream(world, "a", 0.8, world.now + 400.0)
    stream(world, "b", 0.8, world.now + 400.0)
    world.run(400.0)
    served = [call for call in world.calls_by_id.values() if call.fate is Fate.SERVED]
    assert len(served) > 250, "most of the time is spent serving"
    late_s = world.scheduler.state.policy.priority_class(1).late_s
    bound_s = late_s + 25.0 + 1.0 + SWAP_S
    for name in ("a", "b"):
        waits = waits_for_stage(world, name)
        assert 0 < max(waits) <= bound_s, name
    assert 6 <= swaps(world) <= 40, "warm ones go in batches, and the batches end"
    world.run()
    assert all(call.fate is Fate.SERVED for call in world.calls_by_id.values())


def test_a_plan_that_is_called_off_is_charged_to_nobody() -> None:
    world = World([model(name, 6_000) for name in ("a", "b")])
    bert = TenantId("bert")
    world.arrive("long", "a", takes_s=400.0)
    world.run(10.0)
    world.arrive("wants-b", "b", takes_s=1.0, tenant="bert")
    accounts = world.scheduler.state.accounts
    had_s = accounts.served_s(bert)
    world.run(140.0)
    assert world.scheduler.state.ledger.promises, "b is late: a is closed for it"
    assert accounts.served_s(bert) == had_s, "nothing has begun"
    world.go("wants-b")
    assert not world.scheduler.state.ledger.promises and accounts.served_s(bert) <= max(had_s, accounts.level_s)


def busy_pair(**limits: object) -> World:
    """Two small models share a GPU and are never idle; a large one needs all of it, a third small one half."""
    specs = [model(name, 4_000, concurrency=2) for name in ("left", "right", "third")]
    world = World([*specs, model("large", 8_000)], limits=Limits(**limits))  # type: ignore[arg-type]
    ready(world, "left", "right")
    world.run(10.0)
    return world


def test_a_large_model_that_needs_two_victims_is_not_starved_by_small_ones() -> None:
    world = busy_pair()
    for name in ("left", "right"):
        stream(world, name, 0.4, world.now + 200.0)
    world.run(0.1)
    large = world.arrive("large", "large", takes_s=1.0)
    stream(world, "third", 5.0, world.now + 200.0)
    world.run()
    late_s = world.scheduler.state.policy.priority_class(1).late_s
    assert large.granted_at - large.arrived <= late_s + 25.0 + 2 * SWAP_S, (
        "late, then at most a batch of each, and swaps"
    )
    assert all(call.fate is Fate.SERVED for call in world.calls_by_id.values())


def late_beside_a_newcomer() -> World:
    """`right` has just come back by a slow load; the large one has long been late, and must still wait for it."""
    world = busy_pair(deadlines_s=(5.0, 12.0, 240.0), recency_s=1e9)
    world.engines["right"] = Engine(load_s=200.0)
    world.ask("away", MoveKind.UNLOAD, "right")
    world.run(2.0)
    world.arrive("back", "right", takes_s=0.0)
    world.run(200.0)
    assert world.tier("right") is Tier.READY
    for name in ("left", "right"):
        stream(world, name, 0.4, world.now + 150.0)
    world.run(0.1)
    world.arrive("large", "large", takes_s=1.0)
    world.run(2 * world.scheduler.state.policy.priority_class(1).late_s + 1.0)
    return world


def test_who_insists_has_its_devices_kept_from_those_who_come_later() -> None:
    """The large one is late while `right` is still in its residency: the third may not take `left` meanwhile."""
    world = late_beside_a_newcomer()
    large = world.calls_by_id["large"]
    assert world.scheduler.state.kept == {ModelId("large"): frozenset({DeviceId("gpu0")})}
    late = world.arrive("late", "third", takes_s=1.0, priority=0)
    plan = world.scheduler.explain(world.asking("?", "third"))
    assert isinstance(plan, Wait) and (plan.why, plan.behind) == (WaitReason.KEPT_FOR_OTHERS, ("large",))
    world.run()
    assert large.granted_at < late.granted_at and world.fate("late") is Fate.SERVED


def test_kept_devices_are_free_again_when_who_insisted_has_left() -> None:
    world = late_beside_a_newcomer()
    assert world.scheduler.state.kept
    world.go("large")
    assert not world.scheduler.state.kept


# --- loading beside, and calling off --------------------------------------------------------------------------------


def test_the_next_model_is_loaded_beside_a_draining_one_when_memory_allows() -> None:
    world = World([model("a", 4_000), model("b", 4_000), model("c", 4_000)])
    ready(world, "a", "b")
    world.arrive("long", "a", takes_s=100.0)
    world.arrive("cold", "c", takes_s=1.0)
    world.run(10.0)
    assert world.fate("cold") is Fate.SERVED and world.fate("long") is Fate.GRANTED


def test_a_busy_victim_takes_no_more_requests_and_leaves_when_its_answers_have_ended() -> None:
    world = two(recency_s=1e9, deadlines_s=(5.0, 5.0, 5.0))
    world.arrive("long", "a", takes_s=30.0)
    world.arrive("cold", "b", takes_s=1.0)
    switched_after_s(world, at_most_s=20.0)
    assert world.arrive("late", "a", takes_s=1.0).fate is Fate.WAITING, "there is room, but it is about to leave"
    assert world.fate("long") is Fate.GRANTED and not world.moving
    world.run()
    assert world.granted()[-3:] == ["long", "cold", "late"] and not world.calls_by_id["long"].was_cut


def test_a_busy_victim_may_stay_when_nobody_waits_for_its_place_any_more() -> None:
    world = two(recency_s=1e9, deadlines_s=(5.0, 5.0, 5.0))
    world.arrive("long", "a", takes_s=30.0)
    world.arrive("cold", "b", takes_s=1.0)
    switched_after_s(world, at_most_s=20.0)
    late = world.arrive("late", "a", takes_s=1.0)
    world.go("cold")
    assert late.fate is Fate.GRANTED
    world.run()
    assert swaps(world) == 2 and world.tier("a") is Tier.READY and not world.timers


def test_many_cold_models_are_all_brought_in_the_end() -> None:
    """More of them than are asked for in one round."""
    names = [f"m{number}" for number in range(24)]
    world = World([model(name, 6_000) for name in names])
    calls: list[Call] = [world.arrive(f"r-{name}", name, takes_s=1.0) for name in names]
    world.run()
    assert all(call.fate is Fate.SERVED for call in calls) and swaps(world) == 24


@pytest.mark.parametrize("policy", ["default", pytest.param("fifo", marks=pytest.mark.slow)])
def test_a_crowd_of_models_is_served_to_the_last(policy: str) -> None:
    """So many that their order is kept for a moment; some are asked for again while they wait, one urgently."""
    names = [f"m{number}" for number in range(MODELS_FEW + 20)]
    world = World([model(name, 6_000) for name in names], limits=Limits(policy=policy))
    world.arrive("long", names[0], takes_s=5.0)
    for number, name in enumerate(names):
        world.arrive(f"r-{name}", name, takes_s=0.1)
        world.later(0.2 * number, partial(world.arrive, f"again-{name}", name, takes_s=0.1))
    world.later(6.0, partial(world.arrive, "urgent", names[-1], takes_s=0.1, priority=0))
    world.run()
    assert all(call.fate is Fate.SERVED for call in world.calls_by_id.values())
    assert swaps(world) <= len(names) + 3, "those who ask for the same model are served together"
    urgent = world.calls_by_id["urgent"]
    assert urgent.granted_at - urgent.arrived <= 6 * SWAP_S


def test_models_on_other_devices_come_beside_each_other() -> None:
    world = World([model(name, 6_000) for name in "abcd"], devices=(gpu(0, 8_000), gpu(1, 8_000)))
    calls = [world.arrive(name, name, takes_s=1.0) for name in "abcd"]
    world.run()
    assert [round(call.granted_at, 1) for call in calls] == [5.0, 5.0, 12.0, 12.0]


def test_those_whose_model_need_not_leave_after_all_go_on_before_any_newcomer() -> None:
    """A more urgent request has a plan called off; the model that was closed for it opens again."""
    world = World([model(name, 6_000, concurrency=2) for name in ("a", "b", "c")])
    world.arrive("long", "a", takes_s=400.0)
    world.run(10.0)
    world.arrive("other", "a")
    waits = world.arrive("waits-a", "a", takes_s=1.0)
    world.arrive("waits-b", "b", takes_s=1.0)
    world.run(50.0)
    assert world.scheduler.state.ledger.promises, "b is due: a is closed for it"
    world.finish("other")
    assert waits.fate is Fate.WAITING
    world.arrive("urgent", "c", priority=0, takes_s=1.0)
    assert not world.scheduler.state.ledger.promises and waits.fate is Fate.GRANTED
    world.run()
    assert all(call.fate is Fate.SERVED for call in world.calls_by_id.values())


def test_a_wish_that_has_waited_for_ever_holds_up_nobody() -> None:
    """It makes nobody leave, and must not stand before a request that may."""
    world = World([model("a", 6_000), model("b", 6_000)])
    world.arrive("long", "a", takes_s=1_100.0)
    world.run(10.0)
    world.config(model("b", 6_000, preload=True))
    world.run(1_000.0)
    call = world.arrive("late", "b", takes_s=1.0)
    world.run(300.0)
    assert call.fate is Fate.SERVED


def test_devices_are_no_longer_kept_for_a_model_that_is_being_prepared() -> None:
    """While it moves to the green room it cannot come: what was kept for it would serve nothing."""
    specs = [model("held", 7_000), model("large", 8_000, asleep=Need(0, 2_000)), model("small", 400)]
    specs.append(model("sleeper", 500, asleep=Need(0, 2_000)))
    limits = Limits(residency_swaps=1_000.0, green_room_mib=2_000)
    world = World(specs, devices=(gpu(0, 8_000), host(20_000)), limits=limits)
    world.engines["large"] = Engine(load_s=100.0)
    ready(world, "held", "sleeper")
    world.arrive("hold", "held", takes_s=1_000.0)
    world.arrive("late", "large", priority=0)
    world.run(30.0)
    world.memory({})
    world.arrive("waits", "small")
    assert not world.kinds("small"), "the device is kept for the large one"
    world.ask("nap", MoveKind.SLEEP, "sleeper")
    world.ask("prepare", MoveKind.PREPARE, "large")
    world.run(10.0)
    assert world.kinds("large") == ["prepare large"] and world.fate("late") is Fate.WAITING
    started = {move.model: move.started for move in world.moves}
    assert started[ModelId("small")] == started[ModelId("large")], "in the same round"
