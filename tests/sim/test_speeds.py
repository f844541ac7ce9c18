"""Speeds of models, from the gateway's own recordings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from greenroom.sim.config import OWN_PROCESSES, SpeedCurve
from greenroom.sim.traces.speeds import ROWS_MIN, AnswerTimes, speeds
from greenroom.sim.traces.traces import Known, trace_of
from greenroom.sim.workloads import Mix, Poisson
from greenroom.sim.world import World
from tests.sim.settings import MANNERS, setting, sim_model

HEAD = "t,model,prompt_len,output_len,tenant,priority,wait_s,total_s"
# Two answers at a time take twice as long, and so does an answer beside a busy model.
SHARED = SpeedCurve(((1, 1.0), (2, 2.0)), 1.0)
FOREVER = 1e12


def one_by_one(count: int = ROWS_MIN, took_s: float = 2.0, tokens: int = 100, start: float = 0.0) -> list[AnswerTimes]:
    return [AnswerTimes(start + 10.0 * number, start + 10.0 * number + took_s, 0, tokens) for number in range(count)]


def rates(answers: dict[str, list[AnswerTimes]], curve: SpeedCurve | None, gpus: int = 1) -> dict[str, float]:
    return {model: one.tokens_per_s for model, one in speeds(answers, lambda model: curve, FOREVER, gpus).items()}


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
    assert speeds({"a": rows}, lambda model: None, 2_000.0, 1)["a"].tokens_per_s == pytest.approx(100.0)
    # But never more than half of the time, even if prompts are read faster than assumed.
    assert speeds({"a": rows}, lambda model: None, 1.0, 1)["a"].tokens_per_s == pytest.approx(100.0)


def test_speeds_account_for_requests_and_models_beside() -> None:
    two = one_by_one() + one_by_one()
    assert rates({"a": two}, SHARED) == {"a": pytest.approx(100.0)}
    assert rates({"a": two}, None) == {"a": pytest.approx(50.0)}
    beside = {"a": one_by_one(), "b": one_by_one(took_s=2.5)}
    assert rates(beside, SHARED) == {"a": pytest.approx(100.0), "b": pytest.approx(80.0)}
    # On two GPUs, they are not beside each other.
    assert rates(beside, SHARED, gpus=2)["a"] == pytest.approx(50.0)


def test_few_rows_and_short_answers_tell_nothing() -> None:
    assert speeds({"a": one_by_one(ROWS_MIN - 1), "b": one_by_one(tokens=3)}, lambda model: None, FOREVER, 1) == {}


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
    found = speeds({"a": rows}, lambda model: OWN_PROCESSES, FOREVER, 1)["a"]
    assert found.is_curve_known and found.curve is not None
    assert found.tokens_per_s == pytest.approx(50.0, rel=0.1)
    for batch in (2, 4, 8):
        assert found.curve.speed(batch, 0) == pytest.approx(STEEP.speed(batch, 0), rel=0.2)
    # Beyond what was seen, it goes on as the usual one does.
    assert found.curve.speed(128, 0) < found.curve.speed(32, 0) < found.curve.speed(8, 0)
    assert found.curve.neighbour == OWN_PROCESSES.neighbour


def test_what_another_busy_model_costs_is_found_again() -> None:
    rows = played(STEEP, 0.15, 6_000.0, "a", "b")
    found = speeds(rows, lambda model: OWN_PROCESSES, FOREVER, 1)
    assert found["a"].curve is not None and found["a"].curve.neighbour == pytest.approx(0.3, abs=0.1)
    assert found["a"].tokens_per_s == pytest.approx(50.0, rel=0.1)


def test_few_rows_leave_the_curve_as_usual() -> None:
    found = speeds({"a": one_by_one(500)}, lambda model: OWN_PROCESSES, FOREVER, 1)["a"]
    assert found.curve == OWN_PROCESSES and not found.is_curve_known
