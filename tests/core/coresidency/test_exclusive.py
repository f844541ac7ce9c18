"""Configurations of one thing: models that share a word in `exclusive` are never in memory at the same time."""

from __future__ import annotations

import pytest

from greenroom.core.decide.plan import Refuse, Wait, WaitReason
from greenroom.core.effects import RejectCode
from greenroom.core.events import Limits
from greenroom.core.model import Group, ModelId, MoveKind, Need, Tier
from tests.core.queue.test_order import ready
from tests.core.test_explain import explained
from tests.core.world import Fate, World, gpu, host, model

A, B = map(ModelId, "ab")
SWAPPERS = pytest.mark.parametrize("swapper", ["memory", "coordinator"])


@SWAPPERS
def test_the_other_configuration_leaves_first_though_both_would_fit(swapper: str) -> None:
    specs = [model(name, 1_000, exclusive="x") for name in "ab"]
    world = World([*specs, model("c", 1_000), model("d", 1_000, exclusive="y")], limits=Limits(swapper=swapper))
    ready(world, "c", "d", "a", "b")
    assert [world.tier(name) for name in "abcd"] == [Tier.COLD, Tier.READY, Tier.READY, Tier.READY]
    assert world.kinds() == ["load c", "load d", "load a", "unload a", "load b"]


def test_its_load_begins_when_the_other_has_left() -> None:
    world = World([model(name, 1_000, exclusive="x") for name in "ab"])
    ready(world, "a")
    world.arrive("r", "b")
    assert world.kinds() == ["load a", "unload a"], "there is room for both, and still it waits"
    world.run(20.0)
    assert world.kinds()[-1] == "load b" and world.fate("r") is Fate.GRANTED


def test_never_in_the_middle_of_an_answer() -> None:
    world = World([model(name, 1_000, exclusive="x") for name in "ab"])
    ready(world, "a")
    world.arrive("running", "a")
    world.arrive("r", "b")
    world.run(300.0)
    assert world.tier("a") is Tier.READY and world.tier("b") is Tier.COLD
    assert world.kinds() == ["load a"], "it waits for its turn, and then until the answer has ended"
    world.finish("running")
    world.run(20.0)
    assert world.fate("r") is Fate.GRANTED and world.tier("a") is Tier.COLD


def test_one_that_sleeps_is_no_obstacle_and_wakes_in_turn() -> None:
    specs = [model(name, 1_000, exclusive="x", asleep=Need(0, 100)) for name in "ab"]
    world = World(specs, devices=(gpu(0, 8_000), host(8_000)))
    ready(world, "a", "b", "a")
    assert world.kinds() == ["load a", "sleep a", "load b", "sleep b", "wake a"]


def test_refused_beside_a_pinned_configuration_and_told_so() -> None:
    world = World([model("a", 1_000, exclusive="x", pinned=True), model("b", 1_000, exclusive="x")])
    ready(world, "a")
    assert explained(world, "b").plan == Refuse(RejectCode.EXCLUDED, beside=(A,))


def test_one_that_gives_up_is_told_what_was_in_its_way() -> None:
    world = World([model(name, 1_000, exclusive="x") for name in "ab"])
    ready(world, "a")
    world.arrive("running", "a")
    world.arrive("r", "b", within_s=3.0)
    plan = explained(world, "b").plan
    assert isinstance(plan, Wait) and (plan.why, plan.beside) == (WaitReason.EXCLUDED, (A,))
    world.run(4.0)
    rejection = world.calls_by_id["r"].rejection
    assert rejection is not None and (rejection.code, rejection.beside) == (RejectCode.EXPIRED, (A,))


def test_it_holds_beside_the_rules_of_groups() -> None:
    free = Limits(company=(Group("free", (A, B), swap=False, exclusive=False),))
    world = World([model(name, 1_000, exclusive="x") for name in "ab"], limits=free)
    ready(world, "a", "b")
    assert (world.tier("a"), world.tier("b")) == (Tier.COLD, Tier.READY)


def test_a_crashed_one_is_waited_for() -> None:
    world = World([model(name, 1_000, exclusive="x") for name in "ab"])
    ready(world, "a")
    world.lose(world.slot_of("a"))
    world.arrive("r", "b")
    world.run(30.0)
    assert world.fate("r") is Fate.GRANTED and world.kinds("b") == ["load b"]


def test_both_may_be_asleep_and_prepared() -> None:
    specs = [model(name, 1_000, exclusive="x", asleep=Need(0, 100)) for name in "ab"]
    world = World(specs, devices=(gpu(0, 8_000), host(8_000)))
    for name in "ab":
        world.ask(name, MoveKind.PREPARE, name)
        world.run(20.0)
    assert [world.tier(name) for name in "ab"] == [Tier.ASLEEP, Tier.ASLEEP]


def test_a_pinned_sleeper_that_wakes_excludes_the_next_model_of_the_same_round() -> None:
    specs = [model(name, 1_000, exclusive="x", asleep=Need(0, 100), pinned=name == "a") for name in "abc"]
    world = World(specs, devices=(gpu(0, 8_000), host(8_000)))
    ready(world, "a")
    world.ask("sleep", MoveKind.SLEEP, "a")
    world.run(20.0)
    ready(world, "c")
    world.arrive("running", "c")
    world.ask("wake", MoveKind.LOAD, "a")
    world.arrive("r", "b")
    assert world.tier("a") is Tier.ASLEEP and world.fate("r") is Fate.WAITING
    world.finish("running")
    world.run(60.0)
    assert world.tier("a") is Tier.READY and "load b" not in world.kinds()
