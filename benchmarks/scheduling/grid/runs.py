"""Runs many cells on all cores, and keeps their figures.

Every cell is run once, however many goals need it. A terminal shows a progress bar, a file gets a line now and then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.scheduling.grid.cells import Cell, run_cell, stretch_for
from benchmarks.scheduling.judging.figures import Figures, medians

_COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    TimeRemainingColumn(),
)
# How often a line tells what is done, where no terminal shows it.
LINE_EVERY_S = 15.0

Task = TypeVar("Task")
Found = TypeVar("Found")


class Results:
    """Figures by cell and seed."""

    def __init__(self) -> None:
        self._runs: dict[Cell, dict[int, Figures]] = {}

    def add(self, cell: Cell, figures: Figures) -> None:
        self._runs.setdefault(replace(cell, seed=0), {})[cell.seed] = figures

    def lacks(self, cells: Iterable[Cell]) -> list[Cell]:
        return [cell for cell in dict.fromkeys(cells) if cell.seed not in self._runs.get(replace(cell, seed=0), {})]

    def draws(self, cell: Cell, policy: str) -> list[Figures]:
        """Of all seeds that were run, in their order."""
        return [figures for _, figures in sorted(self._runs[replace(cell, policy=policy, seed=0)].items())]

    def median(self, cell: Cell, policy: str) -> Figures:
        return medians(self.draws(cell, policy))

    def policies_at(self, cell: Cell) -> list[str]:
        like = replace(cell, policy="", seed=0)
        return [one.policy for one in self._runs if replace(one, policy="") == like]


def over(cells: Iterable[Cell], policies: Sequence[str], seeds: int) -> list[Cell]:
    """These cells under each policy with each seed."""
    return [replace(cell, policy=policy, seed=seed) for cell in cells for policy in policies for seed in range(seeds)]


def run_all(cells: Iterable[Cell], results: Results, what: str, jobs: int | None = None) -> None:
    """Run the cells that were not run yet. The slowest go first, so that no core idles at the end."""
    todo = sorted(results.lacks(cells), key=_cost, reverse=True)
    for cell, figures in zip(todo, each(run_cell, todo, what, jobs), strict=True):
        results.add(cell, figures)


def _cost(cell: Cell) -> float:
    """About how long a cell takes to run, in a unit of its own."""
    return cell.traffic.expected * len(cell.machine.models_mib)


def all_stretched(cells: Sequence[Cell], occupied: float, steps: int, jobs: int | None = None) -> list[Cell]:
    """Each of these cells at the stretch that makes it that busy under collating FIFO."""
    return each(stretch_for, cells, f"looking for {occupied:.0%} busy", jobs, occupied, steps)


def each(
    work: Callable[..., Found], tasks: Sequence[Task], what: str, jobs: int | None = None, *details: object
) -> list[Found]:
    """The work done on each task, in the order of the tasks; by so many processes, or by one for each core."""
    console, began = Console(stderr=True), time.monotonic()
    told_at = began
    with Progress(*_COLUMNS, console=console) as progress, ProcessPoolExecutor(jobs or os.cpu_count()) as pool:
        bar = progress.add_task(what, total=len(tasks))
        futures = {pool.submit(work, task, *details): place for place, task in enumerate(tasks)}
        found: dict[int, Found] = {}
        for future in as_completed(futures):
            found[futures[future]] = future.result()
            progress.advance(bar)
            if not console.is_terminal and (now := time.monotonic()) >= told_at + LINE_EVERY_S:
                told_at = now
                console.print(f"{what}: {len(found):,} of {len(tasks):,} after {now - began:.0f} s")
    return [found[place] for place in range(len(tasks))]
