"""The fault simulation itself: no seed shows a violation, and each is the same in every process.

More seeds: `make sim`, which plays two hundred by default.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.many import Figures, play_many
from tests.chaos.play import play
from tests.chaos.scenario import draw_scenario
from tests.chaos.seeds.seeds import ONCE_FAILED

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SEEDS = 120
EVENTS_MIN = 1_200_000
FAULTS_MIN = 12_000
# A minute on two idle cores; a loaded machine may take much longer.
PATIENCE_S = 1_800
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


@pytest.mark.timeout(PATIENCE_S)
def test_seeds_show_no_violation(capsys: pytest.CaptureFixture[str]) -> None:
    figures = Figures()
    for played in play_many(range(SEEDS)):
        figures.take(played)
    with capsys.disabled():
        sys.stdout.write("\n" + "\n".join(figures.lines()) + "\n")
    assert not figures.failures, "\n\n".join(str(failure) for failure in figures.failures[:3])
    assert figures.seeds == SEEDS
    assert figures.events >= EVENTS_MIN
    assert figures.faults.total() >= FAULTS_MIN
    assert not [name for name in JUDGES if not figures.judged[name]]


@pytest.mark.timeout(PATIENCE_S)
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


@pytest.mark.parametrize("seed", [4, 18, 23])
def test_the_same_seed_has_the_same_trace_in_processes_that_hash_differently(seed: int) -> None:
    trace = f"trace: {play(seed, hashed=True).trace}"
    assert trace_in_process(seed, "1") == trace_in_process(seed, "4242") == trace
