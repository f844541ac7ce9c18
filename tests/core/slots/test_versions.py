"""Versions: one is loaded beside the model that serves, and takes its name in one step."""

from __future__ import annotations

from dataclasses import replace

from greenroom.core.effects import OpOutcome, RejectCode
from greenroom.core.events import Limits
from greenroom.core.model import (
    DeviceId,
    Group,
    Matrix,
    ModelId,
    ModelSpec,
    MoveKind,
    Need,
    Outcome,
    RequestId,
    Tier,
)
from tests.core.queue.test_order import ready
from tests.core.world import Fate, World, gpu, host, model

A = ModelId("a")
NEXT = ModelId("a@2")


def coming(mib: int = 3_000, **keys: object) -> ModelSpec:
    return replace(model("a@2", mib, **keys), version_of=A)  # type: ignore[arg-type]


def promote(world: World, mib: int = 3_000, **keys: object) -> None:
    world.promote(NEXT, model("a", mib, revision=2, **keys))  # type: ignore[arg-type]


def slots(world: World) -> list[tuple[str, int, str]]:
    return [(slot.model, slot.spec.revision, slot.tier.value) for slot in world.scheduler.state.slots.values()]


def test_a_promoted_version_serves_those_that_wait_and_the_old_one_finishes_uncut() -> None:
    world = World([model("a", 3_000, grace_s=1.0)])
    ready(world, "a")
    world.arrive("old", "a", takes_s=500.0)
    world.config(coming())
    ready(world, "a@2")
    world.arrive("waits", "a", takes_s=5.0)
    assert world.fate("waits") is Fate.WAITING
    promote(world, grace_s=1.0)
    assert world.fate("waits") is Fate.GRANTED
    world.run(300.0)
    assert (world.fate("waits"), world.fate("old")) == (Fate.SERVED, Fate.GRANTED)
    world.run()
    assert world.fate("old") is Fate.SERVED and not world.calls_by_id["old"].was_cut
    assert slots(world) == [("a", 2, "ready")]
    assert NEXT not in world.scheduler.state.models


def test_a_new_version_that_is_told_to_sleep_does_so_while_the_old_one_leaves() -> None:
    asleep = Need(0, 3_000)
    world = World([model("a", 3_000, asleep=asleep)], devices=(gpu(0, 8_000), host(64_000)))
    ready(world, "a")
    world.config(coming(asleep=asleep))
    ready(world, "a@2")
    world.plays = False
    promote(world, asleep=asleep)
    world.ask("o", MoveKind.SLEEP, "a")
    assert world.kinds()[-2:] == ["unload a", "sleep a"]
    for move in world.moves[-2:]:
        world.end_move(move.id, Outcome.DONE)
    assert world.ops["o"] is OpOutcome.DONE and slots(world) == [("a", 2, "asleep")]


def test_later_requests_see_the_new_version_only() -> None:
    world = World([model("a", 3_000, concurrency=4)])
    ready(world, "a")
    world.arrive("old", "a", takes_s=100.0)
    world.config(coming(concurrency=4))
    ready(world, "a@2")
    promote(world, concurrency=4)
    world.arrive("new", "a", takes_s=100.0)
    state = world.scheduler.state
    revisions = [state.slots[state.grants[RequestId(one)].slot].spec.revision for one in ("old", "new")]
    assert revisions == [1, 2]


def test_a_coming_version_does_not_make_its_model_leave() -> None:
    world = World([model("a", 6_000)])
    ready(world, "a")
    world.config(coming(6_000))
    world.ask("load", MoveKind.LOAD, "a@2")
    world.run(1.0)
    assert world.ops["load"] is OpOutcome.TOO_LARGE
    assert slots(world) == [("a", 1, "ready")]


def test_a_coming_version_makes_other_models_leave() -> None:
    world = World([model("a", 3_000), model("b", 4_000)])
    ready(world, "a", "b")
    world.config(coming(4_000))
    world.ask("load", MoveKind.LOAD, "a@2")
    world.run(100.0)
    assert world.ops["load"] is OpOutcome.DONE
    assert sorted(slots(world)) == [("a", 1, "ready"), ("a@2", 1, "ready")]


def test_a_request_for_a_coming_version_waits_while_its_model_and_a_busy_one_fill_the_gpu() -> None:
    world = World([model("a", 3_000), model("b", 4_000)])
    ready(world, "a", "b")
    world.arrive("busy", "b", takes_s=10_000.0)
    world.config(coming(4_000))
    world.arrive("proof", "a@2", takes_s=1.0, within_s=5_000.0)
    world.run(4_000.0)
    # However long it waits, its model stays; only the busy one is asked to leave.
    assert ("a", 1, "ready") in slots(world)


def test_a_version_of_a_model_that_has_none_yet() -> None:
    world = World()
    world.config(coming())
    ready(world, "a@2")
    promote(world, preload=True)
    world.arrive("r", "a", takes_s=1.0)
    world.run()
    assert world.fate("r") is Fate.SERVED and world.kinds() == ["load a@2"]


def test_what_was_learned_goes_over() -> None:
    world = World([model("a", 3_000)])
    ready(world, "a")
    world.arrive("one", "a", takes_s=7.0)
    world.run()
    world.config(coming())
    ready(world, "a@2")
    promote(world)
    record = world.scheduler.state.models[A]
    assert record.answers == 2 and MoveKind.LOAD in record.learned_s and record.spec.revision == 2


def test_an_unknown_or_foreign_version_is_ignored() -> None:
    world = World([model("a", 3_000), model("b", 100)])
    before = world.scheduler.state.counters.ignored
    promote(world)
    world.promote("b", model("a", 3_000, revision=2))
    assert world.scheduler.state.counters.ignored == before + 2
    assert world.scheduler.state.models[A].spec.revision == 1


def test_what_waits_for_the_coming_version_itself_is_rejected() -> None:
    world = World([model("a", 3_000)], plays=False)
    world.config(coming(concurrency=1))
    world.arrive("proof", "a@2")
    promote(world)
    assert world.code("proof") is RejectCode.REMOVED
    assert world.scheduler.state.models[A].spec.revision == 2


def test_a_version_that_was_not_ready_arrives_under_its_new_name() -> None:
    world = World([model("a", 3_000)], plays=False)
    world.config(coming())
    world.arrive("proof", "a@2")
    world.arrive("r", "a")
    promote(world)
    first = next(move for move in world.moves if move.model == NEXT)
    world.end_move(first.id, Outcome.DONE)
    assert world.fate("r") is Fate.GRANTED
    assert MoveKind.LOAD in world.scheduler.state.models[A].learned_s


def test_an_old_version_that_was_leaving_for_another_model_does_not_come_back() -> None:
    world = World(
        [model("a", 4_000, devices=(DeviceId("gpu0"),)), model("b", 6_000)],
        devices=(gpu(0, 8_000), gpu(1, 5_000), host(9_000)),
    )
    ready(world, "a")
    world.arrive("old", "a", takes_s=300.0)
    world.config(replace(coming(3_000), devices=(DeviceId("gpu1"),)))
    ready(world, "a@2")
    world.arrive("other", "b", takes_s=1.0, priority=0, within_s=250.0)
    promote(world, 3_000)
    world.run()
    assert [slot for slot in slots(world) if slot[:2] == ("a", 1)] == []


def test_a_sleeping_old_version_is_unloaded() -> None:
    world = World([model("a", 3_000, asleep=Need(0, 1_000))])
    ready(world, "a")
    world.ask("sleep", MoveKind.SLEEP, "a")
    world.run(50.0)
    world.config(coming(asleep=Need(0, 1_000)))
    ready(world, "a@2")
    promote(world, asleep=Need(0, 1_000))
    world.run()
    assert slots(world) == [("a", 2, Tier.READY.value)]


def test_an_old_version_that_is_planned_is_called_off() -> None:
    world = World([model("a", 3_000), model("b", 6_000)], plays=False)
    world.config(coming())
    world.arrive("r", "a")
    promote(world)
    assert all(slot.spec.revision == 2 for slot in world.scheduler.state.slots.values() if slot.planned is not None)


# --- one at a time ----------------------------------------------------------------------------------------------------


def held(mib: int = 6_000, **keys: object) -> ModelSpec:
    return model("a", mib, held=True, **keys)


def test_a_held_model_drains_and_sleeps_and_its_next_version_serves_those_that_waited() -> None:
    asleep = {"asleep": Need(0, 2_000)}
    world = World([model("a", 6_000, **asleep)], devices=(gpu(0, 8_000), host(9_000)))
    ready(world, "a")
    world.arrive("old", "a", takes_s=20.0)
    world.config(coming(6_000, **asleep))
    world.ask("prepare", MoveKind.PREPARE, "a@2")
    world.run(8.0)
    assert world.ops["prepare"] is OpOutcome.DONE and world.tier("a") is Tier.READY
    world.config(held(**asleep))
    world.arrive("waits", "a", takes_s=1.0)
    world.ask("wake", MoveKind.LOAD, "a@2")
    world.run(60.0)
    assert (world.fate("old"), world.fate("waits")) == (Fate.SERVED, Fate.WAITING)
    assert sorted(slots(world)) == [("a", 1, "asleep"), ("a@2", 1, "ready")] and world.ops["wake"] is OpOutcome.DONE
    promote(world, 6_000, **asleep)
    assert world.fate("waits") is Fate.GRANTED
    world.run()
    assert slots(world) == [("a", 2, "ready")]


def test_a_model_that_is_no_longer_held_comes_back_for_those_that_waited() -> None:
    world = World([model("a", 6_000)])
    ready(world, "a")
    world.config(held())
    world.arrive("waits", "a", takes_s=1.0)
    world.ask("load", MoveKind.LOAD, "a")
    world.run(100.0)
    assert world.fate("waits") is Fate.WAITING and slots(world) == [] and world.ops["load"] is None
    world.config(model("a", 6_000))
    world.run(100.0)
    assert world.fate("waits") is Fate.SERVED and world.ops["load"] is OpOutcome.DONE


def test_what_waits_for_a_held_model_gives_up_in_time() -> None:
    world = World([model("a", 6_000)])
    ready(world, "a")
    world.config(held())
    world.arrive("waits", "a", takes_s=1.0, within_s=5.0)
    world.run(50.0)
    assert world.code("waits") is RejectCode.EXPIRED


def test_holding_twice_and_another_revision_of_a_held_model() -> None:
    world = World([model("a", 3_000)])
    ready(world, "a")
    world.arrive("old", "a", takes_s=50.0)
    world.config(held(3_000))
    world.config(held(3_000))
    world.config(model("a", 3_000, revision=2))
    world.arrive("new", "a", takes_s=1.0)
    world.run()
    assert world.fate("new") is Fate.SERVED and world.fate("old") is Fate.SERVED


# --- beside rules about which models may be ready together ------------------------------------------------------------

TURNS = (Group("turns", (A, ModelId("b")), exclusive=False), Group("alone", (ModelId("c"),)))
SETS = Matrix((("both", "a & b"),))


def test_a_coming_version_goes_by_the_rules_of_its_model() -> None:
    world = World([model("a", 1_000), model("b", 1_000)], limits=Limits(company=TURNS))
    ready(world, "b")
    ready(world, "a")
    assert slots(world) == [("a", 1, "ready")], "they take turns"
    world.config(coming(1_000))
    ready(world, "a@2")
    assert sorted(slots(world)) == [("a", 1, "ready"), ("a@2", 1, "ready")], "a version does not push out its model"
    promote(world, 1_000)
    world.run(100.0)
    assert slots(world) == [("a", 2, "ready")]


def test_a_coming_version_makes_models_leave_that_its_model_would() -> None:
    world = World([model("a", 1_000), model("b", 1_000)], limits=Limits(company=TURNS))
    ready(world, "b")
    world.config(coming(1_000))
    ready(world, "a@2")
    assert slots(world) == [("a@2", 1, "ready")]


def test_a_model_that_sends_another_away_sends_its_coming_version_away() -> None:
    world = World([model("a", 1_000), model("c", 1_000)], limits=Limits(company=TURNS))
    ready(world, "a")
    world.config(coming(1_000))
    ready(world, "a@2")
    ready(world, "c")
    assert slots(world) == [("c", 1, "ready")]


def test_a_coming_version_may_be_ready_beside_whatever_its_model_may() -> None:
    world = World([model("a", 1_000), model("b", 1_000), model("c", 1_000)], limits=Limits(company=SETS))
    ready(world, "c", "a", "b")
    assert sorted(slots(world)) == [("a", 1, "ready"), ("b", 1, "ready")]
    world.config(coming(1_000))
    ready(world, "a@2")
    assert sorted(slots(world)) == [("a", 1, "ready"), ("a@2", 1, "ready"), ("b", 1, "ready")]
