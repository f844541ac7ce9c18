"""How fast models answered, from the gateway's own recordings (`record_activity`).

Owns the estimate: a row has the length of an answer, how long its request waited and when it was over. How many answers
ran beside it follows from the other rows; where these are enough, so does the curve: how much slower answers are beside
others. What an answer would have taken alone follows from the curve. The median over a model's rows is its speed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import median
from typing import NamedTuple

from greenroom.sim.config import SpeedCurve

# Enough for a median; a file may be much longer.
ROWS_MAX = 100_000
# Shorter answers say more about the network than about the model; so do models with fewer rows.
TOKENS_MIN, ROWS_MIN = 16, 20
# A prompt is taken to be at most this share of an answer's time, whatever its assumed speed.
PREFILL_SHARE_MAX = 0.5


class AnswerTimes(NamedTuple):
    began: float
    ended: float
    prompt_len: int
    output_len: int


class RecordedAnswers:
    """The answers of the first rows of a trace, as far as their times and lengths are known."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, float, float, float, int, int]] = []

    def take(self, model: str, at: float, prompt_len: int, output_len: int, wait_s: str, total_s: str) -> None:
        """`at` is in the unit of the trace; lengths below 0 are unknown, and so are times that are empty."""
        if len(self._rows) >= ROWS_MAX or min(prompt_len, output_len) < 0:
            return
        try:
            waited_s, took_s = float(wait_s), float(total_s)
        except ValueError:
            return
        if isfinite(waited_s) and isfinite(took_s) and took_s > waited_s:
            self._rows.append((model, at, waited_s, took_s, prompt_len, output_len))

    def by_model(self, unit_s: float) -> dict[str, list[AnswerTimes]]:
        found: dict[str, list[AnswerTimes]] = {}
        for model, at, waited_s, took_s, prompt_len, output_len in self._rows:
            arrived = at * unit_s
            answer = AnswerTimes(arrived + waited_s, arrived + took_s, prompt_len, output_len)
            found.setdefault(model, []).append(answer)
        return found


@dataclass(frozen=True, slots=True)
class RecordedSpeed:
    """Tokens a second of an answer alone, and how others slow it down; `is_curve_known` if rows told that, too."""

    tokens_per_s: float
    curve: SpeedCurve | None
    is_curve_known: bool


def speeds(
    answers: Mapping[str, Sequence[AnswerTimes]],
    usual_curves: Mapping[str, SpeedCurve | None],
    prefill_tokens_per_s: float,
    gpus: int,
) -> dict[str, RecordedSpeed]:
    """For models with enough rows. Busy models are taken to be spread over GPUs. Without a curve speed is constant."""
    company = {model: _Company(rows) for model, rows in answers.items()}
    found = {}
    for model, rows in answers.items():
        long = [row for row in rows if row.output_len >= TOKENS_MIN]
        if len(long) >= ROWS_MIN:
            usual = usual_curves[model]
            seen = [_seen(row, model, company, prefill_tokens_per_s, max(1, gpus)) for row in long]
            curve = None if usual is None else curve_from(seen, usual)
            alone = [_rate(row, one, curve, prefill_tokens_per_s) for row, one in zip(long, seen, strict=True)]
            found[model] = RecordedSpeed(median(alone), curve, curve != usual)
    return found


class SeenAnswer(NamedTuple):
    """Seconds for each token, beside how many answers of its own model (itself included) and how many busy models."""

    token_s: float
    batch: int
    neighbours: int


def _seen(
    row: AnswerTimes, model: str, company: Mapping[str, _Company], prefill_tokens_per_s: float, gpus: int
) -> SeenAnswer:
    took_s, middle = row.ended - row.began, (row.began + row.ended) / 2
    prefill_s = min(row.prompt_len / prefill_tokens_per_s, PREFILL_SHARE_MAX * took_s)
    busy = sum(other.running(middle) > 0 for name, other in company.items() if name != model)
    batch = max(1, company[model].running(middle))
    return SeenAnswer((took_s - prefill_s) / row.output_len, batch, busy // gpus)


def _rate(row: AnswerTimes, seen: SeenAnswer, curve: SpeedCurve | None, prefill_tokens_per_s: float) -> float:
    alone_s = row.ended - row.began
    if curve is not None:
        alone_s *= curve.speed(seen.batch, seen.neighbours)
    prefill_s = min(row.prompt_len / prefill_tokens_per_s, PREFILL_SHARE_MAX * alone_s)
    return row.output_len / (alone_s - prefill_s)


def curve_from(seen: Sequence[SeenAnswer], usual: SpeedCurve) -> SpeedCurve:
    """The curve that these answers show; the usual one where too few of them tell."""
    curve = replace(usual, steps=_steps_from([one for one in seen if not one.neighbours], usual))
    alone = [one.token_s * curve.speed(one.batch, 0) for one in seen if not one.neighbours]
    beside = [one for one in seen if one.neighbours]
    if min(len(alone), len(beside)) < ROWS_MIN:
        return curve
    token_s = median(alone)
    slower = (one.token_s * curve.speed(one.batch, 0) / token_s - 1.0 for one in beside)
    shares = [share / one.neighbours for share, one in zip(slower, beside, strict=True)]
    return replace(curve, neighbour=max(0.0, median(shares)))


def _steps_from(seen: Sequence[SeenAnswer], usual: SpeedCurve) -> tuple[tuple[int, float], ...]:
    """A step for one answer alone, and for each doubling of the batch that has enough rows. Further on as usual."""
    groups: dict[int, list[SeenAnswer]] = {}
    for one in seen:
        groups.setdefault(one.batch.bit_length(), []).append(one)
    known = {size: rows for size, rows in sorted(groups.items()) if len(rows) >= ROWS_MIN}
    if 1 not in known or len(known) < 2:
        return usual.steps
    alone_s = median(one.token_s for one in known.pop(1))
    steps = [(1, 1.0)]
    for rows in known.values():
        # More answers at a time are never faster.
        longer = max(steps[-1][1], median(one.token_s for one in rows) / alone_s)
        steps.append((round(median(one.batch for one in rows)), longer))
    last, longest = steps[-1]
    beyond = longest * usual.speed(last, 0)
    return (*steps, *((batch, beyond * longer) for batch, longer in usual.steps if batch > last))


class _Company:
    """How many answers of a model ran at any time."""

    def __init__(self, rows: Sequence[AnswerTimes]) -> None:
        self._began = sorted(row.began for row in rows)
        self._ended = sorted(row.ended for row in rows)

    def running(self, at: float) -> int:
        return bisect_right(self._began, at) - bisect_right(self._ended, at)
