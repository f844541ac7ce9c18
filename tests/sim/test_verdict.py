from __future__ import annotations

from dataclasses import replace

import pytest

from greenroom.sim.cases import Case, Result, cases, run_all, simulate
from greenroom.sim.config import SimConfig
from greenroom.sim.verdict import Effect, advice, effect, seconds
from greenroom.sim.workloads import Agents, Mix, Poisson, zipf
from tests.sim.settings import gpu, host, names, setting, sim_model

SMALL = setting(*(sim_model(name) for name in names(4)), devices=(gpu(1_000), host(9_000)))
WORKLOAD = Poisson(Mix(zipf(names(4))), 0.2, 600.0)


def results(*compared: Case, base: SimConfig = SMALL) -> list[Result]:
    return run_all(compared, base, WORKLOAD, 0, lambda case, share: None)


def test_a_second_gpu_is_compared_with_the_first() -> None:
    (sentence,) = advice(results(Case("fifo", 1), Case("fifo", 2)))
    assert sentence.startswith("A second GPU would take the p95 wait from ")
    assert sentence.endswith(": it helps a lot.")


def test_steps_of_several_gpus_are_named_as_such() -> None:
    (sentence,) = advice(results(Case("fifo", 1), Case("fifo", 4)))
    assert sentence.startswith("4 GPUs instead of 1 would take")


def test_a_green_room_is_compared_with_none() -> None:
    (sentence,) = advice(results(Case("fifo", 1, 0), Case("fifo", 1, 8_000)))
    assert sentence.startswith("A green room of 8,000 MiB instead of none would take the p95 wait")
    assert "it helps" in sentence


def test_hardware_is_spoken_of_once_and_policies_for_every_machine() -> None:
    sentences = advice(results(*cases(["default", "fifo"], [1, 2], [None])))
    assert [sentence.split(" would")[0] for sentence in sentences] == [
        "A second GPU",
        "The policy default instead of fifo",
        "The policy default instead of fifo",
    ]
    assert "(1 GPU)" in sentences[1] and "(2 GPUs)" in sentences[2]


def test_what_changes_nothing_is_said_to_change_nothing() -> None:
    sentences = advice(results(Case("fifo", 7), Case("fifo", 8)))
    assert sentences[0].startswith("An eighth GPU would take the p95 wait from 0.0 s to 0.0 s")
    assert sentences[0].endswith(": no request waits either way.")


def test_one_case_alone_is_summed_up() -> None:
    (sentence,) = advice(results(Case("fifo", 1)))
    assert "requests were served; half of them waited at most" in sentence


def test_times_are_said_as_people_say_them() -> None:
    assert [seconds(value) for value in (0.0, 0.44, 12.3, 150.0, 9_000.0)] == [
        "0.0 s",
        "0.4 s",
        "12 s",
        "2.5 min",
        "2.5 h",
    ]


# --- requests that are not served count -------------------------------------------------------------------------------


def test_a_gpu_that_serves_twice_as_many_helps_though_waits_stay_as_long() -> None:
    """Callers give up after a minute, so with one GPU as with two those served waited up to a minute."""
    base = replace(SMALL, patience_s=60.0)
    busy = Poisson(Mix(zipf(names(4))), 30.0, 300.0)
    one, two = run_all((Case("fifo", 1), Case("fifo", 2)), base, busy, 0, lambda case, share: None)
    assert two.stats.served > 1.5 * one.stats.served and one.stats.requests == two.stats.requests
    assert two.stats.waits.p95_s == pytest.approx(one.stats.waits.p95_s, rel=0.05)
    (sentence,) = advice([one, two])
    figures = f"from {one.stats.served:,} of {one.stats.requests:,} to {two.stats.served:,} of {one.stats.requests:,}"
    assert f"requests served {figures}, the p95 wait" in sentence and "it helps" in sentence


def test_short_waits_of_the_few_that_are_served_are_no_gain() -> None:
    (one,) = results(Case("fifo", 1))
    waits = replace(one.stats.waits, p95_s=one.stats.waits.p95_s / 10)
    fewer = replace(one.stats, served=one.stats.served * 9 // 10, waits=waits)
    assert effect(one.stats, fewer) is Effect.WORSE and effect(fewer, one.stats) is Effect.MUCH_BETTER


def test_agents_that_get_more_answers_in_the_same_time_are_better_off() -> None:
    """They ask again after each answer: all are served in both cases, and there are more of them."""
    loops = Agents(Mix(zipf(names(4))), 8, 600.0)
    slow, quick = (simulate(replace(SMALL, devices=(gpu(mib), host(9_000))), loops) for mib in (1_000, 4_000))
    assert slow.lost == quick.lost == 0 and quick.served > 1.5 * slow.served
    even = replace(quick, waits=slow.waits)
    assert effect(slow, even) is Effect.MUCH_BETTER and effect(even, slow) is Effect.WORSE


def test_where_nothing_is_served_there_is_no_wait_to_speak_of() -> None:
    too_small = replace(SMALL, devices=(gpu(500), host(9_000)))
    none, all_served = results(Case("fifo", 1), base=too_small) + results(Case("fifo", 2))
    assert none.stats.served == 0
    (sentence,) = advice([none, all_served])
    assert "the p95 wait from - to" in sentence and "it helps a lot" in sentence
