"""Recorded traces: the gateway's own recordings and public logs, as CSV or as lines of JSON.

Owns the meaning of cells: the unit of times, and what happens to models that are not configured. `columns.py`
finds the columns. A trace says what it took its columns to be and which rows it left out. Rows may be in any order;
time begins with the earliest. An unknown length is empty, and counts as the mean of the known ones. A wrong row is an
error with file and line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from io import TextIOWrapper
from pathlib import Path
from random import Random

from greenroom.config.schema import PRIORITY_NAMES
from greenroom.sim.records import Arrivals, SimArrival
from greenroom.sim.traces.cells import UNITS_S, Lengths, Times, WrongCell, priority_of, shown, tenant_of
from greenroom.sim.traces.columns import MARK_BYTES, TITLES, TraceCells, TraceError, refuse_packed, table_of
from greenroom.sim.traces.speeds import AnswerTimes, RecordedAnswers
from greenroom.sim.workloads import ARRIVALS_MAX, Draw, zipf

ROWS_MAX = ARRIVALS_MAX
# Public traces may carry whole prompts.
LINE_CHARS_MAX = 4_000_000
# Models that are named in a remark on those left out.
NAMED_MAX = 5


@dataclass(frozen=True, slots=True)
class Known:
    """The configured models and their aliases. A trace that names no models is spread over them."""

    models: Sequence[str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    priorities: Mapping[str, int] = field(default_factory=dict)
    # True if rows for other models are left out; otherwise they are an error.
    skips_others: bool = False
    # True if the models that a trace names do not count: it is spread like one without.
    spreads: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """The rows in order of time, what the columns were taken to be, and remarks on what differs from the file."""

    rows: Arrivals
    columns: str
    remarks: tuple[str, ...] = ()
    # A guess that the caller should confirm; empty if there is none.
    doubt: str = ""
    # What the rows tell of answers by model; empty unless it is a recording of the gateway.
    answers: Mapping[str, Sequence[AnswerTimes]] = field(default_factory=dict)


def read_trace(path: str | Path, known: Known | None = None, seed: int = 0) -> list[SimArrival]:
    """The rows in order of time. Without `known` any model is accepted."""
    return list(trace_of(path, known, seed).rows)


def trace_of(path: str | Path, known: Known | None = None, seed: int = 0, time_unit: str | None = None) -> Trace:
    """The rows in order of time, with what was understood and remarks on rows left out and completed. `time_unit` is
    one of `UNITS_S`, for times that are numbers; without it the unit is found from the titles and times."""
    try:
        with open(path, "rb") as raw:
            refuse_packed(str(path), raw.peek(MARK_BYTES))
            file = TextIOWrapper(raw, newline="", encoding="utf-8-sig")
            return _Reading(str(path), _lines(str(path), file), known, seed, time_unit).trace()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise TraceError(f"{path}: cannot be read: {reason}") from error


def _lines(name: str, file: TextIOWrapper) -> Iterator[str]:
    """The lines of a file. Raises TraceError for one that is too long, as a file without any line breaks is."""
    number = 0
    while line := file.readline(LINE_CHARS_MAX + 1):
        number += 1
        if len(line) > LINE_CHARS_MAX:
            raise TraceError(f"{name}:{number}: the line has more than {LINE_CHARS_MAX:,} characters; is it a trace?")
        yield line


class _Reading:
    """Reads one file to its end."""

    def __init__(self, name: str, file: Iterator[str], known: Known | None, seed: int, time_unit: str | None) -> None:
        self._name = name
        self._table = table_of(name, file)
        self._rows = Arrivals()
        # Further ones, which are left out.
        self._headers = 0
        self._times = Times(self._table.titles["t"], time_unit)
        self._prompts = Lengths("prompt_len", self._table.titles)
        self._outputs = Lengths("output_len", self._table.titles)
        spreads = "model" not in self._table.titles or (known is not None and known.spreads)
        self._models = _Drawn(name, known, seed) if spreads else _NamedModels(known)
        # A model that was drawn did not give that answer.
        self._answers = None if spreads else RecordedAnswers()

    def trace(self) -> Trace:
        for count, cells in enumerate(self._table.rows, start=1):
            if count > ROWS_MAX:
                raise TraceError(f"{self._name}: more than {ROWS_MAX:,} rows; give a part of it")
            if self._is_header(cells):
                self._headers += 1
                continue
            try:
                self._take(cells)
            except WrongCell as error:
                raise TraceError(f"{self._name}:{cells.line}: {error}") from error
        if not self._rows:
            raise TraceError(f"{self._name}: there is no row in it{self._why_none()}")
        return self._completed()

    def _why_none(self) -> str:
        if self._models.skipped:
            return " for a model of the configuration"
        if self._table.kind:
            return ": no request arrived while it was recorded"
        return ", only a header; a gateway with server.record_activity adds a row for each answered request"

    def _take(self, cells: TraceCells) -> None:
        found = self._models.of(cells.model)
        if found is not None:
            (model, usual), at = found, self._times.read(cells.t)
            prompt_len, output_len = self._prompts.read(cells.prompt_len), self._outputs.read(cells.output_len)
            priority = priority_of(cells.priority, usual)
            self._rows.add(at, model, prompt_len, output_len, tenant_of(cells.tenant), priority)
            if self._answers is not None and cells.total_s:
                self._answers.take(model, at, prompt_len, output_len, cells.wait_s, cells.total_s)

    def _is_header(self, cells: TraceCells) -> bool:
        """True in the middle of a file that was put together from several."""
        titles = self._table.titles
        # Most rows differ in the first that is looked at.
        return cells.t == titles["t"] and all(getattr(cells, name) == title for name, title in titles.items())

    def _completed(self) -> Trace:
        rows = self._rows
        unit, why = self._times.unit(rows, self._table.kind == "JSON")
        rows.unit_s = UNITS_S[unit]
        rows.usual_prompt_len, of_prompts = self._prompts.usual()
        rows.usual_output_len, of_outputs = self._outputs.usual()
        rows.sort()
        of_headers = f"{self._headers:,} with the titles once more left out" if self._headers else ""
        remarks = (self._models.remark, of_headers, of_prompts, of_outputs)
        of_times, doubt = self._times.origin(unit, why), self._times.doubt(unit, why)
        answers = {} if self._answers is None else self._answers.by_model(rows.unit_s)
        return Trace(rows, self._columns(of_times), tuple(filter(None, remarks)), doubt, answers)

    def _columns(self, of_times: str) -> str:
        titles = self._table.titles
        parts = [of_times, *filter(None, [self._models.origin(titles)])]
        others = [
            (meaning, titles[meaning]) for meaning in TITLES if meaning in titles and meaning not in ("t", "model")
        ]
        parts += [f"{meaning} from {title}" for meaning, title in others if title != meaning]
        if self._table.unused:
            parts.append(f"not used: {', '.join(self._table.unused)}")
        kind = f"{self._table.kind}: " if self._table.kind else ""
        return kind + "; ".join(parts)


class _NamedModels:
    """The models that the rows name."""

    def __init__(self, known: Known | None) -> None:
        self._known = known
        self._configured = frozenset(known.models) if known is not None else frozenset()
        self._found: dict[str, tuple[str, int] | None] = {}
        self.skipped: Counter[str] = Counter()

    def of(self, name: str) -> tuple[str, int] | None:
        """The model and its usual priority; None if the row is left out. Raises WrongCell."""
        if name not in self._found:
            self._found[name] = self._look_up(name)
        found = self._found[name]
        if found is None:
            self.skipped[name] += 1
        return found

    def _look_up(self, name: str) -> tuple[str, int] | None:
        known, usual = self._known, PRIORITY_NAMES["normal"]
        if not name and not (known is not None and known.skips_others):
            raise WrongCell("model is empty")
        if known is None:
            return name, usual
        model = known.aliases.get(name, name)
        if model in self._configured:
            return model, known.priorities.get(model, usual)
        if known.skips_others:
            return None
        near = get_close_matches(model, known.models, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else "."
        raise WrongCell(
            f"there is no model {shown(model)} in the configuration{meant} Give it as an alias, leave such rows out "
            "(--skip-unknown) or spread all rows over your models (--spread)"
        )

    def origin(self, titles: Mapping[str, str]) -> str:
        return "" if titles["model"] == "model" else f"model from {titles['model']}"

    @property
    def remark(self) -> str:
        """On rows left out; empty if there are none."""
        if not self.skipped:
            return ""
        named = [f"{shown(name)} {count:,}" for name, count in self.skipped.most_common(NAMED_MAX)]
        more = f", and {len(self.skipped) - NAMED_MAX:,} more" if len(self.skipped) > NAMED_MAX else ""
        total = self.skipped.total()
        return f"{total:,} for models that are not in the configuration left out ({', '.join(named)}{more})"


class _Drawn:
    """Models drawn from the configuration, the first most often."""

    remark = ""

    def __init__(self, name: str, known: Known | None, seed: int) -> None:
        if known is None or not known.models:
            raise TraceError(f"{name}: it names no models; say over which to spread it")
        self._draw, self._random, self._priorities = (
            Draw(zipf(known.models)),
            Random(f"{seed}:models"),
            known.priorities,
        )
        self.skipped: Counter[str] = Counter()

    def of(self, name: str) -> tuple[str, int] | None:
        model = self._draw.one(self._random)
        return model, self._priorities.get(model, PRIORITY_NAMES["normal"])

    def origin(self, titles: Mapping[str, str]) -> str:
        instead = f", whatever {titles['model']} says" if "model" in titles else ""
        return f"models drawn from the configuration{instead}, the first most often"
