"""How well the scheduler decides: the default policy beside collating FIFO, simulated, so the machine does not matter.

The grid has one family of cells for each shape of traffic, and one for each trace that is given (CSV). A cell draws
machine, models, green room, concurrency, tenants and load from its number, so it is the same in every run. It is played
with five draws of requests and load times, and judged by the middle one: single draws are worse by chance. The other
goals: a starved model, priority classes, a flooding tenant, kept cases, and that more of something never hurts.

    python -m benchmarks.scheduling.quality [TRACE.csv …] [--quick] [--goals grid,starved,classes,flood,cases,more]
    python -m benchmarks.scheduling.quality --goals grid --family bursty,users --cells 100
    python -m benchmarks.scheduling.quality --goals grid --save     # 1,000 cells: about five hours of one core
    python -m benchmarks.scheduling.quality --goals more --save     # 3,000 pairs: about 75 minutes of one core
    python -m benchmarks.scheduling.quality --cell 'steady#3' --cell dominant --cell 'more#12' --policy default,strict

`--policy` names the policies that are judged: built-in, `strict`, `clairvoyant` or `chance` (references), or
`module:class`. `chance` is FIFO with other load times: it shows how many cells are worse by chance alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from benchmarks.rig.result import Run, options_of
from benchmarks.scheduling.grid.cases import CASES, case_goals, kept_cases
from benchmarks.scheduling.grid.cells import Cell, stretched
from benchmarks.scheduling.grid.families import FAMILIES, draw_cell, family_cells
from benchmarks.scheduling.grid.machines import slots
from benchmarks.scheduling.grid.more import (
    MORE,
    MORE_SHARED,
    PAIRS,
    PAIRS_SHARED,
    draw_pair,
    draw_pairs,
    more_goals,
)
from benchmarks.scheduling.grid.references import KNOWN
from benchmarks.scheduling.grid.runs import Results, all_stretched, over, run_all
from benchmarks.scheduling.grid.traffic import Named, trace_name, trace_rows
from benchmarks.scheduling.grid.workloads import MODELS
from benchmarks.scheduling.judging.goals import (
    Goal,
    calm_of,
    class_goal,
    flood_goal,
    grid_goals,
    not_worse_goal,
    starved_goals,
)
from benchmarks.scheduling.judging.judge import Verdict
from benchmarks.scheduling.judging.show import (
    family_figures,
    goal_figures,
    show_cells,
    show_families,
    show_goal,
    show_models,
)
from greenroom.errors import ConfigError

FIFO = "fifo"
STARVING = ("starve-rare", "starve-some", "starve-short")
# How busy "under load" is, and how many times that load is more than can be served.
UNDER_LOAD, OVERLOAD = 0.95, 2.0
GOALS = ("grid", "starved", "classes", "flood", CASES, MORE)


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is run."""

    cells: int  # of each family
    pairs: int
    pairs_shared: int  # those that share compute
    draws: int  # of requests and load times for each cell and pair
    seeds: int  # of the single goals
    swaps_s: tuple[float, ...]
    busy_steps: int
    class_slots: tuple[int, ...]


FULL = Extent(
    100, PAIRS, PAIRS_SHARED, draws=5, seeds=10, swaps_s=(0.4, 1.0, 5.0, 20.0), busy_steps=5, class_slots=(1, 2, 4)
)
QUICK = Extent(12, 200, 100, draws=1, seeds=1, swaps_s=(0.4, 5.0), busy_steps=4, class_slots=(1, 4))


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.extent = QUICK if options.quick else FULL
        self.seeds = options.seeds or self.extent.seeds
        self.draws = options.seeds or self.extent.draws
        self.cells = options.cells or self.extent.cells
        self.pairs = {
            MORE: options.pairs or self.extent.pairs,
            MORE_SHARED: options.pairs or self.extent.pairs_shared,
        }
        self.jobs: int | None = options.jobs or None
        self.policies: list[str] = options.policy.split(",")
        self.traces = {trace_name(path): path for path in options.traces}
        self.families: list[str] = options.family.split(",") if options.family else [*FAMILIES, *self.traces]
        self.results = Results()
        self.figures: dict[str, Any] = {}

    def run(self, cells: Iterable[Cell], what: str, seeds: int, beside: tuple[str, ...] = (FIFO,)) -> None:
        run_all(over(cells, (*self.policies, *beside), seeds), self.results, what, self.jobs)

    def goals(self, wanted: Iterable[str]) -> list[Goal]:
        computed: dict[str, Callable[[], list[Goal]]] = {
            "grid": self._grid,
            "starved": self._starved,
            "classes": self._classes,
            "flood": self._flood,
            CASES: self._cases,
            MORE: self._more,
        }
        return [goal for name in GOALS if name in wanted for goal in computed[name]()]

    def single(self, names: Iterable[str]) -> list[Goal]:
        """All figures of single cells."""
        cells = [cell for name in names for cell in cells_named(name, self.traces)]
        self.run(cells, "cells", self.draws)
        for cell in cells:
            show_models(self.results, cell)
        show_cells(self.results, cells)
        return self._each_policy(
            lambda policy: [not_worse_goal("cells_not_worse", [self._verdict(cell, policy) for cell in cells])]
        )

    def _grid(self) -> list[Goal]:
        cells = [cell for family in self.families for cell in family_cells(family, self.cells, self.traces)]
        self.run(cells, "grid", self.draws)
        return self._judged(cells, grid_goals)

    def _cases(self) -> list[Goal]:
        cells = list(kept_cases().values())
        self.run(cells, CASES, self.draws)
        show_cells(self.results, cells)
        return self._judged(cells, case_goals)

    def _judged(self, cells: list[Cell], goals_of: Callable[[list[Verdict]], list[Goal]]) -> list[Goal]:
        """Each policy beside FIFO, family by family."""
        goals: list[Goal] = []
        for policy in self.policies:
            verdicts = [self._verdict(cell, policy) for cell in cells]
            show_families(verdicts, policy)
            self.figures.setdefault(policy, {}).update(family_figures(verdicts))
            goals += self._named(goals_of(verdicts), policy)
        return goals

    def _verdict(self, cell: Cell, policy: str) -> Verdict:
        return Verdict(cell, self.results.draws(cell, policy), self.results.draws(cell, FIFO))

    def _named(self, goals: list[Goal], policy: str) -> list[Goal]:
        """Where several policies are judged, a goal tells which."""
        several = len(self.policies) > 1
        return [Goal(f"{policy} {goal.name}", goal.wanted, goal.cases) if several else goal for goal in goals]

    def _starved(self) -> list[Goal]:
        cells = [goal_cell(name, 1, swap_s) for name, swap_s in product(STARVING, self.extent.swaps_s)]
        self.run(cells, "starvation", self.seeds)
        return self._each_policy(lambda policy: starved_goals(self.results, cells, policy))

    def _classes(self) -> list[Goal]:
        extent = self.extent
        bases = [goal_cell("classes", count, swap_s) for count, swap_s in product(extent.class_slots, extent.swaps_s)]
        loaded = all_stretched(bases, UNDER_LOAD, extent.busy_steps, self.jobs)
        cells = loaded + [overloaded(cell) for cell in loaded]
        self.run(cells, "classes", self.seeds)
        show_cells(self.results, cells)
        return self._each_policy(lambda policy: [class_goal(self.results, cells, policy)])

    def _flood(self) -> list[Goal]:
        swaps_s = self.extent.swaps_s
        cells = [goal_cell(name, 1, swap_s) for name, swap_s in product(("flood-ready", "flood-cold"), swaps_s)]
        self.run([*map(calm_of, cells), *cells], "flood", self.seeds)
        return self._each_policy(lambda policy: [flood_goal(self.results, cells, policy)])

    def _more(self) -> list[Goal]:
        drawn = {family: draw_pairs(family, count) for family, count in self.pairs.items()}
        self.run([cell for pairs in drawn.values() for pair in pairs for cell in pair], MORE, self.draws, beside=())
        return self._each_policy(
            lambda policy: [
                goal for family, pairs in drawn.items() for goal in more_goals(self.results, family, pairs, policy)
            ]
        )

    def _each_policy(self, goals_of: Callable[[str], list[Goal]]) -> list[Goal]:
        return [goal for policy in self.policies for goal in self._named(goals_of(policy), policy)]


def goal_cell(workload: str, count: int, swap_s: float) -> Cell:
    """A cell of a single goal: equal slots, and a workload by its name."""
    return Cell("goal", f"{workload}, {count} slots, swap {swap_s:g} s", slots(count, swap_s, MODELS), Named(workload))


def overloaded(cell: Cell) -> Cell:
    assert isinstance(cell.traffic, Named)
    return replace(stretched(cell, cell.traffic.stretch / OVERLOAD), name=f"{cell.name}, overloaded")


def cells_named(name: str, traces: dict[str, str]) -> list[Cell]:
    """One kept case, both cells of a pair (`more#12`), or a cell of a family (`steady#3`)."""
    family, _, number = name.partition("#")
    if name in kept_cases():
        return [kept_cases()[name]]
    if not number.isdigit() or family not in (*FAMILIES, *traces, MORE, MORE_SHARED):
        raise SystemExit(f"there is no cell {name}: {', '.join(kept_cases())}, or FAMILY#NUMBER")
    if family in (MORE, MORE_SHARED):
        return [*draw_pair(family, int(number))]
    return [draw_cell(family, int(number), traces)]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("traces", nargs="*")
    parser.add_argument("--quick", action="store_true", help="few cells and one seed")
    parser.add_argument("--goals", default=",".join(GOALS), help="only these goals")
    parser.add_argument("--family", help=f"only these families: {', '.join(FAMILIES)}, or the name of a trace")
    parser.add_argument("--cells", type=int, default=0, help="cells of each family")
    parser.add_argument("--pairs", type=int, default=0, help="pairs of the goal `more`")
    parser.add_argument(
        "--seeds", type=int, default=0, help="draws of each cell (default: 5, other goals 10; --quick: 1)"
    )
    parser.add_argument("--jobs", type=int, default=0, help="processes; one for each core if not given")
    parser.add_argument("--cell", action="append", default=[], help="only this cell; may be given several times")
    parser.add_argument("--policy", default="default", help="the policies that are judged")
    options = parser.parse_args()
    if unknown := set(options.goals.split(",")) - set(GOALS):
        parser.error(f"there is no goal {', '.join(sorted(unknown))}: {', '.join(GOALS)}")
    try:
        for path in options.traces:
            trace_rows(path, 0)
    except ConfigError as error:
        parser.error(str(error))
    bench = Bench(options)
    if unknown := {name for name in bench.policies if ":" not in name} - KNOWN:
        parser.error(f"there is no policy {', '.join(sorted(unknown))}: {', '.join(sorted(KNOWN))}, or module:class")
    if unknown := set(bench.families) - {*FAMILIES, *bench.traces}:
        parser.error(f"there is no family {', '.join(sorted(unknown))}: {', '.join((*FAMILIES, *bench.traces))}")
    run, began = Run("scheduling", options), time.perf_counter()
    goals = bench.single(options.cell) if options.cell else bench.goals(options.goals.split(","))
    for goal in goals:
        show_goal(goal)
    figures = {
        "draws": bench.draws,
        "seeds": bench.seeds,
        "took_s": round(time.perf_counter() - began, 1),
        **bench.figures,
    }
    figures |= {goal.name: goal_figures(goal) for goal in goals}
    run.report(figures, {goal.name: goal.wanted for goal in goals}, all(goal.is_met for goal in goals))


if __name__ == "__main__":
    main()
