"""Changed configurations: new revisions, relabelled models, removed ones, learned times."""

from __future__ import annotations

from greenroom.core.effects import OpOutcome, RejectCode
from greenroom.core.events import Learned, Limits
from greenroom.core.model import DeviceId, ModelId, MoveKind, Need, Outcome, RequestId, Tier
from tests.core.queue.test_order import ready

from .world import Fate, World, gpu, host, model


def test_a_new_revision_is_loaded_beside_the_old_one_which_drains() -> None:
    world = World([model("a", 3_000)])
    ready(world, "a")
    world.arrive("old", "a", takes_s=20.0)
    world.config(model("a", 3_000, revision=2))
    world.arrive("new", "a", takes_s=1.0)
    world.run(6.5)
    assert (world.fate("old"), world.fate("new")) == (Fate.GRANTED, Fate.SERVED)
    world.run()
    assert world.kinds() == ["load a", "load a", "unload a"]
    assert [move.revision for move in world.moves] == [1, 2, 1]


def test_a_new_revision_that_does_not_fit_beside_the_old_one_waits_for_its_end() -> None:
    world = World([model("a", 6_000, grace_s=10.0)])
    ready(world, "a")
    world.arrive("old", "a", takes_s=100.0)
    world.config(model("a", 6_000, revision=2, grace_s=10.0))
    world.arrive("new", "a", takes_s=1.0)
    world.run()
    assert world.calls_by_id["old"].was_cut and world.fate("new") is Fate.SERVED
    assert world.kinds() == ["load a", "unload a", "load a"]


def test_waiters_for_the_old_revision_are_served_by_the_new_one() -> None:
    world = World([model("a", 6_000)])
    world.arrive("r", "a", takes_s=1.0)
    world.config(model("a", 6_000, revision=2))
    world.run()
    assert world.fate("r") is Fate.SERVED and [move.revision for move in world.moves] == [1, 2]


def test_what_an_old_revision_does_says_nothing_about_the_new_one() -> None:
    world = World([model("a", 3_000)])
    ready(world, "a")
    world.arrive("old", "a")
    world.outcome_of = lambda move: Outcome.FAILED
    world.config(model("a", 3_000, revision=2))
    world.arrive("new", "a")
    world.run(5.0)
    assert world.code("new") is RejectCode.LOAD_FAILED
    world.finish("old")
    assert world.scheduler.state.models[ModelId("a")].failures == 1


def test_an_old_revision_whose_load_ends_badly_is_simply_gone() -> None:
    world = World([model("a", 3_000)], plays=False)
    world.arrive("r", "a")
    world.config(model("a", 3_000, revision=2))
    world.end_move(world.moves[0].id, Outcome.FAILED)
    assert world.scheduler.state.models[ModelId("a")].failures == 0 and world.fate("r") is Fate.WAITING


def test_an_old_revision_whose_load_was_done_before_its_abort_is_unloaded() -> None:
    world = World([model("a", 3_000)], plays=False)
    world.arrive("r", "a")
    world.config(model("a", 3_000, revision=2))
    world.end_move(world.moves[0].id, Outcome.DONE)
    assert [f"{move.kind.value} {move.revision}" for move in world.moves] == ["load 1", "load 2", "unload 1"]
    assert not world.scheduler.state.models[ModelId("a")].learned_s


def test_an_unload_waits_for_every_slot_of_the_model() -> None:
    world = World([model("a", 3_000), model("b", 1_000)])
    ready(world, "a", "b")
    world.arrive("old", "a")
    world.config(model("a", 3_000, revision=2))
    ready(world, "a")
    world.ask("a", MoveKind.UNLOAD, "a", grace_s=100.0)
    world.ask("b", MoveKind.UNLOAD, "b")
    world.run(5.0)
    assert world.ops == {"a": None, "b": OpOutcome.DONE}, "the new revision has left, the old one serves"
    world.finish("old")
    world.run()
    assert world.ops["a"] is OpOutcome.DONE


def test_an_old_revision_that_dies_is_not_counted_as_a_crash() -> None:
    world = World([model("a", 3_000, preload=True)])
    world.run()
    world.arrive("old", "a")
    old = world.slot_of("a")
    world.config(model("a", 3_000, revision=2, preload=True))
    world.lose(old)
    assert world.scheduler.state.models[ModelId("a")].failures == 0


def test_a_new_revision_knows_what_was_learned_of_the_old_one() -> None:
    world = World([model("a", 3_000)])
    world.arrive("r", "a", takes_s=2.0)
    world.run()
    world.config(model("a", 3_000, revision=2))
    record = world.scheduler.state.models[ModelId("a")]
    assert (record.learned_s[MoveKind.LOAD], record.service_s) == (5.0, 2.0)


def test_a_new_revision_is_not_held_up_by_the_back_off_of_the_old_one() -> None:
    world = World([model("a", 3_000)])
    world.outcome_of = lambda move: Outcome.FAILED if move.revision == 1 else Outcome.DONE
    world.arrive("r1", "a")
    world.run(5.0)
    world.config(model("a", 3_000, revision=2))
    world.arrive("r2", "a", takes_s=0.0)
    world.run()
    assert world.fate("r2") is Fate.SERVED


def test_a_relabelled_model_keeps_running() -> None:
    world = World([model("a", 3_000)])
    ready(world, "a")
    world.arrive("r", "a")
    world.config(model("a", 3_000, priority=0, grace_s=1.0))
    world.run()
    assert world.fate("r") is Fate.GRANTED and world.kinds() == ["load a"]


def test_a_relabelled_model_takes_more_at_once_and_fewer_without_revoking_a_grant() -> None:
    world = World([model("a", concurrency=1)])
    ready(world, "a")
    for name in ("r1", "r2", "r3"):
        world.arrive(name, "a")
    world.config(model("a", concurrency=2))
    assert [world.fate(name) for name in ("r1", "r2", "r3")] == [Fate.GRANTED, Fate.GRANTED, Fate.WAITING]
    world.config(model("a", concurrency=1))
    world.finish("r1")
    assert [world.fate(name) for name in ("r2", "r3")] == [Fate.GRANTED, Fate.WAITING]


def test_relabelling_leaves_a_draining_old_revision_alone() -> None:
    world = World([model("a", 3_000)])
    ready(world, "a")
    world.arrive("old", "a")
    world.config(model("a", 3_000, revision=2))
    world.config(model("a", 3_000, revision=2, concurrency=5))
    (old,) = world.scheduler.state.slots.values()
    assert (old.spec.revision, old.concurrency) == (1, 1)


def test_a_need_measured_anew_counts_at_the_next_load() -> None:
    world = World([model("a", 3_000)])
    ready(world, "a")
    world.config(model("a", 3_500))
    assert world.kinds() == ["load a"]
    world.ask("o", MoveKind.UNLOAD, "a")
    world.run()
    ready(world, "a")
    assert world.moves[-1].claim == {DeviceId("gpu0"): 3_500}


def test_a_removed_model_rejects_waiters_cancels_operators_and_drains() -> None:
    world = World([model("a", 6_000), model("b", 6_000)])
    ready(world, "a")
    world.arrive("running", "a", takes_s=3.0)
    world.arrive("waits", "b")
    world.ask("o", MoveKind.LOAD, "b")
    world.config(removed=("a", "b", "never there"))
    assert world.code("waits") is RejectCode.REMOVED and world.ops["o"] is OpOutcome.CANCELLED
    assert world.code(world.arrive("late", "a").id) is RejectCode.UNKNOWN_MODEL
    world.run()
    assert world.fate("running") is Fate.SERVED and not world.scheduler.state.slots


def test_a_model_removed_in_its_back_off_leaves_no_timer() -> None:
    world = World([model("a")])
    world.outcome_of = lambda move: Outcome.FAILED
    world.arrive("r", "a")
    world.run(5.0)
    assert world.timers
    world.config(removed=("a",))
    assert not world.timers


def test_a_model_that_comes_back_while_its_old_slot_drains_waits_for_it() -> None:
    world = World([model("a", 3_000)])
    ready(world, "a")
    world.arrive("running", "a", takes_s=3.0)
    world.config(removed=("a",))
    world.config(model("a", 3_000))
    world.arrive("r", "a", takes_s=0.0)
    world.run()
    assert world.fate("r") is Fate.SERVED and world.kinds() == ["load a", "unload a", "load a"]


def test_learned_times_are_taken_over_for_models_that_are_there() -> None:
    world = World([model("a")])
    world.config(learned={ModelId("a"): Learned({MoveKind.LOAD: 7.0}), ModelId("gone"): Learned({MoveKind.LOAD: 1.0})})
    world.arrive("r", "a")
    outlook = world.scheduler.view.outlook(RequestId("r"), 0.0)
    assert outlook is not None and outlook.eta_s == 7.0


def test_what_was_learned_can_be_handed_to_a_later_run() -> None:
    world = World([model("a"), model("b"), model("never", asleep=Need(0, 1))])
    world.ask_lease("train", 100)
    world.arrive("r", "a", takes_s=2.0)
    world.ask("o", MoveKind.LOAD, "b")
    world.run()
    told = world.scheduler.view.learned()
    assert told == {
        ModelId("a"): Learned({MoveKind.LOAD: 5.0}, 2.0),
        ModelId("b"): Learned({MoveKind.LOAD: 5.0}, None),
    }
    later = World([model("a"), model("b")])
    later.config(learned=told)
    assert later.scheduler.view.learned() == told
    later.arrive("late", "a", budget_s=6.0)
    assert later.code("late") is RejectCode.EXPIRED, "five seconds to load and two to answer"


def test_what_this_run_has_seen_itself_is_not_overwritten_by_an_earlier_one() -> None:
    world = World([model("a")])
    world.arrive("r", "a", takes_s=2.0)
    world.run()
    world.config(learned={ModelId("a"): Learned({}, 50.0)})
    assert world.scheduler.view.learned()[ModelId("a")].service_s == 2.0


def test_new_limits_count_from_then_on() -> None:
    world = World([model("a")])
    world.config(limits=Limits(queue_depth_max=1))
    world.arrive("r1", "a")
    assert world.arrive("r2", "a").fate is Fate.REJECTED


def test_more_memory_on_a_device_serves_a_request_that_waits_for_it() -> None:
    world = World([model("a", 6_000), model("b", 6_000, asleep=Need(0, 1))], devices=(gpu(0, 8_000), host(100)))
    ready(world, "a")
    world.arrive("running", "a")
    world.arrive("r", "b", takes_s=0.0)
    world.config(devices=(gpu(0, 12_000), host(100)))
    world.run()
    assert world.fate("r") is Fate.SERVED and world.tier("a") is Tier.READY
