"""What operators ask for: load, unload, sleep, wake, prepare, shutdown; and when they are answered."""

from __future__ import annotations

import pytest

from greenroom.core import events as ev
from greenroom.core.effects import OpOutcome, RejectCode
from greenroom.core.model import DeviceId, ModelId, MoveKind, Need, OpId, Outcome, Tier
from tests.core.queue.test_order import ready
from tests.core.world import HOST, Fate, World, gpu, host, model

GPU0 = DeviceId("gpu0")


def sleepers() -> World:
    return World(
        [model("a", 6_000, asleep=Need(500, 3_000)), model("b", 6_000, asleep=Need(500, 3_000)), model("stiff", 6_000)],
        devices=(gpu(0, 8_000), host(4_000)),
    )


def test_a_load_is_answered_when_the_model_is_ready() -> None:
    world = World([model("a")])
    world.ask("o", MoveKind.LOAD, "a")
    world.run(4.9)
    assert world.ops["o"] is None
    world.run()
    assert world.ops["o"] is OpOutcome.DONE


def test_a_load_of_a_ready_model_is_answered_at_once_even_if_it_is_full() -> None:
    world = World([model("a")])
    ready(world, "a")
    world.arrive("running", "a")
    world.ask("o", MoveKind.LOAD, "a")
    assert world.ops["o"] is OpOutcome.DONE


def test_a_load_joins_one_under_way_and_is_answered_though_the_slot_is_full() -> None:
    world = World([model("a")])
    world.arrive("r1", "a")
    world.arrive("r2", "a")
    world.ask("o", MoveKind.LOAD, "a")
    world.run()
    assert world.kinds() == ["load a"] and world.ops["o"] is OpOutcome.DONE and world.fate("r2") is Fate.WAITING


def test_a_load_makes_idle_models_leave_and_those_named_too() -> None:
    world = World([model("a", 2_000, pinned=True), model("b", 2_000), model("c", 2_000)])
    ready(world, "a", "b")
    world.ask("o", MoveKind.LOAD, "c", evict=("a",))
    world.run()
    assert world.kinds() == ["load a", "load b", "unload a", "load c"] and world.ops["o"] is OpOutcome.DONE


@pytest.mark.parametrize("gpu_mib", [7_000, 6_000])
def test_none_leaves_for_a_model_that_can_never_fit(gpu_mib: int) -> None:
    """Beside `kept`, which is pinned and not named, 6,000 MiB fit and 7,000 do not."""
    world = World([model("a", 2_000), model("kept", 2_000, pinned=True), model("c", gpu_mib)])
    ready(world, "kept", "a")
    world.ask("o", MoveKind.LOAD, "c", evict=("a",))
    world.run()
    fits = gpu_mib == 6_000
    assert ("unload a" in world.kinds()) is fits
    assert world.ops["o"] is (OpOutcome.DONE if fits else OpOutcome.TOO_LARGE)


def test_answers_of_a_model_named_to_leave_may_end_within_their_grace() -> None:
    world = World([model("a", 6_000, grace_s=10.0), model("b", 6_000)])
    ready(world, "a")
    world.arrive("running", "a", takes_s=100.0)
    world.ask("o", MoveKind.LOAD, "b", evict=("a",))
    world.run(9.9)
    assert world.fate("running") is Fate.GRANTED
    world.run()
    assert world.calls_by_id["running"].was_cut and world.ops["o"] is OpOutcome.DONE


@pytest.mark.parametrize(
    ("spec", "kind", "outcome"),
    [
        ("nope", MoveKind.LOAD, OpOutcome.UNKNOWN_MODEL),
        ("nope", MoveKind.UNLOAD, OpOutcome.UNKNOWN_MODEL),
        ("huge", MoveKind.LOAD, OpOutcome.TOO_LARGE),
        ("stiff", MoveKind.SLEEP, OpOutcome.REFUSED),
        ("stiff", MoveKind.PREPARE, OpOutcome.REFUSED),
        ("sleepy", MoveKind.PREPARE, OpOutcome.TOO_LARGE),
        ("stiff", MoveKind.UNLOAD, OpOutcome.DONE),
    ],
)
def test_what_cannot_be_done_is_answered_at_once(spec: str, kind: MoveKind, outcome: OpOutcome) -> None:
    models = [model("huge", 9_000), model("stiff", 6_000), model("sleepy", 6_000, asleep=Need(0, 9_000))]
    world = World(models, (gpu(0, 8_000), host(4_000)))
    world.ask("o", kind, spec)
    assert world.ops["o"] is outcome and not world.moves


def test_the_same_order_twice_is_ignored_and_counted() -> None:
    world = World([model("a")])
    world.ask("o", MoveKind.LOAD, "a")
    world.post(ev.MoveAsked(world.now, OpId("o"), MoveKind.UNLOAD, ModelId("a")))
    world.run()
    assert world.ops["o"] is OpOutcome.DONE and world.scheduler.state.counters.ignored == 1


# --- unload ---------------------------------------------------------------------------------------------------------


def test_an_unload_lets_running_answers_end_rejects_waiters_and_answers_when_all_is_gone() -> None:
    world = World([model("a")])
    ready(world, "a")
    world.arrive("running", "a", takes_s=3.0)
    world.arrive("waits", "a")
    world.ask("o", MoveKind.UNLOAD, "a", grace_s=10.0)
    assert world.code("waits") is RejectCode.UNLOADED
    world.run(3.5)
    assert world.fate("running") is Fate.SERVED and world.kinds()[-1] == "unload a" and world.ops["o"] is None
    world.run()
    assert world.ops["o"] is OpOutcome.DONE and not world.timers


def test_an_unload_cuts_running_answers_after_its_grace() -> None:
    world = World([model("a", grace_s=1_000.0)])
    ready(world, "a")
    call = world.arrive("running", "a", takes_s=100.0)
    world.ask("o", MoveKind.UNLOAD, "a", grace_s=10.0)
    world.run(9.9)
    assert not call.was_cut
    world.run()
    assert call.was_cut and world.ops["o"] is OpOutcome.DONE and call.ended_at < 30.0


def test_an_unload_without_grace_cuts_at_once() -> None:
    world = World([model("a")])
    ready(world, "a")
    call = world.arrive("running", "a")
    world.ask("o", MoveKind.UNLOAD, "a", grace_s=0.0)
    assert call.was_cut
    world.run()
    assert world.ops["o"] is OpOutcome.DONE


def test_a_second_unload_may_shorten_the_grace_but_not_lengthen_it() -> None:
    world = World([model("a")])
    ready(world, "a")
    call = world.arrive("running", "a")
    for op, grace_s in [("o1", 50.0), ("o2", 10.0), ("o3", 90.0)]:
        world.ask(op, MoveKind.UNLOAD, "a", grace_s=grace_s)
    world.run(10.0)
    assert call.was_cut
    world.run()
    assert set(world.ops.values()) == {OpOutcome.DONE}


def test_an_answer_that_was_cut_says_nothing_about_how_long_answers_take() -> None:
    world = World([model("a")])
    ready(world, "a")
    world.arrive("running", "a")
    world.run(50.0)
    world.ask("o", MoveKind.UNLOAD, "a", grace_s=0.0)
    world.run()
    assert world.scheduler.state.models[ModelId("a")].service_s == 0.0


def test_an_answer_is_cut_only_once() -> None:
    world = World([model("a")], plays=False)
    world.arrive("running", "a")
    world.end_move(world.moves[0].id, Outcome.DONE)
    world.ask("o1", MoveKind.UNLOAD, "a", grace_s=0.0)
    world.ask("o2", MoveKind.UNLOAD, "a", grace_s=0.0)
    assert sum(1 for call in world.calls if call[0] == "cut") == 1


def test_an_unload_of_a_loading_model_aborts_the_load_once() -> None:
    world = World([model("a")], plays=False)
    world.arrive("r", "a")
    world.ask("o1", MoveKind.UNLOAD, "a")
    world.ask("o2", MoveKind.UNLOAD, "a")
    assert world.code("r") is RejectCode.UNLOADED
    assert sum(1 for call in world.calls if call[0] == "abort") == 1 and world.ops["o1"] is None
    world.end_move(world.moves[0].id, Outcome.ABORTED)
    assert set(world.ops.values()) == {OpOutcome.DONE} and not world.scheduler.state.slots


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.NO_MEMORY, Outcome.NO_LEASE])
def test_a_load_that_was_aborted_and_ends_badly_has_not_failed(outcome: Outcome) -> None:
    world = World([model("a")], plays=False)
    world.arrive("r1", "a")
    world.ask("o", MoveKind.UNLOAD, "a")
    world.arrive("r2", "a")
    world.end_move(world.moves[0].id, outcome)
    assert world.fate("r2") is Fate.WAITING and world.kinds() == ["load a", "load a"]


def test_a_load_that_was_done_before_its_abort_is_unloaded() -> None:
    world = World([model("a")], plays=False)
    world.arrive("r1", "a")
    world.ask("o", MoveKind.UNLOAD, "a")
    world.arrive("r2", "a")
    world.end_move(world.moves[0].id, Outcome.DONE)
    assert world.kinds() == ["load a", "unload a"] and world.fate("r2") is Fate.WAITING
    world.end_move(world.moves[1].id, Outcome.DONE)
    assert world.kinds()[-1] == "load a" and world.ops["o"] is OpOutcome.DONE


def test_an_unload_of_a_planned_load_takes_it_back() -> None:
    world = World([model("a", 6_000), model("b", 6_000)])
    ready(world, "a")
    world.arrive("r", "b")
    world.ask("o", MoveKind.UNLOAD, "b")
    assert world.ops["o"] is OpOutcome.DONE and world.code("r") is RejectCode.UNLOADED
    world.run()
    assert world.kinds() == ["load a", "unload a"]


def test_an_unload_while_a_slot_falls_asleep_goes_on_to_cold() -> None:
    world = sleepers()
    ready(world, "a")
    world.ask("sleep", MoveKind.SLEEP, "a")
    world.ask("unload", MoveKind.UNLOAD, "a")
    world.run()
    assert world.kinds() == ["load a", "sleep a", "unload a"]
    assert world.ops == {"sleep": OpOutcome.FAILED, "unload": OpOutcome.DONE}


def test_an_unload_cancels_the_operators_own_load() -> None:
    world = World([model("a")])
    world.ask("load", MoveKind.LOAD, "a")
    world.ask("unload", MoveKind.UNLOAD, "a")
    world.run()
    assert world.ops == {"load": OpOutcome.CANCELLED, "unload": OpOutcome.DONE}


def test_requests_that_come_while_a_model_leaves_bring_it_back() -> None:
    world = World([model("a")])
    ready(world, "a")
    world.ask("o", MoveKind.UNLOAD, "a")
    world.arrive("r", "a", takes_s=0.0)
    world.run()
    assert world.kinds() == ["load a", "unload a", "load a"] and world.fate("r") is Fate.SERVED


def test_an_unload_of_a_model_whose_process_is_gone_is_done_though_its_answers_are_not_told_yet() -> None:
    world = World([model("a")])
    ready(world, "a")
    call = world.arrive("running", "a")
    world.lose(world.slot_of("a"))
    world.ask("o", MoveKind.UNLOAD, "a", grace_s=5.0)
    assert world.ops["o"] is OpOutcome.DONE
    world.run()
    assert call.was_cut and not world.scheduler.state.slots and not world.timers


# --- sleep, wake, prepare -------------------------------------------------------------------------------------------


def test_a_sleep_is_answered_when_the_model_is_asleep() -> None:
    world = sleepers()
    ready(world, "a")
    world.ask("o", MoveKind.SLEEP, "a")
    assert world.ops["o"] is None
    world.run()
    assert world.ops["o"] is OpOutcome.DONE and world.moves[-1].claim == {GPU0: 500, HOST: 3_000}


def test_a_sleep_of_a_sleeping_model_changes_nothing() -> None:
    world = sleepers()
    ready(world, "a")
    world.ask("o1", MoveKind.SLEEP, "a")
    world.run()
    ready(world, "stiff")
    world.ask("o2", MoveKind.SLEEP, "a")
    world.run()
    assert world.ops["o2"] is OpOutcome.DONE and world.tier("a") is Tier.ASLEEP


def test_a_sleep_that_finds_no_room_in_the_green_room_when_it_begins_becomes_an_unload() -> None:
    """There was room when it was asked for, but running answers took their time."""
    world = sleepers()
    ready(world, "a")
    world.arrive("running", "a", takes_s=5.0)
    world.ask("o", MoveKind.SLEEP, "a")
    world.memory({HOST: 2_000})
    world.run()
    assert world.kinds("a") == ["load a", "unload a"] and world.ops["o"] is OpOutcome.FAILED


def test_a_grace_that_was_not_needed_does_not_cut_later_answers() -> None:
    world = sleepers()
    ready(world, "a")
    world.arrive("running", "a", takes_s=1.0)
    world.ask("o", MoveKind.SLEEP, "a", grace_s=10.0)
    world.run(3.0)
    call = world.arrive("later", "a")
    world.run(60.0)
    assert world.kinds() == ["load a", "sleep a", "wake a"]
    assert call.fate is Fate.GRANTED and not call.was_cut


def test_a_wake_brings_what_sleeps_and_loads_what_is_cold() -> None:
    world = sleepers()
    world.ask("o1", MoveKind.WAKE, "a")
    world.run()
    world.ask("o2", MoveKind.SLEEP, "a")
    world.run()
    world.ask("o3", MoveKind.WAKE, "a")
    world.run()
    assert world.kinds() == ["load a", "sleep a", "wake a"] and set(world.ops.values()) == {OpOutcome.DONE}


def test_a_prepare_brings_a_model_to_the_green_room_and_it_wakes_with_all_it_needs() -> None:
    world = sleepers()
    world.ask("o", MoveKind.PREPARE, "a")
    world.run()
    assert world.ops["o"] is OpOutcome.DONE and world.tier("a") is Tier.ASLEEP
    assert world.moves[0].claim == {GPU0: 500, HOST: 3_000}
    world.arrive("r", "a", takes_s=0.0)
    world.run()
    assert world.kinds() == ["prepare a", "wake a"] and world.moves[1].claim == {GPU0: 6_000}


def test_a_prepare_of_a_ready_or_sleeping_model_is_done_at_once() -> None:
    world = sleepers()
    ready(world, "a")
    world.ask("o1", MoveKind.PREPARE, "a")
    world.ask("sleep", MoveKind.SLEEP, "a")
    world.run()
    world.ask("o2", MoveKind.PREPARE, "a")
    assert (world.ops["o1"], world.ops["o2"]) == (OpOutcome.DONE, OpOutcome.DONE)


def test_requests_for_a_model_that_is_being_prepared_wait_and_then_wake_it() -> None:
    world = sleepers()
    world.ask("o", MoveKind.PREPARE, "a")
    world.arrive("r", "a", takes_s=0.0)
    world.run()
    assert world.kinds() == ["prepare a", "wake a"] and world.fate("r") is Fate.SERVED


def test_a_prepare_that_must_wait_holds_up_no_request_behind_it() -> None:
    world = World([model("a", 6_000, asleep=Need(0, 3_000)), model("b", 6_000)], (gpu(0, 8_000), host(4_000)))
    ready(world, "b")
    world.arrive("running", "b")
    world.memory({HOST: 2_000})
    world.ask("o", MoveKind.PREPARE, "a")
    world.arrive("r", "a", takes_s=0.0)
    world.finish("running")
    world.run()
    assert world.fate("r") is Fate.SERVED and world.ops["o"] is OpOutcome.DONE


def test_a_model_that_lost_its_sleep_while_a_prepare_waited_is_loaded_instead() -> None:
    world = World([model("a", 6_000, asleep=Need(0, 3_000))], (gpu(0, 8_000), host(4_000)))
    world.memory({HOST: 2_000})
    world.ask("o", MoveKind.PREPARE, "a")
    world.config(model("a", 6_000))
    world.run()
    assert world.kinds() == ["load a"] and world.ops["o"] is OpOutcome.DONE


# --- shutdown -------------------------------------------------------------------------------------------------------


def test_a_shutdown_rejects_waiters_lets_answers_end_and_stops_everything() -> None:
    world = World([model("a", 4_000), model("b", 4_000), model("c", 8_000)])
    ready(world, "a", "b")
    world.arrive("running", "a", takes_s=3.0)
    world.arrive("waits", "c")
    world.ask("load", MoveKind.LOAD, "c")
    world.shut_down(30.0)
    assert world.code("waits") is RejectCode.SHUTTING_DOWN and world.ops["load"] is OpOutcome.CANCELLED
    assert world.code(world.arrive("late", "a").id) is RejectCode.SHUTTING_DOWN
    world.ask("late load", MoveKind.LOAD, "c")
    assert world.ops["late load"] is OpOutcome.CANCELLED
    world.run()
    assert world.fate("running") is Fate.SERVED and not world.calls_by_id["running"].was_cut
    assert not world.places and not world.scheduler.state.slots and not world.timers


def test_a_shutdown_cuts_what_still_runs_after_the_drain() -> None:
    world = World([model("a")])
    ready(world, "a")
    call = world.arrive("running", "a")
    world.shut_down(30.0)
    world.run(29.9)
    assert not call.was_cut
    world.run()
    assert call.was_cut and not world.places


def test_a_second_shutdown_skips_the_drain() -> None:
    world = World([model("a")])
    ready(world, "a")
    call = world.arrive("running", "a")
    world.shut_down(30.0)
    world.shut_down(0.0)
    assert call.was_cut
    world.run()
    assert not world.places


def test_a_shutdown_aborts_loads_forgets_plans_and_unloads_sleepers() -> None:
    world = sleepers()
    ready(world, "a", "b")
    world.arrive("loading", "stiff")
    world.run(1.5)
    world.arrive("planned", "a")
    world.shut_down(5.0)
    world.run()
    assert not world.places and not world.scheduler.state.slots
    assert not world.scheduler.state.ledger.holdings and not world.scheduler.state.ledger.promises


def test_an_operators_load_also_brings_the_model_for_requests_before_it() -> None:
    world = World([model("a", 6_000), model("new", 6_000)])
    for number in range(200):
        world.arrive(f"r{number}", "a", takes_s=0.01)
    world.run(30.0)
    world.arrive("running", "a")
    world.arrive("first", "new", takes_s=0.0)
    world.ask("o", MoveKind.LOAD, "new")
    world.run(0.01)
    world.finish("running")
    world.run(0.01)
    assert world.kinds()[-1] == "unload a", "it is likely to be asked again soon, but an operator need not care"
