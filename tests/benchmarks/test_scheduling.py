"""The scheduling benchmark: how cells are drawn and judged; slow ones hold the default policy to kept cases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.scheduling import ahead
from benchmarks.scheduling.grid.cases import DOMINANT_P50_S, kept_cases
from benchmarks.scheduling.grid.cells import Cell, run_cell
from benchmarks.scheduling.grid.families import FAMILIES, SLOTS, family_cells
from benchmarks.scheduling.grid.machines import GIB, Machine, gib, slots
from benchmarks.scheduling.grid.more import MORE, MORE_SHARED, Pair, draw_pair, draw_pairs, more_goals
from benchmarks.scheduling.grid.runs import Results
from benchmarks.scheduling.grid.traffic import Named, Requests
from benchmarks.scheduling.judging.figures import Figures, Waited
from benchmarks.scheduling.judging.goals import grid_goals
from benchmarks.scheduling.judging.judge import FAR_SHARE, FamilyVerdict, Verdict, allowed_s, by_family, is_starving
from greenroom.sim.config import OWN_PROCESSES

SWAP_S = 10.0
CELL = Cell("steady", "steady#0", slots(1, SWAP_S, 2), Named("poisson"))
# A few pairs of the goal `more` that are run by every slow test run.
FEW_PAIRS = 40
# Pairs in which a policy once rose by more than 25 % and a swap.
KEPT_PAIRS = (433, 457, 499, 1814)


def figures(p95_s: float, p99_s: float, worst_s: float) -> Figures:
    waits = Waited(100, p95_s / 2, p95_s / 4, p95_s, p99_s, p99_s)
    by_model = {"m0": waits, "m1": replace(waits, p95_s=worst_s)}
    empty = Waited(0, 0, 0, 0, 0, 0)
    return Figures(waits, {}, empty, by_model, {}, 1.0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0)


FIFO = figures(100, 200, 300)


def verdict(own: Figures, fifo: Figures = FIFO) -> Verdict:
    """By one draw."""
    return Verdict(CELL, [own], [fifo])


def test_allowed_is_a_swap_or_five_percent_more_whichever_is_larger() -> None:
    assert allowed_s(100, SWAP_S) == 110
    assert allowed_s(1_000, SWAP_S) == 1_050
    assert allowed_s(0, SWAP_S) == SWAP_S


@pytest.mark.parametrize(
    ("own", "worse"),
    [
        (FIFO, False),
        (figures(110, 210, 315), False),
        (figures(111, 200, 300), True),
        (figures(100, 211, 300), True),
        (figures(100, 200, 316), True),
    ],
)
def test_each_of_three_figures_makes_a_cell_worse(own: Figures, worse: bool) -> None:
    assert (verdict(own).excess > 0) is worse


def test_where_fifo_starves_a_model_only_the_worst_model_counts() -> None:
    starving = figures(100, 2_000, 2_000)
    assert is_starving(starving) and not is_starving(FIFO)
    # Not starved: all models wait that long; or not so long as to call it that.
    assert not is_starving(figures(1_000, 2_000, 2_000)) and not is_starving(figures(10, 400, 400))
    assert verdict(figures(500, 3_000, 600), starving).excess < 0
    assert verdict(figures(50, 3_000, 2_500), starving).excess > 0
    assert verdict(figures(500, 3_000, 995), starving).middle.judged_ratio == 0.5


def test_ratio_is_finite_without_waits() -> None:
    assert verdict(figures(10, 10, 10), figures(0, 0, 0)).middle.p95_ratio == 2.0


def test_families_are_judged_apart() -> None:
    good, bad = verdict(FIFO), Verdict(replace(CELL, family="bursty"), [figures(200, 200, 300)], [FIFO])
    families = {family.family: family for family in by_family([good, good, bad])}
    assert families["steady"].worse == 0 and families["steady"].p95_ratio == 1.0
    assert families["bursty"].worse_share == 1.0 and families["bursty"].far == 1 and families["bursty"].worst is bad
    rare, far, mean = grid_goals([good, good, bad])
    assert (rare.misses, far.misses, mean.misses) == (1, 1, 1)
    assert all(goal.is_met for goal in grid_goals([good]))


def test_little_beyond_what_is_allowed_is_worse_but_not_far() -> None:
    own = figures(allowed_s(100, SWAP_S) * (1 + FAR_SHARE / 2), 200, 300)
    (family,) = by_family([verdict(own)])
    assert (family.worse, family.far) == (1, 0)


def test_cell_is_judged_by_its_middle_draw_and_not_by_medians_of_draws_that_differ() -> None:
    slow, fast, worse = figures(500, 600, 700), figures(10, 20, 30), figures(200, 300, 400)
    calm = Verdict(CELL, [slow, worse, fast], [slow, FIFO, fast])
    family = FamilyVerdict("steady", [calm])
    assert (family.worse, family.worse_draws, family.far_draws) == (0, 1, 1)
    assert Verdict(CELL, [slow, worse, worse], [slow, FIFO, FIFO]).excess > 0
    # Of two draws, the worse one.
    assert Verdict(CELL, [worse, fast], [FIFO, fast]).excess > 0


def test_pair_is_judged_draw_by_draw() -> None:
    """One of five draws rises by half; the medians of both sides would differ by a quarter."""
    pair, results = draw_pair(MORE, 622), Results()
    for seed, (less_s, more_s) in enumerate([(240, 365), (256, 235), (238, 227), (514, 501), (335, 327)]):
        for cell, p95_s in zip(pair, (less_s, more_s), strict=True):
            results.add(replace(cell, seed=seed), figures(p95_s, p95_s, p95_s))
    rare, far = more_goals(results, MORE, [pair], "default")
    assert rare.is_met and far.is_met
    assert (
        "0 of 1 rise; of 5 single draws 1 rise, 1 of them far: more#622+green 240.0 -> 365.0 s" in rare.cases[0].found
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_cells_are_the_same_however_many_are_drawn_and_differ_from_each_other(family: str) -> None:
    cells = family_cells(family, 6, {})
    assert family_cells(family, 3, {}) == cells[:3]
    assert len({(cell.machine, cell.traffic) for cell in cells}) == len(cells)
    for cell in cells:
        machine = cell.machine
        assert all(mib <= machine.gpu_mib for mib in machine.models_mib)
        assert family in (SLOTS, "shared") or sum(machine.models_mib) > machine.gpus * machine.gpu_mib
        assert (machine.compute is not None) == (family == "shared")


def test_slow_answers_count_where_models_share_compute() -> None:
    """One GPU holds both models. Where they share its compute, their answers take longer, and nothing else differs."""
    two = Machine(1, 80 * GIB, gib(5, 5), concurrency=4)
    traffic = Requests("two", (0.5, 0.5), rate=0.5, count=200, output_len=200.0, variation=1.0, tenants=1)
    alone, shared = (run_cell(Cell("two", "two", replace(two, compute=one), traffic)) for one in (None, OWN_PROCESSES))
    assert shared.waits.p95_s > alone.waits.p95_s + alone.service_mean_s
    assert shared.swaps == alone.swaps == 2


def test_same_seed_brings_the_same_requests() -> None:
    traffic = kept_cases()["users"].traffic
    first, again, other = (list(traffic.workload(seed).arrivals()) for seed in (0, 0, 1))  # type: ignore[attr-defined]
    assert first == again != other
    assert [one.at for one in first] == sorted(one.at for one in first)


@pytest.mark.parametrize("family", [MORE, MORE_SHARED])
def test_pairs_differ_only_in_having_more(family: str) -> None:
    for pair in draw_pairs(family, 60):
        less, more = pair.less.machine, pair.more.machine
        assert pair.less.traffic == pair.more.traffic
        assert less.models_mib == more.models_mib
        assert less.compute == more.compute and (less.compute is not None) == (family == MORE_SHARED)
        grown = (more.gpus > less.gpus, more.gpu_mib > less.gpu_mib, more.green_room_mib > less.green_room_mib)
        assert sum(grown) == 1


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [False, True])
def test_preparing_ahead_spares_cold_requests_only_after_a_restart(restarts: bool) -> None:
    config = ahead.config_of(ahead.GPUS_MIB["1 GPU"], ahead.ROOMS_MIB["roomy"])
    today, prepared = (ahead.play(config, 3, False, restarts, prepares, seed=0) for prepares in (False, True))
    assert (prepared != today) == prepared.helps(today) == restarts
    assert prepared.cold == 0
    assert prepared.hurts(today) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["share-no-green-room", "dominant", "share"])
def test_default_policy_is_not_worse_than_first_come_in_kept_cases(name: str) -> None:
    cell = kept_cases()[name]
    assert Verdict(cell, [run_cell(cell)], [run_cell(replace(cell, policy="fifo"))]).excess <= 0


@pytest.mark.slow
def test_dominant_model_pays_little_for_the_other_one() -> None:
    assert run_cell(kept_cases()["dominant"]).waits.p50_s <= DOMINANT_P50_S


@pytest.mark.slow
@pytest.mark.parametrize("family", [MORE, MORE_SHARED])
def test_more_of_something_never_hurts_the_default_policy(family: str) -> None:
    assert_more_never_hurts(family, draw_pairs(family, FEW_PAIRS))


@pytest.mark.slow
@pytest.mark.parametrize("number", KEPT_PAIRS)
def test_pairs_that_once_got_far_worse_do_not(number: int) -> None:
    assert_more_never_hurts(MORE, [draw_pair(MORE, number)])


def assert_more_never_hurts(family: str, pairs: list[Pair]) -> None:
    results = Results()
    for cell in (cell for pair in pairs for cell in pair):
        results.add(cell, run_cell(cell))
    for goal in more_goals(results, family, pairs, "default"):
        assert goal.is_met, goal.worst(3)
