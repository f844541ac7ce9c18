"""Cases that are compared: what they change, and that each is played alike however many run at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import replace

import pytest

from greenroom.core.events import Limits
from greenroom.core.model import Device, DeviceId, DeviceKind, Need
from greenroom.core.policy import BUILT_IN
from greenroom.core.policy.base import Policy
from greenroom.core.policy.fifo import FirstCome
from greenroom.core.policy.swapper import Resident, Swapper
from greenroom.sim.cases import Case, cases, config_for, play, short_labels
from greenroom.sim.runs import CaseFailed, CaseRuns
from greenroom.sim.workloads import Mix, Poisson, zipf
from tests.sim.settings import gpu, host, names, setting, sim_model

BASE = setting(*(sim_model(name) for name in names(4)), devices=(gpu(2_000), gpu(3_000, 1), host(9_000)))
SMALL = setting(*(sim_model(name) for name in names(4)), devices=(gpu(1_000), host(9_000)))
WORKLOAD = Poisson(Mix(zipf(names(4))), 0.2, 600.0)


def test_every_policy_meets_every_machine() -> None:
    assert cases(["default", "fifo"], [1, 2], [None]) == (
        Case("default", 1),
        Case("default", 2),
        Case("fifo", 1),
        Case("fifo", 2),
    )


def test_a_case_says_what_it_is() -> None:
    assert Case("fifo").label == "fifo"
    assert Case("default", 1, 0).label == "default, 1 GPU, no green room"
    assert Case("default", 3, 65_536).label == "default, 3 GPUs, green room 65,536 MiB"
    assert Case("default", 1, gpu_mib=24_576).label == "default, 1 GPU of 24,576 MiB"
    assert Case("default", gpu_mib=24_576, concurrency=4).label == "default, GPUs of 24,576 MiB, concurrency 4"


def test_short_labels_leave_out_what_all_cases_share() -> None:
    def labels(*compared: Case) -> list[str]:
        return list(short_labels(compared).values())

    assert labels(Case("fifo", 1, 0), Case("fifo", 2, 0)) == ["1 GPU", "2 GPUs"]
    assert labels(Case("fifo", 2, 0, 100), Case("fifo", 2, 0, 200)) == ["2 GPUs of 100 MiB", "2 GPUs of 200 MiB"]
    assert labels(Case("fifo", 2), Case("default", 2)) == ["fifo", "default"]
    assert labels(Case("fifo", 2)) == ["fifo"]


def test_a_case_without_changes_leaves_the_configuration_as_it_is() -> None:
    config = config_for(Case("default"), BASE)
    assert (config.devices, config.models, config.policy) == (BASE.devices, BASE.models, "default")


def test_gpus_are_the_configured_ones_and_more_like_the_last() -> None:
    def sizes(count: int) -> dict[str, int]:
        return {device.id: device.capacity_mib for device in config_for(Case("fifo", count), BASE).devices}

    assert sizes(1) == {"gpu0": 2_000, "host": 9_000}
    assert sizes(4) == {"gpu0": 2_000, "gpu1": 3_000, "gpu2": 3_000, "gpu3": 3_000, "host": 9_000}


def test_gpus_of_another_size_and_another_concurrency() -> None:
    config = config_for(Case("fifo", 2, gpu_mib=5_000, concurrency=3), BASE)
    assert {device.id: device.capacity_mib for device in config.devices} == {
        "gpu0": 5_000,
        "gpu1": 5_000,
        "host": 9_000,
    }
    assert {model.told.concurrency for model in config.models} == {3}


def test_the_first_case_has_the_first_value_of_each_option() -> None:
    found = cases(["fifo", "default"], [2, 1], [0, 100], [10, 20], [4, 8])
    assert len(found) == len(set(found)) == 32 and found[0] == Case("fifo", 2, 0, 10, 4)


def test_a_green_room_lets_models_sleep_in_the_hosts_memory() -> None:
    config = config_for(Case("fifo", 1, 4_000), setting(sim_model("a", 1_000), devices=(gpu(1_000),)))
    assert config.devices[-1] == Device(DeviceId("host"), DeviceKind.HOST, 4_000)
    assert config.models[0].spec.need_asleep == Need(0, 1_000)
    without = config_for(Case("fifo", 1, 0), BASE)
    assert without.models[0].spec.need_asleep is None


def test_all_cases_meet_the_same_callers() -> None:
    found = [play(case, SMALL, WORKLOAD) for case in cases(["default", "fifo"], [1, 2], [None])]
    assert len({result.stats.requests for result in found}) == 1


JITTERY = setting(*(sim_model(name) for name in names(4)), jitter=0.1)
FOUR = cases(("default", "fifo"), (1, 2), (None,))


@pytest.mark.parametrize("jobs", [2, 3, 9])
def test_figures_do_not_depend_on_how_many_run_at_once(jobs: int) -> None:
    told: dict[Case, list[float]] = {}
    with CaseRuns(FOUR, JITTERY, WORKLOAD, 7, jobs=1) as alone:
        one_by_one = alone.results(lambda case, share: None)
    with CaseRuns(FOUR, JITTERY, WORKLOAD, 7, jobs) as runs:
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

    base = replace(JITTERY, policies={**BUILT_IN, "fifo": made})
    runs = CaseRuns(cases(("fifo", "default"), (1,), (None,)), base, WORKLOAD, 0, jobs=2)
    with pytest.raises(CaseFailed) as failed, runs:
        runs.results(lambda case, share: None)
    assert failed.value.case.label == "fifo, 1 GPU" and failed.value.why.startswith(told)
    assert multiprocessing.active_children() == []
