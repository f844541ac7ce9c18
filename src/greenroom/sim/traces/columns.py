"""What a trace file has: its format, which column is what, and its rows as text. Owns the titles of columns (`TITLES`)
and the formats: CSV, lines of JSON, a recording of events. A row is not interpreted here; `traces.py` reads it."""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

from greenroom.errors import ConfigError

# Titles of columns, or keys of JSON, by what they mean; the gateway's own first. Case, spaces and underscores do not
# matter.
TITLES: Mapping[str, tuple[str, ...]] = {
    "t": ("t", "timestamp", "time", "arrival_time", "timestamp_ms", "time_ms", "arrival_time_ms"),
    "model": ("model", "model_id", "model_name"),
    "prompt_len": ("prompt_len", "contexttokens", "request_tokens", "input_length", "prompt_tokens", "input_tokens"),
    "output_len": (
        "output_len",
        "generatedtokens",
        "response_tokens",
        "output_length",
        "completion_tokens",
        "output_tokens",
    ),
    "tenant": ("tenant",),
    "priority": ("priority",),
    # Of the gateway's own recordings; they tell speeds.
    "wait_s": ("wait_s",),
    "total_s": ("total_s",),
}
REQUIRED = ("t", "prompt_len", "output_len")
WANTED = (
    "t, model, prompt_len, output_len (and tenant, priority), or those of a public log, such as "
    "TIMESTAMP, ContextTokens, GeneratedTokens"
)

# Of a cell in an error message.
SHOWN_CHARS_MAX = 60
# What may separate columns; the one that the header has most of counts.
DELIMITERS = ",;\t|"
# Lines of JSON that are looked at for their keys before the first is read: not every one has all.
JSON_KEY_LINES = 100

# The first line of a recording of events, and what marks an arrival in it.
EVENTS_HEAD = '{"greenroom_events":1}'
EVENT_MARK = '"_":"RequestArrived"'


# How files begin that hold no text: what they are, and the program that writes their text to standard output.
MARK_BYTES = 6
PACKED = {
    b"\x1f\x8b": ("gzip", "gzip -dc"),
    b"BZh": ("bzip2", "bzip2 -dc"),
    b"\xfd7zXZ\x00": ("xz", "xz -dc"),
    b"\x28\xb5\x2f\xfd": ("Zstandard", "zstd -dc"),
    b"PK\x03\x04": ("zip", "unzip -p"),
}
PARQUET = b"PAR1"


class TraceError(ConfigError):
    """A trace cannot be read. The message names the file, the line and what was expected there."""

    code = "invalid_trace"


class TraceCells(NamedTuple):
    """One row as text, and its line in the file; what the file does not have is empty."""

    line: int
    t: str
    model: str
    prompt_len: str
    output_len: str
    tenant: str
    priority: str
    wait_s: str
    total_s: str


@dataclass(frozen=True, slots=True)
class TraceTable:
    """What a file has: for each meaning its title, the rest of its titles, and the rows."""

    titles: Mapping[str, str]
    unused: tuple[str, ...]
    rows: Iterator[TraceCells]
    kind: str = ""


def refuse_packed(name: str, begins: bytes) -> None:
    """Raises TraceError if a file that begins so is compressed or Parquet, with what to do about it."""
    for mark, (kind, unpack) in PACKED.items():
        if begins.startswith(mark):
            raise TraceError(
                f"{name}: it is compressed ({kind}): unpack it first, or let a pipe do it: "
                f"--trace <({unpack} {shlex.quote(name)})"
            )
    if begins.startswith(PARQUET):
        raise TraceError(f"{name}: it is a Parquet file: write it as CSV with a header, or as one JSON object a line")


def table_of(name: str, file: Iterator[str]) -> TraceTable:
    """Find the format from the first line that is not empty. Raises TraceError."""
    line, first = next(((line, text) for line, text in enumerate(file, 1) if text.strip()), (0, ""))
    if not line:
        raise TraceError(f"{name}: it is empty; a trace has a row for each request and a header that names {WANTED}")
    if first.strip() == EVENTS_HEAD:
        return TraceTable({"t": "t", "model": "model"}, (), _events(name, file, line), "a recording of events")
    if first.lstrip().startswith("["):
        raise TraceError(f"{name}:{line}: this is one JSON document: give one object a line")
    if first.lstrip().startswith("{"):
        return _json_table(name, [first, *islice(file, JSON_KEY_LINES - 1)], file, line)
    table = csv.reader(chain([first], file), strict=True, delimiter=max(DELIMITERS, key=first.count))
    header = [title.strip() for title in _next_cells(table, name, line)]
    titles, unused = _titles(header, f"{name}:{line}")
    return TraceTable(titles, unused, _csv_rows(name, table, line - 1, header, titles))


def _titles(found: Sequence[str], where: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """The title of each meaning, and titles without one. Raises TraceError if a required one is missing."""
    by_name = {plain(title): title for title in reversed(found)}
    titles = {
        meaning: by_name[plain(name)]
        for meaning, names in TITLES.items()
        for name in reversed(names)
        if plain(name) in by_name
    }
    if missing := [meaning for meaning in REQUIRED if meaning not in titles]:
        raise TraceError(f"{where}: the header must name {WANTED}; there is no {' and no '.join(missing)}")
    if doubled := [title for title in titles.values() if found.count(title) > 1]:
        raise TraceError(f"{where}: the header names {doubled[0]} twice: leave one of these columns out")
    return titles, tuple(title for title in found if title not in titles.values())


def plain(title: str) -> str:
    return title.lower().replace(" ", "").replace("_", "")


def _next_cells(table: Any, name: str, line: int) -> list[str]:
    try:
        return next(table, [])
    except csv.Error as error:
        raise TraceError(f"{name}:{line}: this is not CSV: {error}") from error


def _csv_rows(
    name: str, table: Any, skipped: int, header: Sequence[str], titles: Mapping[str, str]
) -> Iterator[TraceCells]:
    # A column that is not there is an empty cell behind the last.
    places = [header.index(titles[meaning]) if meaning in titles else -1 for meaning in TITLES]
    try:
        for cells in table:
            if not cells:
                continue
            line = skipped + table.line_num
            if len(cells) != len(header):
                values = "1 value" if len(cells) == 1 else f"{len(cells)} values"
                raise TraceError(f"{name}:{line}: {values} where the header names {len(header)}")
            cells.append("")
            yield TraceCells(line, *[cells[place].strip() for place in places])
    except csv.Error as error:
        raise TraceError(f"{name}:{skipped + table.line_num}: this is not CSV: {error}") from error


def _json_table(name: str, begins: Sequence[str], file: Iterator[str], first: int) -> TraceTable:
    """`begins` are the lines before those of `file`; the first of them has this number."""
    keys: dict[str, None] = {}
    for line, text in enumerate(begins, first):
        if text.strip():
            keys |= dict.fromkeys(_object(name, line, text))
    titles, unused = _titles(list(keys), f"{name}:{first}")
    return TraceTable(titles, unused, _json_lines(name, chain(begins, file), first, titles, {*keys}), "JSON")


def _json_lines(
    name: str, file: Iterator[str], first: int, titles: Mapping[str, str], seen: set[str]
) -> Iterator[TraceCells]:
    keys = [titles.get(meaning, "") for meaning in TITLES]
    for line, text in enumerate(file, first):
        if text.strip():
            said = _object(name, line, text)
            if not said.keys() <= seen:
                _refuse_late(f"{name}:{line}", said.keys() - seen, titles)
                seen |= said.keys()
            yield TraceCells(line, *[_text(said.get(key), name, line, key) for key in keys])


def _refuse_late(where: str, keys: Iterable[str], titles: Mapping[str, str]) -> None:
    """Raises TraceError if one of these keys has a meaning that the lines before were read without."""
    for key in keys:
        if any(meaning not in titles and plain(key) in map(plain, names) for meaning, names in TITLES.items()):
            raise TraceError(f"{where}: it has {key!r}, which no line before has: give it in the first, as null")


def _object(name: str, line: int, text: str) -> dict[str, Any]:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{name}:{line}: this is not JSON: {error}") from error
    if not isinstance(said, dict):
        raise TraceError(f"{name}:{line}: this is not a JSON object")
    return said


def _text(value: object, name: str, line: int, key: str) -> str:
    """A value as a cell. Raises TraceError for a list, an object, true and false."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bool | list | dict):
        raise TraceError(f"{name}:{line}: {key} is {_shown(value)}, neither text nor a number")
    return "" if value is None else str(value)


def _shown(value: object) -> str:
    said = json.dumps(value, ensure_ascii=False)
    return said if len(said) <= SHOWN_CHARS_MAX else f"{said[:SHOWN_CHARS_MAX]}…"


def _events(name: str, file: Iterator[str], head: int) -> Iterator[TraceCells]:
    """The arrivals of a recording of events; it has no lengths."""
    for line, text in enumerate(file, head + 1):
        if EVENT_MARK in text:
            said = _object(name, line, text).get("event")
            models = said.get("candidates") if isinstance(said, dict) else None
            if not isinstance(said, dict) or not isinstance(models, list) or not models:
                raise TraceError(f"{name}:{line}: this is not the arrival of a request, which names its models")
            now, tenant, priority = (_text(said.get(key), name, line, key) for key in ("now", "tenant", "priority"))
            yield TraceCells(line, now, _text(models[0], name, line, "candidates"), "", "", tenant, priority, "", "")
