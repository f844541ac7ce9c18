"""More never hurts: pairs of small cells, the second with one more GPU, larger GPUs or more green room.

The traffic of a pair is the same. Scheduling has anomalies, so a few pairs may get somewhat worse; the worst are shown.
In a second set of pairs models share the compute of their GPUs, and slow answers count as waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

from benchmarks.scheduling.grid.cells import Cell
from benchmarks.scheduling.grid.families import CURVES, FAST_LOAD, SLOW_LOAD, SOME_FIT, Shape, draw_machine, draw_rate
from benchmarks.scheduling.grid.machines import GIB, Machine
from benchmarks.scheduling.grid.runs import Results
from benchmarks.scheduling.grid.traffic import Requests, shares
from benchmarks.scheduling.judging.figures import Figures
from benchmarks.scheduling.judging.goals import Goal
from benchmarks.scheduling.judging.judge import allowed_s, middle_of

MORE, MORE_SHARED = "more", "more_shared"
PAIRS, PAIRS_SHARED = 2_000, 1_000
RISEN_SHOWN = 10
# From the page cache; still slower than a wake, or a green room would not be more of anything.
CACHED_LOAD = (2.0, 12_000.0)
RISES_SHARE, RISES_FAR = 0.01, 0.25
# Loads are fast, because a rise of less than a swap does not count.
SHAPE = Shape(
    gpus=(1, 1, 2, 3), tenants=(1, 1, 50), variation=(1.0, 1.0, 2.0, 4.0), loads=(SLOW_LOAD, FAST_LOAD, CACHED_LOAD)
)
SHAPES = {MORE: SHAPE, MORE_SHARED: replace(SHAPE, over=SOME_FIT, compute=CURVES)}
MODELS_MAX, COUNT_MIN, COUNT_MAX = 16, 150, 300
# How much larger the GPUs of the second cell are.
GPU_TIMES = 1.5
GREEN_ROOM_STEP_MIB = 64 * GIB


class Pair(NamedTuple):
    less: Cell
    more: Cell


@dataclass(frozen=True, slots=True)
class Outcome:
    """The p95 of both cells of a pair, with the same requests."""

    pair: Pair
    less_s: float
    more_s: float

    def __str__(self) -> str:
        return f"{self.pair.more.name} {self.less_s:.1f} -> {self.more_s:.1f} s"

    @property
    def swap_s(self) -> float:
        return self.pair.less.swap_s

    @property
    def rise(self) -> float:
        """How far beyond what is allowed, as a share of it: above 0 is a rise."""
        return self.more_s / allowed_s(self.less_s, self.swap_s) - 1

    @property
    def far(self) -> float:
        """How far beyond a rise of 25 %, and of a swap."""
        return self.more_s / max(self.less_s * (1 + RISES_FAR), self.less_s + self.swap_s) - 1


def draw_pairs(family: str, count: int) -> list[Pair]:
    return [draw_pair(family, number) for number in range(count)]


def draw_pair(family: str, number: int) -> Pair:
    name, shape = f"{family}#{number}", SHAPES[family]
    random = Random(name)
    drawn = draw_machine(random, shape)
    machine = replace(drawn, models_mib=drawn.models_mib[:MODELS_MAX])
    output_len = random.choice(shape.output_len)
    traffic = Requests(
        name,
        shares(len(machine.models_mib), random.choice((0.7, 1.0, 1.3)), random.choice((None, None, 0.6, 0.9))),
        draw_rate(random, machine, output_len),
        random.randint(COUNT_MIN, COUNT_MAX),
        output_len,
        random.choice(shape.variation),
        random.choice(shape.tenants),
    )
    more, what = _more_of(random, machine)
    return Pair(Cell(family, name, machine, traffic), Cell(family, f"{name}+{what}", more, traffic))


def _more_of(random: Random, machine: Machine) -> tuple[Machine, str]:
    what = random.choice(("gpu", "memory", "green"))
    if what == "gpu":
        return replace(machine, gpus=machine.gpus + 1), what
    if what == "memory":
        return replace(machine, gpu_mib=round(machine.gpu_mib * GPU_TIMES)), what
    return replace(machine, green_room_mib=machine.green_room_mib + GREEN_ROOM_STEP_MIB), what


def more_goals(results: Results, family: str, pairs: Iterable[Pair], policy: str) -> list[Goal]:
    """A pair is played with several draws of requests and load times, and counts as the middle one of its rises."""
    drawn = [outcomes(pair, *(results.draws(cell, policy) for cell in pair)) for pair in pairs]
    found = [middle_of(draws, key=lambda one: one.rise) for draws in drawn]
    where = " where models share compute" if family == MORE_SHARED else ""
    wanted = f"with more of something p95 rises by 5 % and a swap in at most 1 % of pairs{where}"
    rare = Goal(f"{family}_rarely_worse", wanted)
    risen = sorted((one for one in found if one.rise > 0), key=lambda one: -one.rise)
    names = "".join(f"; {one}" for one in risen[:RISEN_SHOWN])
    singles = [one for draws in drawn for one in draws]
    worst = max(singles, key=lambda one: one.rise)
    rises, fars = sum(one.rise > 0 for one in singles), sum(one.far > 0 for one in singles)
    of_draws = f"{rises} rise" + (f", {fars} of them far: {worst}" if rises else "")
    rare.add(
        "all pairs",
        f"{len(risen)} of {len(found)} rise{names}; of {len(singles)} single draws {of_draws}",
        len(risen) / len(found) / RISES_SHARE - 1,
    )
    far = Goal(f"{family}_never_far_worse", "and by 25 % and a swap in none")
    for one in found:
        what = f"{one.pair.less.machine}; {one.pair.less.traffic}"
        far.add(what, f"{one}, swap {one.swap_s:.1f} s", one.far)
    return [rare, far]


def outcomes(pair: Pair, less: Sequence[Figures], more: Sequence[Figures]) -> list[Outcome]:
    """One for each draw."""
    return [Outcome(pair, one.waits.p95_s, other.waits.p95_s) for one, other in zip(less, more, strict=True)]
