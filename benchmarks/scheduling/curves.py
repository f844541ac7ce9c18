"""Trade-offs: one limit of the scheduler changes, and what that costs and gains is shown side by side.

Owns the sweeps. They explain where a goal cannot be met: serving a request sooner takes swaps, and every swap costs the
answers that must end first, the load, and a slot that is not full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from benchmarks.scheduling.cells import Cell
from benchmarks.scheduling.figures import Figures
from benchmarks.scheduling.runs import Results, over, run_all, stretched
from benchmarks.scheduling.workloads import COLD_MODEL

# How often a stretch is tried out for a wanted load.
BUSY_STEPS = 4


@dataclass(frozen=True, slots=True)
class Sweep:
    cells: tuple[Cell, ...]
    settings: tuple[str, ...]
    titles: tuple[str, ...]
    numbers: Callable[[Figures], tuple[str, ...]]
    busy: float | None = None  # cells are stretched until their slots are occupied for this share of the time


def _cold(own: Figures) -> tuple[str, ...]:
    cold = own.by_model[COLD_MODEL]
    return (f"{cold.p95_s:.1f}", f"{cold.max_s:.1f}")


def _classes(own: Figures) -> tuple[str, ...]:
    high, normal = own.by_class["high"].p95_s, own.by_class["normal"].p95_s
    return (f"{high:.1f}", f"{normal:.1f}", f"{high / normal:.2f}", f"{own.waits.mean_s:.1f}")


_COLD_TITLES = ("cold p95 s", "cold max s")


_STARVED = Sweep(
    tuple(Cell(name, 1, swap_s) for name in ("starve-rare", "starve-short") for swap_s in (0.4, 5.0, 20.0)),
    tuple(f"deadlines_s=5/{normal_s}/{2 * normal_s + 120}" for normal_s in (15, 30, 60, 120, 240)),
    _COLD_TITLES,
    _cold,
)
_BATCH = Sweep(
    tuple(Cell(name, 1, swap_s) for name in ("starve-some", "flood-cold") for swap_s in (0.4, 5.0, 20.0)),
    tuple(f"batch_swaps={swaps}" for swaps in (2, 5, 10, 20, 40)),
    _COLD_TITLES,
    _cold,
)
_CLASSES = Sweep(
    tuple(Cell("classes", slots, swap_s) for slots in (1, 4) for swap_s in (0.4, 5.0, 20.0)),
    tuple(
        f"deadlines_s={high_s}/60/240;residency_swaps={residency}"
        for residency in (2, 0)
        for high_s in (0, 1, 5, 20, 60)
    ),
    ("high p95 s", "normal p95 s", "ratio", "mean s"),
    _classes,
    busy=0.95,
)
_MEAN = Sweep(
    tuple(
        Cell(name, slots, swap_s)
        for name in ("poisson", "bursty", "agents")
        for slots in (1, 2)
        for swap_s in (0.4, 5.0)
    ),
    (
        "batch_swaps=1;residency_swaps=0",
        "batch_swaps=5;residency_swaps=2",
        "batch_swaps=20;residency_swaps=8",
        "batch_swaps=40;residency_swaps=20",
        "deadlines_s=5/20/80",
        "deadlines_s=5/240/960",
    ),
    ("mean s", "p95 s", "max s"),
    lambda own: (f"{own.waits.mean_s:.2f}", f"{own.waits.p95_s:.1f}", f"{own.waits.max_s:.1f}"),
    busy=0.80,
)
CURVES = {"starved": _STARVED, "batch": _BATCH, "classes": _CLASSES, "mean": _MEAN}


def curve_of(name: str, results: Results, seeds: int) -> list[Cell]:
    """Run a sweep; gives its cells in the order of their settings."""
    sweep = CURVES[name]
    bases = sweep.cells if sweep.busy is None else stretched(list(sweep.cells), sweep.busy, BUSY_STEPS)
    cells = [replace(cell, limits=setting) for cell in bases for setting in sweep.settings]
    run_all(over(cells, ("default",), seeds) + over(bases, ("fifo",), seeds), results, name)
    return cells


def show_curve(name: str, results: Results, cells: list[Cell]) -> list[dict[str, str]]:
    """Print a sweep; gives its rows by their titles."""
    sweep = CURVES[name]
    titles = ("cell", *sweep.titles, "swaps/req", "served a second", "lost to fifo", "mean to fifo")
    table, rows = Table(*titles, box=None), []
    for cell in cells:
        own, fifo = results.median(cell, "default"), results.median(replace(cell, limits=""), "fifo")
        lost = 1 - own.served_per_s / fifo.served_per_s
        mean = own.waits.mean_s / fifo.waits.mean_s - 1
        shared = (f"{own.swaps_per_request:.4f}", f"{own.served_per_s:.2f}", f"{lost:.1%}", f"{mean:+.1%}")
        row = (cell.place, *sweep.numbers(own), *shared)
        table.add_row(*row)
        rows.append(dict(zip(titles, row, strict=True)))
    Console(width=180, highlight=False).print(table)
    return rows
