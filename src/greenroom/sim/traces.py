"""Recorded traces from CSV files: the gateway's own recordings, and public logs of one model spread over several.

Owns the two formats. Both have a header; its names decide which it is:
- `t, model, prompt_len, output_len` and, where known, `tenant` and `priority`: t in seconds from anywhere;
- `TIMESTAMP, ContextTokens, GeneratedTokens`: models are drawn, the first given most often.
Rows may stand in any order; time begins with the earliest. A row that is wrong is an error with file and line.
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

from greenroom.config.schema import PRIORITY_NAMES
from greenroom.core.model import NO_TENANT, ModelId, TenantId
from greenroom.errors import ConfigError
from greenroom.sim.records import Arrival
from greenroom.sim.workloads import Draw, zipf

ROWS_MAX = 2_000_000
TOKENS_MAX = 100_000_000
PRIORITY_MAX = 100
NAME_CHARS_MAX = 256

OWN = ("t", "model", "prompt_len", "output_len")
OWN_OPTIONAL = ("tenant", "priority")
PUBLIC = ("timestamp", "contexttokens", "generatedtokens")

Row = Mapping[str, str]
Reader = Callable[[Row], Arrival]


class TraceError(ConfigError):
    """A trace cannot be read. The message names the file, the line and what was expected there."""

    code = "invalid_trace"


class _Wrong(ValueError):
    """What is wrong with a row."""


@dataclass(frozen=True, slots=True)
class Known:
    """What the configuration knows: its models, or those to spread a trace over that names none; their other names."""

    models: Sequence[str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    priorities: Mapping[str, int] = field(default_factory=dict)


def read_trace(path: str | Path, known: Known | None = None, seed: int = 0) -> list[Arrival]:
    """The rows in order of time. Without `known` any model is taken as it is named."""
    rows: list[Arrival] = []
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            for row in _rows(file, str(path), known, seed):
                rows.append(row)
                if len(rows) > ROWS_MAX:
                    raise TraceError(f"{path}: more than {ROWS_MAX:,} rows; give a part of it")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise TraceError(f"{path}: cannot be read: {reason}") from error
    if not rows:
        raise TraceError(f"{path}: there is no row in it")
    rows.sort(key=lambda row: row.at)
    first = rows[0].at
    return [row._replace(at=row.at - first) for row in rows]


def _rows(file: Iterator[str], name: str, known: Known | None, seed: int) -> Iterator[Arrival]:
    table = csv.reader(file, strict=True)
    try:
        header = [title.strip().lower() for title in next(table, [])]
        read = _reader(header, name, known, seed)
        for cells in table:
            if cells:
                yield _row(read, header, cells, f"{name}:{table.line_num}")
    except csv.Error as error:
        raise TraceError(f"{name}:{table.line_num}: this is not CSV: {error}") from error


def _row(read: Reader, header: Sequence[str], cells: Sequence[str], where: str) -> Arrival:
    if len(cells) != len(header):
        raise TraceError(f"{where}: {len(cells)} values where the header names {len(header)}")
    try:
        return read({title: cell.strip() for title, cell in zip(header, cells, strict=True)})
    except _Wrong as error:
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


def _own(row: Row, known: Known | None, models: frozenset[str] | None) -> Arrival:
    model = row["model"]
    if not model:
        raise _Wrong("model is empty")
    usual = PRIORITY_NAMES["normal"]
    if known is not None and models is not None:
        model = known.aliases.get(model, model)
        usual = known.priorities.get(model, usual)
        if model not in models:
            raise _Wrong(f"there is no model {model!r} in the configuration{_nearest(model, known.models)}")
    return Arrival(
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


def _public(row: Row, model: str, priorities: Mapping[str, int]) -> Arrival:
    return Arrival(
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
        raise _Wrong(f"{title} is {row[title]!r}, not a number") from None
    if not isfinite(value):
        raise _Wrong(f"{title} is {row[title]!r}, not a finite number")
    return value


def _tokens(row: Row, title: str) -> int:
    text = row[title]
    if not (text.isascii() and text.isdigit() and int(text[:12]) <= TOKENS_MAX):
        raise _Wrong(f"{title} is {text!r}, not a number of tokens")
    return int(text)


def _tenant(text: str) -> TenantId:
    if len(text) > NAME_CHARS_MAX or not text.isprintable():
        raise _Wrong(f"tenant is not a name of at most {NAME_CHARS_MAX} printable characters")
    return TenantId(text) if text else NO_TENANT


def _priority(text: str, usual: int) -> int:
    if not text:
        return usual
    if text in PRIORITY_NAMES:
        return PRIORITY_NAMES[text]
    if not (text.isascii() and text.isdigit() and int(text[:12]) <= PRIORITY_MAX):
        raise _Wrong(f"priority is {text!r}, not {', '.join(PRIORITY_NAMES)} or 0 to {PRIORITY_MAX}")
    return int(text)


def _moment(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise _Wrong(f"TIMESTAMP is {text!r}, not a time like 2023-11-16 18:15:46.680") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
