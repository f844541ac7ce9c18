"""A few runs decide as they always did; `python -m tests.chaos.golden` compares all that are kept."""

from __future__ import annotations

import pytest

from tests.chaos.golden import hash_of, kept

pytestmark = pytest.mark.slow

RUNS = (
    "replay:mixed",
    "workload:poisson/default/1",
    "workload:agents/fifo/0",
    "workload:flood-cold/default/0",
    "fault:0",
    "fault:3",
    "fault:7",
    "shared:1",
)


@pytest.mark.parametrize("run", RUNS)
def test_a_run_decides_as_before(run: str) -> None:
    assert hash_of(run) == kept()[run]
