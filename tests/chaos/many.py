"""Many seeds on all cores, and the figures of all of them together."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

from tests.chaos.play import Failure, Play, Played, play
from tests.chaos.scenario import draw_task_storm

# How many seeds a process is given at a time: few, because they take very different times.
CHUNK = 2


@dataclass(slots=True)
class Figures:
    """What came of all seeds played so far."""

    seeds: int = 0
    events: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    fates: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    judged: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def take(self, played: Played | Failure) -> None:
        self.seeds += 1
        if isinstance(played, Failure):
            self.failures.append(played)
            return
        self.events += played.events
        self.faults += played.faults
        self.fates += played.fates
        self.judged += played.judged
        self.kinds[played.kind] += 1

    def lines(self) -> list[str]:
        """For people, the totals first."""
        return [
            f"{self.seeds:,} seeds, {self.events:,} events, {self.faults.total():,} faults, "
            f"{len(self.failures)} violations",
            f"scenarios: {_listed(self.kinds)}",
            f"ends: {_listed(self.fates)}",
            f"faults: {_listed(self.faults)}",
            f"judged: {_listed(self.judged)}",
        ]


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.most_common() if count)


def outcome(seed: int, versions: bool = False, plain: bool = False) -> Played | Failure:
    """What comes of one seed, good or bad; with `versions`, models are updated meanwhile."""
    try:
        return play(seed, versions=versions, plain=plain)
    except Failure as failure:
        return failure


def task_storm_outcome(seed: int) -> Played | Failure:
    """What comes of one short storm in which callers ask for tasks."""
    try:
        return Play(draw_task_storm(seed)).to_the_end()
    except Failure as failure:
        return failure


def play_many(
    seeds: Iterable[int],
    jobs: int | None = None,
    versions: bool = False,
    task_storms: bool = False,
    plain: bool = False,
) -> Iterator[Played | Failure]:
    """Play these seeds on so many processes, all cores by default, each outcome as soon as it is there."""
    one = task_storm_outcome if task_storms else partial(outcome, versions=versions, plain=plain)
    # Started afresh, so that nothing of this process, threads and test doubles included, is inherited.
    with get_context("spawn").Pool(jobs or os.cpu_count() or 1) as pool:
        yield from pool.imap_unordered(one, seeds, CHUNK)
