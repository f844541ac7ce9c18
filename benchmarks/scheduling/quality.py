"""How well the scheduler decides: the default policy beside strict first-come, collating FIFO and offline references.

Simulated, so the machine does not matter: traces given as CSV files and generated workloads, for 1, 2, 4 and 8 slots,
swaps of 0.4 to 20 s, several stretches of time, equal and unequal models. Figures are medians over seeds. A seed draws
the workload, the models of a trace that names none, and how much the times of moves vary.

    python -m benchmarks.scheduling.quality [TRACE.csv …] [--quick] [--goals p95,mean,starved,classes,flood]
    python -m benchmarks.scheduling.quality TRACE.csv --cell arena27,slots=2,swap=5,stretch=4 [--seeds 3]
    python -m benchmarks.scheduling.quality --curve starved|batch|classes|mean [--seeds 3]
    python -m benchmarks.scheduling.quality --cell poisson,slots=1,limits='batch_swaps=3;residency_swaps=1'
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.rig.result import Run, options_of
from benchmarks.scheduling.cells import Cell, cell_from
from benchmarks.scheduling.curves import CURVES, curve_of, show_curve
from benchmarks.scheduling.figures import Figures
from benchmarks.scheduling.goals import FEW_SLOTS, Goal, class_goal, flood_goal, mean_goal, p95_goal, starved_goals
from benchmarks.scheduling.references import CLAIRVOYANT, ORACLE, STRICT, swaps_per_request
from benchmarks.scheduling.runs import Results, over, run_all, stretched
from benchmarks.scheduling.workloads import GRID, trace_name, trace_rows
from greenroom.errors import ConfigError

SLOTS = (1, 2, 4, 8)
COMPARED = ("default", "fifo")
EVERY_POLICY = (*COMPARED, STRICT, CLAIRVOYANT, ORACLE)
STARVING = ("starve-rare", "starve-some", "starve-short")
# How busy "under load" is, and how many times that load is more than can be served.
UNDER_LOAD, OVERLOAD = 0.95, 2.0
GOALS = ("p95", "mean", "starved", "classes", "flood")
WORST_SHOWN = 10
# A pipe gets a table as wide as a terminal does.
_console = Console(width=160, highlight=False)
_TITLES = ("cell", "policy", "swaps/req", "mean", "p50", "p95", "p99", "max", "Jain", "serving", "swapping")


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is run."""

    seeds: int
    swaps_s: tuple[float, ...]
    generated: tuple[str, ...]
    stretches_of_traces: tuple[float, ...]
    stretches_of_generated: tuple[float, ...]
    stretches_of_mixed: tuple[float, ...]  # for models of unequal size
    reference_slots: tuple[int, ...]  # the references run for these too, at the stretch that all workloads have
    busy: tuple[float, ...]  # cells are stretched until they are this busy, in so many steps
    busy_steps: int
    class_slots: tuple[int, ...]


ALL_HAVE = 16.0
FULL = Extent(
    seeds=10,
    swaps_s=(0.4, 1.0, 5.0, 20.0),
    generated=tuple(GRID),
    stretches_of_traces=(1.0, 4.0, ALL_HAVE, 64.0),
    stretches_of_generated=(4.0, ALL_HAVE),
    stretches_of_mixed=(ALL_HAVE,),
    reference_slots=SLOTS,
    busy=(0.75, 0.85),
    busy_steps=5,
    class_slots=(1, 2, 4),
)
QUICK = Extent(
    seeds=1,
    swaps_s=(0.4, 5.0),
    generated=("poisson",),
    stretches_of_traces=(ALL_HAVE,),
    stretches_of_generated=(ALL_HAVE,),
    stretches_of_mixed=(),
    reference_slots=(2,),
    busy=(0.8,),
    busy_steps=4,
    class_slots=(1, 4),
)


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.extent = QUICK if options.quick else FULL
        self.seeds = options.seeds or self.extent.seeds
        self.traces = {trace_name(path): path for path in options.traces}
        self.results = Results()

    def run(self, cells: Iterable[Cell], what: str, policies: tuple[str, ...] = COMPARED) -> None:
        run_all(over(cells, policies, self.seeds), self.results, what)

    def goals(self, wanted: Iterable[str]) -> list[Goal]:
        """The wanted goals; the first two share their cells."""
        grid = self._grid() if {"p95", "mean"} & set(wanted) else []
        computed = {
            "p95": lambda: [p95_goal(self.results, grid)],
            "mean": lambda: [mean_goal(self.results, grid)],
            "starved": self._starved,
            "classes": self._classes,
            "flood": self._flood,
        }
        return [goal for name in GOALS if name in wanted for goal in computed[name]()]

    def _grid(self) -> list[Cell]:
        extent = self.extent
        cells = [cell for base in self._bases(SLOTS) for cell in self._variants(base)]
        few = self._bases(FEW_SLOTS)
        busy_cells = [cell for busy in extent.busy for cell in stretched(few, busy, extent.busy_steps)]
        cells += busy_cells
        self.run(cells, "grid")
        self.run(busy_cells, "what could be gained", (ORACLE,))
        at = [cell for cell in cells if cell.stretch == ALL_HAVE and cell.sizes == "equal"]
        references = [cell for cell in at if cell.slots in extent.reference_slots]
        self.run(references, "references", (STRICT, CLAIRVOYANT))
        show_cells(self.results, cells)
        return cells

    def _bases(self, slots: Iterable[int]) -> list[Cell]:
        """Every workload on every machine."""
        workloads = self.traces | dict.fromkeys(self.extent.generated, "")
        grid = product(workloads.items(), slots, self.extent.swaps_s)
        return [Cell(name, count, swap_s, trace=path) for (name, path), count, swap_s in grid]

    def _variants(self, base: Cell) -> list[Cell]:
        """Several stretches of time, and unequal models."""
        extent = self.extent
        stretches = extent.stretches_of_traces if base.trace else extent.stretches_of_generated
        equal = [replace(base, stretch=stretch) for stretch in stretches]
        return equal + [replace(base, stretch=stretch, sizes="mixed") for stretch in extent.stretches_of_mixed]

    def _starved(self) -> list[Goal]:
        cells = [Cell(name, 1, swap) for name, swap in product(STARVING, self.extent.swaps_s)]
        self.run(cells, "starvation")
        return starved_goals(self.results, cells)

    def _classes(self) -> list[Goal]:
        extent = self.extent
        cells = [Cell("classes", slots, swap_s) for slots, swap_s in product(extent.class_slots, extent.swaps_s)]
        loaded = stretched(cells, UNDER_LOAD, extent.busy_steps)
        cells = loaded + [replace(cell, stretch=cell.stretch / OVERLOAD) for cell in loaded]
        self.run(cells, "classes")
        show_cells(self.results, cells)
        return [class_goal(self.results, cells)]

    def _flood(self) -> list[Goal]:
        cells = {kind: self._flood_cells(kind) for kind in ("calm", "flood")}
        self.run([*cells["calm"], *cells["flood"]], "flood")
        return [flood_goal(self.results, cells["flood"])]

    def _flood_cells(self, kind: str) -> list[Cell]:
        return [Cell(f"{kind}-{state}", 1, swap_s) for state in ("ready", "cold") for swap_s in self.extent.swaps_s]


def run_single(bench: Bench, cells: list[Cell]) -> list[Goal]:
    bench.run(cells, "cells", EVERY_POLICY)
    show_cells(bench.results, cells)
    return [p95_goal(bench.results, cells), mean_goal(bench.results, cells)]


# --- what is printed ----------------------------------------------------------------------------------------------


def show_cells(results: Results, cells: Iterable[Cell]) -> None:
    table = Table(*_TITLES, title="waits in seconds, medians over seeds", box=None)
    for cell in cells:
        for policy in results.policies_at(cell):
            figures = results.median(cell, policy)
            table.add_row(cell.place, policy, *_row(figures))
            for name, waits in figures.by_class.items():
                if len(figures.by_class) > 1:
                    seconds = (waits.mean_s, waits.p50_s, waits.p95_s, waits.p99_s, waits.max_s)
                    table.add_row("", f"  {name}", "", *(f"{value:.2f}" for value in seconds))
    _console.print(table)


def _row(figures: Figures) -> list[str]:
    waits = figures.waits
    seconds = [f"{value:.2f}" for value in (waits.mean_s, waits.p50_s, waits.p95_s, waits.p99_s, waits.max_s)]
    shares = [f"{figures.jain:.3f}", f"{figures.busy:.0%}", f"{figures.moving:.0%}"]
    return [f"{figures.swaps_per_request:.3f}", *seconds, *shares]


def show_offline(traces: dict[str, str], slots: Sequence[int]) -> dict[str, dict[int, dict[str, float]]]:
    """Swaps per request if service took no time."""
    table = Table("trace", "slots", "LRU", "Belady", "regrouped 10 s", "regrouped 30 s", title="offline", box=None)
    found: dict[str, dict[int, dict[str, float]]] = {}
    for name, path in traces.items():
        asked = [(row.at, str(row.model)) for row in trace_rows(path, 0)]
        found[name] = {count: swaps_per_request(asked, count) for count in slots}
        for count, swaps in found[name].items():
            table.add_row(name, str(count), *(f"{value:.3f}" for value in swaps.values()))
    _console.print(table)
    return found


def show_goal(goal: Goal) -> None:
    verdict = "PASS" if goal.is_met else "FAIL"
    _console.print(f"\n{verdict} {goal.name}: {goal.wanted} ({len(goal.cases)} cases, {goal.misses} missed)")
    for case in goal.worst(WORST_SHOWN):
        _console.print(f"  {case.excess:+7.1%} {case.place}: {case.found}", soft_wrap=True)


def goal_figures(goal: Goal) -> dict[str, Any]:
    worst = goal.worst(1)
    return {
        "met": goal.is_met,
        "cases": len(goal.cases),
        "missed": goal.misses,
        "worst": f"{worst[0].place}: {worst[0].found}" if worst else "",
    }


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("traces", nargs="*")
    parser.add_argument("--quick", action="store_true", help="one seed and a small grid")
    parser.add_argument("--cell", action="append", default=[], help="only this cell; may be given several times")
    parser.add_argument("--goals", default=",".join(GOALS), help="only these goals")
    parser.add_argument("--curve", choices=CURVES, help="what is traded for what as one limit changes")
    parser.add_argument("--seeds", type=int, default=0)
    options = parser.parse_args()
    if unknown := set(options.goals.split(",")) - set(GOALS):
        parser.error(f"there is no goal {', '.join(sorted(unknown))}: {', '.join(GOALS)}")
    try:
        for path in options.traces:
            trace_rows(path, 0)
    except ConfigError as error:
        parser.error(str(error))
    run, began, bench = Run("scheduling", options), time.perf_counter(), Bench(options)
    figures: dict[str, Any] = {"seeds": bench.seeds}
    if options.curve:
        curve = show_curve(options.curve, bench.results, curve_of(options.curve, bench.results, bench.seeds))
        return run.report(figures | {options.curve: curve}, {}, met=True)
    if options.cell:
        goals = run_single(bench, [cell_from(text, options.traces) for text in options.cell])
    else:
        goals = bench.goals(options.goals.split(","))
        if bench.traces:
            figures["offline"] = show_offline(bench.traces, SLOTS)
    for goal in goals:
        show_goal(goal)
    figures |= {"took_s": round(time.perf_counter() - began, 1)} | {goal.name: goal_figures(goal) for goal in goals}
    return run.report(figures, {goal.name: goal.wanted for goal in goals}, all(goal.is_met for goal in goals))


if __name__ == "__main__":
    main()
