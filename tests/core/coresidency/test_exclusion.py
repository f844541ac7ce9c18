"""A model that the rules keep out: refused at once beside a pinned model, else it waits with the right reason."""

from __future__ import annotations

import pytest

from greenroom.core.decide.plan import Refuse, Wait, WaitReason
from greenroom.core.effects import OpOutcome, RejectCode
from greenroom.core.events import Limits
from greenroom.core.model import Group, Matrix, ModelId, MoveKind, Need, Rules
from tests.core.queue.test_order import ready
from tests.core.test_explain import explained
from tests.core.world import Fate, World, model

A, B, C = map(ModelId, "abc")
TURNS = (Group("turns", (A, B), exclusive=False), Group("free", (C,), exclusive=False))
# Any two of the three, never all.
PAIRS = Matrix((("pairs", "a & b | a & c | b & c"),))


@pytest.mark.parametrize("swapper", ["memory", "coordinator"])
def test_refused_at_once_beside_a_pinned_model(swapper: str) -> None:
    world = World([model("a", 1_000, pinned=True), model("b", 1_000)], limits=Limits(swapper=swapper, company=TURNS))
    ready(world, "a")
    answer = explained(world, "b")
    assert answer.plan == Refuse(RejectCode.EXCLUDED, beside=(A,)) and answer.eta_s is None
    world.arrive("r", "b")
    rejection = world.calls_by_id["r"].rejection
    assert rejection is not None and (rejection.code, rejection.beside) == (RejectCode.EXCLUDED, (A,))


def test_an_operators_load_is_refused_too_and_a_prepare_is_not() -> None:
    sleepy = model("b", 1_000, asleep=Need(0, 100))
    world = World([model("a", 1_000, pinned=True), sleepy], limits=Limits(company=TURNS))
    ready(world, "a")
    world.ask("load", MoveKind.LOAD, "b")
    assert world.ops["load"] is OpOutcome.EXCLUDED
    world.ask("prepare", MoveKind.PREPARE, "b")
    world.run(20.0)
    assert world.ops["prepare"] is OpOutcome.DONE
    world.arrive("r", "b")
    assert world.code("r") is RejectCode.EXCLUDED, "it may be asleep beside a, but not awake"


def test_waiters_are_refused_when_a_pinned_model_arrives() -> None:
    world = World([model("a", 1_000, pinned=True), model("b", 1_000)], limits=Limits(company=TURNS))
    ready(world, "b")
    world.arrive("running", "b")
    world.arrive("pinned", "a", takes_s=0.0)
    world.finish("running")
    world.run(1.0)
    world.arrive("late", "b")
    world.run(60.0)
    assert world.fate("pinned") is Fate.SERVED and world.code("late") is RejectCode.EXCLUDED


def test_only_pinned_models_that_are_in_the_way_are_named() -> None:
    pinned = [model(name, 1_000, pinned=True) for name in ("a", "b")]
    world = World([*pinned, model("c", 1_000), model("d", 1_000)], limits=Limits(company=PAIRS))
    ready(world, "a")
    assert not isinstance(explained(world, "c").plan, Refuse)
    ready(world, "b")
    assert explained(world, "c").plan == Refuse(RejectCode.EXCLUDED, beside=(A, B)), "neither alone would keep it out"
    assert explained(world, "d").plan == Refuse(RejectCode.EXCLUDED, beside=(B,)), "either would: one is named"


def test_a_request_with_another_candidate_goes_there() -> None:
    models = [model("a", 1_000, pinned=True), model("b", 1_000), model("c", 1_000)]
    world = World(models, limits=Limits(company=TURNS))
    ready(world, "a")
    world.arrive("r", "b", "c", takes_s=0.0)
    world.run(20.0)
    assert world.fate("r") is Fate.SERVED


@pytest.mark.parametrize("rules", [TURNS, PAIRS])
def test_a_mere_wait_names_the_rule_and_the_model(rules: Rules) -> None:
    names = ("a",) if rules is TURNS else ("a", "c")
    world = World([model(name, 1_000) for name in "abc"], limits=Limits(company=rules))
    for name in names:
        ready(world, name)
        world.arrive(f"running-{name}", name)
    plan = explained(world, "b").plan
    assert isinstance(plan, Wait) and (plan.why, plan.beside) == (WaitReason.EXCLUDED, tuple(map(ModelId, names)))
    world.arrive("r", "b", takes_s=0.0)
    for name in names:
        world.finish(f"running-{name}")
    world.run(60.0)
    assert world.fate("r") is Fate.SERVED


def test_a_wait_for_memory_under_rules_is_still_one_for_memory() -> None:
    world = World([model("a", 6_000), model("c", 6_000)], limits=Limits(company=TURNS))
    ready(world, "a")
    world.arrive("running", "a")
    plan = explained(world, "c").plan
    assert isinstance(plan, Wait) and (plan.why, plan.beside) == (WaitReason.NO_ROOM, ())


@pytest.mark.parametrize("mib", [1_000, 6_000])
def test_a_request_that_gives_up_is_told_what_it_waited_for(mib: int) -> None:
    """b may not be ready beside a; c only lacks its memory."""
    world = World([model("a", mib), model("b", mib), model("c", mib)], limits=Limits(company=TURNS))
    ready(world, "a")
    world.arrive("running", "a")
    name = "b" if mib == 1_000 else "c"
    world.arrive("r", name, within_s=3.0)
    world.run(4.0)
    rejection = world.calls_by_id["r"].rejection
    assert rejection is not None and rejection.code is RejectCode.EXPIRED
    expected = ((A,), 0) if name == "b" else ((), mib)
    assert (rejection.beside, rejection.needs_mib) == expected


def test_it_comes_when_a_busy_model_in_its_way_has_answered_though_there_is_room_for_both() -> None:
    world = World([model("a", 1_000), model("b", 1_000)], limits=Limits(company=TURNS))
    ready(world, "a")
    world.arrive("running", "a")
    world.arrive("waiting", "b")
    world.keep_busy("a", takes_s=5.0, for_s=290.0)
    world.run(280.0)
    assert world.code("waiting") is None and world.kinds() == ["load a"], "the first answer goes on"
    world.finish("running")
    world.run(20.0)
    assert world.fate("waiting") is Fate.GRANTED and world.kinds() == ["load a", "unload a", "load b"]
