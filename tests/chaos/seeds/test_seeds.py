"""The fault simulation itself: no seed shows a violation, whoever decides, and each is the same in every process.

More seeds: `make sim`, which plays two hundred by default; `python -m tests.chaos --seeds 200`, with --plain for the
other scheduler, with --versions for updates among all other faults.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.many import Figures, play_many, task_storm_outcome
from tests.chaos.play import Play, play
from tests.chaos.scenario import draw_scenario, draw_task_storm, under_plain
from tests.chaos.seeds.planted import BUGS, found
from tests.chaos.seeds.seeds import ONCE_FAILED

ROOT = Path(__file__).parents[3]
SEEDS = 120
EVENTS_MIN = 1_200_000
FAULTS_MIN = 12_000
# Storms with few callers.
SHORT = range(12)
# Two of them once had an update that waited for ever; the others are the first ones.
WITH_UPDATES = (*range(28), 121, 160)
# Short storms in which callers ask for tasks: a remote model gets what no local one could serve.
STORMS = range(200)
# In the last two a request waits for the remote model when a local one can serve again.
TELLING = (*range(8), 43, 69)
# These judge only where there is something to judge, so it is worth seeing that there was.
JUDGES = (
    "Order",
    "PinnedStay",
    "Reasons",
    "Invariants",
    "FairShares",
    "WaitingBound",
    "IdleGo",
    "GreenRoom",
    "LeasesWhole",
    "Needs",
    "CoordinatorRules",
    "Apart",
)


def long(test: Any) -> Any:
    """A minute on two idle cores; a loaded machine may take much longer."""
    return pytest.mark.slow(pytest.mark.timeout(1_800)(test))


def played(seeds: Iterable[int], **how: bool) -> Figures:
    figures = Figures()
    for one in play_many(seeds, **how):
        figures.take(one)
    assert not figures.failures, "\n\n".join(str(failure) for failure in figures.failures[:3])
    return figures


@long
def test_seeds_show_no_violation(capsys: pytest.CaptureFixture[str]) -> None:
    figures = played(range(SEEDS))
    with capsys.disabled():
        sys.stdout.write("\n" + "\n".join(figures.lines()) + "\n")
    assert figures.seeds == SEEDS
    assert figures.events >= EVENTS_MIN
    assert figures.faults.total() >= FAULTS_MIN
    assert not [name for name in JUDGES if not figures.judged[name]]


@pytest.mark.parametrize("plain", [False, True], ids=["default", "plain"])
def test_a_few_storms_show_no_violation(plain: bool) -> None:
    storms = map(draw_task_storm, SHORT)
    outcomes = [Play(under_plain(storm) if plain else storm).to_the_end() for storm in storms]
    assert sum(one.faults.total() for one in outcomes) > 200
    assert sum(one.judged["Invariants"] for one in outcomes) > 40


@long
def test_seeds_of_the_plain_scheduler_show_no_violation() -> None:
    figures = played(range(72), plain=True)
    assert figures.faults.total() > 10_000 and figures.judged["Order"] > 50_000


@long
def test_seeds_of_the_plain_scheduler_with_updates_show_no_violation() -> None:
    assert played(range(16), plain=True, versions=True).judged["Servable"] > 5


@long
def test_seeds_with_updates_show_no_violation() -> None:
    figures = played(WITH_UPDATES, versions=True)
    assert figures.judged["Servable"] > 15
    assert figures.faults["version_held"] > 1 and figures.faults["version_given_up"] > 1


@long
def test_no_storm_asks_the_remote_model_where_a_local_one_could_serve() -> None:
    figures = played(STORMS, task_storms=True)
    assert figures.seeds == len(STORMS)
    assert figures.judged["LastResort"] > 1_000
    assert figures.faults["engine_is_busy"] > 400


@long
@pytest.mark.parametrize("name", [name for name in BUGS if name.startswith("cloud_")])
def test_a_planted_bug_of_choosing_is_found(name: str) -> None:
    failure = found(name, TELLING, task_storm_outcome)
    assert failure is not None and failure.checker == "tests.chaos.checks.tasks"


@long
@pytest.mark.parametrize("seed", sorted(ONCE_FAILED))
def test_a_seed_that_once_failed_no_longer_does(seed: int) -> None:
    assert play(seed).events > 0, ONCE_FAILED[seed]
    if draw_scenario(seed) != draw_scenario(seed, folding=False, exclusives=False, tasks=False):
        # Most of them failed when no copy could be folded and no model excluded another.
        assert play(seed, folding=False, exclusives=False, tasks=False).events > 0, ONCE_FAILED[seed]


def trace_in_process(seed: int, hash_seed: str) -> str:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-m", "tests.chaos", str(seed)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=env)
    return run.stdout.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 18, 23])
def test_the_same_seed_has_the_same_trace_in_processes_that_hash_differently(seed: int) -> None:
    trace = f"trace: {play(seed, hashed=True).trace}"
    assert trace_in_process(seed, "1") == trace_in_process(seed, "4242") == trace
