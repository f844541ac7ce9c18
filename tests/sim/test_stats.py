from __future__ import annotations

from itertools import pairwise

import pytest

from greenroom.core.model import ModelId, TenantId
from greenroom.sim.cases import simulate
from greenroom.sim.results.stats import CURVE_MAX, jain, quantile, stats_of, waits_of
from greenroom.sim.truth import STRETCHES_MAX, TierTimes
from greenroom.sim.workloads import Mix, Poisson, zipf
from greenroom.sim.world import World
from tests.sim.settings import gpu, host, names, setting, sim_model, sleeper

A, B = ModelId("a"), ModelId("b")


def test_quantiles_are_values_that_occurred() -> None:
    ordered = [float(value) for value in range(1, 101)]
    assert [quantile(ordered, share) for share in (0.5, 0.95, 0.99, 1.0)] == [50.0, 95.0, 99.0, 100.0]
    assert quantile([7.0], 0.5) == 7.0


def test_waits_are_summed_up() -> None:
    waits = waits_of([4.0, 1.0, 3.0, 2.0])
    assert (waits.count, waits.mean_s, waits.p50_s, waits.p95_s, waits.max_s) == (4, 2.5, 2.0, 4.0, 4.0)
    assert waits.curve == ((1.0, 0.25), (2.0, 0.5), (3.0, 0.75), (4.0, 1.0))
    assert waits_of([]).count == 0 and waits_of([]).max_s == 0.0


def test_the_curve_of_many_waits_has_few_points_of_them() -> None:
    curve = waits_of(float(value) for value in range(10_000, 0, -1)).curve
    assert len(curve) == CURVE_MAX and curve[0] == (1.0, 0.0001) and curve[-1] == (10_000.0, 1.0)
    assert all(share == wait / 10_000 for wait, share in curve) and len(set(curve)) == CURVE_MAX


def test_fairness_is_one_for_equals_and_small_where_one_has_all() -> None:
    assert jain([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([]) == jain([0.0, 0.0]) == 1.0


def test_a_run_comes_to_figures() -> None:
    """One GPU for one of two models: load, answer, unload, load, answer."""
    world = World(setting(sim_model("a"), sim_model("b")))
    world.arrive(A, 1, 100, TenantId("x"), priority=0)
    world.arrive(B, 1, 300, TenantId("y"), priority=7)
    world.arrive(ModelId("stranger"), 1, 1)
    world.run()
    stats = stats_of(world)
    assert (stats.requests, stats.served, stats.rejected) == (3, 2, {"unknown_model": 1})
    assert stats.by_class["high"].max_s == pytest.approx(5.0) and stats.by_class["7"].max_s == pytest.approx(12.0)
    assert stats.by_tenant["y"].count == stats.by_model["b"].count == 1
    assert (stats.loads, stats.unloads, stats.wakes, stats.swaps) == (2, 1, 0, 2)
    assert stats.swaps_per_request == 1.0
    assert stats.makespan_s == stats.ends_s == pytest.approx(15.0)
    assert stats.served_per_s == pytest.approx(2 / 15) and stats.tokens_per_s == pytest.approx(400 / 15)
    use = stats.devices["gpu0"]
    # Serving for 1 and 3 s of 15; loading, unloading, loading for 5, 1 and 5.
    assert use.busy == pytest.approx(4 / 15) and use.moving == pytest.approx(11 / 15) and stats.busy == use.busy
    # x was served for 1 of 6 s, y for 3 of 15.
    assert stats.jain == pytest.approx(jain([1 / 6, 3 / 15]))
    first, *empty, last = stats.over_time
    assert (first.served, first.p95_s) == (2, pytest.approx(12.0)) and not any(one.served for one in (*empty, last))


def test_what_is_lost_is_counted_by_class_and_tenant_and_waiting_in_vain_is_not_fair() -> None:
    world = World(setting(sim_model("a"), sim_model("b")))
    world.arrive(A, 1, 1_000, TenantId("x"))
    world.arrive(B, 1, 100, TenantId("y"), priority=2, patience_s=3.0)
    world.arrive(ModelId("stranger"), 1, 1, TenantId("z"))
    world.run()
    stats = stats_of(world)
    assert stats.lost_by_class == {"normal": 1, "low": 1} and stats.lost_by_tenant == {"y": 1, "z": 1}
    # x was served for 10 of 15 s, y for none of 3; z was refused at once.
    assert stats.jain == pytest.approx(jain([10 / 15, 0.0]))


def test_waits_are_summed_up_by_the_time_of_arrival() -> None:
    world = World(setting(sim_model("a", concurrency=1)))
    for at, output in ((0.0, 100), (59.0, 200), (60.0, 100)):
        world.after(at, lambda world, output=output: world.arrive(A, 0, output))  # type: ignore[misc]
    world.run()
    moments = [moment for moment in stats_of(world).over_time if moment.served]
    # The last two arrive in the last minute's end: at 59 and 60 s of 60, in stretches of a second.
    assert [(round(moment.at, 1), moment.served) for moment in moments] == [(0.5, 1), (59.5, 2)]
    assert [moment.p95_s for moment in moments] == [pytest.approx(5.0), pytest.approx(1.0)]


def test_requests_that_are_lost_are_counted_by_the_time_of_arrival() -> None:
    world = World(setting(sim_model("a", concurrency=1)))
    for at, patience_s in ((0.0, 60.0), (30.0, 60.0), (60.0, 0.5), (60.0, 0.5)):
        world.after(at, lambda world, patience_s=patience_s: world.arrive(A, 0, 4_000, patience_s=patience_s))  # type: ignore[misc]
    world.run()
    moments = [(one.served, one.lost) for one in stats_of(world).over_time if one.served or one.lost]
    assert moments == [(1, 0), (1, 0), (0, 2)]


def test_tiers_are_kept_over_time() -> None:
    world = World(setting(sleeper("a"), sleeper("b"), devices=(gpu(1_000), host(5_000))))
    world.arrive(A, 1, 100)
    world.arrive(B, 1, 100)
    world.run()
    marks = stats_of(world).tiers
    changes = [(0.0, (0, 0, 0)), *((mark.at, mark[1:]) for mark in marks if all(one.is_integer() for one in mark[1:]))]
    assert [tiers for (_, before), (_, tiers) in pairwise(changes) if tiers != before] == [
        (0, 0, 1),  # a loads
        (1, 0, 0),
        (0, 0, 1),  # a falls asleep
        (0, 1, 1),  # b loads
        (1, 1, 0),
    ]
    # The last stretch is shorter than the others.
    assert [sum(mark[tier] for mark in marks) * (marks[1].at - marks[0].at) for tier in (1, 2, 3)] == [
        pytest.approx(1.0 + 1.0, abs=0.15),
        pytest.approx(5.0 + 1.0, abs=0.15),
        pytest.approx(5.0 + 0.25 + 5.0, abs=0.15),
    ]


@pytest.mark.parametrize("step_s", [0.001, 1.0, 40_000.0])
def test_tiers_are_true_to_the_end_however_many_changes_there_are(step_s: float) -> None:
    times, changes = TierTimes(), 20_000
    for number in range(changes):
        # The later, the more are ready.
        times.change(number * 10 // changes, number % 2, 1, number * step_s)
    marks = times.means(changes * step_s)
    assert STRETCHES_MAX / 2 <= len(marks) <= STRETCHES_MAX
    assert marks[-1].at == pytest.approx(changes * step_s, rel=0.01)
    for mark in marks[1:-1]:
        assert mark.ready == pytest.approx(10 * mark.at / changes / step_s - 0.5, abs=0.55)
        assert (mark.asleep, mark.moving) == (pytest.approx(0.5, abs=0.05), pytest.approx(1.0))


def test_changes_after_the_last_answer_are_left_out() -> None:
    times = TierTimes()
    times.change(1, 0, 0, 1.0)
    times.change(0, 0, 0, 900.0)
    marks = times.means(100.0)
    assert marks[0].at < marks[-1].at < 104.0 and marks[-1].ready == 1.0


def test_a_world_where_nothing_happened_has_figures_too() -> None:
    stats = stats_of(World(setting(sim_model("a"))))
    assert (stats.requests, stats.swaps_per_request, stats.busy, stats.jain, stats.makespan_s) == (
        0,
        0.0,
        0.0,
        1.0,
        0.0,
    )


def test_more_room_means_fewer_swaps() -> None:
    def swaps(mib: int) -> int:
        config = setting(*(sim_model(name) for name in names(4)), mib=mib)
        return simulate(config, Poisson(Mix(zipf(names(4))), 0.3, 600.0)).swaps

    assert swaps(1_000) > swaps(2_000) > swaps(4_000) == 4


def test_progress_is_told_and_changes_nothing() -> None:
    config = setting(*(sim_model(name) for name in names(3)), jitter=0.1)
    workload, told = Poisson(Mix(zipf(names(3))), 0.3, 600.0), []
    watched = simulate(config, workload, 3, on_progress=told.append)
    assert watched == simulate(config, workload, 3)
    assert told == sorted(told) and told[-1] == 1.0
