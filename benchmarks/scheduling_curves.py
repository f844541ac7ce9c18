"""What is traded for what: one limit of the scheduler changes, and what it costs and buys stands side by side.

Owns the sweeps. They explain where a goal cannot be met: serving somebody sooner takes switches, and every switch costs
the answers that are waited for, the load, and a slot that is not full.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from scheduling_cells import Cell
from scheduling_runs import Results, over, run_all
from scheduling_workloads import COLD_MODEL


@dataclass(frozen=True, slots=True)
class Sweep:
    cells: tuple[Cell, ...]
    settings: tuple[str, ...]


_STARVED = Sweep(
    tuple(Cell(name, 1, swap_s) for name in ("starve-rare", "starve-short") for swap_s in (0.4, 5.0, 20.0)),
    tuple(f"deadlines_s=5/{normal_s}/{2 * normal_s + 120}" for normal_s in (15, 30, 60, 120, 240)),
)
_BATCH = Sweep(
    tuple(Cell(name, 1, swap_s) for name in ("starve-some", "flood-cold") for swap_s in (0.4, 5.0, 20.0)),
    tuple(f"batch_swaps={swaps}" for swaps in (2, 5, 10, 20, 40)),
)
CURVES = {"starved": _STARVED, "batch": _BATCH}


def curve_of(name: str, results: Results, seeds: int) -> list[Cell]:
    """Run a sweep; gives its cells in the order of its settings."""
    sweep = CURVES[name]
    cells = [replace(cell, limits=setting) for cell in sweep.cells for setting in sweep.settings]
    run_all(over(cells, ("default",), seeds) + over(sweep.cells, ("fifo",), seeds), results, name)
    return cells


def show_curve(results: Results, cells: list[Cell]) -> None:
    table = Table("cell", "cold p95 s", "cold max s", "swaps/req", "served a second", "lost to fifo", box=None)
    for cell in cells:
        own, fifo = results.median(cell, "default"), results.median(replace(cell, limits=""), "fifo")
        cold, per_s = own.by_model[COLD_MODEL], own.served_per_s
        lost = 1 - per_s / fifo.served_per_s
        numbers = (
            f"{cold.p95_s:.1f}",
            f"{cold.max_s:.1f}",
            f"{own.swaps_per_request:.4f}",
            f"{per_s:.2f}",
            f"{lost:.1%}",
        )
        table.add_row(cell.place, *numbers)
    Console(width=140, highlight=False).print(table)
