"""Many seeds on all cores, and the figures of all of them together."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from multiprocessing import get_context

from tests.sim.shared.play import BOUND_S, Played, play

CHUNK = 4


class Figures:
    """What came of all seeds played so far."""

    def __init__(self) -> None:
        self.played: list[Played] = []
        self.failures: list[tuple[int, str]] = []

    def take(self, seed: int, outcome: Played | str) -> None:
        if isinstance(outcome, str):
            self.failures.append((seed, outcome))
        else:
            self.played.append(outcome)

    def lines(self) -> list[str]:
        faults: Counter[str] = sum((one.faults for one in self.played), Counter())
        refusals: Counter[str] = sum((one.refusals for one in self.played), Counter())
        drained = sorted(one.drained_s for one in self.played) or [0.0]
        return [
            f"{len(self.played) + len(self.failures):,} seeds, {sum(one.virtual_s for one in self.played):,.0f} s of "
            f"virtual time, {faults.total():,} faults, {len(self.failures)} violations",
            f"served {sum(one.served for one in self.played):,} requests, {sum(one.leases for one in self.played):,} "
            "leases of trainers",
            f"faults: {_listed(faults)}",
            f"refused and asked again: {_listed(refusals)}",
            f"all were served after the last fault within: median {drained[len(drained) // 2]:.1f} s, worst "
            f"{drained[-1]:.1f} s, bound {BOUND_S:g} s",
        ]


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.most_common())


def outcome(seed: int) -> tuple[int, Played | str]:
    try:
        return seed, play(seed)
    except Exception as error:
        return seed, f"{type(error).__name__}: {error}"


def play_many(seeds: Iterable[int], jobs: int | None = None) -> Iterator[tuple[int, Played | str]]:
    with get_context("spawn").Pool(jobs or os.cpu_count() or 1) as pool:
        yield from pool.imap_unordered(outcome, seeds, CHUNK)
