"""`python -m tests.chaos SEED` replays one seed; with `--seeds N` it plays many on all cores."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.chaos.many import Figures, play_many
from tests.chaos.play import Failure, play

SHOWN_MAX = 5


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", help="replay this one and say what came of it")
    parser.add_argument("--seeds", type=int, default=200, metavar="N", help="play so many (default 200)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="beginning with this one")
    parser.add_argument("--jobs", type=int, default=None, metavar="N", help="on so many cores (default: all)")
    parser.add_argument("--versions", action="store_true", help="with updates of models among the faults")
    parser.add_argument("--plain", action="store_true", help="with the plain scheduler")
    said = parser.parse_args(arguments)
    # Plain when piped: lines are not folded, so that they can be searched.
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if said.seed is not None:
        return _replay(said.seed, said.versions, said.plain, console)
    return _play(range(said.first, said.first + said.seeds), said.jobs, said.versions, said.plain, console)


def _replay(seed: int, versions: bool, plain: bool, console: Console) -> int:
    try:
        played = play(seed, hashed=True, versions=versions, plain=plain)
    except Failure as failure:
        console.print(str(failure))
        return 1
    figures = Figures()
    figures.take(played)
    console.print("\n".join(figures.lines()))
    console.print(f"trace: {played.trace}")
    return 0


def _play(seeds: range, jobs: int | None, versions: bool, plain: bool, console: Console) -> int:
    figures = Figures()
    columns = (
        TextColumn("playing"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[events]:,} events"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(seeds), events=0)
        for played in play_many(seeds, jobs, versions, plain=plain):
            figures.take(played)
            progress.update(task, advance=1, events=figures.events)
    console.print("\n".join(figures.lines()))
    for failure in sorted(figures.failures, key=lambda one: one.seed)[:SHOWN_MAX]:
        again = f"python -m tests.chaos {failure.seed}{' --versions' if versions else ''}{' --plain' if plain else ''}"
        console.print(f"\n{failure}\nreplay it: {again}")
    if figures.failures:
        console.print(
            f"\nseeds that failed: {' '.join(str(seed) for seed in sorted(one.seed for one in figures.failures))}"
        )
    return 1 if figures.failures else 0


if __name__ == "__main__":
    sys.exit(main())
