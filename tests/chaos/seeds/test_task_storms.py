"""Two hundred short storms in which callers ask for tasks: a remote model gets what no local one could serve."""

from __future__ import annotations

import pytest

from tests.chaos.many import Figures, play_many, task_storm_outcome
from tests.chaos.seeds.planted import BUGS, found

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]

SEEDS = range(200)
# In the last two a request waits for the remote model when a local one can serve again.
TELLING = (*range(8), 43, 69)


def test_no_storm_asks_the_remote_model_where_a_local_one_could_serve() -> None:
    figures = Figures()
    for played in play_many(SEEDS, task_storms=True):
        figures.take(played)
    assert not figures.failures, "\n\n".join(str(failure) for failure in figures.failures[:3])
    assert figures.seeds == len(SEEDS)
    assert figures.judged["LastResort"] > 1_000
    assert figures.faults["engine_is_busy"] > 400


@pytest.mark.parametrize("name", [name for name in BUGS if name.startswith("cloud_")])
def test_a_planted_bug_of_choosing_is_found(name: str) -> None:
    failure = found(name, TELLING, task_storm_outcome)
    assert failure is not None and failure.checker == "tests.chaos.checks.tasks"
