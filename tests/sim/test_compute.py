"""Answers beside others: how fast they are, when they end, what they wait for; and speeds from recordings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from greenroom.core.model import ModelId
from greenroom.sim.cases import simulate
from greenroom.sim.config import MEASURED_STEPS, ONE_PROCESS, OWN_PROCESSES, SimModel, SpeedCurve
from greenroom.sim.hooks import TraceHash
from greenroom.sim.records import Fate
from greenroom.sim.results.stats import Stats, stats_of
from greenroom.sim.traces.speeds import ROWS_MIN, AnswerTimes, speeds
from greenroom.sim.traces.traces import Known, trace_of
from greenroom.sim.workloads import Mix, Poisson, zipf
from greenroom.sim.world import World
from tests.sim.settings import MANNERS, gpu, host, names, setting, sim_model

A, B = ModelId("a"), ModelId("b")
# With two answers each takes twice as long, with three three times; a busy neighbour doubles it again.
SHARED = SpeedCurve(((1, 1.0), (2, 2.0)), 1.0)


def shared(name: str, mib: int = 1_000, **more: object) -> SimModel:
    return sim_model(name, mib, timings=replace(MANNERS, load_s=0.0, unload_s=0.0, speed=SHARED), **more)


# --- the curve --------------------------------------------------------------------------------------------------------


def test_an_answer_alone_has_the_whole_speed() -> None:
    assert OWN_PROCESSES.speed(1, 0) == ONE_PROCESS.speed(1, 0) == 1.0


def test_the_curve_goes_through_what_was_measured() -> None:
    alone = 197.46
    for batch, per_s in ((8, 1_440.8), (32, 5_193.5), (128, 14_115.3)):
        assert batch * alone * OWN_PROCESSES.speed(batch, 0) == pytest.approx(per_s, rel=0.01)
    # Two models with 8 callers each, in two processes and in one.
    for curve, per_s in ((OWN_PROCESSES, 1_356.4), (ONE_PROCESS, 1_763.4)):
        assert 2 * 8 * alone * curve.speed(8, 1) == pytest.approx(per_s, rel=0.01)


def test_more_requests_or_busier_neighbours_are_never_faster() -> None:
    speeds = [OWN_PROCESSES.speed(batch, 0) for batch in range(1, 300)]
    assert speeds == sorted(speeds, reverse=True) and len(set(speeds)) == len(speeds)
    assert MEASURED_STEPS[-1][0] < 299
    beside = [OWN_PROCESSES.speed(4, busy) for busy in range(5)]
    assert beside == sorted(beside, reverse=True)


# --- ends -------------------------------------------------------------------------------------------------------------


def test_an_answer_is_timed_anew_when_the_batch_changes() -> None:
    """The second comes when the first has done half: then both go at half speed until the first is done."""
    world = World(setting(shared("a")))
    first = world.arrive(A, 0, 200)
    world.run(until=1.0)
    second = world.arrive(A, 0, 200)
    world.run()
    # From 1 to 3 both do a second of work; from then on the second has the GPU to itself.
    assert (first.ended_at, second.ended_at) == (pytest.approx(3.0), pytest.approx(4.0))


def test_models_on_one_gpu_slow_each_other_and_those_on_another_do_not() -> None:
    def ends(*devices: int) -> list[float]:
        gpus = tuple(gpu(mib, number) for number, mib in enumerate(devices))
        world = World(setting(shared("a"), shared("b"), devices=gpus))
        calls = [world.arrive(A, 0, 100), world.arrive(B, 0, 200)]
        world.run()
        return [call.ended_at for call in calls]

    assert ends(1_000, 1_000) == pytest.approx([1.0, 2.0])
    # Both at half speed until a is done at 2; b has a second of work left then.
    assert ends(2_000) == pytest.approx([2.0, 3.0])


def test_a_caller_that_leaves_makes_the_others_faster() -> None:
    world = World(setting(shared("a")))
    stays, leaves = world.arrive(A, 0, 200), world.arrive(A, 0, 100)
    world.run(until=1.0)
    world.leave(leaves)
    world.run()
    assert leaves.fate is Fate.GONE and stays.ended_at == pytest.approx(2.5)


def test_answers_of_an_engine_that_dies_do_not_end_later() -> None:
    world = World(setting(shared("a")))
    calls = [world.arrive(A, 0, 200), world.arrive(A, 0, 300)]
    world.run(until=1.0)
    world.crash([calls[0].slot] if calls[0].slot else [])
    world.run(until=2.0)
    assert all(call.fate is Fate.SERVED and call.was_broken for call in calls)
    later = world.arrive(A, 0, 100)
    world.run()
    assert later.ended_at == pytest.approx(later.granted_at + 1.0)


def test_a_model_of_constant_speed_is_a_neighbour_too() -> None:
    world = World(setting(shared("a"), sim_model("b", timings=replace(MANNERS, load_s=0.0)), mib=2_000))
    a, b = world.arrive(A, 0, 100), world.arrive(B, 0, 200)
    world.run()
    assert (a.ended_at, b.ended_at) == (pytest.approx(2.0), pytest.approx(2.0))


def test_models_without_a_gpu_share_the_host() -> None:
    models = tuple(
        replace(model, spec=replace(model.spec, need=replace(model.spec.need, gpu_mib=0, host_mib=1_000)))
        for model in (shared("a"), shared("b"))
    )
    world = World(setting(*models, devices=(host(5_000),)))
    calls = [world.arrive(A, 0, 100), world.arrive(B, 0, 100)]
    world.run()
    assert [call.ended_at for call in calls] == pytest.approx([2.0, 2.0])


def test_speed_that_never_changes_gives_the_same_figures_as_none() -> None:
    def run(speed: SpeedCurve | None) -> Stats:
        models = (sim_model(name, timings=replace(MANNERS, speed=speed)) for name in names(4))
        return simulate(setting(*models, mib=2_000), Poisson(Mix(zipf(names(4))), 2.0, 300.0))

    flat, none = run(SpeedCurve(((1, 1.0), (2, 1.0)), 0.0)), run(None)
    assert (flat.served, flat.swaps, flat.events) == (none.served, none.swaps, none.events)
    assert (flat.waits.mean_s, flat.makespan_s) == (pytest.approx(none.waits.mean_s), pytest.approx(none.makespan_s))


def test_a_run_with_shared_compute_is_the_same_every_time() -> None:
    def run() -> str:
        trace = TraceHash()
        models = (sim_model(name, timings=replace(MANNERS, speed=OWN_PROCESSES)) for name in names(4))
        simulate(setting(*models, mib=2_000), Poisson(Mix(zipf(names(4))), 4.0, 300.0), watchers=[trace])
        return trace.hex()

    assert run() == run()


# --- why requests take longer -----------------------------------------------------------------------------------------


def test_waits_are_split_into_not_there_and_full() -> None:
    """One answer at a time: a loads for 5 s, then its second request waits a second more; b waits for both."""
    world = World(setting(sim_model("a", concurrency=1), sim_model("b", concurrency=1)))
    for model in (A, A, B):
        world.arrive(model, 0, 100)
    world.run()
    delays = stats_of(world).delays
    a, b = delays["a"], delays["b"]
    assert (a.not_there_s, a.full_s, a.slow_s) == (pytest.approx(10.0), pytest.approx(1.0), pytest.approx(0.0))
    # 5 s of load, 2 s of answers, 1 s to unload, 5 s to load.
    assert (b.not_there_s, b.full_s, b.served) == (pytest.approx(13.0), pytest.approx(0.0), 1)
    total = stats_of(world).all_delays
    assert (total.not_there_s, total.full_s, total.served) == (pytest.approx(23.0), pytest.approx(1.0), 3)


def test_slow_is_what_an_answer_takes_longer_than_alone() -> None:
    world = World(setting(shared("a")))
    for _ in range(2):
        world.arrive(A, 0, 100)
    world.run()
    total = stats_of(world).all_delays
    assert (total.slow_s, total.not_there_s, total.full_s) == (pytest.approx(2.0), 0.0, 0.0)


def test_requests_that_are_not_served_count_by_what_they_waited_for() -> None:
    config = setting(sim_model("a", concurrency=1), sim_model("b"), patience_s=6.0, policy="fifo")
    world = World(config)
    for model in (A, A, B):
        world.arrive(model, 0, 1_000)
    world.run()
    delays = stats_of(world).delays
    assert (delays["a"].lost_full, delays["a"].lost_not_there) == (1, 0)
    assert (delays["b"].lost_full, delays["b"].lost_not_there) == (0, 1)
    assert stats_of(world).all_delays.lost == stats_of(world).lost == 2


HEAD = "t,model,prompt_len,output_len,tenant,priority,wait_s,total_s"
# Two answers at a time take twice as long, and so does an answer beside a busy model.
FOREVER = 1e12


def one_by_one(count: int = ROWS_MIN, took_s: float = 2.0, tokens: int = 100, start: float = 0.0) -> list[AnswerTimes]:
    return [AnswerTimes(start + 10.0 * number, start + 10.0 * number + took_s, 0, tokens) for number in range(count)]


def rates(answers: dict[str, list[AnswerTimes]], curve: SpeedCurve | None, gpus: int = 1) -> dict[str, float]:
    return {
        model: one.tokens_per_s for model, one in speeds(answers, dict.fromkeys(answers, curve), FOREVER, gpus).items()
    }


def test_rows_are_read_with_their_waits(tmp_path: Path) -> None:
    file = tmp_path / "activity.csv"
    rows = ["100.0,a,7,50,lab,1,2.0,5.0", "101.0,a,,50,lab,1,0.000,1.0", "102.0,old,7,50,lab,1,,", "103,old,1,9,,1,1,2"]
    file.write_text("\n".join([HEAD, *rows, "104,b,1,9,,1,nan,2", "104,b,1,9,,1,3,2"]))
    trace = trace_of(file, Known(["a", "b"], {"old": "b"}))
    assert trace.answers == {"a": [AnswerTimes(102.0, 105.0, 7, 50)], "b": [AnswerTimes(104.0, 105.0, 1, 9)]}
    assert trace.columns == "time from t in seconds (by its title)"
    assert trace_of(file, Known(["a"], spreads=True)).answers == {}


def test_other_files_have_no_speeds(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("t,model,prompt_len,output_len\n0,a,1,1\n")
    assert trace_of(file).answers == {}


def test_an_answer_alone_tells_its_speed() -> None:
    assert rates({"a": one_by_one()}, OWN_PROCESSES) == {"a": pytest.approx(50.0)}


def test_prompts_are_no_part_of_it() -> None:
    rows = [row._replace(prompt_len=2_000) for row in one_by_one()]
    assert speeds({"a": rows}, {"a": None}, 2_000.0, 1)["a"].tokens_per_s == pytest.approx(100.0)
    # But never more than half of the time, even if prompts are read faster than assumed.
    assert speeds({"a": rows}, {"a": None}, 1.0, 1)["a"].tokens_per_s == pytest.approx(100.0)


def test_speeds_account_for_requests_and_models_beside() -> None:
    two = one_by_one() + one_by_one()
    assert rates({"a": two}, SHARED) == {"a": pytest.approx(100.0)}
    assert rates({"a": two}, None) == {"a": pytest.approx(50.0)}
    beside = {"a": one_by_one(), "b": one_by_one(took_s=2.5)}
    assert rates(beside, SHARED) == {"a": pytest.approx(100.0), "b": pytest.approx(80.0)}
    # On two GPUs, they are not beside each other.
    assert rates(beside, SHARED, gpus=2)["a"] == pytest.approx(50.0)


def test_few_rows_and_short_answers_tell_nothing() -> None:
    assert speeds({"a": one_by_one(ROWS_MIN - 1), "b": one_by_one(tokens=3)}, {}, FOREVER, 1) == {}


# --- the curve --------------------------------------------------------------------------------------------------------

# Steeper over batches than the usual one, flatter over models.
STEEP = SpeedCurve(((1, 1.0), (4, 1.6), (16, 4.0)), 0.3)


def played(curve: SpeedCurve, rate: float, seconds: float, *models: str) -> dict[str, list[AnswerTimes]]:
    """What a gateway would have recorded of models that answer like this."""
    timings = replace(MANNERS, load_s=0.1, tokens_per_s=50.0, concurrency=16, speed=curve)
    world = World(setting(*(sim_model(name, 400, timings=timings) for name in models), mib=1_000))
    Poisson(Mix(dict.fromkeys(models, 1.0)), rate, seconds).begin(world)
    world.run()
    found: dict[str, list[AnswerTimes]] = {}
    for call in world.ended:
        found.setdefault(call.model, []).append(AnswerTimes(call.granted_at, call.ended_at, 0, call.output_len))
    return found


def test_the_curve_over_batches_is_found_again() -> None:
    calm, busy = played(STEEP, 0.15, 3_000.0, "a")["a"], played(STEEP, 1.0, 1_500.0, "a")["a"]
    later = max(one.ended for one in calm) + 100.0
    rows = calm + [one._replace(began=one.began + later, ended=one.ended + later) for one in busy]
    found = speeds({"a": rows}, {"a": OWN_PROCESSES}, FOREVER, 1)["a"]
    assert found.is_curve_known and found.curve is not None
    assert found.tokens_per_s == pytest.approx(50.0, rel=0.1)
    for batch in (2, 4, 8):
        assert found.curve.speed(batch, 0) == pytest.approx(STEEP.speed(batch, 0), rel=0.2)
    # Beyond what was seen, it goes on as the usual one does.
    assert found.curve.speed(128, 0) < found.curve.speed(32, 0) < found.curve.speed(8, 0)
    assert found.curve.neighbour == OWN_PROCESSES.neighbour


def test_what_another_busy_model_costs_is_found_again() -> None:
    rows = played(STEEP, 0.15, 6_000.0, "a", "b")
    found = speeds(rows, dict.fromkeys(rows, OWN_PROCESSES), FOREVER, 1)
    assert found["a"].curve is not None and found["a"].curve.neighbour == pytest.approx(0.3, abs=0.1)
    assert found["a"].tokens_per_s == pytest.approx(50.0, rel=0.1)


def test_few_rows_leave_the_curve_as_usual() -> None:
    found = speeds({"a": one_by_one(500)}, {"a": OWN_PROCESSES}, FOREVER, 1)["a"]
    assert found.curve == OWN_PROCESSES and not found.is_curve_known
