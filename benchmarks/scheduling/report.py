"""What is printed: cells beside each other, offline figures, goals with their worst cases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.scheduling.cells import Cell
from benchmarks.scheduling.figures import Figures
from benchmarks.scheduling.goals import Goal
from benchmarks.scheduling.offline import swaps_per_request
from benchmarks.scheduling.runs import Results
from benchmarks.scheduling.workloads import trace_rows

WORST_SHOWN = 10
# A pipe is given as wide a table as a terminal.
_console = Console(width=160, highlight=False)
_TITLES = ("cell", "policy", "swaps/req", "mean", "p50", "p95", "p99", "max", "Jain", "serving", "swapping")


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
