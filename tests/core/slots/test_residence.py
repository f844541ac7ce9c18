"""Which models stay and which load by themselves: ttl, pins, preloads."""

from __future__ import annotations

from greenroom.core.model import ModelId, MoveKind, Need, Outcome, Tier
from tests.core.queue.test_order import ready
from tests.core.world import Engine, Fate, World, gpu, host, model


def test_a_model_leaves_when_it_was_idle_for_its_ttl() -> None:
    world = World([model("a", ttl_s=60.0)])
    world.arrive("r", "a", takes_s=1.0)
    world.run(65.9)
    assert world.tier("a") is Tier.READY
    world.run()
    assert world.kinds() == ["load a", "unload a"] and world.now == 67.0


def test_a_ttl_of_zero_is_for_ever() -> None:
    world = World([model("a")])
    ready(world, "a")
    assert not world.timers


def test_requests_begin_the_ttl_anew_without_touching_the_timer() -> None:
    world = World([model("a", ttl_s=10.0)])
    ready(world, "a")
    for number in range(20):
        world.arrive(f"r{number}", "a", takes_s=1.0)
        world.run(5.0)
    assert world.kinds() == ["load a"]
    assert sum(1 for call in world.calls if call[0] == "set_timer") < 15, "not once for every request"
    world.run()
    assert world.kinds() == ["load a", "unload a"]


def test_a_running_answer_is_not_idleness() -> None:
    world = World([model("a", ttl_s=5.0)])
    world.arrive("r", "a", takes_s=100.0)
    world.run(104.0)
    assert world.fate("r") is Fate.GRANTED and world.kinds() == ["load a"]
    world.run()
    assert world.now == 111.0


def test_a_model_that_can_sleep_falls_asleep_at_its_ttl() -> None:
    world = World([model("a", ttl_s=5.0, asleep=Need(0, 100))], devices=(gpu(0, 8_000), host(4_000)))
    ready(world, "a")
    world.run()
    assert world.kinds() == ["load a", "sleep a"] and not world.timers


def test_a_pinned_model_has_no_ttl() -> None:
    world = World([model("a", ttl_s=5.0, pinned=True)])
    ready(world, "a")
    world.run()
    assert world.kinds() == ["load a"] and not world.timers


def test_a_model_pinned_while_its_ttl_runs_stays() -> None:
    world = World([model("a", ttl_s=50.0)])
    ready(world, "a")
    world.config(model("a", ttl_s=50.0, pinned=True))
    world.run()
    assert world.kinds() == ["load a"]


def test_a_shorter_ttl_counts_at_once() -> None:
    world = World([model("a", ttl_s=1_000.0)])
    ready(world, "a")
    world.config(model("a", ttl_s=20.0))
    world.run()
    assert world.now == 26.0


def test_a_preload_is_loaded_at_start() -> None:
    world = World([model("a", preload=True), model("b")])
    world.run()
    assert world.kinds() == ["load a"]


def test_a_preload_comes_again_after_a_crash() -> None:
    world = World([model("a", preload=True)])
    world.run()
    world.lose(world.slot_of("a"))
    world.run()
    assert world.kinds() == ["load a", "load a"]


def test_a_preload_left_asleep_by_a_crash_is_woken() -> None:
    world = World([model("a", preload=True, asleep=Need(0, 100))], devices=(gpu(0, 8_000), host(4_000)))
    world.run()
    world.lose(world.slot_of("a"), left_in=Tier.ASLEEP)
    world.run()
    assert world.kinds() == ["load a", "wake a"]


def test_a_preload_that_crashes_again_and_again_backs_off() -> None:
    world = World([model("a", preload=True)])
    loads = []
    for _ in range(5):
        world.run()
        loads.append(world.moves[-1].started)
        world.lose(world.slot_of("a"))
    assert loads == [0.0, 5.0, 20.0, 45.0, 90.0], "at once, then after 10, 20, 40 s, each plus 5 s of loading"


def test_a_preload_does_not_come_back_after_an_eviction() -> None:
    world = World([model("a", 6_000, preload=True), model("b", 6_000)])
    world.run()
    ready(world, "b")
    world.ask("o", MoveKind.UNLOAD, "b")
    world.run()
    assert world.kinds() == ["load a", "unload a", "load b", "unload b"]


def test_a_preload_never_makes_others_leave() -> None:
    world = World([model("a", 6_000)])
    ready(world, "a")
    world.config(model("wish", 6_000, preload=True))
    world.run()
    assert world.kinds() == ["load a"]
    world.ask("o", MoveKind.UNLOAD, "a")
    world.run()
    assert world.kinds()[-1] == "load wish", "it comes as soon as there is room"


def test_a_pinned_preload_makes_idle_models_leave_and_waits_for_busy_ones() -> None:
    world = World([model("a", 6_000)])
    ready(world, "a")
    world.arrive("running", "a", takes_s=10.0)
    world.config(model("wish", 6_000, preload=True, pinned=True))
    world.run(5.0)
    assert world.kinds() == ["load a"]
    world.run()
    assert world.kinds() == ["load a", "unload a", "load wish"]


def test_a_waiting_preload_blocks_no_request() -> None:
    world = World([model("a", 6_000, concurrency=30), model("small", 1_000)])
    ready(world, "a")
    world.arrive("running", "a")
    world.config(model("wish", 6_000, preload=True, pinned=True))
    for number in range(20):
        assert world.arrive(f"r{number}", "a").fate is Fate.GRANTED
    world.arrive("small", "small", takes_s=0.0)
    world.run()
    assert world.fate("small") is Fate.SERVED


def test_a_preload_that_waits_for_moves_blocks_no_request() -> None:
    world = World([model("a", 6_000, concurrency=9)])
    world.arrive("r", "a", takes_s=1.0)
    world.config(model("wish", 6_000, preload=True))
    assert not world.scheduler.state.kept and world.arrive("next", "a", takes_s=1.0).fate is Fate.WAITING
    world.run()
    assert world.granted() == ["r", "next"] and world.kinds() == ["load a"]


def test_a_preload_too_large_is_forgotten_without_a_word() -> None:
    world = World([model("wish", 9_000, preload=True)])
    assert not world.scheduler.state.waitlist and not world.calls


def test_a_preload_that_fails_is_tried_again_after_the_back_off() -> None:
    world = World([model("a", preload=True)])
    world.outcome_of = lambda move: Outcome.FAILED if len(world.moves) < 3 else Outcome.DONE
    world.run()
    assert [move.started for move in world.moves] == [0.0, 10.0, 25.0] and world.tier("a") is Tier.READY


def test_a_failing_preload_that_was_unloaded_stays_away() -> None:
    world = World([model("a", preload=True)])
    world.outcome_of = lambda move: Outcome.FAILED
    world.run(5.0)
    world.ask("o", MoveKind.UNLOAD, "a")
    world.run()
    assert world.kinds() == ["load a"]


def test_a_failing_preload_that_an_operator_brought_and_that_was_evicted_stays_away() -> None:
    world = World([model("a", 6_000, preload=True), model("b", 6_000)])
    world.outcome_of = lambda move: Outcome.FAILED if len(world.moves) < 4 else Outcome.DONE
    world.run(37.0)
    world.ask("o", MoveKind.LOAD, "a")
    world.run(5.1)
    ready(world, "b")
    world.ask("p", MoveKind.UNLOAD, "b")
    world.run()
    assert world.kinds()[-3:] == ["unload a", "load b", "unload b"]


def test_preload_switched_on_loads_the_model_and_switched_off_ends_its_wait() -> None:
    world = World([model("a", 6_000), model("b", 6_000)])
    ready(world, "a")
    world.config(model("b", 6_000, preload=True))
    assert world.scheduler.state.waitlist
    world.config(model("b", 6_000))
    assert not world.scheduler.state.waitlist
    world.config(model("b", 6_000, preload=True))
    world.config(model("b", 6_000, preload=True), removed=("a",))
    world.run()
    assert world.tier("b") is Tier.READY


def test_no_preload_is_asked_for_while_shutting_down() -> None:
    world = World([model("a")])
    world.shut_down(0.0)
    world.config(model("b", preload=True))
    assert not world.scheduler.state.waitlist


def test_a_move_that_goes_on_after_it_was_done_is_learned_with_all_it_takes() -> None:
    world = World([model("a", 1_000)])
    world.engines["a"] = Engine(load_s=5.0, took_s=8.0)
    ready(world, "a")
    state = world.scheduler.state
    assert state.models[ModelId("a")].learned_s[MoveKind.LOAD] == 8.0 and state.avg_swap_s == 8.0
