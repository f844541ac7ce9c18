"""What coresidency rules cost: one answer of the matrix, found symbolically, beside writing every set out.

Ten choices of six models joined by `&` are sixty million sets of models; of these 60 models 10 or 20 are ready when
another is loaded. The same question on a size that can be written out shows the ratio, and that both answers are equal.
A matrix remembers its answers, so each question goes to a new one; parsing and compiling it are not counted.

    python -m benchmarks.scheduling.coresidency [--rounds 500]
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

from benchmarks.rig.result import Run, options_of
from greenroom.core.model import ModelId
from greenroom.core.policy.matrix import ByMatrix, Matrix

GOALS = {"large_10_ready_us_max": 1000.0, "large_20_ready_us_max": 1000.0}
LARGE, SMALL = (10, 6), (5, 6)
# In "any n of m" the parts share every model: the hard case. Printed, without a goal.
OVERLAPS = ((3, 20), (6, 20))

Answer = frozenset[ModelId]


def choices(groups: int, size: int) -> list[list[ModelId]]:
    return [[ModelId(f"m{group}.{choice}") for choice in range(size)] for group in range(groups)]


def product(groups: int, size: int) -> Matrix:
    return Matrix((("all", " & ".join(f"({' | '.join(group)})" for group in choices(groups, size))),))


def any_of(count: int, size: int) -> Matrix:
    return Matrix((("any", " | ".join(choices(1, size)[0])), ("some", " & ".join(["+any"] * count))))


def ready(groups: int, size: int, each: int) -> list[ModelId]:
    """Some models of each group; the newcomer is the last of the last."""
    return [model for group in choices(groups, size) for model in group[:each]]


def written_out(groups: int, size: int, newcomer: ModelId, present: Sequence[ModelId]) -> Answer:
    """The answer from every allowed set of models."""
    there = frozenset(present)
    allowed = (frozenset(chosen) for chosen in itertools.product(*choices(groups, size)))
    return min((there - models for models in allowed if newcomer in models), key=len)


def median_us(prepared: Callable[[], Callable[[], object]], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        answer = prepared()
        began = time.perf_counter()
        answer()
        taken.append(time.perf_counter() - began)
    return round(statistics.median(taken) * 1e6, 1)


def fresh(spec: Matrix, newcomer: ModelId, present: Sequence[ModelId]) -> Callable[[], Callable[[], Answer | None]]:
    def prepared() -> Callable[[], Answer | None]:
        rules = ByMatrix(spec)
        return lambda: rules.leavers(newcomer, present, frozenset())

    return prepared


def figures_of(rounds: int) -> dict[str, float]:
    last, figures = ModelId(f"m{LARGE[0] - 1}.{LARGE[1] - 1}"), {}
    for each in (1, 2):
        present = ready(*LARGE, each)
        figures[f"large_{len(present)}_ready_us"] = median_us(fresh(product(*LARGE), last, present), rounds)
    last, present = ModelId(f"m{SMALL[0] - 1}.{SMALL[1] - 1}"), ready(*SMALL, 1)
    symbolic = fresh(product(*SMALL), last, present)
    if symbolic()() != written_out(*SMALL, last, present):
        raise SystemExit("the matrix and the sets written out give different answers")
    figures["small_us"] = median_us(symbolic, rounds)
    figures["small_written_out_us"] = median_us(lambda: lambda: written_out(*SMALL, last, present), 5)
    figures["written_out_ratio"] = round(figures["small_written_out_us"] / figures["small_us"], 1)
    for count, size in OVERLAPS:
        models = choices(1, size)[0]
        answer = fresh(any_of(count, size), models[-1], models[:count])
        figures[f"any_{count}_of_{size}_us"] = median_us(answer, max(1, rounds // 10))
    return figures


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    options = parser.parse_args()
    run, figures = Run("company", options), figures_of(options.rounds)
    for name, value in figures.items():
        print(f"{name:24} {value:12,.1f}")
    met = all(figures[name.removesuffix("_max")] < most for name, most in GOALS.items())
    run.report(figures, GOALS, met)


if __name__ == "__main__":
    main()
