"""Budgets: the whole answer must have ended by then, or it is not begun; what runs over is cut."""

from __future__ import annotations

import pytest

from greenroom.core.decide.arrival import TRY_AGAIN_S
from greenroom.core.effects import RejectCode
from greenroom.core.events import Timer, TimerKind
from greenroom.core.model import ModelId, Tier
from tests.core.world import Fate, World, model


def learned(*names: str, takes_s: float = 10.0) -> World:
    """Each of these models has been loaded and has answered once; the last one is ready. No two fit together."""
    world = World([model(name, 6_000) for name in names])
    for name in names:
        world.arrive(f"first-{name}", name, takes_s=takes_s)
        world.run()
    return world


def why_cut(world: World, name: str) -> str:
    (reason,) = [call[2] for call in world.calls if call[0] == "cut" and call[1] == name]
    return str(reason)


def test_an_answer_within_its_budget_is_left_alone() -> None:
    world = learned("a")
    call = world.arrive("r", "a", takes_s=10.0, budget_s=12.0)
    world.run()
    assert call.fate is Fate.SERVED and not call.was_cut and not world.timers


def test_an_answer_that_runs_over_its_budget_is_cut_then() -> None:
    world = learned("a")
    call = world.arrive("r", "a", takes_s=100.0, budget_s=12.0)
    world.run(11.9)
    assert not call.was_cut
    world.run(0.2)
    assert call.was_cut and why_cut(world, "r") == "budget"
    world.run()
    assert call.fate is Fate.SERVED and world.scheduler.state.models[ModelId("a")].service_s == 10.0


def test_the_budget_counts_from_arrival_and_not_from_the_grant() -> None:
    world = learned("a", "b")
    begun = world.now
    call = world.arrive("r", "a", takes_s=100.0, budget_s=20.0)
    world.run()
    assert call.was_cut and call.granted_at >= begun + 6.0 and call.ended_at == pytest.approx(begun + 20.0, abs=0.1)


def test_a_ready_model_refuses_what_cannot_end_in_time() -> None:
    world = learned("a")
    call = world.arrive("r", "a", budget_s=9.0)
    assert call.rejection is not None and call.rejection.code is RejectCode.EXPIRED
    assert world.arrive("enough", "a", budget_s=10.0).fate is Fate.GRANTED


def test_one_slow_answer_does_not_lock_out_all_requests_with_a_budget() -> None:
    world = learned("a")
    record = world.scheduler.state.models[ModelId("a")]
    assert world.arrive("too-soon", "a", budget_s=9.0).fate is Fate.REJECTED
    world.run(TRY_AGAIN_S)
    assert world.arrive("tried", "a", takes_s=1.0, budget_s=9.0).fate is Fate.GRANTED
    assert world.arrive("beside", "a", budget_s=9.0).fate is Fate.REJECTED, "one is enough to learn from"
    world.run()
    assert world.fate("tried") is Fate.SERVED and record.service_s == pytest.approx(8.2)
    assert world.arrive("again", "a", takes_s=1.0, budget_s=9.0).fate is Fate.GRANTED


def test_the_wait_counts_too() -> None:
    world = learned("a")
    world.arrive("runs", "a", takes_s=10.0)
    assert world.code(world.arrive("late", "a", budget_s=15.0).id) is RejectCode.EXPIRED
    assert world.arrive("enough", "a", budget_s=25.0).fate is Fate.WAITING


def test_a_load_that_takes_too_long_is_begun_for_the_next_caller() -> None:
    world = learned("a", "b")
    call = world.arrive("r", "a", budget_s=14.0)
    assert call.rejection is not None and call.rejection.code is RejectCode.EXPIRED
    assert call.rejection.retry_after_s is not None and call.rejection.retry_after_s >= 5.0
    world.run()
    assert world.tier("a") is Tier.READY


def test_a_budget_refuses_no_request_before_times_are_known() -> None:
    world = World([model("a")])
    assert world.arrive("r", "a", budget_s=0.5).fate is Fate.WAITING


def test_a_request_that_still_waits_when_its_budget_ends_expires() -> None:
    world = World([model("a")])
    call = world.arrive("r", "a", budget_s=3.0)
    world.run(3.1)
    assert call.fate is Fate.REJECTED and world.code("r") is RejectCode.EXPIRED and call.ended_at == 3.0


def test_the_shorter_of_patience_and_budget_counts_while_waiting() -> None:
    for within_s, budget_s in ((2.0, 4.0), (4.0, 2.0)):
        world = World([model("a")])
        call = world.arrive("r", "a", within_s=within_s, budget_s=budget_s)
        world.run(4.5)
        assert call.ended_at == 2.0


def test_patience_does_not_end_an_answer_and_a_budget_does() -> None:
    world = learned("a", takes_s=1.0)
    patient = world.arrive("patient", "a", takes_s=20.0, within_s=5.0)
    world.run(10.0)
    assert patient.fate is Fate.GRANTED and not patient.was_cut


def test_an_impatient_caller_with_a_long_budget_is_judged_by_when_its_answer_begins() -> None:
    world = learned("a")
    world.arrive("runs", "a", takes_s=10.0)
    assert world.arrive("late", "a", within_s=5.0, patient=False, budget_s=100.0).fate is Fate.REJECTED
    assert world.arrive("in time", "a", within_s=15.0, patient=False, budget_s=100.0).fate is Fate.WAITING


def test_the_timer_goes_with_the_answer() -> None:
    world = learned("a")
    world.arrive("ends", "a", budget_s=50.0)
    assert Timer(TimerKind.BUDGET, "ends") in world.timers
    world.finish("ends")
    world.arrive("leaves", "a", budget_s=50.0)
    world.go("leaves")
    assert not world.timers


def test_a_budget_timer_that_fires_early_cuts_no_answer() -> None:
    world = learned("a")
    call = world.arrive("r", "a", budget_s=50.0)
    world.fire(Timer(TimerKind.BUDGET, "r"))
    assert not call.was_cut
    world.run()
    assert call.was_cut


def test_an_answer_is_cut_once_though_it_is_to_leave_and_out_of_budget() -> None:
    world = learned("a")
    call = world.arrive("r", "a", budget_s=50.0)
    world.plays = False
    world.shut_down(1.0)
    world.run(100.0)
    assert call.was_cut and sum(1 for one in world.calls if one[0] == "cut") == 1


def test_a_grant_lost_before_its_first_byte_keeps_its_budget() -> None:
    world = learned("a")
    call = world.arrive("r", "a", takes_s=100.0, budget_s=30.0)
    begun = world.now
    world.run(1.0)
    world.finish("r", lost=True)
    assert call.fate is Fate.GRANTED, "it is at once given its place again"
    world.run()
    assert call.was_cut and call.ended_at == pytest.approx(begun + 30.0, abs=0.1)
