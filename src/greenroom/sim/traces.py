"""Recorded traces from CSV files: the gateway's own recordings, and public logs of one model spread over several.

Owns the two formats, which differ by their header:
- `t, model, prompt_len, output_len` and optionally `tenant` and `priority`: t in seconds from any moment;
- `TIMESTAMP, ContextTokens, GeneratedTokens`: models are drawn, the first most often.
Rows may be in any order; time begins with the earliest. An unknown length is empty, and counts as the mean of the known
ones. A wrong row is an error with file and line.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from random import Random
from statistics import fmean

from greenroom.config.schema import PRIORITY_NAMES
from greenroom.core.model import NO_TENANT, ModelId, TenantId
from greenroom.errors import ConfigError
from greenroom.sim.records import SimArrival
from greenroom.sim.workloads import Draw, zipf

ROWS_MAX = 2_000_000
TOKENS_MAX = 100_000_000
# A number of more digits is wrong in every column, and is never converted.
DIGITS_MAX = 12
# Older gateways allowed priorities below 0, and their recordings are still around.
PRIORITY_MIN, PRIORITY_MAX = -100, 100
NAME_CHARS_MAX = 256
# Of a cell in an error message.
SHOWN_CHARS_MAX = 60

# Marks an unknown length while reading; and the length used if the file has none at all.
UNKNOWN_LEN = -1
USUAL_LEN = 200

OWN = ("t", "model", "prompt_len", "output_len")
OWN_OPTIONAL = ("tenant", "priority")
PUBLIC = ("timestamp", "contexttokens", "generatedtokens")

Row = Mapping[str, str]
Reader = Callable[[Row], SimArrival]


class TraceError(ConfigError):
    """A trace cannot be read. The message names the file, the line and what was expected there."""

    code = "invalid_trace"


class _Wrong(ValueError):
    """What is wrong with a row."""


class _OtherModel(_Wrong):
    """The row is for a model that is not configured."""


@dataclass(frozen=True, slots=True)
class Known:
    """The configured models and their aliases. A trace that names no models is spread over them."""

    models: Sequence[str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    priorities: Mapping[str, int] = field(default_factory=dict)
    # True if rows for other models are left out; otherwise they are an error.
    skips_others: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """The rows in order of time, and remarks on what differs from the file."""

    rows: list[SimArrival]
    remarks: tuple[str, ...] = ()


def read_trace(path: str | Path, known: Known | None = None, seed: int = 0) -> list[SimArrival]:
    """The rows in order of time. Without `known` any model is accepted."""
    return trace_of(path, known, seed).rows


def trace_of(path: str | Path, known: Known | None = None, seed: int = 0) -> Trace:
    """The rows in order of time, with remarks on those left out and those completed."""
    rows, skipped = _read(path, known, seed)
    if not rows:
        raise TraceError(f"{path}: there is no row in it{' for a model of the configuration' if skipped else ''}")
    prompt_len, of_prompts = _usual("prompt_len", [row.prompt_len for row in rows])
    output_len, of_outputs = _usual("output_len", [row.output_len for row in rows])
    first = min(row.at for row in rows)
    whole = [
        row._replace(
            at=row.at - first,
            prompt_len=prompt_len if row.prompt_len == UNKNOWN_LEN else row.prompt_len,
            output_len=output_len if row.output_len == UNKNOWN_LEN else row.output_len,
        )
        for row in rows
    ]
    left_out = f"{skipped:,} for models that are not in the configuration left out" if skipped else ""
    return Trace(sorted(whole, key=lambda row: row.at), tuple(filter(None, (left_out, of_prompts, of_outputs))))


def _usual(title: str, lengths: Sequence[int]) -> tuple[int, str]:
    """The length for rows without one, and a remark on it; the remark is empty if all lengths are known."""
    known = [length for length in lengths if length != UNKNOWN_LEN]
    if len(known) == len(lengths):
        return USUAL_LEN, ""
    usual, why = (round(fmean(known)), "the mean of the others") if known else (USUAL_LEN, "as none is known")
    return usual, f"{len(lengths) - len(known):,} without {title} taken as {usual:,} tokens, {why}"


def _read(path: str | Path, known: Known | None, seed: int) -> tuple[list[SimArrival], int]:
    """The rows in the order of the file, and how many were left out."""
    rows: list[SimArrival] = []
    count = 0
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            for count, row in enumerate(_rows(file, str(path), known, seed), start=1):
                if count > ROWS_MAX:
                    raise TraceError(f"{path}: more than {ROWS_MAX:,} rows; give a part of it")
                if row is not None:
                    rows.append(row)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise TraceError(f"{path}: cannot be read: {reason}") from error
    return rows, count - len(rows)


def _rows(file: Iterator[str], name: str, known: Known | None, seed: int) -> Iterator[SimArrival | None]:
    """None stands for a row that is left out."""
    skips = known is not None and known.skips_others
    table = csv.reader(file, strict=True)
    try:
        header = [title.strip().lower() for title in next(table, [])]
        read = _reader(header, name, known, seed)
        for cells in table:
            if cells:
                yield _row(read, header, cells, f"{name}:{table.line_num}", skips)
    except csv.Error as error:
        raise TraceError(f"{name}:{table.line_num}: this is not CSV: {error}") from error


def _row(read: Reader, header: Sequence[str], cells: Sequence[str], where: str, skips: bool) -> SimArrival | None:
    if len(cells) != len(header):
        raise TraceError(f"{where}: {len(cells)} values where the header names {len(header)}")
    try:
        return read({title: cell.strip() for title, cell in zip(header, cells, strict=True)})
    except _Wrong as error:
        if skips and isinstance(error, _OtherModel):
            return None
        raise TraceError(f"{where}: {error}") from error


def _reader(header: Sequence[str], name: str, known: Known | None, seed: int) -> Reader:
    if set(OWN) <= set(header):
        models = None if known is None else frozenset(known.models)
        return lambda row: _own(row, known, models)
    if set(PUBLIC) <= set(header):
        if known is None or not known.models:
            raise TraceError(f"{name}: it names no models; say over which to spread it")
        draw, random, priorities = Draw(zipf(known.models)), Random(f"{seed}:models"), known.priorities
        return lambda row: _public(row, draw.one(random), priorities)
    wanted = f"{', '.join(OWN)} (and {', '.join(OWN_OPTIONAL)}), or TIMESTAMP, ContextTokens, GeneratedTokens"
    raise TraceError(f"{name}:1: the header must name {wanted}")


def _own(row: Row, known: Known | None, models: frozenset[str] | None) -> SimArrival:
    model = row["model"]
    if not model:
        raise _Wrong("model is empty")
    usual = PRIORITY_NAMES["normal"]
    if known is not None and models is not None:
        model = known.aliases.get(model, model)
        usual = known.priorities.get(model, usual)
        if model not in models:
            # Looking for the nearest name is slow, and useless if the row is left out.
            near = "" if known.skips_others else _nearest(model, known.models)
            raise _OtherModel(f"there is no model {_shown(model)} in the configuration{near}")
    return SimArrival(
        _number(row, "t"),
        ModelId(model),
        _tokens(row, "prompt_len"),
        _tokens(row, "output_len"),
        _tenant(row.get("tenant", "")),
        _priority(row.get("priority", ""), usual),
    )


def _nearest(model: str, models: Sequence[str]) -> str:
    near = get_close_matches(model, models, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _public(row: Row, model: str, priorities: Mapping[str, int]) -> SimArrival:
    return SimArrival(
        _moment(row["timestamp"]),
        ModelId(model),
        _tokens(row, "contexttokens"),
        _tokens(row, "generatedtokens"),
        priority=priorities.get(model, PRIORITY_NAMES["normal"]),
    )


def _number(row: Row, title: str) -> float:
    try:
        value = float(row[title])
    except ValueError:
        raise _Wrong(f"{title} is {_shown(row[title])}, not a number") from None
    if not isfinite(value):
        raise _Wrong(f"{title} is {_shown(row[title])}, not a finite number")
    return value


def _shown(text: str) -> str:
    return repr(text) if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]!r} … ({len(text):,} characters)"


def _tokens(row: Row, title: str) -> int:
    text = row[title]
    if not text:
        return UNKNOWN_LEN
    if not (_is_whole(text) and int(text) <= TOKENS_MAX):
        raise _Wrong(f"{title} is {_shown(text)}, not a number of tokens")
    return int(text)


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX


def _tenant(text: str) -> TenantId:
    if len(text) > NAME_CHARS_MAX or not text.isprintable():
        raise _Wrong(f"tenant is not a name of at most {NAME_CHARS_MAX} printable characters")
    return TenantId(text) if text else NO_TENANT


def _priority(text: str, usual: int) -> int:
    if not text:
        return usual
    if text in PRIORITY_NAMES:
        return PRIORITY_NAMES[text]
    if not (_is_whole(text.removeprefix("-")) and PRIORITY_MIN <= int(text) <= PRIORITY_MAX):
        words = ", ".join(PRIORITY_NAMES)
        raise _Wrong(f"priority is {_shown(text)}, not {words} or {PRIORITY_MIN} to {PRIORITY_MAX}")
    return int(text)


def _moment(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise _Wrong(f"TIMESTAMP is {_shown(text)}, not a time like 2023-11-16 18:15:46.680") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
