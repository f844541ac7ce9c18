from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import replace

import pytest

from greenroom.core.events import Limits
from greenroom.core.policy import BUILT_IN
from greenroom.core.policy.base import Policy
from greenroom.core.policy.fifo import FirstCome
from greenroom.core.policy.swapper import Resident, Swapper
from greenroom.sim.cases import Case, cases
from greenroom.sim.runs import CaseFailed, CaseRuns
from greenroom.sim.workloads import Mix, Poisson, zipf
from tests.sim.settings import names, setting, sim_model

BASE = setting(*(sim_model(name) for name in names(4)), jitter=0.1)
WORKLOAD = Poisson(Mix(zipf(names(4))), 0.2, 600.0)
FOUR = cases(("default", "fifo"), (1, 2), (None,))


@pytest.mark.parametrize("jobs", [2, 3, 9])
def test_figures_do_not_depend_on_how_many_run_at_once(jobs: int) -> None:
    told: dict[Case, list[float]] = {}
    with CaseRuns(FOUR, BASE, WORKLOAD, 7, jobs=1) as alone:
        one_by_one = alone.results(lambda case, share: None)
    with CaseRuns(FOUR, BASE, WORKLOAD, 7, jobs) as runs:
        found = runs.results(lambda case, share: told.setdefault(case, []).append(share))
    assert found == one_by_one and [result.case for result in found] == list(FOUR)
    assert set(told) == set(FOUR) and all(shares == sorted(shares) and shares[-1] == 1.0 for shares in told.values())


class Failing(FirstCome):
    """Fails when it prices a resident."""

    def loss(self, resident: Resident, now: float) -> float:
        raise ZeroDivisionError("nothing to divide by")


class Killed(FirstCome):
    """Its process is killed, as by a kernel that is out of memory."""

    def loss(self, resident: Resident, now: float) -> float:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0.0


@pytest.mark.parametrize(
    ("policy", "told"),
    [(Failing, "ZeroDivisionError: nothing to divide by"), (Killed, "its process was ended by signal 9; play fewer")],
)
def test_a_case_that_fails_is_told_and_no_process_is_left(policy: type[Policy], told: str) -> None:
    def made(limits: Limits, swapper: Swapper) -> Policy:
        return policy(limits, swapper)  # type: ignore[call-arg]

    base = replace(BASE, policies={**BUILT_IN, "fifo": made})
    runs = CaseRuns(cases(("fifo", "default"), (1,), (None,)), base, WORKLOAD, 0, jobs=2)
    with pytest.raises(CaseFailed) as failed, runs:
        runs.results(lambda case, share: None)
    assert failed.value.case.label == "fifo, 1 GPU" and failed.value.why.startswith(told)
    assert multiprocessing.active_children() == []
