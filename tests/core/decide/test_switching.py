"""When one model gives way to another: idle ones at once, busy ones when due, kept devices, calling off.

Loads take 5 s and departures 1 s, so a swap on an idle GPU takes 6 s. An answer takes 1 s, so a busy model that is sent
away is away for some 12 s; with the default limits it is closed for others after some 120 s.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from greenroom.core.decide.plan import Wait, WaitReason
from greenroom.core.effects import OpOutcome
from greenroom.core.events import Limits
from greenroom.core.model import DeviceId, Group, ModelId, MoveKind, Need, TenantId, Tier
from greenroom.core.queue.waitlist import MODELS_FEW
from tests.core.queue.test_order import ready
from tests.core.world import Call, Engine, Fate, World, gpu, host, model

SWAP_S, AWAY_S = 6.0, 12.0
AT_ONCE_S = (0.0, 0.0, 0.0)


def stream(world: World, name: str, every_s: float, for_s: float, takes_s: float = 1.0, priority: int = 1) -> None:
    """From now on a request every so often."""
    for number in range(int(for_s / every_s)):
        arrive = partial(world.arrive, f"{name}-{number}", name, takes_s=takes_s, priority=priority)
        world.later(number * every_s, arrive)


def two(concurrency: int = 2, **limits: object) -> World:
    """Two models that do not fit together; both have been loaded before, a at last."""
    specs = [model("a", 6_000, concurrency=concurrency), model("b", 6_000, concurrency=concurrency)]
    world = World(specs, limits=Limits(**limits))  # type: ignore[arg-type]
    ready(world, "b", "a")
    world.run(10.0)
    return world


def switched_after_s(world: World, at_most_s: float = 1_000.0) -> float:
    """Let time pass until the next swap is decided on; says how long that took."""
    begun, swapped = world.now, world.scheduler.state.counters.swaps
    while world.scheduler.state.counters.swaps == swapped:
        assert world.now < begun + at_most_s, "no model was asked to leave"
        world.run(0.1)
    return world.now - begun


def swaps(world: World) -> int:
    return sum(1 for kind in world.kinds() if kind.startswith("load"))


def waited_s(call: Call) -> float:
    assert call.fate is Fate.SERVED
    return call.granted_at - call.arrived


# --- idle residents -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("priority", [0, 1, 2])
def test_an_idle_model_gives_way_at_once_however_often_and_urgently_it_was_asked_for(priority: int) -> None:
    world = two()
    stream(world, "a", 0.5, 10.0, takes_s=0.1, priority=priority)
    world.run(10.0)
    world.arrive("cold", "b", takes_s=1.0, priority=2)
    assert world.kinds()[-1] == "unload a"


def test_a_model_gives_way_as_soon_as_its_last_answer_has_ended() -> None:
    world = two()
    world.arrive("runs", "a", takes_s=7.0)
    cold = world.arrive("cold", "b", takes_s=1.0)
    world.run()
    assert waited_s(cold) == 7.0 + SWAP_S


# --- busy residents -------------------------------------------------------------------------------------------------


def busy_for_s(cold: int = 1, resident: int = 1, **limits: object) -> float:
    """How long a model that is never idle, and for which nothing waits, is kept from a request of that priority.

    It is so busy that those that would have to wait outweigh one that does.
    """
    world = two(concurrency=4, recency_s=20.0, **limits)
    stream(world, "a", 0.25, 700.0, takes_s=0.95, priority=resident)
    world.run(100.0)
    world.arrive("cold", "b", takes_s=1.0, priority=cold)
    return switched_after_s(world)


@pytest.mark.untraced
@pytest.mark.parametrize("share", [0.1, 0.2, 1.0])
def test_a_busy_model_is_closed_so_late_that_it_is_away_for_its_share_of_the_time(share: float) -> None:
    assert 0.8 * AWAY_S / share <= busy_for_s(away_share=share, deadlines_s=AT_ONCE_S) <= 1.2 * AWAY_S / share


@pytest.mark.untraced
@pytest.mark.parametrize(("priority", "deadline_s"), [(1, 240.0), (2, 480.0), (7, 480.0)])
def test_a_busy_model_is_not_closed_before_the_deadline(priority: int, deadline_s: float) -> None:
    assert busy_for_s(cold=priority, resident=priority, away_share=1.0) == pytest.approx(deadline_s, abs=0.2)


@pytest.mark.untraced
def test_a_busy_model_that_serves_less_urgent_requests_is_closed_at_the_deadline() -> None:
    for urgent, last in ((0, 1), (1, 2), (-3, 0)):
        deadline_s = Limits().deadlines_s[max(urgent, 0)]
        assert busy_for_s(urgent, last, away_share=0.01) == pytest.approx(deadline_s, abs=0.2)


@pytest.mark.untraced
def test_requests_that_are_as_urgent_are_not_closed_out_at_the_deadline() -> None:
    assert busy_for_s(0, 0) >= 100.0


@pytest.mark.untraced
def test_an_urgent_request_notices_that_a_busy_model_has_gone_on_with_less_urgent_ones() -> None:
    """When it came the model served another urgent one: without that it would have been due much sooner."""
    world = two(concurrency=1)
    world.arrive("as-urgent", "a", takes_s=0.5, priority=0)
    stream(world, "a", 0.5, 300.0)
    urgent = world.arrive("urgent", "b", takes_s=1.0, priority=0)
    world.run()
    assert waited_s(urgent) <= 5.0 + 1.0 + SWAP_S


# --- requests on both sides -----------------------------------------------------------------------------------------


@pytest.mark.untraced
def test_requests_that_waited_when_a_model_came_are_served_before_it_is_closed() -> None:
    """b is due many times before the last of them."""
    world = World([model("a", 6_000), model("b", 6_000)], limits=Limits(deadlines_s=AT_ONCE_S, away_share=1.0))
    ready(world, "b", "a", "b")
    first = [world.arrive(f"a-{number}", "a", takes_s=1.0) for number in range(200)]
    world.run(SWAP_S + 0.5)
    cold = world.arrive("cold", "b", takes_s=1.0)
    later = [world.arrive(f"later-{number}", "a", takes_s=1.0) for number in range(20)]
    world.run()
    assert waited_s(cold) > 10 * AWAY_S
    assert max(call.granted_at for call in first) < cold.granted_at < max(call.granted_at for call in later)


def test_requests_that_came_later_are_overtaken_by_a_queue_that_is_due() -> None:
    world = two(concurrency=1)
    stream(world, "a", 1.0, 400.0)
    world.run(0.1)
    cold = world.arrive("cold", "b", takes_s=1.0)
    world.run()
    assert 200.0 <= waited_s(cold) <= 240.0 + 2 * AWAY_S
    assert swaps(world) == 4, "b, a, b, a"


# --- floods ---------------------------------------------------------------------------------------------------------


@pytest.mark.untraced
@pytest.mark.parametrize("after_s", [-1.0, 0.0, 30.0])
def test_a_tenant_that_floods_a_model_does_not_keep_others_from_theirs(after_s: float) -> None:
    """Its requests come after the other's or before; either way it is noticed in time that they are too many."""
    world = two(concurrency=1)
    world.arrive("runs", "a", takes_s=2.0, tenant="flood")
    if after_s < 0.0:
        cold = world.arrive("cold", "b", takes_s=1.0, tenant="other")
        world.run(1.0)
    for number in range(300):
        world.arrive(f"flood-{number}", "a", takes_s=1.0, tenant="flood")
    if after_s >= 0.0:
        world.run(after_s)
        cold = world.arrive("cold", "b", takes_s=1.0, tenant="other")
    world.run()
    assert waited_s(cold) <= 3 * AWAY_S


@pytest.mark.untraced
def test_a_tenant_that_floods_a_cold_model_does_not_keep_others_from_theirs_when_it_has_come() -> None:
    world = two(concurrency=1)
    for number in range(300):
        world.arrive(f"flood-{number}", "b", takes_s=1.0, tenant="flood")
    world.run(SWAP_S + 30.0)
    other = world.arrive("other", "a", takes_s=1.0, tenant="other")
    world.run()
    assert waited_s(other) <= 3 * AWAY_S


@pytest.mark.untraced
def test_a_tenant_that_floods_a_model_waits_for_its_own_other_requests() -> None:
    world = two(concurrency=1)
    for number in range(300):
        world.arrive(f"flood-{number}", "a", takes_s=1.0, tenant="flood")
    cold = world.arrive("cold", "b", takes_s=1.0, tenant="flood")
    world.run()
    assert waited_s(cold) > 100.0


# --- no request starves ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_models_that_are_asked_for_too_often_are_both_served_within_the_bound() -> None:
    """Each gets more requests than a whole GPU could serve."""
    world = two(concurrency=1)
    stream(world, "a", 0.8, 400.0)
    stream(world, "b", 0.8, 400.0)
    world.run(400.0)
    served = [call for call in world.calls_by_id.values() if call.fate is Fate.SERVED]
    assert len(served) > 350, "nearly all of the time is spent serving"
    world.run()
    turns = sorted(call.granted_at for call in world.calls_by_id.values() if call.candidates == ("b",))
    assert turns[0] <= 30.0 + 10 * 120.0
    assert all(call.fate is Fate.SERVED for call in world.calls_by_id.values())
    assert 3 <= swaps(world) <= 12


def test_a_plan_that_is_called_off_is_charged_to_no_tenant() -> None:
    world = World([model(name, 6_000) for name in ("a", "b")])
    bert = TenantId("bert")
    world.arrive("long", "a", takes_s=400.0)
    world.run(10.0)
    world.arrive("wants-b", "b", takes_s=1.0, tenant="bert")
    accounts = world.scheduler.state.accounts
    had_s = accounts.served_s(bert)
    world.run(260.0)
    assert world.scheduler.state.ledger.promises, "b is late: a is closed for it"
    assert accounts.served_s(bert) == had_s, "nothing has begun"
    world.go("wants-b")
    assert not world.scheduler.state.ledger.promises and accounts.served_s(bert) <= max(had_s, accounts.level_s)


def busy_pair(*first: str, **limits: object) -> World:
    """Two small models that share a GPU, a third one that can sleep, and a large one that needs all of it."""
    specs = [model(name, 4_000, concurrency=2) for name in ("left", "right")]
    specs += [model("third", 4_000, concurrency=2, asleep=Need(0, 1_000)), model("large", 8_000)]
    world = World(specs, devices=(gpu(0, 8_000), host(9_000)), limits=Limits(**limits))  # type: ignore[arg-type]
    ready(world, *first, "left", "right")
    world.run(10.0)
    return world


@pytest.mark.slow
def test_a_large_model_that_needs_two_victims_is_not_starved_by_small_ones() -> None:
    world = busy_pair(deadlines_s=(5.0, 120.0, 480.0))
    for name in ("left", "right"):
        stream(world, name, 0.6, 400.0)
    world.run(0.1)
    large = world.arrive("large", "large", takes_s=1.0)
    stream(world, "third", 5.0, 400.0)
    world.run()
    due_s = 10 * (1.0 + 8_000 / 1_024 + 1.0 + 5.0)
    assert waited_s(large) <= due_s + 5 * AWAY_S, "then the turn of a small one that has just come, at most"
    assert all(call.fate is Fate.SERVED for call in world.calls_by_id.values())


def overdue_beside_a_newcomer(*first: str, **limits: object) -> World:
    """`right` has just come back, and serves those that waited for it; the large one needs its place and is overdue."""
    world = busy_pair(*first, deadlines_s=(5.0, 12.0, 240.0), away_share=1.0, **limits)
    world.ask("away", MoveKind.UNLOAD, "right")
    world.run(2.0)
    for number in range(100):
        world.arrive(f"back-{number}", "right", takes_s=1.0)
    world.run(6.0)
    large = world.arrive("large", "large", takes_s=1.0)
    world.run(15.0)
    assert not world.scheduler.state.kept and large.fate is Fate.WAITING
    world.run(15.0)
    return world


@pytest.mark.parametrize(("first", "tier"), [((), Tier.COLD), (("third",), Tier.ASLEEP)])
def test_a_queue_that_is_overdue_has_its_devices_kept_from_models_that_come_later(
    first: tuple[str, ...], tier: Tier
) -> None:
    """The third may not take the place of `left`, which is idle."""
    world = overdue_beside_a_newcomer(*first)
    assert world.tier("third") is tier
    large = world.calls_by_id["large"]
    assert world.scheduler.state.kept == {ModelId("large"): frozenset({DeviceId("gpu0")})}
    late = world.arrive("late", "third", takes_s=1.0)
    plan = world.scheduler.view.explanation(world.asking("?", "third")).plan
    assert isinstance(plan, Wait) and (plan.why, plan.behind) == (WaitReason.KEPT_FOR_OTHERS, ("large",))
    world.run()
    assert large.granted_at < late.granted_at and world.fate("late") is Fate.SERVED


TOGETHER = Group("together", tuple(map(ModelId, ("left", "right", "third", "large"))), swap=False, exclusive=False)


def test_devices_are_kept_under_rules_that_allow_it() -> None:
    world = overdue_beside_a_newcomer(company=(TOGETHER,))
    assert world.scheduler.state.kept == {ModelId("large"): frozenset({DeviceId("gpu0")})}
    world.run()
    assert world.fate("large") is Fate.SERVED


def test_no_device_is_kept_for_a_swapper_that_would_not_evict_what_is_there() -> None:
    """The coordinator evicts nothing that is busy."""
    assert not overdue_beside_a_newcomer(swapper="coordinator").scheduler.state.kept


def test_a_version_that_no_longer_fits_beside_its_model_is_refused_while_devices_are_kept_for_others() -> None:
    world = overdue_beside_a_newcomer()
    world.config(replace(model("left@2", 3_000), version_of=ModelId("left")))
    world.ask("update", MoveKind.LOAD, "left@2")
    world.run(0.1)
    assert world.scheduler.state.kept and world.ops["update"] is None
    world.config(needs={ModelId("left@2"): Need(5_000)})
    world.run(0.1)
    assert world.ops["update"] is OpOutcome.TOO_LARGE


def test_kept_devices_are_free_again_when_the_request_they_were_kept_for_has_left() -> None:
    world = overdue_beside_a_newcomer()
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
    world = two()
    world.arrive("long", "a", takes_s=30.0)
    world.arrive("cold", "b", takes_s=1.0, priority=0)
    switched_after_s(world, at_most_s=20.0)
    assert world.arrive("late", "a", takes_s=1.0).fate is Fate.WAITING, "there is room, but it is about to leave"
    assert world.fate("long") is Fate.GRANTED and not world.moving
    world.run()
    assert world.granted()[-3:] == ["long", "cold", "late"] and not world.calls_by_id["long"].was_cut


def test_a_busy_victim_stays_when_no_request_waits_for_its_memory_any_more() -> None:
    world = two()
    world.arrive("long", "a", takes_s=30.0)
    world.arrive("cold", "b", takes_s=1.0, priority=0)
    switched_after_s(world, at_most_s=20.0)
    late = world.arrive("late", "a", takes_s=1.0)
    world.go("cold")
    assert late.fate is Fate.GRANTED
    world.run()
    assert swaps(world) == 2 and world.tier("a") is Tier.READY and not world.timers


@pytest.mark.untraced
def test_many_cold_models_are_all_brought_in_the_end() -> None:
    """More of them than are asked for in one round."""
    names = [f"m{number}" for number in range(24)]
    world = World([model(name, 6_000) for name in names])
    calls: list[Call] = [world.arrive(f"r-{name}", name, takes_s=1.0) for name in names]
    world.run()
    assert all(call.fate is Fate.SERVED for call in calls) and swaps(world) == 24


@pytest.mark.untraced
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
    assert swaps(world) <= len(names) + 3, "requests for the same model are served together"
    urgent = world.calls_by_id["urgent"]
    assert urgent.granted_at - urgent.arrived <= 6 * SWAP_S


def test_models_on_other_devices_come_beside_each_other() -> None:
    world = World([model(name, 6_000) for name in "abcd"], devices=(gpu(0, 8_000), gpu(1, 8_000)))
    calls = [world.arrive(name, name, takes_s=1.0) for name in "abcd"]
    world.run()
    assert [round(call.granted_at, 1) for call in calls] == [5.0, 5.0, 12.0, 12.0]


def flooded_and_closed() -> World:
    """A tenant floods a, which is closed for a request for b long before the deadline of that one."""
    world = World([model(name, 6_000, concurrency=2) for name in ("a", "b", "c")])
    ready(world, "b", "a")
    world.arrive("long", "a", takes_s=400.0, tenant="flood")
    for number in range(100):
        world.arrive(f"flood-{number}", "a", takes_s=1.0, tenant="flood")
    world.arrive("waits-b", "b", takes_s=1.0, tenant="other")
    switched_after_s(world, at_most_s=60.0)
    world.run(5.0)
    assert world.scheduler.state.ledger.promises, "a is closed for it, and still busy"
    return world


def test_a_model_that_is_flooded_is_closed_again_though_a_more_urgent_request_has_come() -> None:
    """The plan is called off and made anew in the same round, because the other request is still due."""
    world = flooded_and_closed()
    world.arrive("urgent", "c", priority=0, takes_s=1.0)
    assert world.scheduler.state.ledger.promises
    world.run()
    assert all(call.fate is Fate.SERVED for call in world.calls_by_id.values())


def test_a_plan_past_its_deadline_is_not_called_off_for_a_more_urgent_request() -> None:
    world = flooded_and_closed()
    world.run(120.0)
    world.arrive("urgent", "c", priority=0, takes_s=1.0)
    assert world.scheduler.state.ledger.promises
    world.run()
    assert world.calls_by_id["waits-b"].granted_at < world.calls_by_id["urgent"].granted_at


def test_a_preload_that_waits_for_ever_delays_no_request() -> None:
    """It evicts no busy model, and must not stand before a request that may."""
    world = World([model("a", 6_000), model("b", 6_000)])
    world.arrive("long", "a", takes_s=1_100.0)
    world.run(10.0)
    world.config(model("b", 6_000, preload=True))
    world.run(1_000.0)
    call = world.arrive("late", "b", takes_s=1.0)
    world.run(300.0)
    assert call.fate is Fate.SERVED


@pytest.mark.untraced
def test_devices_are_no_longer_kept_for_a_model_that_is_being_prepared() -> None:
    """While it moves to the green room it cannot come: what was kept for it would serve nothing."""
    specs = [model("held", 7_000), model("large", 8_000, asleep=Need(0, 2_000)), model("small", 400)]
    specs.append(model("sleeper", 500, asleep=Need(0, 2_000)))
    limits = Limits(deadlines_s=AT_ONCE_S, away_share=1.0, green_room_mib=2_000)
    world = World(specs, devices=(gpu(0, 8_000), host(20_000)), limits=limits)
    ready(world, "sleeper")
    # Those that waited for it when it came have their turns first.
    for number in range(300):
        world.arrive(f"first-{number}", "held", takes_s=1.0)
    world.run(10.0)
    world.arrive("late", "large")
    world.run(200.0)
    world.memory({})
    world.arrive("waits", "small")
    assert not world.kinds("small"), "the device is kept for the large one"
    world.ask("nap", MoveKind.SLEEP, "sleeper")
    world.ask("prepare", MoveKind.PREPARE, "large")
    world.run(10.0)
    assert world.kinds("large") == ["prepare large"] and world.fate("late") is Fate.WAITING
    started = {move.model: move.started for move in world.moves}
    assert started[ModelId("small")] == started[ModelId("large")], "in the same round"


@pytest.mark.slow
def test_nothing_is_owed_to_those_that_left() -> None:
    """Callers that gave up when the model came do not hold up the models of others."""
    waited = []
    for leaving in (0, 300):
        world = two(concurrency=1)
        world.ask("away", MoveKind.UNLOAD, "a")
        world.run(20.0)
        gone = [world.arrive(f"gone-{number}", "a", takes_s=1.0) for number in range(leaving)]
        stream(world, "a", 0.9, 1_000.0)
        world.run(6.0)
        for call in gone:
            if call.fate is Fate.WAITING:
                world.go(call.id)
        cold = world.arrive("cold", "b", takes_s=1.0)
        world.run(900.0)
        waited.append(waited_s(cold))
    assert waited[1] == pytest.approx(waited[0], abs=10.0)


def test_no_device_is_kept_where_a_lease_stays() -> None:
    """A lease that is not recalled for a large model may stay for ever: others that fit beside it come."""
    small = [model(f"small-{number}", 1_000) for number in range(5)]
    world = World([model("big", 7_000), *small], devices=(gpu(0, 8_000, 0),))
    world.ask_lease("train", 3_000, priority=1, preemptible=True)
    world.arrive("big", "big", takes_s=1.0)
    calls: list[Call] = []
    for number in range(5):
        world.run(200.0)
        calls.append(world.arrive(f"r{number}", f"small-{number}", takes_s=1.0))
    world.run(100.0)
    assert [call.fate for call in calls] == [Fate.SERVED] * 5


@pytest.mark.parametrize("after_s", [100.0, 3_000.0])
def test_a_steady_stream_has_the_same_rate_soon_after_the_start_as_later(after_s: float) -> None:
    world = World([model("a", 6_000, concurrency=4)])
    stream(world, "a", 1.0, after_s)
    world.run(after_s)
    assert world.scheduler.state.models[ModelId("a")].rate(600.0, world.now) == pytest.approx(1.0, rel=0.02)


def test_a_burst_at_the_start_is_no_rate() -> None:
    world = World([model("a", 6_000, concurrency=4)])
    for number in range(6):
        world.arrive(f"r{number}", "a", takes_s=0.1)
    assert world.scheduler.state.models[ModelId("a")].rate(600.0, world.now) <= 0.11


def test_a_busy_model_is_closed_before_those_that_wait_give_up() -> None:
    """Ten times a slow switch is longer than callers wait: without this no rare request would ever be served."""
    specs = [model("a", 6_000, concurrency=4), model("b", 6_000, concurrency=4)]
    world = World(specs, limits=Limits(wait_max_s=300.0))
    world.engines["a"] = world.engines["b"] = Engine(load_s=60.0)
    for name in "ba":
        world.arrive(f"warm-{name}", name, takes_s=1.0)
        world.run(100.0)
    stream(world, "a", 5.0, 1_300.0, takes_s=10.0)
    world.run(20.0)
    calls: list[Call] = []
    for number in range(3):
        calls.append(world.arrive(f"b-{number}", "b", takes_s=1.0, within_s=300.0))
        world.run(400.0)
    assert [call.fate for call in calls] == [Fate.SERVED] * 3
