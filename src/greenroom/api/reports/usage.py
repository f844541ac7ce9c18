"""What keys, tenants and models used, as JSON or CSV. A key without `admin` or the verb `read` sees its own usage only.

Owns how a question is read and how the rows are shown. `access/usage_store.py` has the rows.
"""

from __future__ import annotations

import csv
import io
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from greenroom.access.keys import Caller, Permission
from greenroom.access.usage_store import GROUPS, ROWS_MAX, By, UsageQuestion, UsageRow, UsageStore
from greenroom.api.asgi import asked_by_admin, caller_of
from greenroom.api.declared import Routes, get
from greenroom.api.views import View
from greenroom.errors import BadRequest, NotFound, shown
from greenroom.telemetry.activity import FIGURES, HOUR_S

PATH: Final = "/api/v1/usage"
CSV: Final = "text/csv"
_UNITS: Final = {"m": 60, "h": HOUR_S, "d": 24 * HOUR_S, "w": 7 * 24 * HOUR_S}
_SPAN: Final = re.compile(r"([0-9]{1,6})([mhdw])")
_UNIX: Final = re.compile(r"[0-9]{1,11}")
# How a spreadsheet recognises a formula. Callers without keys choose the names of their tenants.
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")

When = Annotated[str | None, Query(max_length=64)]


class Used(View):
    """Sums. A sum is null where nothing is known that belongs to it."""

    requests: int
    """Requests to models that have ended, refused ones included."""
    refused: int
    """Answered with 4xx, by the gateway or the engine."""
    rate_limited: int
    """Of those, the ones answered with 429."""
    failed: int
    """Answered with 5xx."""
    aborted: int
    """The caller left before the answer was complete."""
    estimated: int
    """Answers whose `completion_tokens` are a guess, because the stream ended before the engine told them. Their
    prompts are not counted."""
    uncounted: int
    """Answers of which neither tokens nor sound nor pictures are known, because the engine did not tell."""
    prompt_tokens: int | None
    cached_tokens: int | None
    """Of the prompt tokens, those that were not computed again, where the engine tells."""
    completion_tokens: int | None
    gpu_s: float | None
    """How long engines computed, where they tell."""
    answer_s: float
    """From the grant of a slot to the end of the answer, over all answers."""
    audio_s: float | None
    """Sound that was heard or made."""
    pictures: int | None


class UsedBy(Used):
    """The usage of one group. Only the fields that were asked for with `by` are there."""

    key: str | None = None
    """The name of a key; null for requests without one."""
    tenant: str | None = None
    """Null for requests of no tenant."""
    model: str | None = None
    """Null for requests that were refused before their model was known."""
    day: str | None = None
    """YYYY-MM-DD, in UTC."""


class UsageView(View):
    since: int
    """Unix time of the first hour that is counted."""
    until: int
    by: list[str]
    rows: list[UsedBy]
    total: Used


_KINDS: Final[dict[int | str, dict[str, Any]]] = {200: {"content": {CSV: {}}}}


class UsageRoutes(Routes):
    def __init__(self, store: UsageStore | None) -> None:
        """`store` is None where none is kept."""
        self._store = store

    @get(
        PATH,
        needs=Permission.ASK,
        response_model=UsageView,
        response_model_exclude_unset=True,
        responses=_KINDS,
    )
    async def usage(
        self,
        request: Request,
        since: When = None,
        until: When = None,
        by: Annotated[str, Query(max_length=64)] = "model",
        format: Literal["json", "csv"] | None = None,
    ) -> UsageView | Response:
        """What was used from `since` (30d) to `until` (now), by any of key, tenant, model and day.

        Times are whole hours, older than eight days whole days (UTC): `7d`, `24h`, `2026-11-01`, or Unix time. Without
        an admin's key, only what the caller's own key used. `format=csv` or `Accept: text/csv` makes it a CSV file.
        """
        store = self._store
        if store is None:
            raise NotFound("No usage is kept here (server.usage_days is 0).")
        question = _question(since, until, by, None if asked_by_admin(request) else caller_of(request))
        rows = await store.ask(question)
        if len(rows) > ROWS_MAX:
            raise BadRequest(f"These are more than {ROWS_MAX:,} rows; ask for a shorter time, or by less.", param="by")
        if format == "csv" or (format is None and CSV in request.headers.get("accept", "")):
            name = {"content-disposition": 'attachment; filename="usage.csv"'}
            return Response(as_csv(question.by, rows), media_type=f"{CSV}; charset=utf-8", headers=name)
        shown_rows = [UsedBy(**_named(question.by, row), **_figures(row[len(question.by) :])) for row in rows]
        return UsageView(
            since=question.since, until=question.until, by=list(question.by), rows=shown_rows, total=_total(shown_rows)
        )


# --- the question ---------------------------------------------------------------------------------------------------


def _question(since: str | None, until: str | None, by: str, caller: Caller | None) -> UsageQuestion:
    """`caller` sees its own usage only; None sees all. Raises BadRequest."""
    now = time.time()
    begin, end = moment(since or "30d", now, "since"), now if until is None else moment(until, now, "until")
    if begin > end:
        raise BadRequest("since is later than until.", param="since")
    begin -= begin % HOUR_S
    own = (None, None) if caller is None else (caller.name, caller.tenant or "")
    return UsageQuestion(int(begin), int(end), groups(by), *own)


def groups(by: str) -> tuple[By, ...]:
    """The groups of a comma list, each once. Raises BadRequest."""
    named = dict.fromkeys(word.strip() for word in by.split(","))
    found = tuple(group for word in named for group in GROUPS if group == word)
    if len(found) != len(named):
        raise BadRequest(f"by is a list of {', '.join(GROUPS)}, with commas between them; not {shown(by)}.", param="by")
    return found


def moment(text: str, now: float, param: str) -> float:
    """Unix time of `7d` (before now), of Unix time, or of a date or time of ISO 8601, in UTC. Raises BadRequest."""
    text = text.strip()
    if (span := _SPAN.fullmatch(text)) is not None:
        return max(0.0, now - int(span[1]) * _UNITS[span[2]])
    if _UNIX.fullmatch(text):
        return float(text)
    try:
        # A plus sign in a query is a space.
        at = datetime.fromisoformat(re.sub(r" (?=[0-9]{2}:?[0-9]{2}$)", "+", text) if "T" in text else text)
        return max(0.0, (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        raise BadRequest(
            f"{param} is a time back from now (7d, 24h, 2w), a date (2026-11-01), a time (2026-11-01T12:00Z) or Unix "
            f"time; not {shown(text)}.",
            param=param,
        ) from None


# --- the answer -----------------------------------------------------------------------------------------------------


def _named(by: Sequence[By], row: UsageRow) -> dict[str, Any]:
    return {group: _day(value) if group == "day" else value or None for group, value in zip(by, row, strict=False)}


def _day(start: object) -> str:
    return (datetime.fromtimestamp(0, UTC) + timedelta(seconds=int(str(start)))).date().isoformat()


def _figures(figures: Sequence[Any]) -> dict[str, Any]:
    pairs = zip(FIGURES, figures, strict=True)
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in pairs}


def _total(rows: Sequence[Used]) -> Used:
    sums: dict[str, Any] = {}
    for name in FIGURES:
        known = [value for row in rows if (value := getattr(row, name)) is not None]
        sums[name] = sum(known) if known else None
    counted = ("requests", "refused", "rate_limited", "failed", "aborted", "estimated", "uncounted", "answer_s")
    return Used(**_figures([sums[name] or 0 if name in counted else sums[name] for name in FIGURES]))


def as_csv(by: Sequence[By], rows: Sequence[UsageRow]) -> str:
    """A header and a line for each row; what is not known is empty."""
    text = io.StringIO()
    lines = csv.writer(text)
    lines.writerow((*by, *FIGURES))
    for row in rows:
        named, figures = _named(by, row), _figures(row[len(by) :])
        lines.writerow([*(_cell(value) for value in named.values()), *figures.values()])
    return text.getvalue()


def _cell(name: str | None) -> str | None:
    """A name that a spreadsheet would take for a formula gets a quote before it."""
    return f"'{name}" if name is not None and name.startswith(_FORMULA) else name
