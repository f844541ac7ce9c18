"""Is a policy worse than collating FIFO? Judged draw by draw, then cell by cell, then family by family.

A draw is worse if its p95, its p99 or its worst model's p95 is above what is allowed: 5 % or one swap more than FIFO's.
Where FIFO itself starves a model, only the worst model's p95 counts: serving that model must cost the others something.

One request that goes first instead of second can change all that comes later, so one draw of requests and load times
says little. A cell is played with several draws, each under the policy and under FIFO; the middle one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from benchmarks.scheduling.grid.cells import Cell
from benchmarks.scheduling.judging.figures import Figures

WORSE_SHARE = 0.05
# A cell beyond what is allowed by this share of it is far beyond.
FAR_SHARE = 0.25
# FIFO starves a model whose p95 is above both: so many seconds, and so many times the p95 of all requests.
STARVED_S, STARVED_TIMES = 480.0, 3.0

One = TypeVar("One")


def allowed_s(fifo_s: float, swap_s: float) -> float:
    return max(fifo_s * (1 + WORSE_SHARE), fifo_s + swap_s)


def middle_of(draws: Sequence[One], key: Callable[[One], float]) -> One:
    """The draw that half of the others exceed; of an even number, the worse of the two in the middle."""
    return sorted(draws, key=key)[len(draws) // 2]


def is_starving(fifo: Figures) -> bool:
    """True if the waiting bound of the default policy is broken for some model."""
    return fifo.worst_s > max(STARVED_S, STARVED_TIMES * fifo.waits.p95_s)


@dataclass(frozen=True, slots=True)
class Draw:
    """The same requests and load times under a policy and under FIFO."""

    own: Figures
    fifo: Figures
    swap_s: float

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
        return max(own_s / allowed_s(fifo_s, self.swap_s) - 1 for own_s, fifo_s in pairs)

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
        return (own_s + self.swap_s) / (fifo_s + self.swap_s)


class Verdict:
    """One cell under a policy, beside FIFO."""

    def __init__(self, cell: Cell, own: Sequence[Figures], fifo: Sequence[Figures]) -> None:
        self.cell, self.own = cell, own
        self.draws = [Draw(one, other, cell.swap_s) for one, other in zip(own, fifo, strict=True)]
        self.middle = middle_of(self.draws, key=lambda draw: draw.excess)

    @property
    def starved(self) -> bool:
        return self.middle.starved

    @property
    def excess(self) -> float:
        return self.middle.excess


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
    def draws(self) -> list[Draw]:
        return [draw for one in self.verdicts for draw in one.draws]

    @property
    def worse_draws(self) -> int:
        """Single draws, each judged for itself: chance makes some of them worse."""
        return sum(draw.excess > 0 for draw in self.draws)

    @property
    def far_draws(self) -> int:
        return sum(draw.excess > FAR_SHARE for draw in self.draws)

    @property
    def worst_draw(self) -> float:
        """Its excess."""
        return max(draw.excess for draw in self.draws)

    @property
    def p95_ratio(self) -> float:
        return fmean(draw.p95_ratio for draw in self.draws)

    @property
    def judged_ratio(self) -> float:
        return fmean(draw.judged_ratio for draw in self.draws)

    @property
    def mean_ratio(self) -> float:
        return fmean(draw.mean_ratio for draw in self.draws)


def by_family(verdicts: Iterable[Verdict]) -> list[FamilyVerdict]:
    families: dict[str, list[Verdict]] = {}
    for one in verdicts:
        families.setdefault(one.cell.family, []).append(one)
    return [FamilyVerdict(name, members) for name, members in families.items()]
