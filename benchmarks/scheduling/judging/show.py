"""What the scheduling benchmark prints: figures of cells, families beside FIFO, and goals with their worst cases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.scheduling.grid.cells import Cell
from benchmarks.scheduling.grid.runs import Results
from benchmarks.scheduling.judging.figures import Figures, Waited
from benchmarks.scheduling.judging.goals import Goal, beside_fifo
from benchmarks.scheduling.judging.judge import FamilyVerdict, Verdict, by_family

WORST_SHOWN = 10
# A pipe gets a table as wide as a terminal does.
_console = Console(width=160, highlight=False)
_WAITS = ("mean", "p50", "p95", "p99", "max")
_CELL_TITLES = ("cell", "policy", *_WAITS, "worst model", "swaps", "Jain", "serving", "swapping")
_FAMILY_TITLES = (
    "family",
    "cells",
    "FIFO starves",
    "worse",
    "far worse",
    "draws: worse, far, worst",
    "p95 to FIFO",
    "mean to FIFO",
    "worst cell",
)


def show_cells(results: Results, cells: Iterable[Cell]) -> None:
    """All figures of each cell, by policy and, where there are several, by class."""
    table = Table(*_CELL_TITLES, title="waits in seconds, medians over seeds", box=None)
    for cell in cells:
        for policy in results.policies_at(cell):
            figures = results.median(cell, policy)
            table.add_row(cell.name, policy, *_row(figures))
            for name, waits in figures.by_class.items():
                if len(figures.by_class) > 1:
                    table.add_row("", f"  {name}", *_seconds(waits))
    _console.print(table)


def _row(figures: Figures) -> list[str]:
    shares = [f"{figures.jain:.3f}", f"{figures.busy:.0%}", f"{figures.moving:.0%}"]
    return [*_seconds(figures.waits), f"{figures.worst_s:.2f}", f"{figures.swaps:.0f}", *shares]


def _seconds(waits: Waited) -> list[str]:
    return [f"{value:.2f}" for value in (waits.mean_s, waits.p50_s, waits.p95_s, waits.p99_s, waits.max_s)]


def show_models(results: Results, cell: Cell) -> None:
    """The waits of each model of a cell."""
    policies = results.policies_at(cell)
    titles = ("model", "MiB", "load s", "requests", *(f"{policy} p50 / p95 / max" for policy in policies))
    table, found = Table(*titles, box=None), [results.median(cell, policy) for policy in policies]
    for model in cell.machine.sim_models():
        name, mib = str(model.spec.id), model.spec.need.gpu_mib
        if name not in found[0].by_model:
            continue
        waits = [figures.by_model[name] for figures in found]
        texts = [f"{one.p50_s:.1f} / {one.p95_s:.1f} / {one.max_s:.1f}" for one in waits]
        table.add_row(name, str(mib), f"{model.timings.load_s:.1f}", f"{waits[0].count:.0f}", *texts)
    _console.print(f"\n{cell.place}; one swap {cell.swap_s:.1f} s", soft_wrap=True)
    _console.print(table)


def show_families(verdicts: Sequence[Verdict], policy: str) -> None:
    table = Table(*_FAMILY_TITLES, title=f"{policy} beside collating FIFO", box=None)
    families = by_family(verdicts)
    for family in families:
        table.add_row(*_family_row(family))
    if len(families) > 1:
        table.add_row(*_family_row(FamilyVerdict("all", verdicts)))
    _console.print(table)
    _console.print("worst cell of each family in its middle draw, own / FIFO:")
    for family in families:
        worst = family.worst
        _console.print(f"  {worst.excess:+7.1%} {worst.cell.place}: {beside_fifo(worst)}", soft_wrap=True)


def _family_row(family: FamilyVerdict) -> list[str]:
    count, worst = len(family.verdicts), family.worst
    return [
        family.family,
        str(count),
        str(family.starved),
        f"{family.worse} ({family.worse_share:.1%})",
        str(family.far),
        f"{family.worse_draws}, {family.far_draws} of {len(family.draws)}, {family.worst_draw:+.0%}",
        f"{family.p95_ratio:.3f}",
        f"{family.mean_ratio:.3f}",
        f"{worst.cell.name} {worst.excess:+.0%}",
    ]


def family_figures(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {
        family.family: {
            "cells": len(family.verdicts),
            "starved": family.starved,
            "worse": family.worse,
            "far": family.far,
            "draws": len(family.draws),
            "draws_worse": family.worse_draws,
            "draws_far": family.far_draws,
            "draws_worst": round(family.worst_draw, 4),
            "p95_ratio": round(family.p95_ratio, 4),
            "mean_ratio": round(family.mean_ratio, 4),
            "worst": f"{family.worst.cell.name} {family.worst.excess:+.1%}",
        }
        for family in by_family(verdicts)
    }


def show_goal(goal: Goal) -> None:
    verdict = "PASS" if goal.is_met else "FAIL"
    _console.print(f"\n{verdict} {goal.name}: {goal.wanted} ({len(goal.cases)} cases, {goal.misses} missed)")
    # Of a goal that is met, the case that came nearest to a miss is enough.
    for case in goal.worst(min(WORST_SHOWN, max(1, goal.misses))):
        _console.print(f"  {case.excess:+7.1%} {case.place}: {case.found}", soft_wrap=True)


def goal_figures(goal: Goal) -> dict[str, Any]:
    worst = goal.worst(1)
    return {
        "met": goal.is_met,
        "cases": len(goal.cases),
        "missed": goal.misses,
        "worst": f"{worst[0].place}: {worst[0].found}" if worst else "",
    }
