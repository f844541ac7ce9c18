"""The fault simulation with updates: two hundred seeds in which versions come and go among all other faults."""

from __future__ import annotations

import os
from collections import Counter
from multiprocessing import get_context

import pytest

from tests.chaos.play import Failure, Played, play

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]
SEEDS = 200


def outcome(seed: int) -> Played | Failure:
    try:
        return play(seed, versions=True)
    except Failure as failure:
        return failure


def test_two_hundred_seeds_with_updates_show_no_violation() -> None:
    faults, judged, failures = Counter[str](), 0, []
    with get_context("spawn").Pool(os.cpu_count() or 1) as pool:
        for played in pool.imap_unordered(outcome, range(SEEDS), 4):
            if isinstance(played, Failure):
                failures.append(played)
            else:
                faults += played.faults
                judged += played.judged["Servable"]
    assert not failures, "\n\n".join(str(failure) for failure in failures[:3])
    assert judged > 100 and faults["version_held"] > 10 and faults["version_given_up"] > 10
