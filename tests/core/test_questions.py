"""Questions change nothing and tell the truth: `explain` and `outlook`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from greenroom.core.decide.plan import Join, Plan, Refuse, Serve, Swap, Wait
from greenroom.core.effects import RejectCode
from greenroom.core.events import Limits
from greenroom.core.model import DeviceId, ModelId, MoveKind, Need, Outcome, RequestId
from tests.core.queue.test_order import ready

from .world import Call, Engine, Fate, World, gpu, host, model, picture


def a_mixed_moment() -> World:
    """Something of everything: ready, busy, loading, asleep, failing, blocked."""
    world = World(
        [
            model("ready", 1_000, concurrency=2),
            model("busy", 3_000),
            model("loading", 1_000),
            model("asleep", 1_000, asleep=Need(0, 500)),
            model("failing", 100),
            model("blocked", 7_000),
            model("huge", 9_000),
            model("cold", 500),
        ],
        devices=(gpu(0, 8_000), host(1_000)),
        limits=Limits(queue_depth_max=6),
    )
    world.outcome_of = lambda move: Outcome.FAILED if move.model == "failing" else Outcome.DONE
    ready(world, "ready", "busy", "asleep")
    world.ask("sleep", MoveKind.SLEEP, "asleep")
    world.run()
    world.arrive("fails", "failing")
    world.run(5.0)
    world.arrive("running", "busy")
    world.arrive("comes", "loading")
    world.arrive("blocked", "blocked")
    return world


@pytest.mark.parametrize(
    ("name", "priority", "kind"),
    [
        ("ready", 1, Serve),
        ("ready", 2, Serve),
        ("busy", 1, Wait),
        ("loading", 1, Join),
        ("asleep", 1, Swap),
        ("failing", 1, Refuse),
        ("blocked", 1, Wait),
        ("huge", 1, Refuse),
        ("cold", 1, Swap),
        ("nope", 1, Refuse),
    ],
)
def test_explain_changes_nothing_and_agrees_with_what_then_happens(name: str, priority: int, kind: type[Plan]) -> None:
    world = a_mixed_moment()
    before, said_before = picture(world.scheduler.state), list(world.calls)
    plan = world.scheduler.view.explanation(world.asking("r", name, priority=priority)).plan
    assert isinstance(plan, kind), plan
    assert picture(world.scheduler.state) == before and world.calls == said_before
    moves = len(world.moves)
    fate = world.arrive("r", name, priority=priority).fate
    expected = {Serve: Fate.GRANTED, Refuse: Fate.REJECTED}.get(kind, Fate.WAITING)
    assert fate is expected and (len(world.moves) > moves) == (kind is Swap)


def test_explain_knows_of_a_full_queue_and_of_lateness() -> None:
    world = a_mixed_moment()
    for number in range(4):
        world.arrive(f"more{number}", "blocked")
    call = Call("r", 0, (next(iter(world.specs)),), 1, world.calls_by_id["running"].tenant, None)
    call.candidates = (world.moves[1].model,)
    plan = world.scheduler.view.explanation(world.arrival(call)).plan
    assert isinstance(plan, Refuse) and plan.code is RejectCode.QUEUE_FULL
    world.go("more0")
    world.scheduler.state.models[call.candidates[0]].service_s = 60.0
    plan = world.scheduler.view.explanation(world.arrival(call, give_up_at=world.now + 1.0, patient=False)).plan
    assert plan == Refuse(RejectCode.EXPIRED, 60.0)


def test_outlook_gives_position_and_time_of_waiting_requests_only() -> None:
    world = World([model("a", 6_000), model("b", 6_000)])
    assert world.scheduler.view.outlook(RequestId("nobody"), 0.0) is None
    world.arrive("r1", "a", takes_s=2.0)
    first = world.scheduler.view.outlook(RequestId("r1"), 0.0)
    assert first is not None and (first.position, first.eta_s) == (1, None), "nothing was learned yet"
    world.run()
    ready(world, "b")
    for name in ("r2", "r3", "r4"):
        world.arrive(name, "a", takes_s=2.0)
    world.arrive("urgent", "a", takes_s=2.0, priority=0)

    def outlook(name: str) -> tuple[int, float | None]:
        told = world.scheduler.view.outlook(RequestId(name), world.now)
        assert told is not None
        return told.position, told.eta_s

    assert outlook("urgent") == (1, 5.0) and outlook("r2") == (2, 7.0) and outlook("r4") == (4, 11.0)
    world.run(3.0)
    assert outlook("urgent") == (1, 3.0), "one second to unload, two of five to load"
    world.run(3.5)
    assert outlook("r2") == (1, 2.0), "the running answer comes first"


def test_the_estimate_counts_the_moves_of_requests_ahead() -> None:
    world = World([model("a", 6_000), model("b", 6_000), model("c", 6_000)])
    ready(world, "b", "c", "a")
    world.arrive("running", "a")
    world.arrive("first", "b")
    world.arrive("second", "c")
    told = world.scheduler.view.outlook(RequestId("second"), world.now)
    assert told is not None and told.eta_s == 10.0
    world.ask_lease("train", 6_000, priority=0)
    told = world.scheduler.view.outlook(RequestId("second"), world.now)
    assert told is not None and told.eta_s == 10.0, "a lease takes no time"


def told_s(world: World, name: str) -> float | None:
    told = world.scheduler.view.outlook(RequestId(name), world.now)
    assert told is not None
    return told.eta_s


def test_the_estimate_is_not_known_while_no_answer_ahead_has_ever_ended() -> None:
    world = World([model("a", 6_000)])
    world.ask("load", MoveKind.LOAD, "a")
    world.run()
    world.arrive("running", "a", takes_s=2.0)
    assert world.scheduler.view.explanation(world.asking("?", "a")).eta_s is None
    world.arrive("r", "a", within_s=1.0)
    assert told_s(world, "r") is None
    world.run(1.0)
    refused = world.calls_by_id["r"].rejection
    assert refused is not None and (refused.code, refused.retry_after_s) == (RejectCode.EXPIRED, None)
    world.run(1.0)
    world.arrive("next", "a")
    assert world.scheduler.view.explanation(world.asking("?", "a")).eta_s == 2.0, "an answer has ended"


def test_the_estimate_needs_no_length_of_answers_that_go_beside_or_after() -> None:
    world = World([model("a", 6_000, concurrency=2)])
    world.scheduler.state.models[ModelId("a")].learned_s[MoveKind.LOAD] = 5.0
    world.arrive("first", "a")
    world.arrive("second", "a")
    assert told_s(world, "second") == 5.0, "both are answered at once"
    world.arrive("third", "a")
    assert told_s(world, "third") is None and told_s(world, "first") == 5.0


@pytest.mark.parametrize(("budget_s", "refused"), [(4.0, True), (6.0, False)])
def test_a_budget_is_over_if_the_load_alone_exceeds_it(budget_s: float, refused: bool) -> None:
    """How long the answer ahead takes is not known, and can only add to the load's five seconds."""
    world = World([model("a", 6_000)])
    world.scheduler.state.models[ModelId("a")].learned_s[MoveKind.LOAD] = 5.0
    world.arrive("first", "a")
    arrival = replace(world.asking("?", "a"), answer_by=world.now + budget_s)
    plan = world.scheduler.view.explanation(arrival).plan
    assert (plan == Refuse(RejectCode.EXPIRED, None)) is refused and (isinstance(plan, Join) is not refused)


def test_the_estimate_counts_a_load_that_holds_the_memory() -> None:
    world = World([model("a", 6_000), model("b", 6_000)])
    ready(world, "a", "b")
    world.scheduler.state.models[ModelId("b")].learned_s[MoveKind.LOAD] = 0.2
    world.ask("op", MoveKind.LOAD, "a")
    world.run(2.0)
    assert world.scheduler.view.explanation(world.asking("?", "b")).eta_s == pytest.approx(4.2)
    world.arrive("r", "b", within_s=1.0)
    assert told_s(world, "r") == pytest.approx(4.2), "one second to unload, four of five to load, and its own"
    loads_s = world.scheduler.state.models[ModelId("a")].learned_s
    usual_s, loads_s[MoveKind.LOAD] = loads_s[MoveKind.LOAD], 0.5
    assert told_s(world, "r") is None, "a load that takes longer than usual may take any time"
    loads_s[MoveKind.LOAD] = usual_s
    world.run(1.0)
    refused = world.calls_by_id["r"].rejection
    assert refused is not None and refused.code is RejectCode.EXPIRED
    assert (refused.retry_after_s, refused.room_s) == (pytest.approx(0.2), pytest.approx(3.0))


@pytest.mark.parametrize(("name", "s"), [("anywhere", 5.0), ("there", 8.0), ("host", 5.0)])
def test_the_estimate_counts_loads_only_where_the_model_could_be(name: str, s: float) -> None:
    first, second = (DeviceId("gpu0"),), (DeviceId("gpu1"),)
    models = [
        model("loading", 6_000, devices=first),
        model("busy", 6_000, devices=second),
        model("busy-on-host", 0, host_mib=6_000),
        model("anywhere", 6_000),
        model("there", 6_000, devices=first),
        model("host", 0, host_mib=6_000),
    ]
    world = World(models, devices=(gpu(0, 8_000), gpu(1, 8_000), host(8_000)))
    for record in world.scheduler.state.models.values():
        record.learned_s[MoveKind.LOAD] = 5.0
    world.arrive("r1", "busy")
    world.arrive("r2", "busy-on-host")
    world.run(10.0)
    world.ask("op", MoveKind.LOAD, "loading")
    world.run(2.0)
    world.arrive("r", name)
    assert told_s(world, "r") == s


@pytest.mark.parametrize(("mib", "s"), [(3_000, 5.0), (4_000, 8.0)])
def test_the_estimate_counts_no_load_beside_which_the_model_fits(mib: int, s: float) -> None:
    """It waits for a model that is busy, not for the one that comes, unless it needs the memory of both."""
    world = World([model("busy", 3_000), model("loading", 5_000), model("a", mib)], devices=(gpu(0, 8_000),))
    for record in world.scheduler.state.models.values():
        record.learned_s[MoveKind.LOAD] = 5.0
    world.arrive("r1", "busy")
    world.run(10.0)
    world.ask("op", MoveKind.LOAD, "loading")
    world.run(2.0)
    world.arrive("r", "a")
    assert told_s(world, "r") == s


def test_the_estimate_counts_every_load_that_a_model_on_several_devices_waits_for() -> None:
    first, second = (DeviceId("gpu0"),), (DeviceId("gpu1"),)
    models = [
        model("soon", 6_000, devices=first),
        model("late", 6_000, devices=second),
        model("pinned", 1_000, devices=second, pinned=True),
        model("wide", 6_000, gpus=2),
    ]
    world = World(models, devices=(gpu(0, 8_000), gpu(1, 8_000)))
    for name, record in world.scheduler.state.models.items():
        record.learned_s[MoveKind.LOAD] = 30.0 if name == "late" else 5.0
    for name in ("soon", "late", "pinned"):
        world.ask(f"load {name}", MoveKind.LOAD, name)
    world.run(2.0)
    world.arrive("r", "wide")
    assert told_s(world, "r") == 28.0 + 5.0


def test_the_estimate_of_a_sleeping_model_is_that_of_its_wake() -> None:
    world = World([model("a", 6_000, asleep=Need(0, 100)), model("b", 6_000)], devices=(gpu(0, 8_000), host(1_000)))
    ready(world, "a", "b", "a", "b")
    world.arrive("running", "b")
    world.arrive("r", "a")
    told = world.scheduler.view.outlook(RequestId("r"), world.now)
    assert told is not None and told.eta_s == 0.5


def test_the_estimate_of_a_model_that_is_prepared_counts_the_rest_of_that_and_its_wake() -> None:
    world = World([model("a", asleep=Need(0, 4_000))], (gpu(0, 8_000), host(64_000)))
    world.engines["a"] = Engine(load_s=60.0, wake_s=1.0)
    record = world.scheduler.state.models[ModelId("a")]
    record.learned_s.update({MoveKind.PREPARE: 60.0, MoveKind.WAKE: 1.0, MoveKind.LOAD: 60.0})
    world.ask("p", MoveKind.PREPARE, "a")
    world.run(50.0)
    waits = world.arrive("r", "a", takes_s=0.0)
    outlook = world.scheduler.view.outlook(RequestId("r"), world.now)
    world.run(200.0)
    assert outlook is not None and outlook.eta_s == pytest.approx(waits.granted_at - waits.arrived, abs=0.1) == 11.0


@pytest.mark.parametrize(
    ("leaves_by", "least_s", "most_s"), [(MoveKind.SLEEP, 5.0, 7.0), (MoveKind.UNLOAD, 85.0, 91.0)]
)
def test_the_estimate_of_a_model_that_leaves_counts_the_rest_of_that_and_how_it_comes_back(
    leaves_by: MoveKind, least_s: float, most_s: float
) -> None:
    """It takes 60 s to load, 1 s to wake, 5 s to fall asleep and 30 s to be unloaded."""
    world = World([model("a", asleep=Need(0, 4_000))], (gpu(0, 8_000), host(64_000)))
    world.engines["a"] = Engine(load_s=60.0, wake_s=1.0, leave_s=5.0)
    for round_ in range(3):
        world.arrive(f"r{round_}", "a", takes_s=0.0)
        world.run(100.0)
        if round_ < 2:
            world.ask(f"sleep {round_}", MoveKind.SLEEP, "a")
            world.run(100.0)
    if leaves_by is MoveKind.UNLOAD:
        world.scheduler.state.models[ModelId("a")].learned_s[MoveKind.UNLOAD] = 30.0
        world.engines["a"].leave_s = 30.0
        world.ask("sleep", MoveKind.SLEEP, "a")
        world.run(100.0)
    world.ask("leave", leaves_by, "a")
    world.run(0.5)
    waits = world.arrive("r", "a", takes_s=0.0)
    outlook = world.scheduler.view.outlook(RequestId("r"), world.now)
    world.run(200.0)
    assert outlook is not None and outlook.eta_s == pytest.approx(waits.granted_at - waits.arrived, abs=0.1)
    assert least_s <= outlook.eta_s <= most_s


@pytest.mark.parametrize(
    ("pinned", "loads_s", "s", "kind"),
    [(False, 5.0, 3.5, MoveKind.WAKE), (False, 30.0, 9.5, MoveKind.LOAD), (True, 30.0, 28.5, MoveKind.WAKE)],
)
def test_the_estimate_of_a_sleeping_model_counts_a_load_that_holds_its_own_gpu(
    pinned: bool, loads_s: float, s: float, kind: MoveKind
) -> None:
    """It wakes only where it sleeps. When it has waited for as long as a load takes more, it is loaded elsewhere.

    A pinned model is not.
    """
    first = (DeviceId("gpu0"),)
    models = [model("a", 6_000, asleep=Need(0, 100), pinned=pinned), model("coming", 6_000, devices=first)]
    world = World(models, devices=(gpu(0, 8_000), gpu(1, 8_000), host(8_000)))
    ready(world, "a")
    assert world.places[world.slot_of("a")].holds == {first[0]: 6_000}
    world.engines["coming"] = Engine(load_s=loads_s, leave_s=0.0)
    for name, kind_s in (("a", {MoveKind.LOAD: 5.0, MoveKind.WAKE: 0.5}), ("coming", {MoveKind.LOAD: loads_s})):
        world.scheduler.state.models[ModelId(name)].learned_s.update(kind_s)
    world.ask("sleep", MoveKind.SLEEP, "a")
    world.run()
    world.ask("load", MoveKind.LOAD, "coming")
    world.run(2.0)
    world.arrive("r", "a")
    assert told_s(world, "r") == pytest.approx(s)
    world.run(30.0)
    call = world.calls_by_id["r"]
    assert call.granted_at - call.arrived == pytest.approx(s) and world.moves[-1].kind is kind, "and so it happens"


def test_reasons_read_as_a_line() -> None:
    world = World([model("a", 6_000), model("b", 6_000)])
    ready(world, "a")
    world.arrive("r", "b")
    reason = str(world.reasons[world.moves[-1].id])
    assert reason == "evicted model=a for_model=b for_request=r loss=0.1667 idle_s=5.0"
