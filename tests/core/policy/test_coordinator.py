"""The swapper with few rules: evicts idle models, neither pinned nor more urgent, least urgent and oldest first."""

from __future__ import annotations

import pytest

from greenroom.core.events import Limits
from greenroom.core.model import DeviceId, ModelId, MoveKind, Need
from greenroom.core.policy.coresidency import Group
from tests.core.decide.test_memory import victims
from tests.core.queue.test_order import ready
from tests.core.world import Fate, World, gpu, host, model

LIMITS = Limits(swapper="coordinator")
GPU0, GPU1 = DeviceId("gpu0"), DeviceId("gpu1")


def used(world: World, **priorities: int) -> None:
    for name, priority in priorities.items():
        world.arrive(f"warm {name}", name, takes_s=0.0, priority=priority)
        world.run(10.0)


@pytest.mark.parametrize(
    ("priorities", "leaves"),
    [({"a": 1, "b": 2, "c": 3}, ["c"]), ({"a": 1, "b": 1, "c": 1}, ["a"]), ({"a": 0, "b": 1, "c": 0}, ["b"])],
    ids=["the least urgent", "the least recently used", "equals but not more urgent ones"],
)
def test_the_least_urgent_leaves_first_and_then_the_least_recently_used(
    priorities: dict[str, int], leaves: list[str]
) -> None:
    world = World([model(name, 2_500) for name in "abc"] + [model("new", 2_500)], limits=LIMITS)
    used(world, **priorities)
    world.arrive("r", "new", takes_s=0.0)
    world.run()
    assert victims(world) == leaves and world.fate("r") is Fate.SERVED


def test_they_leave_in_turn_until_there_is_room() -> None:
    world = World([model("a", 1_000), model("b", 1_000), model("c", 6_000), model("new", 6_000)], limits=LIMITS)
    used(world, a=1, b=1, c=1)
    world.arrive("r", "new", takes_s=0.0)
    world.run()
    assert victims(world) == ["a", "b", "c"], "it looks at no costs: the oldest go, though the last alone would do"


def test_more_urgent_ones_are_left_alone_until_they_go_by_themselves() -> None:
    world = World([model("a", 6_000, ttl_s=50.0), model("new", 6_000)], limits=LIMITS)
    used(world, a=0)
    world.arrive("r", "new", takes_s=0.0)
    world.run(30.0)
    assert world.fate("r") is Fate.WAITING and not victims(world)
    world.run(60.0)
    assert world.fate("r") is Fate.SERVED and world.kinds() == ["load a", "unload a", "load new"]


def test_busy_and_pinned_ones_are_left_alone() -> None:
    world = World(
        [model("a", 4_000, pinned=True), model("b", 2_000), model("c", 2_000), model("n", 2_000)], limits=LIMITS
    )
    used(world, a=9, b=9, c=1)
    world.arrive("running", "b", priority=9)
    world.arrive("r", "n", takes_s=0.0)
    world.run()
    assert victims(world) == ["c"]


def test_no_model_is_evicted_where_that_would_not_help() -> None:
    world = World(
        [model("a", 4_000, devices=(GPU0,)), model("b", 6_000, devices=(GPU1,)), model("n", 7_000, devices=(GPU1,))],
        (gpu(0, 8_000), gpu(1, 8_000)),
        LIMITS,
    )
    used(world, a=9, b=1)
    world.arrive("r", "n", takes_s=0.0)
    world.run()
    assert victims(world) == ["b"]


def test_of_two_gpus_the_tighter_fit_then_where_fewer_leave_then_whose_turn_it_is() -> None:
    world = World([model("a", 7_000), model("b", 3_000), model("c", 2_000)], (gpu(0, 8_000), gpu(1, 4_000)), LIMITS)
    used(world, a=1, b=1)
    assert [dict(move.claim) for move in world.moves] == [{GPU0: 7_000}, {GPU1: 3_000}], "no eviction: the tighter fit"
    used(world, c=1)
    assert victims(world) == ["a"], "one leaves in either case: the least recently used"
    world.arrive("r", "a", takes_s=0.0)
    world.run()
    assert victims(world) == ["a", "c"]


def test_a_sleeping_model_is_unloaded_for_the_memory_that_it_keeps() -> None:
    world = World(
        [model("a", 6_000, asleep=Need(1_000, 2_000)), model("b", 8_000)], (gpu(0, 8_000), host(8_000)), LIMITS
    )
    ready(world, "a")
    world.ask("o", MoveKind.SLEEP, "a")
    world.run(5.0)
    world.arrive("r", "b", takes_s=0.0)
    world.run()
    assert world.kinds("a") == ["load a", "sleep a", "unload a"] and world.fate("r") is Fate.SERVED


def test_rules_of_coresidency_hold_for_this_swapper_too() -> None:
    rules = (Group("turns", (ModelId("a"), ModelId("b")), exclusive=False),)
    world = World([model("a", 1_000), model("b", 1_000)], limits=Limits(swapper="coordinator", company=rules))
    used(world, a=1)
    world.arrive("urgent", "b", takes_s=0.0)
    world.run(20.0)
    assert victims(world) == ["a"] and world.fate("urgent") is Fate.SERVED
    world.arrive("running", "b", priority=0)
    world.arrive("r", "a", takes_s=0.0)
    world.run(20.0)
    assert world.fate("r") is Fate.WAITING, "b is busy and more urgent"
    world.finish("running")
    world.run(200.0)
    assert world.fate("r") is Fate.WAITING


def test_the_rules_of_coresidency_evict_a_loading_model_only_when_it_is_loaded() -> None:
    rules = (Group("turns", (ModelId("a"), ModelId("b")), exclusive=False),)
    world = World([model("a", 1_000), model("b", 1_000)], limits=Limits(swapper="coordinator", company=rules))
    world.arrive("first", "a", takes_s=0.0)
    world.run(1.0)
    world.arrive("r", "b", takes_s=0.0)
    assert world.fate("r") is Fate.WAITING and victims(world) == [], "a is loading"
    world.run(20.0)
    assert world.fate("r") is Fate.SERVED and victims(world) == ["a"]


def test_a_model_is_as_urgent_as_the_most_urgent_request_that_waits_for_it() -> None:
    world = World([model("a", 6_000), model("new", 6_000)], limits=LIMITS)
    used(world, a=0)
    world.arrive("running", "a", priority=0)
    world.arrive("late", "new", takes_s=0.0)
    world.run(1_000.0)
    world.arrive("urgent", "new", priority=0, takes_s=0.0)
    world.finish("running")
    world.run()
    assert victims(world) == ["a"], "the late one goes first, but alone it could not have made a leave"
    assert world.granted()[-2:] == ["late", "urgent"]


def test_the_stay_of_sleepers_is_over_however_urgent_they_were() -> None:
    models = [model("a", 6_000, asleep=Need(1_000, 2_000), ttl_s=5.0), model("b", 8_000)]
    world = World(models, (gpu(0, 8_000), host(8_000)), LIMITS)
    used(world, a=0)
    assert world.kinds() == ["load a", "sleep a"]
    world.arrive("r", "b", takes_s=0.0, priority=2)
    world.run()
    assert victims(world)[-1:] == ["a"] and world.fate("r") is Fate.SERVED


def test_sleeping_models_stay_where_evicting_a_ready_one_frees_enough() -> None:
    models = [model(name, 2_000, asleep=Need(300, 500)) for name in ("s1", "s2")] + [
        model("a", 6_000),
        model("n", 6_500),
    ]
    world = World(models, (gpu(0, 8_000), host(8_000)), LIMITS)
    for name in ("s1", "s2"):
        ready(world, name)
        world.ask(f"sleep {name}", MoveKind.SLEEP, name)
        world.run(5.0)
    used(world, a=1)
    world.arrive("r", "n", takes_s=0.0)
    world.run()
    assert victims(world) == ["a"] and world.fate("r") is Fate.SERVED
