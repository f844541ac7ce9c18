"""How fast models answered, from the gateway's own recordings (`record_activity`).

Owns the estimate: a row has the length of an answer, how long its request waited and when it was over. How many answers
ran beside it follows from the other rows; what it would have taken alone follows from the curve. The median over a
model's rows is its speed.
"""

from __future__ import annotations

import csv
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from math import isfinite
from pathlib import Path
from statistics import median
from typing import NamedTuple

from greenroom.sim.config import SpeedCurve
from greenroom.sim.traces.cells import TOKENS_MAX

COLUMNS = ("t", "model", "prompt_len", "output_len", "wait_s", "total_s")
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


def recorded_answers(path: str | Path) -> dict[str, list[AnswerTimes]]:
    """The answers in this file by the names of their models; none if it is not a recording with these columns."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            return _answers(rows) if {*COLUMNS} <= {*(rows.fieldnames or ())} else {}
    except (OSError, UnicodeDecodeError, csv.Error):
        return {}


def _answers(rows: Iterable[Mapping[str, str]]) -> dict[str, list[AnswerTimes]]:
    """Rows without a length or a time are left out."""
    found: dict[str, list[AnswerTimes]] = {}
    for row in islice(rows, ROWS_MAX):
        try:
            at, wait_s, total_s = (float(row[name]) for name in ("t", "wait_s", "total_s"))
            answer = AnswerTimes(at + wait_s, at + total_s, int(row["prompt_len"]), int(row["output_len"]))
        except (TypeError, ValueError):
            continue
        is_sane = max(answer.prompt_len, answer.output_len) <= TOKENS_MAX
        if is_sane and isfinite(answer.began) and isfinite(answer.ended) and answer.ended > answer.began:
            found.setdefault(row["model"], []).append(answer)
    return found


def speeds(
    answers: Mapping[str, Sequence[AnswerTimes]],
    curve_of: Callable[[str], SpeedCurve | None],
    prefill_tokens_per_s: float,
    gpus: int,
) -> dict[str, float]:
    """Tokens a second of an answer alone, for models with enough rows. Busy models are taken to be spread over GPUs."""
    company = {model: _Company(rows) for model, rows in answers.items()}
    found = {}
    for model, rows in answers.items():
        long = [row for row in rows if row.output_len >= TOKENS_MIN]
        if len(long) >= ROWS_MIN:
            curve = curve_of(model)
            rates = (_rate(row, model, curve, company, prefill_tokens_per_s, max(1, gpus)) for row in long)
            found[model] = median(rates)
    return found


def _rate(
    row: AnswerTimes,
    model: str,
    curve: SpeedCurve | None,
    company: Mapping[str, _Company],
    prefill_tokens_per_s: float,
    gpus: int,
) -> float:
    alone_s = row.ended - row.began
    if curve is not None:
        middle = (row.began + row.ended) / 2
        busy = sum(other.running(middle) > 0 for name, other in company.items() if name != model)
        alone_s *= curve.speed(max(1, company[model].running(middle)), busy // gpus)
    prefill_s = min(row.prompt_len / prefill_tokens_per_s, PREFILL_SHARE_MAX * alone_s)
    return row.output_len / (alone_s - prefill_s)


class _Company:
    """How many answers of a model ran at any time."""

    def __init__(self, rows: Sequence[AnswerTimes]) -> None:
        self._began = sorted(row.began for row in rows)
        self._ended = sorted(row.ended for row in rows)

    def running(self, at: float) -> int:
        return bisect_right(self._began, at) - bisect_right(self._ended, at)
