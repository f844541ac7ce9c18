"""What each request is doing, what the last ones did, and what each key, tenant and model used, hour by hour.

Owns one record for each request, from arrival to some time after its end: always while it runs, then as one of the
most recent. Never holds bodies or keys. Only `reason` and `details`, which are for operators, quote an engine.

Also owns the counts of use that are not written yet, and how many names are told apart: names that callers make up
cannot fill the disk. `access/usage_store.py` keeps the counts. What no engine told is None, never 0.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, Final, Literal

State = Literal["waiting", "serving", "done"]


# In the order in which they are shown.
_FIELDS: Final = (
    "id",
    "model",
    "asked_as",
    "tenant",
    "client",
    "route",
    "stream",
    "priority",
    "arrived_at",
    "state",
    "slot",
    "model_version",
    "model_repo_id",
    "wait_s",
    "first_byte_s",
    "total_s",
    "status",
    "error_code",
    "error_message",
    "reason",
    "details",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "gpu_time_ms",
    "audio_s",
    "pictures",
    "estimated",
    "chunks",
)


class Record:
    """One request, filled in as it goes on. What is not known yet is None. Times are seconds since arrival. A plain
    class: there is one for every request, and even a compiled dataclass is constructed by the interpreter."""

    __slots__ = _FIELDS

    def __init__(
        self,
        *,
        id: str,
        model: str,
        asked_as: str,
        tenant: str,
        route: str,
        arrived_at: float,
        client: str | None = None,
        stream: bool = False,
        priority: int = 1,
    ) -> None:
        self.id = id
        # The model's id, and the id or alias that the caller sent.
        self.model = model
        self.asked_as = asked_as
        self.tenant = tenant
        self.client = client
        self.route = route
        self.stream = stream
        self.priority = priority
        # Wall clock, for people.
        self.arrived_at = arrived_at
        self.state: State = "waiting"
        self.slot: str | None = None
        # Of a model under version control: which weights answer.
        self.model_version: int | None = None
        self.model_repo_id: str | None = None
        self.wait_s: float | None = None
        self.first_byte_s: float | None = None
        self.total_s: float | None = None
        self.status: int | None = None
        self.error_code: str | None = None
        # The message for callers; the one for operators, and the engine's lines that belong to it.
        self.error_message: str | None = None
        self.reason: str | None = None
        self.details: str | None = None
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        # Prompt tokens that were not computed again, and how long the engine computed, where it tells.
        self.cached_tokens: int | None = None
        self.gpu_time_ms: int | None = None
        # Seconds of sound that were heard or made, and pictures that were made, where the engine tells.
        self.audio_s: float | None = None
        self.pictures: int | None = None
        # True if the gateway counted the tokens because the engine did not report them.
        self.estimated = False
        self.chunks = 0

    def as_dict(self) -> dict[str, Any]:
        """Every field, ready to be JSON."""
        return {name: getattr(self, name) for name in _FIELDS}


class Activity:
    """`begin` and `end` match. If an id is used twice, the newest request counts."""

    def __init__(self, keep_max: int = 2_000) -> None:
        self._live: dict[str, Record] = {}
        # In the order in which they ended. There is no index by id: few are asked for, and every request ends.
        self._ended: deque[Record] = deque(maxlen=keep_max)

    def __len__(self) -> int:
        """The number of requests that run now."""
        return len(self._live)

    def begin(self, record: Record) -> None:
        self._live[record.id] = record

    def end(self, record: Record) -> None:
        """This request is over. Does nothing for one that was ended before or never begun."""
        if self._live.get(record.id) is not record:
            return
        del self._live[record.id]
        record.state = "done"
        self._ended.append(record)

    def get(self, request_id: str) -> Record | None:
        live = self._live.get(request_id)
        return live or next((record for record in reversed(self._ended) if record.id == request_id), None)

    def recent(self, limit: int, model: str | None = None) -> list[Record]:
        """Running requests, then ended ones, each with the newest first."""
        found: list[Record] = []
        for record in chain(reversed(self._live.values()), reversed(self._ended)):
            if len(found) >= limit:
                break
            if model is None or record.model == model:
                found.append(record)
        return found


# --- what keys, tenants and models used -----------------------------------------------------------------------------

HOUR_S: Final = 3_600
DAY_S: Final = 24 * HOUR_S
# What is beyond the bounds below is counted under this name.
OTHER: Final = "other"
# Names (key, tenant and model together) of one day; and of those the ones with a tenant that a caller made up.
NAMES_MAX: Final = 10_000
MADE_UP_MAX: Final = 500
# Rows that wait for the disk. Only a disk that takes nothing for long lets them become so many.
WAITING_MAX: Final = 50_000
# No answer has as many tokens, pictures or seconds; engines of other makers send what they like.
FIGURE_MAX: Final = 10**12

# Key, tenant and model; empty where there is none.
Name = tuple[str, str, str]
# The beginning of its hour (Unix time), and its name.
RowKey = tuple[int, str, str, str]
Figures = tuple[int | float | None, ...]

_RATE_LIMITED: Final = 429
_CLIENT_CLOSED: Final = 499


# The names of the figures, everywhere: in the file, in answers, in tables.
FIGURES: Final = (
    "requests",
    "refused",
    "rate_limited",
    "failed",
    "aborted",
    "estimated",
    "uncounted",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "gpu_s",
    "answer_s",
    "audio_s",
    "pictures",
)


class Counts:
    """The sums of one row. A sum is None until something is known that belongs to it."""

    __slots__ = FIGURES

    def __init__(self) -> None:
        self.requests = 0
        # By status: 4xx, of those 429, 5xx, and callers that left.
        self.refused = 0
        self.rate_limited = 0
        self.failed = 0
        self.aborted = 0
        # Answers whose tokens the gateway guessed, and answers of which nothing is known but their time.
        self.estimated = 0
        self.uncounted = 0
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.gpu_s: float | None = None
        self.answer_s = 0.0
        self.audio_s: float | None = None
        self.pictures: int | None = None

    def figures(self) -> Figures:
        """In the order of `FIGURES`."""
        return tuple(getattr(self, name) for name in FIGURES)

    def add(self, other: Counts) -> None:
        """Count what `other` counted, too."""
        for name in FIGURES:
            one, more = getattr(self, name), getattr(other, name)
            if more is not None:
                setattr(self, name, more if one is None else one + more)

    def count_status(self, status: int) -> None:
        if status == _CLIENT_CLOSED:
            self.aborted += 1
        elif status >= 500:
            self.failed += 1
        elif status >= 400:
            self.refused += 1
            if status == _RATE_LIMITED:
                self.rate_limited += 1


class UsageCounts:
    """Belongs to one event loop. `waiting` is what is not written yet."""

    def __init__(
        self,
        is_named: Callable[[str], bool],
        wall: Callable[[], float] = time.time,
        *,
        names_max: int = NAMES_MAX,
        made_up_max: int = MADE_UP_MAX,
        waiting_max: int = WAITING_MAX,
    ) -> None:
        """`is_named` is true for tenants of the configuration."""
        self._is_named = is_named
        self._wall = wall
        self._names_max = names_max
        self._made_up_max = made_up_max
        self._waiting_max = waiting_max
        self.waiting: dict[RowKey, Counts] = {}
        # The names of this day, and how many of them were made up.
        self._day = 0
        self._names: set[Name] = set()
        self._made_up = 0

    def ended(self, key: str, tenant: str, model: str, record: Record, is_uncounted: bool) -> None:
        """Count a request that has ended. `is_uncounted`: an engine worked for it, and nothing tells how much."""
        counts = self._row(key, tenant, model)
        counts.requests += 1
        counts.count_status(record.status or 0)
        if is_uncounted:
            counts.uncounted += 1
        if record.estimated:
            # Only its events were seen; how long its prompt was is not known.
            counts.estimated += 1
        elif record.prompt_tokens is not None:
            counts.prompt_tokens = _sum(counts.prompt_tokens, record.prompt_tokens)
        if record.completion_tokens is not None:
            counts.completion_tokens = _sum(counts.completion_tokens, record.completion_tokens)
        if record.cached_tokens is not None and not record.estimated:
            counts.cached_tokens = _sum(counts.cached_tokens, record.cached_tokens)
        if record.gpu_time_ms is not None:
            counts.gpu_s = _seconds(counts.gpu_s, record.gpu_time_ms / 1000)
        if record.wait_s is not None and record.total_s is not None:
            counts.answer_s += max(0.0, record.total_s - record.wait_s)
        if record.audio_s is not None:
            counts.audio_s = _seconds(counts.audio_s, record.audio_s)
        if record.pictures is not None:
            counts.pictures = _sum(counts.pictures, record.pictures)

    def refused(self, key: str, tenant: str, model: str, status: int) -> None:
        """Count a request that no engine was asked."""
        counts = self._row(key, tenant, model)
        counts.requests += 1
        counts.count_status(status)

    def recall(self, names: Iterable[Name]) -> None:
        """These are names of this day already."""
        self._roll(int(self._wall()))
        for name in names:
            self._known(name)

    def take(self) -> dict[RowKey, Counts]:
        """What waits, to be written by the caller."""
        taken, self.waiting = self.waiting, {}
        return taken

    def put_back(self, rows: dict[RowKey, Counts]) -> None:
        """These could not be written; they wait again."""
        newer, self.waiting = self.waiting, rows
        for row, counts in newer.items():
            kept = self.waiting.get(row)
            if kept is None:
                self.waiting[row] = counts
            else:
                kept.add(counts)

    def _row(self, key: str, tenant: str, model: str) -> Counts:
        now = int(self._wall())
        hour = now - now % HOUR_S
        counts = self.waiting.get((hour, key, tenant, model))
        return self._new_row(now, (key, tenant, model)) if counts is None else counts

    def _new_row(self, now: int, name: Name) -> Counts:
        self._roll(now)
        if len(self.waiting) >= self._waiting_max:
            name = (OTHER, OTHER, OTHER)
        elif not self._known(name):
            shortened = (name[0], OTHER, name[2])
            name = shortened if self._known(shortened) else (OTHER, OTHER, OTHER)
        row = (now - now % HOUR_S, *name)
        counts = self.waiting.get(row)
        if counts is None:
            counts = self.waiting[row] = Counts()
        return counts

    def _roll(self, now: int) -> None:
        if (day := now // DAY_S) != self._day:
            self._day = day
            self._names.clear()
            self._made_up = 0

    def _known(self, name: Name) -> bool:
        """True if this name is one of the day's, from now on if need be."""
        if name in self._names:
            return True
        key, tenant, _ = name
        is_made_up = not key and tenant not in ("", OTHER) and not self._is_named(tenant)
        if len(self._names) >= self._names_max or (is_made_up and self._made_up >= self._made_up_max):
            return False
        self._names.add(name)
        self._made_up += is_made_up
        return True


def _sum(one: int | None, other: int | None) -> int | None:
    """The sum of what is known. A figure that no answer can have is not known."""
    if other is None or not 0 <= other <= FIGURE_MAX:
        return one
    return other if one is None else one + other


def _seconds(one: float | None, other: float | None) -> float | None:
    if other is None or not 0 <= other <= FIGURE_MAX:
        return one
    return other if one is None else one + other
