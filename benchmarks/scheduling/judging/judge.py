"""Is a policy worse than collating FIFO? Judged cell by cell, then family by family.

A cell is worse if its p95, its p99 or its worst model's p95 is above what is allowed: 5 % or one swap more than FIFO's.
Where FIFO itself starves a model, only the worst model's p95 counts: serving that model must cost the others something.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.scheduling.grid.cells import Cell
from benchmarks.scheduling.judging.figures import Figures

WORSE_SHARE = 0.05
# A cell beyond what is allowed by this share of it is far beyond.
FAR_SHARE = 0.25
# FIFO starves a model whose p95 is above both: so many seconds, and so many times the p95 of all requests.
STARVED_S, STARVED_TIMES = 480.0, 3.0


def allowed_s(fifo_s: float, swap_s: float) -> float:
    return max(fifo_s * (1 + WORSE_SHARE), fifo_s + swap_s)


def is_starving(fifo: Figures) -> bool:
    """True if the waiting bound of the default policy is broken for some model."""
    return fifo.worst_s > max(STARVED_S, STARVED_TIMES * fifo.waits.p95_s)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One cell: its figures under a policy and under FIFO."""

    cell: Cell
    own: Figures
    fifo: Figures

    @property
    def starved(self) -> bool:
        return is_starving(self.fifo)

    @property
    def excess(self) -> float:
        """How far beyond what is allowed, as a share of it: above 0 is worse. Of several figures, the worst."""
        own, fifo = self.own, self.fifo
        pairs = [(own.worst_s, fifo.worst_s)]
        if not self.starved:
            pairs += [(own.waits.p95_s, fifo.waits.p95_s), (own.waits.p99_s, fifo.waits.p99_s)]
        return max(own_s / allowed_s(fifo_s, self.cell.swap_s) - 1 for own_s, fifo_s in pairs)

    @property
    def p95_ratio(self) -> float:
        return self._ratio(self.own.waits.p95_s, self.fifo.waits.p95_s)

    @property
    def judged_ratio(self) -> float:
        """Of p95; where FIFO starves a model, of the worst model's p95."""
        return self._ratio(self.own.worst_s, self.fifo.worst_s) if self.starved else self.p95_ratio

    @property
    def mean_ratio(self) -> float:
        return self._ratio(self.own.waits.mean_s, self.fifo.waits.mean_s)

    def _ratio(self, own_s: float, fifo_s: float) -> float:
        """With a swap added to both, so that a wait of nothing does not decide."""
        return (own_s + self.cell.swap_s) / (fifo_s + self.cell.swap_s)


@dataclass(frozen=True, slots=True)
class FamilyVerdict:
    family: str
    verdicts: Sequence[Verdict]

    @property
    def starved(self) -> int:
        return sum(one.starved for one in self.verdicts)

    @property
    def worse(self) -> int:
        return sum(one.excess > 0 for one in self.verdicts)

    @property
    def worse_share(self) -> float:
        return self.worse / len(self.verdicts)

    @property
    def far(self) -> int:
        return sum(one.excess > FAR_SHARE for one in self.verdicts)

    @property
    def worst(self) -> Verdict:
        return max(self.verdicts, key=lambda one: one.excess)

    @property
    def p95_ratio(self) -> float:
        return fmean(one.p95_ratio for one in self.verdicts)

    @property
    def mean_ratio(self) -> float:
        return fmean(one.mean_ratio for one in self.verdicts)


def by_family(verdicts: Iterable[Verdict]) -> list[FamilyVerdict]:
    families: dict[str, list[Verdict]] = {}
    for one in verdicts:
        families.setdefault(one.cell.family, []).append(one)
    return [FamilyVerdict(name, members) for name, members in families.items()]
