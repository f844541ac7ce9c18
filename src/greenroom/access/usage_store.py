"""Usage kept across restarts: a small SQLite file in the state directory.

Owns the file, how often it is written and how long its rows live. Counts of the last seconds wait in memory
(`telemetry/activity.py`) and are added in one transaction, in a thread: kill -9 loses those seconds and nothing else,
and what a full disk does not take waits for the next try. A row is one name in one hour. Hours become days after
`HOURS_KEPT_S`; days are dropped after `days`, by a clock that was not set just now.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from greenroom.base.detached import run_detached
from greenroom.base.repeated import Repeated
from greenroom.config.limits import is_named
from greenroom.config.part import Part
from greenroom.errors import UsageUnavailable
from greenroom.runtime.clocks import SteadyClock
from greenroom.runtime.shell import Shell
from greenroom.telemetry.activity import DAY_S, FIGURES, Counts, Name, RowKey, UsageCounts
from greenroom.telemetry.logs import get_logger

_log = get_logger("usage")

FILE_NAME: Final = "usage.db"
VERSION: Final = 1
# A crash costs at most what was counted in this time.
WRITE_EVERY_S: Final = 5.0
# Long enough for a week by the hour.
HOURS_KEPT_S: Final = 8 * DAY_S
# How long a question waits for the disk, and a write for another program that reads the file.
ANSWER_MAX_S: Final = 20.0
BUSY_MAX_S: Final = 5.0
# No reader needs more rows in one answer.
ROWS_MAX: Final = 10_000

By = Literal["key", "tenant", "model", "day"]
# By what usage can be told apart, and how SQLite says it.
GROUPS: Final[dict[By, str]] = {
    "key": "key",
    "tenant": "tenant",
    "model": "model",
    "day": f"start - start % {DAY_S}",
}
_REAL: Final = ("gpu_s", "answer_s", "audio_s")
_COLUMNS: Final = ", ".join(f"{name} {'REAL' if name in _REAL else 'INTEGER'}" for name in FIGURES)
_NAMED: Final = "start, hours, key, tenant, model"
_TABLE: Final = f"""
    (start INTEGER NOT NULL, hours INTEGER NOT NULL, key TEXT NOT NULL, tenant TEXT NOT NULL, model TEXT NOT NULL,
     {_COLUMNS}, PRIMARY KEY ({_NAMED})) WITHOUT ROWID"""
_PLACES: Final = ", ".join("?" * (5 + len(FIGURES)))
# A sum of what is known: of two figures, one may be missing.
_MERGED: Final = ", ".join(f"{name} = COALESCE({name} + excluded.{name}, {name}, excluded.{name})" for name in FIGURES)
_SUMS: Final = ", ".join(f"SUM({name})" for name in FIGURES)
_CONFLICT: Final = f"ON CONFLICT ({_NAMED}) DO UPDATE SET {_MERGED}"
_TO_DAYS: Final = f"""
    INSERT INTO usage SELECT start - start % {DAY_S}, 24, key, tenant, model, {_SUMS} FROM usage
    WHERE hours = 1 AND start < ? GROUP BY 1, 3, 4, 5 {_CONFLICT}"""


@dataclass(frozen=True, slots=True)
class UsageQuestion:
    """From `since` on and before `until` (Unix time); None: every key and tenant."""

    since: int
    until: int
    by: tuple[By, ...]
    key: str | None = None
    tenant: str | None = None


# What it is grouped by, in the order of the question; then the figures.
UsageRow = tuple[str | int | float | None, ...]


class UsageStore(Part):
    writes = True

    def __init__(
        self,
        folder: Path,
        counts: UsageCounts,
        days: int,
        *,
        write_every_s: float = WRITE_EVERY_S,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = UsageFile(folder / FILE_NAME, days)
        self.counts = counts
        self._wall = wall
        self._steady = SteadyClock(wall, clock)
        # What was taken to be written is neither in memory nor in the file until it is.
        self._lock = asyncio.Lock()
        self._writing = Repeated(self.write, "writing usage", lambda: write_every_s, _log.failed)
        self._failed = False
        self._rolled_on = 0

    async def open(self) -> None:
        """Go on where an earlier run ended. A file that cannot be read costs a warning and nothing else."""
        now = int(self._wall())
        try:
            self.counts.recall(await run_detached(lambda: self._file.opened(now), "read usage"))
        except (OSError, sqlite3.Error) as error:
            self._warn_once(error)
        self._writing.start()

    async def close(self) -> None:
        """Write a last time."""
        await self._writing.stop()
        await self.write()

    async def write(self) -> None:
        """Write what is new, if anything is."""
        async with self._lock:
            taken, now = self.counts.take(), self._steady.now()
            try:
                if taken:
                    await run_detached(lambda: self._file.add(taken), "write usage")
                    taken = {}
                if now is not None and int(now // DAY_S) != self._rolled_on:
                    await run_detached(lambda: self._file.roll(int(now)), "tidy usage")
                    self._rolled_on = int(now // DAY_S)
            except Exception as error:
                self.counts.put_back(taken)
                self._warn_once(error)
            else:
                self._failed = False

    async def ask(self, question: UsageQuestion) -> list[UsageRow]:
        """At most one row more than `ROWS_MAX`. Raises UsageUnavailable if the disk does not answer."""
        try:
            async with asyncio.timeout(ANSWER_MAX_S), self._lock:
                waiting = _rows(self.counts.waiting)
                return await run_detached(lambda: self._file.ask(question, waiting), "ask usage")
        except (OSError, sqlite3.Error) as error:
            raise UsageUnavailable(f"The file of usage cannot be read: {_why(error)}.") from error

    def _warn_once(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            _log.warning("usage is kept in memory for now", file=str(self._file.path), error=_why(error))


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or repr(error)


def _rows(counts: dict[RowKey, Counts]) -> list[UsageRow]:
    return [(row[0], 1, *map(_text, row[1:]), *counted.figures()) for row, counted in counts.items()]


def _text(name: object) -> str:
    """A name that is not valid text must not keep all others from being written."""
    return str(name).encode("utf-8", "backslashreplace").decode()


def make_usage(shell: Shell) -> UsageStore | None:
    """None if no usage is kept."""
    if not (days := shell.config.server.usage_days):
        return None
    return UsageStore(shell.state_dir.path, UsageCounts(lambda tenant: is_named(shell.config, tenant)), days)


class UsageFile:
    """The file itself. Blocks; each call opens and closes it, in whatever thread. Raises OSError and sqlite3.Error."""

    def __init__(self, path: Path, days: int) -> None:
        self.path = path
        self._days = days

    def opened(self, now: int) -> list[Name]:
        """Begin the file or check it. Returns the names of this day. A file that is none of ours is set aside."""
        try:
            return self._names(now)
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            kept = self.path.with_suffix(".broken")
            _log.warning("usage is counted anew; the file is set aside", file=str(kept), error=str(error))
            os.replace(self.path, kept)
            return self._names(now)

    def add(self, counts: dict[RowKey, Counts]) -> None:
        """Add these counts, all or none of them."""
        with closing(self._connected()) as db, db:
            db.execute("BEGIN IMMEDIATE")
            _insert(db, "usage", _rows(counts))

    def roll(self, now: int) -> None:
        """Make days of old hours and drop old days."""
        today = now - now % DAY_S
        with closing(self._connected()) as db, db:
            db.execute("BEGIN IMMEDIATE")
            db.execute("DELETE FROM usage WHERE start < ?", (today - self._days * DAY_S,))
            db.execute(_TO_DAYS, (today - HOURS_KEPT_S,))
            db.execute("DELETE FROM usage WHERE hours = 1 AND start < ?", (today - HOURS_KEPT_S,))

    def ask(self, question: UsageQuestion, waiting: Sequence[UsageRow]) -> list[UsageRow]:
        """The sums by group, of the file and of the rows that wait to be written."""
        groups = ", ".join(GROUPS[one] for one in question.by)
        # Rows of which any part lies in the time.
        wanted = "start > ? AND start < ? AND start + hours * 3600 > ?"
        said: list[str | int] = [question.since - DAY_S, question.until, question.since]
        for column, value in (("key", question.key), ("tenant", question.tenant)):
            if value is not None:
                wanted += f" AND {column} = ?"
                said.append(value)
        with closing(self._connected()) as db:
            db.execute("PRAGMA temp_store = MEMORY")
            db.execute(f"CREATE TEMP TABLE waiting {_TABLE}")
            _insert(db, "waiting", waiting)
            both = f"(SELECT * FROM main.usage WHERE {wanted} UNION ALL SELECT * FROM waiting WHERE {wanted})"
            query = f"SELECT {groups}, {_SUMS} FROM {both} GROUP BY {groups} ORDER BY {groups} LIMIT {ROWS_MAX + 1}"
            return db.execute(query, [*said, *said]).fetchall()

    def _names(self, now: int) -> list[Name]:
        with closing(self._connected()) as db:
            today = now - now % DAY_S
            return db.execute("SELECT DISTINCT key, tenant, model FROM usage WHERE start >= ?", (today,)).fetchall()

    def _connected(self) -> sqlite3.Connection:
        # No other user may read it, and no link is followed.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        os.close(os.open(self.path, flags, 0o600))
        db = sqlite3.connect(self.path, timeout=BUSY_MAX_S, isolation_level=None)
        try:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version not in (0, VERSION):
                raise sqlite3.DatabaseError(f"it has version {version}, this gateway reads {VERSION}")
            if version == 0:
                db.execute(f"CREATE TABLE IF NOT EXISTS usage {_TABLE}")
                db.execute(f"PRAGMA user_version = {VERSION}")
        except BaseException:
            db.close()
            raise
        return db


def _insert(db: sqlite3.Connection, table: str, rows: Iterable[UsageRow]) -> None:
    db.executemany(f"INSERT INTO {table} VALUES ({_PLACES}) {_CONFLICT}", rows)
