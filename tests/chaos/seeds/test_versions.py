"""The fault simulation with updates: versions come and go among all other faults.

More seeds: `python -m tests.chaos --versions --seeds 200`.
"""

from __future__ import annotations

import pytest

from tests.chaos.many import Figures, play_many

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]
# Two of them once had an update that waited for ever; the others are the first ones.
SEEDS = (*range(28), 121, 160)


def test_seeds_with_updates_show_no_violation() -> None:
    figures = Figures()
    for played in play_many(SEEDS, versions=True):
        figures.take(played)
    assert not figures.failures, "\n\n".join(str(failure) for failure in figures.failures[:3])
    assert figures.judged["Servable"] > 15
    assert figures.faults["version_held"] > 1 and figures.faults["version_given_up"] > 1
