"""Speeds of models, from the gateway's own recordings."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.sim.config import OWN_PROCESSES, SpeedCurve
from greenroom.sim.traces.speeds import ROWS_MIN, AnswerTimes, recorded_answers, speeds

HEAD = "t,model,prompt_len,output_len,tenant,priority,wait_s,total_s"
# Two answers at a time take twice as long, and so does an answer beside a busy model.
SHARED = SpeedCurve(((1, 1.0), (2, 2.0)), 1.0)
FOREVER = 1e12


def one_by_one(count: int = ROWS_MIN, took_s: float = 2.0, tokens: int = 100, start: float = 0.0) -> list[AnswerTimes]:
    return [AnswerTimes(start + 10.0 * number, start + 10.0 * number + took_s, 0, tokens) for number in range(count)]


def test_rows_are_read_with_their_waits(tmp_path: Path) -> None:
    file = tmp_path / "activity.csv"
    rows = ["100.0,a,7,50,lab,1,2.0,5.0", "101.0,a,,50,lab,1,0.000,1.0", "102.0,b,7,50,lab,1,,", "x,a,1,1,,1,1,2"]
    file.write_text("\n".join([HEAD, *rows]))
    assert recorded_answers(file) == {"a": [AnswerTimes(102.0, 105.0, 7, 50)]}


def test_other_files_have_no_speeds(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("t,model,prompt_len,output_len\n0,a,1,1\n")
    assert recorded_answers(file) == {} == recorded_answers(tmp_path / "none.csv")
    file.write_bytes(b"\xff\xfe")
    assert recorded_answers(file) == {}


def test_an_answer_alone_tells_its_speed() -> None:
    assert speeds({"a": one_by_one()}, lambda model: OWN_PROCESSES, FOREVER, 1) == {"a": pytest.approx(50.0)}


def test_prompts_are_no_part_of_it() -> None:
    rows = [row._replace(prompt_len=2_000) for row in one_by_one()]
    assert speeds({"a": rows}, lambda model: None, 2_000.0, 1) == {"a": pytest.approx(100.0)}
    # But never more than half of the time, even if prompts are read faster than assumed.
    assert speeds({"a": rows}, lambda model: None, 1.0, 1) == {"a": pytest.approx(100.0)}


def test_company_is_accounted_for() -> None:
    two = one_by_one() + one_by_one()
    assert speeds({"a": two}, lambda model: SHARED, FOREVER, 1) == {"a": pytest.approx(100.0)}
    assert speeds({"a": two}, lambda model: None, FOREVER, 1) == {"a": pytest.approx(50.0)}
    beside = {"a": one_by_one(), "b": one_by_one(took_s=2.5)}
    assert speeds(beside, lambda model: SHARED, FOREVER, 1) == {"a": pytest.approx(100.0), "b": pytest.approx(80.0)}
    # On two GPUs, they are not beside each other.
    assert speeds(beside, lambda model: SHARED, FOREVER, 2)["a"] == pytest.approx(50.0)


def test_few_rows_and_short_answers_tell_nothing() -> None:
    assert speeds({"a": one_by_one(ROWS_MIN - 1), "b": one_by_one(tokens=3)}, lambda model: None, FOREVER, 1) == {}
