"""Two gateways with a pinned model each, on a GPU that has room for one, while each part of them fails in turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.leases.gateways_history import Fault, History, run

# Of two histories; see tests/leases/test_lease_history.py.
SECONDS = 60.0
KINDS = 9


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_no_overlap_outlasts_its_cause_or_comes_of_a_part_with_a_stand_in(tmp_path: Path, seed: int) -> None:
    history, wrong = await run(tmp_path, SECONDS, seed)
    assert not wrong, history
    assert len({fault.kind for fault in history.faults}) >= KINDS - 1, history.faults


def test_an_overlap_that_outlasts_its_cause_is_found() -> None:
    both, one = {1: "one", 2: "two"}, {2: "two"}
    cause = Fault("stopped_both", False, 1.0, 5.0)
    well = History([cause], [(0.0, {1: "one"}), (4.0, both), (6.9, one)])
    assert not well.wrong(100.0) and well.overlapped_s(100.0) == [1.9]
    late = History([cause], [(0.0, {1: "one"}), (4.0, both), (7.1, one)])
    assert late.wrong(100.0)
    assert History([cause], [(4.0, both)]).wrong(100.0), "it has not ended"
    assert History([Fault("slow_redis", True, 1.0, 5.0)], [(4.0, both), (4.5, one)]).wrong(100.0), "no cause"
