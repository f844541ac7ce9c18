"""When things go wrong: loads that fail, memory that is not there, leases refused, processes that die."""

from __future__ import annotations

import pytest

from greenroom.core import events as ev
from greenroom.core.effects import RejectCode
from greenroom.core.events import Limits
from greenroom.core.model import DeviceId, MoveId, MoveKind, Need, Outcome, SlotId, Tier
from tests.core.queue.test_order import ready
from tests.core.world import HOST, Fate, World, gpu, host, model

GPU0 = DeviceId("gpu0")


def failing(outcome: Outcome, *, times: int = 1_000, **spec: object) -> World:
    """Its loads end so, that many times."""
    world = World([model("a", 4_000, **spec), model("b", 4_000)])  # type: ignore[arg-type]
    left = [times]

    def outcome_of(move: object) -> Outcome:
        if getattr(move, "model", "") != "a" or not left[0]:
            return Outcome.DONE
        left[0] -= 1
        return outcome

    world.outcome_of = outcome_of
    return world


def sleeping() -> World:
    world = World([model("a", 6_000, asleep=Need(0, 1_000)), model("b", 6_000)], (gpu(0, 8_000), host(4_000)))
    ready(world, "a")
    world.ask("sleep", MoveKind.SLEEP, "a")
    world.run()
    assert world.tier("a") is Tier.ASLEEP
    return world


def test_a_failed_load_rejects_its_waiters_at_once_and_backs_off() -> None:
    world = failing(Outcome.FAILED)
    world.arrive("r1", "a")
    world.arrive("r2", "a")
    world.run(5.0)
    for name in ("r1", "r2"):
        rejection = world.calls_by_id[name].rejection
        assert rejection is not None and (rejection.code, rejection.retry_after_s) == (RejectCode.LOAD_FAILED, 5.0)
    world.run(2.0)
    rejection = world.arrive("r3", "a").rejection
    assert rejection is not None and (rejection.code, rejection.retry_after_s) == (RejectCode.LOAD_FAILED, 3.0)
    assert world.kinds() == ["load a"]


def test_the_back_off_doubles_and_is_capped() -> None:
    world = failing(Outcome.FAILED)
    pauses = []
    for number in range(40):
        call = world.arrive(f"r{number}", "a")
        world.run(5.0)
        assert call.rejection is not None and call.rejection.retry_after_s is not None
        pauses.append(call.rejection.retry_after_s)
        world.run(call.rejection.retry_after_s)
    assert pauses[:7] == [5, 10, 20, 40, 80, 160, 300] and set(pauses[7:]) == {300}


def test_an_answer_that_ends_well_ends_the_pattern_of_failures() -> None:
    world = failing(Outcome.FAILED, times=3)
    for number in range(4):
        world.arrive(f"r{number}", "a", takes_s=1.0)
        world.run(100.0)
    assert world.fate("r3") is Fate.SERVED
    world.ask("o", MoveKind.UNLOAD, "a")
    world.run()
    world.outcome_of = lambda move: Outcome.FAILED
    call = world.arrive("again", "a")
    world.run()
    assert call.rejection is not None and call.rejection.retry_after_s == 5.0


def test_an_operator_who_asks_again_overrides_the_back_off() -> None:
    world = failing(Outcome.FAILED, times=1)
    world.arrive("r", "a")
    world.run(5.0)
    world.ask("o", MoveKind.LOAD, "a")
    world.run()
    assert world.kinds() == ["load a", "load a"] and world.ops["o"] is not None and world.ops["o"].value == "done"


def test_an_operator_hears_of_a_failed_load() -> None:
    world = failing(Outcome.FAILED)
    world.ask("o", MoveKind.LOAD, "a")
    world.run()
    assert world.ops["o"] is not None and world.ops["o"].value == "failed"


def test_no_memory_raises_the_need_evicts_more_and_tries_once_more() -> None:
    world = failing(Outcome.NO_MEMORY, times=1)
    ready(world, "b")
    world.arrive("r", "a", takes_s=1.0)
    world.run()
    assert world.fate("r") is Fate.SERVED
    assert world.kinds() == ["load b", "load a", "unload b", "load a"]
    assert world.moves[-1].claim == {GPU0: 5_001}


def test_a_need_is_not_raised_beyond_what_there_could_be() -> None:
    world = World([model("a", 7_000)])
    world.outcome_of = lambda move: Outcome.NO_MEMORY if len(world.moves) < 2 else Outcome.DONE
    world.arrive("r", "a", takes_s=0.0)
    world.run()
    assert world.fate("r") is Fate.SERVED and world.moves[-1].claim == {GPU0: 8_000}


def test_a_need_on_the_host_is_raised_too() -> None:
    world = World([model("a", 0, host_mib=1_000)], devices=(gpu(0, 8_000), host(4_000)))
    world.outcome_of = lambda move: Outcome.NO_MEMORY if len(world.moves) < 2 else Outcome.DONE
    ready_at = world.arrive("r", "a", takes_s=0.0)
    world.run()
    assert ready_at.fate is Fate.SERVED and world.moves[-1].claim == {HOST: 1_251}


def test_a_refused_lease_rejects_no_request_and_is_asked_for_again() -> None:
    world = failing(Outcome.NO_LEASE, times=3)
    world.arrive("r1", "a", takes_s=1.0)
    world.run(5.5)
    world.arrive("r2", "a", takes_s=1.0)
    world.run()
    assert (world.fate("r1"), world.fate("r2")) == (Fate.SERVED, Fate.SERVED)
    assert [move.started for move in world.moves] == [0.0, 6.0, 12.0, 18.0]
    assert world.scheduler.state.models[world.moves[0].model].failures == 0


def test_a_store_that_is_down_keeps_waiters_and_refuses_newcomers() -> None:
    world = failing(Outcome.STORE_DOWN, times=2)
    world.arrive("waits", "a", takes_s=1.0)
    world.arrive("patience", "a", within_s=7.0)
    world.run(5.5)
    rejection = world.arrive("new", "a").rejection
    assert rejection is not None and (rejection.code, rejection.retry_after_s) == (RejectCode.STORE_DOWN, 0.5)
    world.run()
    assert world.fate("waits") is Fate.SERVED and world.code("patience") is RejectCode.EXPIRED


def test_a_load_that_was_aborted_from_outside_is_planned_again() -> None:
    world = failing(Outcome.ABORTED, times=1)
    world.arrive("r", "a", takes_s=1.0)
    world.run()
    assert world.kinds() == ["load a", "load a"] and world.fate("r") is Fate.SERVED


def test_a_failed_sleep_is_followed_by_an_unload() -> None:
    world = World([model("a", 6_000, asleep=Need(0, 1_000)), model("b", 6_000)], (gpu(0, 8_000), host(4_000)))
    world.outcome_of = lambda move: Outcome.FAILED if move.kind is MoveKind.SLEEP else Outcome.DONE
    ready(world, "a", "b")
    assert world.kinds() == ["load a", "sleep a", "unload a", "load b"]


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.NO_MEMORY])
def test_a_wake_that_went_wrong_leaves_nothing_asleep(outcome: Outcome) -> None:
    world = sleeping()
    world.outcome_of = lambda move: outcome if move.kind is MoveKind.WAKE else Outcome.DONE
    world.arrive("r", "a", takes_s=0.0)
    world.run(0.6)
    assert world.kinds()[-2:] == ["wake a", "unload a"]
    assert world.reasons[world.moves[-1].id].why == "wake_ended"
    if outcome is Outcome.FAILED:
        assert world.code("r") is RejectCode.LOAD_FAILED
        assert world.arrive("new", "a").fate is Fate.REJECTED, "also while it still leaves"
    world.run()
    if outcome is Outcome.NO_MEMORY:
        assert world.fate("r") is Fate.SERVED and world.moves[-1].claim == {GPU0: 7_501}


@pytest.mark.parametrize("outcome", [Outcome.ABORTED, Outcome.FAILED])
def test_an_operator_that_unloads_a_waking_model_is_the_cause_however_its_wake_ends(outcome: Outcome) -> None:
    world = sleeping()
    world.outcome_of = lambda move: outcome if move.kind is MoveKind.WAKE else Outcome.DONE
    world.arrive("r", "a")
    world.ask("o", MoveKind.UNLOAD, "a")
    world.run()
    assert world.kinds()[-2:] == ["wake a", "unload a"]
    reason = world.reasons[world.moves[-1].id]
    assert (reason.why, dict(reason.facts)) == ("leaving", {"model": "a", "cause": "asked"})


@pytest.mark.parametrize("outcome", [Outcome.NO_LEASE, Outcome.ABORTED])
def test_a_wake_that_did_not_begin_leaves_it_asleep(outcome: Outcome) -> None:
    world = sleeping()
    world.outcome_of = lambda move: outcome if len(world.moves) < 4 else Outcome.DONE
    world.arrive("r", "a", takes_s=0.0)
    world.run()
    assert world.kinds()[-2:] == ["wake a", "wake a"] and world.fate("r") is Fate.SERVED


def test_an_unload_frees_the_memory_whatever_its_outcome_was() -> None:
    world = World([model("a", 6_000), model("b", 6_000)])
    ready(world, "a")
    world.outcome_of = lambda move: Outcome.FAILED if move.kind is MoveKind.UNLOAD else Outcome.DONE
    ready(world, "b")


def test_the_end_of_an_unknown_move_is_ignored_and_counted() -> None:
    world = World([model("a")])
    ready(world, "a")
    world.post(ev.MoveDone(world.now, world.moves[0].id, Outcome.DONE))
    world.post(ev.MoveDone(world.now, MoveId("m?"), Outcome.DONE))
    assert world.scheduler.state.counters.ignored == 2


# --- processes that die ---------------------------------------------------------------------------------------------


def test_a_slot_that_died_frees_its_memory_at_once_and_its_answers_end_when_they_are_told_to() -> None:
    world = World([model("a", 6_000), model("b", 6_000)])
    ready(world, "a")
    world.arrive("running", "a")
    world.lose(world.slot_of("a"))
    world.arrive("r", "b", takes_s=0.0)
    assert world.kinds()[-1] == "load b"
    world.finish("running")
    world.run()
    assert world.fate("r") is Fate.SERVED
    assert world.scheduler.state.models[world.specs[world.moves[0].model].id].failures == 1, (
        "that answer proves nothing"
    )


def test_a_request_lost_before_its_first_byte_goes_back_to_its_place() -> None:
    world = World([model("a")])
    ready(world, "a")
    world.arrive("first", "a", takes_s=None)
    world.arrive("second", "a", takes_s=1.0)
    world.lose(world.slot_of("a"))
    world.finish("first", lost=True)
    world.run()
    assert world.granted()[-2:] == ["first", "first"] and world.kinds() == ["load a", "load a"]
    world.finish("first")
    world.run()
    assert world.fate("second") is Fate.SERVED


def test_a_request_lost_while_its_model_is_removed_is_rejected() -> None:
    world = World([model("a")])
    ready(world, "a")
    world.arrive("r", "a")
    world.config(removed=("a",))
    world.finish("r", lost=True)
    assert world.code("r") is RejectCode.LOST


def test_a_request_that_was_cut_does_not_come_back() -> None:
    """Its model was unloaded on purpose: putting the request back would load it again."""
    world = World([model("a")], plays=False)
    world.arrive("r", "a")
    world.end_move(world.moves[0].id, Outcome.DONE)
    world.ask("o", MoveKind.UNLOAD, "a", grace_s=0.0)
    world.finish("r", lost=True)
    assert world.code("r") is RejectCode.LOST and world.kinds() == ["load a", "unload a"]


def test_a_request_lost_while_shutting_down_is_told_so() -> None:
    world = World([model("a")])
    ready(world, "a")
    world.arrive("r", "a")
    world.shut_down(60.0)
    world.finish("r", lost=True)
    assert world.code("r") is RejectCode.SHUTTING_DOWN


def test_a_request_that_comes_back_keeps_its_patience() -> None:
    world = World([model("a")])
    ready(world, "a")
    world.arrive("r", "a", within_s=2.0)
    world.lose(world.slot_of("a"))
    world.finish("r", lost=True)
    world.run()
    assert world.code("r") is RejectCode.EXPIRED


def test_a_request_that_a_living_slot_lost_after_its_patience_does_not_come_back() -> None:
    world = World([model("a")])
    ready(world, "a")
    world.arrive("r", "a", within_s=2.0)
    world.run(2.0)
    world.finish("r", lost=True)
    assert world.code("r") is RejectCode.EXPIRED


def test_a_first_crash_is_mended_at_once_and_a_second_before_any_answer_backs_off() -> None:
    world = World([model("a")])
    ready(world, "a")
    world.lose(world.slot_of("a"))
    world.arrive("r1", "a")
    world.run()
    assert world.fate("r1") is Fate.GRANTED
    world.arrive("waits", "a")
    world.lose(world.slot_of("a"))
    assert world.code("waits") is RejectCode.LOAD_FAILED
    world.finish("r1", lost=True)
    assert world.code("r1") is RejectCode.LOAD_FAILED


def test_a_client_that_left_proves_nothing_about_the_model() -> None:
    world = World([model("a")])
    ready(world, "a")
    world.lose(world.slot_of("a"))
    world.arrive("r", "a")
    world.run()
    world.go("r")
    assert world.scheduler.state.models[world.moves[0].model].failures == 1


def test_a_slot_whose_host_copy_survives_is_asleep() -> None:
    world = World([model("a", 6_000, asleep=Need(0, 1_000))], (gpu(0, 8_000), host(4_000)))
    ready(world, "a")
    world.arrive("running", "a")
    world.lose(world.slot_of("a"), left_in=Tier.ASLEEP)
    world.finish("running", lost=True)
    world.run()
    assert world.kinds() == ["load a", "wake a"] and world.fate("running") is Fate.GRANTED


def test_a_wake_that_fails_waits_for_answers_of_the_process_that_died_before() -> None:
    world = World([model("a", 6_000, asleep=Need(0, 1_000))], (gpu(0, 8_000), host(4_000)))
    ready(world, "a")
    world.arrive("running", "a")
    world.lose(world.slot_of("a"), left_in=Tier.ASLEEP)
    world.outcome_of = lambda move: Outcome.FAILED
    world.arrive("r", "a")
    world.run()
    assert world.kinds() == ["load a", "wake a"] and world.code("r") is RejectCode.LOAD_FAILED
    world.finish("running")
    assert world.kinds()[-1] == "unload a"


def test_a_wake_that_is_done_but_no_longer_wanted_waits_for_those_answers_too() -> None:
    world = World([model("a", 6_000, asleep=Need(0, 1_000))], (gpu(0, 8_000), host(4_000)), plays=False)
    world.arrive("running", "a")
    world.end_move(world.moves[0].id, Outcome.DONE)
    world.lose(world.slot_of("a"), left_in=Tier.ASLEEP)
    world.arrive("r", "a")
    world.ask("o", MoveKind.UNLOAD, "a", grace_s=5.0)
    world.end_move(world.moves[1].id, Outcome.DONE)
    assert world.kinds() == ["load a", "wake a"]
    world.run(5.0)
    assert world.calls_by_id["running"].was_cut
    world.finish("running")
    assert world.kinds()[-1] == "unload a"


def test_a_slot_that_cannot_sleep_is_not_left_asleep() -> None:
    world = World([model("a")])
    ready(world, "a")
    world.lose(world.slot_of("a"), left_in=Tier.ASLEEP)
    assert not world.scheduler.state.slots


def test_a_leaving_slot_left_asleep_goes_on_leaving() -> None:
    """Its host copy must not be forgotten: it still holds memory."""
    world = World([model("a", 6_000, asleep=Need(0, 1_000))], (gpu(0, 8_000), host(4_000)), plays=False)
    world.arrive("r", "a")
    world.arrive("s", "a")
    world.end_move(world.moves[0].id, Outcome.DONE)
    world.ask("o", MoveKind.UNLOAD, "a")
    world.lose(world.slot_of("a"), left_in=Tier.ASLEEP)
    assert world.kinds() == ["load a"]
    world.finish("r")
    assert world.kinds() == ["load a", "unload a"]
    world.end_move(world.moves[1].id, Outcome.DONE)
    assert world.ops["o"] is not None and world.ops["o"].value == "done"


def test_an_asleep_slot_that_dies_is_cold_and_what_was_planned_for_it_begins_anew() -> None:
    world = sleeping()
    ready(world, "b")
    world.arrive("r", "a", takes_s=0.0)
    assert world.kinds()[-1] == "unload b"
    world.lose(world.slot_of("a"))
    world.run()
    assert world.kinds()[-1] == "load a" and world.fate("r") is Fate.SERVED


def test_a_process_that_dies_just_before_its_load_is_reported_done_is_not_believed_ready() -> None:
    world = World([model("a")], plays=False)
    world.arrive("r", "a")
    world.lose(world.slot_of("a"))
    world.end_move(world.moves[0].id, Outcome.DONE)
    assert world.code("r") is RejectCode.LOAD_FAILED and not world.scheduler.state.slots


def test_a_process_that_dies_while_it_falls_asleep_is_unloaded() -> None:
    world = World([model("a", asleep=Need(0, 100))], (gpu(0, 8_000), host(4_000)), plays=False)
    world.arrive("r", "a")
    world.end_move(world.moves[0].id, Outcome.DONE)
    world.finish("r")
    world.ask("o", MoveKind.SLEEP, "a")
    world.lose(world.slot_of("a"))
    world.end_move(world.moves[1].id, Outcome.DONE)
    assert world.kinds() == ["load a", "sleep a", "unload a"]
    world.end_move(world.moves[2].id, Outcome.DONE)
    assert world.ops["o"] is not None and world.ops["o"].value == "failed", "it was to sleep and is gone"


def test_losses_of_slots_that_are_not_there_are_ignored_and_those_not_begun_lose_nothing() -> None:
    world = World([model("a", 6_000), model("b", 6_000)])
    ready(world, "a")
    world.arrive("running", "a")
    slot = world.slot_of("a")
    world.lose(slot)
    world.post(ev.SlotsLost(world.now, (slot, SlotId("s?"))))
    assert world.scheduler.state.counters.ignored == 2
    world.finish("running")
    ready(world, "a")
    world.arrive("r", "b", takes_s=0.0)
    planned = next(slot.id for slot in world.scheduler.state.slots.values() if slot.planned)
    world.post(ev.SlotsLost(world.now, (planned,)))
    world.run()
    assert world.fate("r") is Fate.SERVED


def test_the_same_limits_hold_for_a_slow_back_off_configured_by_the_operator() -> None:
    world = World([model("a")], limits=Limits(backoff_s=1.0, backoff_max_s=2.0))
    world.outcome_of = lambda move: Outcome.FAILED
    pauses = []
    for number in range(3):
        call = world.arrive(f"r{number}", "a")
        world.run()
        assert call.rejection is not None
        pauses.append(call.rejection.retry_after_s)
    assert pauses == [1.0, 2.0, 2.0]


# --- a clock that is set back ---------------------------------------------------------------------------------------


def test_a_back_off_that_is_over_does_not_come_back_with_a_clock_that_is_set_back() -> None:
    world = World([model("a")])
    world.now = 100.0
    world.outcome_of = lambda move: Outcome.FAILED if len(world.moves) == 1 else Outcome.DONE
    world.arrive("fails", "a")
    world.run(5.0 + world.scheduler.state.limits.backoff_s + 0.1)
    world.now = 101.0
    assert world.arrive("again", "a", takes_s=0.0).fate is Fate.WAITING
    world.run()
    assert world.fate("again") is Fate.SERVED


def test_a_model_can_be_asked_for_at_any_time_the_clock_may_show() -> None:
    world = World([model("a")])
    world.now = -50.0
    world.arrive("r", "a", takes_s=0.0)
    world.run()
    assert world.fate("r") is Fate.SERVED


def test_a_clock_that_goes_back_gives_no_negative_wait() -> None:
    world = World([model("a")], plays=False)
    world.now = 100.0
    world.arrive("r", "a")
    world.now = 40.0
    world.end_move(world.moves[0].id, Outcome.DONE)
    assert world.fate("r") is Fate.GRANTED and world.scheduler.state.avg_wait_s == 0.0
