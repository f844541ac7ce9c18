"""The benchmark of updates under load: a run in which anything was wrong does not meet its goals."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.versions.judge import grant_gap_ms, went_back
from benchmarks.versions.under_load import Told, goals_of, is_met, is_of, read_stream, told
from greenroom.core.model import ModelId
from tests.core.queue.test_order import ready
from tests.core.world import World, model

GOOD = {
    "updates": 3,
    "updates_failed": 0,
    "versions_seen": 4,
    "failed": 0,
    "mixed": 0,
    "went_back": 0,
    "grant_gap_ms": 0.2,
}


def answer(asked: float, begun: float, version: int, queued_ms: int = 0) -> Told:
    return Told(asked, begun, begun + 1, queued_ms, version)


def test_goals_are_met_only_by_a_run_without_a_fault_and_with_all_its_updates() -> None:
    assert is_met(GOOD, goals_of(3))


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("updates", 2),
        ("updates_failed", 1),
        ("versions_seen", 3),
        ("failed", 1),
        ("mixed", 1),
        ("went_back", 1),
        ("grant_gap_ms", 5.1),
        ("grant_gap_ms", None),
    ],
)
def test_a_single_bad_figure_does_not_meet_the_goals(name: str, figure: float | None) -> None:
    assert not is_met({**GOOD, name: figure}, goals_of(3))


def test_an_older_version_counts_only_if_a_newer_one_answered_before_it_was_asked_for() -> None:
    overlapping = [answer(0.0, 2.0, 2), answer(1.0, 3.0, 1)]
    assert went_back(overlapping) == 0
    assert went_back([*overlapping, answer(2.5, 4.0, 1), answer(2.5, 4.0, 2)]) == 1
    assert went_back([]) == 0


def test_answers_before_and_during_the_updates_are_told_apart() -> None:
    answers = [answer(0, 1, 1, 10), answer(0, 2, 1, 30), answer(9, 10, 1, 50), answer(9, 14, 2, 70)]
    figures = told(answers, 5.0)
    assert (figures["answers"], figures["answers_before"], figures["versions_seen"]) == (4, 2, 2)
    assert (figures["gap_before_ms_max"], figures["gap_during_ms_max"]) == (1_000, 4_000)
    assert (figures["wait_before_ms_max"], figures["wait_during_ms"]) == (30, 60)


def test_a_stream_is_whole_with_its_end_only() -> None:
    chunks = [{"choices": [{"delta": {"content": part}}]} for part in (" alpha", " says hello")]
    lines = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in (*chunks, {"usage": {}}))
    assert read_stream(lines + "data: [DONE]\n\n") == (" alpha says hello", True)
    assert not read_stream(lines)[1] and not read_stream("")[1]


def test_text_of_the_other_version_or_of_both_is_not_of_a_version() -> None:
    assert is_of(" alpha says hello", 3) and is_of(" bravo says hello", 4)
    assert not is_of(" bravo says hello", 3) and not is_of(" alpha says bravo", 3) and not is_of(" alpha says", 3)


def updated_world() -> World:
    """A model that serves, with requests that wait, gets a version beside it."""
    world = World([model("a", 3_000)])
    ready(world, "a")
    for number in range(3):
        world.arrive(f"r{number}", "a", takes_s=5.0)
    world.config(replace(model("a@2", 3_000), version_of=ModelId("a")))
    ready(world, "a@2")
    world.promote("a@2", model("a", 3_000, revision=2))
    world.run(60.0)
    return world


def test_a_flip_under_load_leaves_no_gap_in_the_grants() -> None:
    assert grant_gap_ms(updated_world().events, "a") == 0.0


def test_the_time_in_which_nothing_serves_is_a_gap() -> None:
    world = updated_world()
    world.lose(world.slot_of("a"))
    world.run(7.0)
    world.arrive("late", "a", takes_s=0.0)
    world.run(60.0)
    assert grant_gap_ms(world.events, "a") >= 7_000.0
