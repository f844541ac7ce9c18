"""Both schedulers in the fault simulation: one suite of checks, whoever decides.

More seeds of the plain one: `python -m tests.chaos --plain --seeds 200`.
"""

from __future__ import annotations

import pytest

from tests.chaos.many import Figures, play_many
from tests.chaos.play import Play
from tests.chaos.scenario import draw_task_storm, under_plain

# Storms with few callers.
SHORT = range(12)


def played(seeds: range | tuple[int, ...], **how: bool) -> Figures:
    figures = Figures()
    for one in play_many(seeds, **how):
        figures.take(one)
    assert not figures.failures, "\n\n".join(str(failure) for failure in figures.failures[:3])
    return figures


@pytest.mark.parametrize("plain", [False, True], ids=["default", "plain"])
def test_a_few_storms_show_no_violation(plain: bool) -> None:
    storms = map(draw_task_storm, SHORT)
    outcomes = [Play(under_plain(storm) if plain else storm).to_the_end() for storm in storms]
    assert sum(one.faults.total() for one in outcomes) > 200
    assert sum(one.judged["Invariants"] for one in outcomes) > 40


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_seeds_of_the_plain_scheduler_show_no_violation() -> None:
    figures = played(range(72), plain=True)
    assert figures.faults.total() > 10_000 and figures.judged["Order"] > 50_000


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_seeds_of_the_plain_scheduler_with_updates_show_no_violation() -> None:
    assert played(range(16), plain=True, versions=True).judged["Servable"] > 5
