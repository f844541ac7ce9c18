"""What every scheduler promises (`contract.py`), asked of those that come with Greenroom and of one from the docs.

Nothing here says who goes first: that is what they differ in. The world judges every effect while it plays, and the
invariants are checked after every event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from greenroom.core import events as ev
from greenroom.core.effects import Effects, OpOutcome, Reason, RejectCode
from greenroom.core.events import Limits
from greenroom.core.model import (
    DeviceId,
    ModelId,
    MoveId,
    MoveKind,
    Need,
    Outcome,
    RequestId,
    SlotId,
    Tier,
)
from greenroom.core.plain import PlainScheduler
from greenroom.core.policy.coresidency import Group
from greenroom.core.scheduler import DefaultScheduler
from tests.core.runs.scenarios import finish, mixed_scenario
from tests.core.world import Fate, Recorder, World, gpu, host, model, picture
from tests.docs.pages import defined_in

GPU0 = DeviceId("gpu0")
ENDED = {Fate.SERVED, Fate.REJECTED, Fate.GONE}
SCHEDULERS: dict[str, Callable[[Effects], Any]] = {
    "default": DefaultScheduler,
    "plain": PlainScheduler,
    # The one that docs/design/writing-a-scheduler.md builds.
    "longest": defined_in("docs/design/writing-a-scheduler.md", "longest.py")["LongestWait"],
}


@pytest.fixture(params=SCHEDULERS)
def scheduler(request: pytest.FixtureRequest) -> Callable[[Effects], Any]:
    return SCHEDULERS[request.param]


Worlds = Callable[..., World]


@pytest.fixture
def worlds(scheduler: Callable[[Effects], Any]) -> Worlds:
    """A world of two models, of which one fits at a time, unless told otherwise."""

    def world(*models: Any, **said: Any) -> World:
        return World(models or (model("a", 6_000), model("b", 6_000)), scheduler=scheduler, **said)

    return world


def played(scheduler: Callable[[Effects], Any]) -> World:
    world = mixed_scenario(scheduler=scheduler)
    finish(world)
    return world


# --- a run in which everything happens --------------------------------------------------------------------------------


def test_every_arrival_ends_in_exactly_one_of_served_rejected_and_gone(scheduler: Callable[[Effects], Any]) -> None:
    world = played(scheduler)
    assert {call.fate for call in world.calls_by_id.values()} <= ENDED
    ends = [str(call[1]) for call in world.calls if call[0] == "reject"]
    assert len(ends) == len(set(ends)) and sum(call.fate is Fate.SERVED for call in world.calls_by_id.values()) > 25
    assert None not in world.ops.values() and world.is_at_rest() and not world.places


def test_the_same_events_ask_for_the_same_effects(scheduler: Callable[[Effects], Any]) -> None:
    world, again = played(scheduler), Recorder()
    second = scheduler(again)
    for event in world.events:
        second.handle(event)
    assert len(world.calls) > 100 and repr(again.calls) == repr(world.calls)


def test_every_effect_carries_its_reason(scheduler: Callable[[Effects], Any]) -> None:
    reasons = [call[-1] for call in played(scheduler).calls]
    assert all(isinstance(reason, Reason) and reason.why for reason in reasons)


def test_questions_change_nothing_and_the_view_stays_the_same_object(worlds: Worlds) -> None:
    world = worlds()
    view = world.scheduler.view
    world.arrive("first", "a")
    world.run(6.0)
    world.arrive("waits", "b")
    before, asked = picture(world.scheduler.state), len(world.calls)
    asking = world.asking("asked", "b", "a", priority=0)
    told = (view.explanation(asking), view.weigh(asking), view.outlook(RequestId("waits"), world.now), view.learned())
    assert all(told) and view.movable(world.now) is not None and view.kept_out_by_others(1.0, world.now) == {}
    assert picture(world.scheduler.state) == before and len(world.calls) == asked
    assert world.scheduler.view is view and view.waitlist.depth == 1


# --- requests ---------------------------------------------------------------------------------------------------------


def test_a_model_in_use_gives_way_in_the_end(worlds: Worlds) -> None:
    world = worlds()
    world.keep_busy("a", 2.0, 900.0)
    world.run(30.0)
    world.arrive("other", "b", takes_s=1.0)
    world.run(800.0)
    assert world.fate("other") is Fate.SERVED


def test_what_repeats_and_what_nobody_knows_is_ignored(worlds: Worlds) -> None:
    world = worlds()
    world.arrive("known", "a")
    world.run(6.0)
    asked = len(world.calls)
    strangers: list[ev.Event] = [
        ev.RequestArrived(world.now, RequestId("known"), (ModelId("b"),)),
        ev.RequestGone(world.now, RequestId("stranger")),
        ev.ServeDone(world.now, RequestId("stranger")),
        ev.MoveDone(world.now, MoveId("m?"), Outcome.DONE),
        ev.SlotsLost(world.now, (SlotId("s?"),)),
        ev.TimerFired(world.now, ev.Timer(ev.TimerKind.IDLE, "s?")),
    ]
    for event in strangers:
        world.post(event)
    assert len(world.calls) == asked and world.scheduler.view.counters["ignored"] == len(strangers)


def test_a_request_that_is_lost_before_its_first_byte_is_put_back_once(worlds: Worlds) -> None:
    world = worlds(plays=False)
    world.arrive("unlucky", "a")
    world.end_move(next(iter(world.moving)), Outcome.DONE)
    world.finish("unlucky", lost=True)
    assert world.fate("unlucky") is Fate.GRANTED
    world.finish("unlucky", lost=True)
    assert world.code("unlucky") is RejectCode.LOST


def test_a_request_waits_as_long_as_it_said_and_no_longer(worlds: Worlds) -> None:
    world = worlds(model("a", 6_000, pinned=True), model("b", 2_500))
    world.arrive("runs", "a", takes_s=500.0)
    world.arrive("joins", "a", within_s=20.0)
    world.run()
    assert world.code("joins") is RejectCode.EXPIRED and world.calls_by_id["joins"].ended_at == 20.0


def test_an_answer_over_its_budget_is_cut(worlds: Worlds) -> None:
    world = worlds()
    world.arrive("long", "a", takes_s=500.0, budget_s=60.0)
    world.run()
    assert world.calls_by_id["long"].was_cut and 60.0 <= world.calls_by_id["long"].ended_at < 61.0


def test_a_timer_that_fires_early_is_set_again(worlds: Worlds) -> None:
    world = worlds(plays=False)
    world.arrive("waits", "a", within_s=50.0)
    (timer,) = world.timers
    world.fire(timer)
    assert world.timers == {timer: 50.0} and world.fate("waits") is Fate.WAITING


def test_one_that_names_two_models_is_served_by_the_one_that_can(worlds: Worlds) -> None:
    world = worlds(model("huge", 50_000), model("a", 6_000))
    world.arrive("choosy", "huge", "a", takes_s=1.0)
    world.arrive("only", "huge")
    world.run()
    assert (world.fate("choosy"), world.code("only")) == (Fate.SERVED, RejectCode.TOO_LARGE)


def test_a_full_queue_and_an_unknown_model_are_refused(worlds: Worlds) -> None:
    world = worlds(limits=Limits(queue_depth_max=1), plays=False)
    for name, wanted in (("waits", "a"), ("full", "a"), ("lost", "none")):
        world.arrive(name, wanted)
    assert [world.code(name) for name in ("waits", "full", "lost")] == [
        None,
        RejectCode.QUEUE_FULL,
        RejectCode.UNKNOWN_MODEL,
    ]


# --- moves ------------------------------------------------------------------------------------------------------------


def test_a_move_starts_only_where_its_memory_is_free(worlds: Worlds) -> None:
    world = worlds()
    world.memory({GPU0: 3_000})
    world.arrive("waits", "a", takes_s=1.0)
    world.run(60.0)
    assert world.kinds() == []
    world.memory({GPU0: 0})
    world.run()
    assert world.fate("waits") is Fate.SERVED


@pytest.mark.parametrize(
    ("outcome", "loads", "code"),
    [
        (Outcome.FAILED, 1, RejectCode.LOAD_FAILED),
        (Outcome.NO_MEMORY, 2, RejectCode.LOAD_FAILED),
        (Outcome.NO_LEASE, 3, None),
        (Outcome.STORE_DOWN, 3, None),
    ],
)
def test_a_move_that_ends_badly(worlds: Worlds, outcome: Outcome, loads: int, code: RejectCode | None) -> None:
    world = worlds(limits=Limits(replan_s=10.0))
    world.outcome_of = lambda move: outcome
    world.arrive("waits", "a", within_s=40.0)
    world.run(35.0)
    assert (world.kinds().count("load a"), world.code("waits")) == (loads, code)


def test_a_process_that_dies_during_its_load_has_not_arrived(worlds: Worlds) -> None:
    world = worlds(plays=False)
    world.arrive("waits", "a")
    (move,) = world.moving
    world.lose(world.slot_of("a"))
    world.end_move(move, Outcome.DONE)
    assert world.fate("waits") is not Fate.GRANTED and world.tier("a") is Tier.COLD


def test_operators_are_answered_and_running_answers_get_their_grace(worlds: Worlds) -> None:
    asleep = Need(0, 2_000)
    world = worlds(model("a", 6_000, asleep=asleep), model("b", 6_000), devices=(gpu(0, 8_000), host(8_000)))
    for op, kind in (("load", MoveKind.LOAD), ("sleep", MoveKind.SLEEP), ("wake", MoveKind.WAKE)):
        world.ask(op, kind, "a")
        world.run(30.0)
    assert world.tier("a") is Tier.READY
    world.arrive("runs", "a", takes_s=500.0)
    world.ask("unload", MoveKind.UNLOAD, "a", grace_s=3.0)
    world.run()
    assert set(world.ops.values()) == {OpOutcome.DONE}
    assert world.kinds() == ["load a", "sleep a", "wake a", "unload a"] and world.calls_by_id["runs"].ended_at < 94.0


def test_a_sleeper_wakes_where_it_sleeps_and_a_prepared_model_never_serves(worlds: Worlds) -> None:
    asleep = Need(0, 2_000)
    models = [model(name, 6_000, asleep=asleep) for name in ("a", "b")]
    world = worlds(*models, devices=(gpu(0, 8_000), host(8_000)))
    world.ask("prepare", MoveKind.PREPARE, "b")
    for name in ("a", "b", "a"):
        world.arrive(f"{name} at {world.now:g}", name, takes_s=1.0)
        world.run(60.0)
    assert {call.fate for call in world.calls_by_id.values()} == {Fate.SERVED}
    assert world.kinds() == ["prepare b", "load a", "sleep a", "wake b", "sleep b", "wake a"]


def test_what_the_operator_prepares_while_nothing_else_fits_is_answered(worlds: Worlds) -> None:
    """A request waits for the same model, and neither waits for the other."""
    asleep = Need(0, 2_000)
    first, second = model("a", 6_000, pinned=True), model("b", 2_000, asleep=asleep)
    world = worlds(first, second, devices=(gpu(0, 8_000), host(8_000)))
    world.ask("load", MoveKind.LOAD, "a")
    world.run(10.0)
    world.memory({GPU0: 1_000})
    world.arrive("waits", "b", takes_s=1.0)
    world.ask("prepare", MoveKind.PREPARE, "b")
    world.run(60.0)
    world.memory({GPU0: 0})
    world.run()
    assert (world.fate("waits"), world.ops["prepare"]) == (Fate.SERVED, OpOutcome.DONE)


def test_pinned_models_stay_and_preloads_come_when_there_is_room(worlds: Worlds) -> None:
    world = worlds(model("kept", 3_000, pinned=True, preload=True), model("a", 4_000), model("b", 4_000, preload=True))
    world.run(30.0)
    assert world.tier("kept") is Tier.READY
    for number in range(6):
        world.arrive(f"r{number}", ("a", "b")[number % 2], takes_s=1.0)
        world.run(20.0)
    assert {call.fate for call in world.calls_by_id.values()} == {Fate.SERVED}
    assert world.kinds("kept") == ["load kept"]


def test_coresidency_rules_hold(worlds: Worlds) -> None:
    alone = (Group("one", (ModelId("a"),)), Group("other", (ModelId("b"),)))
    world = worlds(model("a", 1_000), model("b", 1_000), limits=Limits(company=alone))
    for name in ("a", "b"):
        world.arrive(name, name, takes_s=1.0)
        world.run()
    assert world.kinds() == ["load a", "unload a", "load b"]
    assert {call.fate for call in world.calls_by_id.values()} == {Fate.SERVED}


# --- memory, leases and configuration ---------------------------------------------------------------------------------


def test_a_lease_is_granted_whole_and_recalled_for_what_is_more_urgent(worlds: Worlds) -> None:
    world = worlds(devices=(gpu(0, 8_000), gpu(1, 8_000)))
    world.ask_lease("train", 5_000, priority=2, preemptible=True, gpus=2)
    assert world.fate("train") is Fate.GRANTED
    world.arrive("urgent", "a", takes_s=1.0)
    world.run()
    assert [call[0] for call in world.calls].count("recall") == 1
    assert (world.fate("train"), world.fate("urgent")) == (Fate.SERVED, Fate.SERVED)


def test_a_lease_that_gives_up_is_refused_with_the_numbers(worlds: Worlds) -> None:
    world = worlds(model("a", 6_000, pinned=True))
    world.ask("load", MoveKind.LOAD, "a")
    world.run(10.0)
    world.memory({GPU0: 1_500})
    world.ask_lease("train", 1_000, within_s=5.0)
    world.run()
    rejection = world.calls_by_id["train"].rejection
    assert rejection is not None and (rejection.code, rejection.needs_mib) == (RejectCode.EXPIRED, 1_000)


def test_memory_that_another_holder_was_granted_is_given_up_at_once(worlds: Worlds) -> None:
    world = worlds()
    world.arrive("runs", "a", takes_s=500.0)
    world.run(10.0)
    world.post(ev.MemoryChanged(world.now, {}, taken=(world.slot_of("a"), SlotId("s?"))))
    world.run(5.0)
    assert world.calls_by_id["runs"].was_cut and world.tier("a") is Tier.COLD


def test_while_the_store_is_away_new_requests_are_refused_and_others_wait(worlds: Worlds) -> None:
    world = worlds()
    world.arrive("runs", "a", takes_s=10.0)
    world.run(6.0)
    world.post(ev.MemoryChanged(world.now, {}, store_is_down=True))
    world.arrive("new", "b")
    assert world.code("new") is RejectCode.STORE_DOWN
    world.post(ev.MemoryChanged(world.now, {}, store_is_down=False))
    world.arrive("later", "b", takes_s=1.0)
    world.run()
    assert (world.fate("runs"), world.fate("later")) == (Fate.SERVED, Fate.SERVED)


def test_a_promoted_version_serves_those_that_wait(worlds: Worlds) -> None:
    world = worlds(model("a", 3_000))
    world.arrive("old", "a", takes_s=500.0)
    world.run(10.0)
    world.config(replace(model("a@2", 3_000), version_of=ModelId("a")))
    world.ask("load", MoveKind.LOAD, "a@2")
    world.run(10.0)
    world.arrive("waits", "a", takes_s=5.0)
    world.promote("a@2", model("a", 3_000, revision=2))
    world.run(10.0)
    assert (world.fate("waits"), world.fate("old")) == (Fate.SERVED, Fate.GRANTED)
    world.run()
    assert world.fate("old") is Fate.SERVED and not world.calls_by_id["old"].was_cut


def test_a_removed_model_rejects_its_waiters_and_a_shutdown_all_of_them(worlds: Worlds) -> None:
    world = worlds()
    world.arrive("runs", "a", takes_s=500.0)
    world.run(6.0)
    world.arrive("joins", "a")
    world.arrive("other", "b")
    world.config(removed=("b",))
    assert world.code("other") is RejectCode.REMOVED
    world.shut_down(5.0)
    world.run()
    assert world.code("joins") is RejectCode.SHUTTING_DOWN and world.calls_by_id["runs"].was_cut
    assert world.is_at_rest() and not world.places and not world.timers


def test_waits_tell_positions_in_the_order_of_the_scheduler(worlds: Worlds) -> None:
    world = worlds(plays=False)
    for number in range(5):
        world.arrive(f"r{number}", "ab"[number % 2])
    outlooks = [world.scheduler.view.outlook(RequestId(caller.id), 0.0) for caller in world.scheduler.view.callers()]
    assert all(one.position + 1 == other.position for one, other in pairwise(outlooks))
