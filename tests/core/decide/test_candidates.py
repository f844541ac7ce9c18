"""Requests that name several models: the first that can serve them does."""

from __future__ import annotations

import pytest

from greenroom.core.effects import RejectCode
from greenroom.core.model import MoveKind, Outcome
from greenroom.core.plain import PlainScheduler
from greenroom.core.scheduler import DefaultScheduler
from tests.core.queue.test_order import ready
from tests.core.world import Fate, World, gpu, host, model


def served_by(world: World, name: str) -> str:
    grants = [call for call in world.calls if call[0] == "grant" and call[1] == name]
    slot = grants[-1][2]
    return next(str(move.model) for move in world.moves if move.slot == slot)


def test_the_first_candidate_is_brought_when_none_is_there() -> None:
    world = World([model("a", 3_000), model("b", 3_000)])
    world.arrive("r", "a", "b", takes_s=0.0)
    world.run()
    assert world.kinds() == ["load a"] and served_by(world, "r") == "a"


def test_a_candidate_that_is_ready_serves_at_once() -> None:
    world = World([model("a", 3_000), model("b", 3_000)])
    ready(world, "b")
    world.arrive("r", "a", "b", takes_s=0.0)
    assert world.fate("r") is Fate.GRANTED and served_by(world, "r") == "b" and world.kinds() == ["load b"]


def test_the_second_candidate_serves_when_the_first_is_full_or_when_it_becomes_free_first() -> None:
    world = World([model("a", 3_000), model("b", 3_000)])
    ready(world, "a", "b")
    world.arrive("usual", "a", takes_s=4.0)
    world.run()
    world.arrive("on a", "a")
    world.arrive("r1", "a", "b")
    assert world.fate("r1") is Fate.GRANTED and served_by(world, "r1") == "b"
    world.arrive("r2", "a", "b")
    assert world.fate("r2") is Fate.WAITING
    world.finish("r1")
    assert world.fate("r2") is Fate.GRANTED and served_by(world, "r2") == "b"


def test_the_second_candidate_is_brought_when_the_first_fails() -> None:
    world = World([model("a", 3_000), model("b", 3_000)])
    world.outcome_of = lambda move: Outcome.FAILED if move.model == "a" else Outcome.DONE
    world.arrive("both", "a", "b", takes_s=0.0)
    world.arrive("only a", "a")
    world.run(6.0)
    assert world.code("only a") is RejectCode.LOAD_FAILED
    world.arrive("later", "a", "b", takes_s=0.0)
    world.run()
    assert world.kinds() == ["load a", "load b"]
    assert world.fate("both") is Fate.SERVED and world.fate("later") is Fate.SERVED


def test_a_request_that_turns_to_its_second_candidate_joins_that_load() -> None:
    world = World([model("a", 30_000), model("b", 3_000)])
    world.arrive("first", "b", takes_s=0.0)
    world.arrive("r", "a", "b", takes_s=0.0)
    world.run()
    assert world.kinds() == ["load b"] and world.granted() == ["first", "r"]


def test_a_request_all_of_whose_candidates_are_hopeless_is_refused_for_the_first() -> None:
    world = World([model("a", 30_000), model("b", 40_000)])
    rejection = world.arrive("r", "a", "b", "nope").rejection
    assert rejection is not None and (rejection.code, rejection.needs_mib) == (RejectCode.TOO_LARGE, 30_000)


def test_all_candidates_failing_ends_in_a_rejection() -> None:
    world = World([model("a", 3_000), model("b", 3_000)])
    world.outcome_of = lambda move: Outcome.FAILED
    world.arrive("r", "a", "b")
    world.run()
    assert world.code("r") is RejectCode.LOAD_FAILED and world.kinds() == ["load a", "load b"]


def test_unloading_one_candidate_leaves_the_other() -> None:
    world = World([model("a", 6_000), model("b", 6_000)])
    world.arrive("r", "a", "b", takes_s=0.0)
    world.ask("o", MoveKind.UNLOAD, "a")
    world.run()
    assert world.fate("r") is Fate.SERVED and served_by(world, "r") == "b"


def test_those_behind_one_that_turned_elsewhere_are_decided_on_in_the_same_breath() -> None:
    """Both wait for a, which has become too large. The first turns to b; the second must hear at once."""
    world = World([model("a", 6_000), model("b", 3_000), model("c", 6_000)], devices=(gpu(0, 7_000),))
    ready(world, "c")
    world.arrive("running", "c")
    world.arrive("first", "a", "b")
    world.arrive("second", "a")
    world.config(devices=(gpu(0, 5_000),))
    assert world.code("second") is RejectCode.TOO_LARGE and world.fate("first") is Fate.WAITING


def test_a_request_served_by_its_second_candidate_delays_no_request_for_its_first() -> None:
    world = World([model("a", 6_000, concurrency=9), model("b", 6_000)])
    ready(world, "a")
    world.arrive("running", "a", takes_s=3.0)
    world.arrive("urgent", "b", priority=0, takes_s=0.0)
    assert world.arrive("low", "b", "a", priority=2, takes_s=1.0).fate is Fate.GRANTED
    assert served_by(world, "low") == "a"
    world.run()
    assert world.fate("urgent") is Fate.SERVED


def test_a_choosy_request_counts_only_for_the_model_in_whose_queue_it_stands() -> None:
    world = World([model("a", 6_000), model("b", 6_000), model("c", 6_000)])
    ready(world, "c")
    world.arrive("running", "c")
    world.arrive("r", "a", "b")
    assert list(world.scheduler.state.waitlist.queues) == ["a"] and list(
        world.scheduler.state.waitlist.with_choice
    ) == ["r"]
    world.go("r")
    assert not world.scheduler.state.waitlist.with_choice


@pytest.mark.parametrize("scheduler", [DefaultScheduler, PlainScheduler])
def test_a_request_stays_with_the_candidate_it_turned_to_while_the_store_is_down(
    scheduler: type[PlainScheduler],
) -> None:
    world = World([model("a", 3_000), model("b", 7_000), model("loading", 5_000)], scheduler=scheduler)
    world.outcome_of = lambda move: Outcome.STORE_DOWN if move.model == "a" else Outcome.DONE
    world.arrive("waits for a", "a")
    world.run(4.0)
    world.arrive("slow", "loading", takes_s=60.0)
    world.run(1.5)
    waitlist = world.scheduler.state.waitlist
    for name in ("either", "or"):
        assert world.arrive(name, "a", "b").fate is Fate.WAITING
        assert waitlist["either"].model == "b" and waitlist[name].model == "b"
    assert waitlist["waits for a"].model == "a"


def test_the_plan_of_a_pinned_model_is_not_called_off_for_a_candidate_beside_which_it_has_no_room() -> None:
    pinned = (
        model("kept", 1_000, pinned=True, preload=True),
        model("fixed", 3_000, pinned=True, preload=True, sizes_itself=True),
    )
    models = (*pinned, model("small", 2_000), model("large", 5_000), model("middle", 4_000))
    world = World(models, (gpu(0, 8_000), host(10_000)), plays=False)
    world.arrive("first", "small")
    assert world.scheduler.view.explanation(world.asking("asked", "large", "middle", priority=0)).calls_off == ()
    world.arrive("asked", "large", "middle", priority=0)
    assert world.scheduler.state.waitlist["asked"].model == "middle"
