"""The table of operations: long work that outlives the request which started it, and the gateway's own restarts.

Owns every row, the only way from one status to the next, and how much is kept. A status is seen only once it is on
disk, so that no crash takes it back. Never runs anything: jobs are run by `features/jobs/jobs.py`, downloads by
`features/library/downloads.py`, loads and unloads by `features/operations/loads.py`. Jobs and all other kinds are
counted apart, so that neither pushes out the other. Durations, and how old a row of this run is, go by the clock that
is never set: of a row that has changed in this run, each time is told as the time before it and the seconds since.

    queued → running → done | failed | cancelled          queued → failed | cancelled
    running → queued, at a restart, if the operation may run again; a load or unload fails then
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Self, TypeVar

import msgspec

from greenroom.base.detached import run_detached
from greenroom.config.part import Part
from greenroom.config.schema import Config
from greenroom.errors import NotFound, OperationsFull, OperationStoreFull, ResultTooLarge, TooManyUnfinished
from greenroom.runtime.clocks import SteadyClock
from greenroom.runtime.observer import Hub
from greenroom.runtime.operations import files
from greenroom.runtime.operations.files import (
    RETRY_AFTER_S,
    Operation,
    OperationError,
    OperationFiles,
    OperationKind,
    OperationStatus,
    ResultPart,
    disk_failed,
)
from greenroom.telemetry.logs import get_logger

_log = get_logger("operations")

# An operation that ran this often when the gateway died does not run again: it may be the cause.
RUNS_MAX: Final = 3
# Of operations that are no jobs: how many rows there are at most, and how long ended ones stay.
OTHERS_MAX: Final = 10_000
OTHERS_KEEP_S: Final = 3_600.0
# What a row is counted as when it is decided which tenant keeps most.
ROW_BYTES: Final = 4096
RESTARTED: Final = OperationError(
    "restarted", "The gateway ended while this ran. Start it again, or send `retry: true` with what may run twice."
)
RESTARTED_OFTEN: Final = OperationError("restarted", f"The gateway ended {RUNS_MAX} times while this ran.")

MIB: Final = 1024 * 1024

About = TypeVar("About")
Changed = TypeVar("Changed")


@dataclass(frozen=True, slots=True)
class KeepLimits:
    """How much is kept: operations that have ended make room for new ones. Times and counts are those of jobs."""

    keep_s: float
    count_max: int
    bytes_max: int

    @classmethod
    def of_pictures(cls, config: Config) -> KeepLimits:
        images = config.images
        return KeepLimits(images.keep_s, images.count_max, images.store_mib * MIB)


@dataclass(frozen=True, slots=True)
class JobLimits(KeepLimits):
    """`unfinished_max` are jobs of one key or tenant that have not ended. They hold no larger share of the bytes."""

    unfinished_max: int

    @classmethod
    def of(cls, config: Config) -> Self:
        jobs = config.jobs
        return cls(jobs.keep_s, jobs.count_max, jobs.store_mib * MIB, jobs.unfinished_max)


class OperationTable(Part):
    def __init__(
        self,
        stored: OperationFiles,
        limits: Callable[[], JobLimits],
        hub: Hub,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = stored
        self._limits = limits
        self._hub = hub
        self._wall = wall
        self._clock = clock
        self._steady = SteadyClock(wall, clock)
        self._rows: dict[str, Operation] = {}
        # When a row of this run changed last, by the clock that is never set.
        self._changed_at: dict[str, float] = {}
        # Bytes of results that are being written.
        self._parts: dict[str, int] = {}
        # Of all jobs and their parts together.
        self._used_bytes = 0
        # One write at a time: the row on disk is always the newest.
        self._writing = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()
        # Ended, but the disk did not take the row; tried again.
        self._unsaved: set[str] = set()

    async def open(self) -> None:
        self.read()

    def read(self) -> None:
        """Read the rows of earlier runs, and settle what ran when the gateway died. Blocks. Raises OSError."""
        for row in self._files.read_rows():
            settled = self._after_restart(row)
            if settled is not row:
                self._save(settled)
            if settled.status.is_over:
                self._files.remove(row.id, files.REQUEST)
            self._rows[row.id] = settled
        self._rows = dict(sorted(self._rows.items(), key=lambda item: item[1].created))
        self._used_bytes = sum(map(_weight, self._rows.values()))

    def _after_restart(self, row: Operation) -> Operation:
        size = self._files.result_bytes(row.id)
        if row.status.is_over:
            return row if row.result_bytes == (size or 0) else replace(row, result_bytes=size or 0)
        is_lost = row.kind.is_move or (row.kind is OperationKind.DOWNLOAD and not row.retry)
        if row.status is OperationStatus.QUEUED and not is_lost:
            return row
        if size is not None:
            now = self._wall()
            return replace(row, status=OperationStatus.DONE, ended=now, request_bytes=0, result_bytes=size)
        if row.retry and (row.runs < RUNS_MAX or row.kind is OperationKind.DOWNLOAD):
            # A download runs in a process of its own, which does not end the gateway.
            return replace(row, status=OperationStatus.QUEUED, started=None)
        why = RESTARTED_OFTEN if row.retry else RESTARTED
        return replace(row, status=OperationStatus.FAILED, ended=self._wall(), request_bytes=0, error=why)

    def _save(self, row: Operation) -> None:
        """A gateway starts even if the disk is full: its next start would settle the row in the same way."""
        try:
            self._files.write_row(row)
        except OSError as error:
            _log.warning("an operation cannot be written", id=row.id, error=error.strerror or str(error))

    # --- telling ------------------------------------------------------------------------------------------------------

    @property
    def listeners(self) -> int:
        """Dashboards and the like."""
        return self._hub.listeners

    def publish(self, row: Operation, progress: float | None = None) -> None:
        """Tell listeners the status of a row, and while it runs how far it is."""
        about = {"id": row.id, "status": row.status.value, "model": row.model, "route": row.route, "tenant": row.tenant}
        error = None if row.error is None else row.error.code
        # `load` and `unload` are the events of the moves themselves.
        what = "operation" if row.kind.is_move else row.kind.value
        self._hub.publish(what, about | {"kind": row.kind.value, "error": error, "progress": progress})

    # --- reading ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Operation]:
        """Oldest first."""
        return iter(list(self._rows.values()))

    def get(self, id: str) -> Operation | None:
        return self._rows.get(id)

    def ran_s(self, row: Operation) -> float | None:
        """How long it runs, or ran; None if it never did."""
        if row.started is None:
            return None
        until = row.ended if row.ended is not None else self._time_of(row)
        return max(0.0, until - row.started)

    def _time_of(self, row: Operation) -> float:
        """Now, as the next time of this row."""
        since = self._changed_at.get(row.id)
        return self._wall() if since is None else (row.started or row.created) + self._clock() - since

    def read_request(self, id: str, about: type[About]) -> tuple[About, Iterator[bytes]]:
        """Blocks. Raises OSError or msgspec.MsgspecError."""
        said, file = self._files.read(id, files.REQUEST, about)
        return said, files.chunks(file)

    def read_result(self, id: str, about: type[About]) -> tuple[About, Iterator[bytes]] | None:
        """None if there is no result. Blocks. What is read stays readable when the operation is removed. Raises
        OperationStoreFull if it cannot be read now."""
        try:
            said, file = self._files.read(id, files.RESULT, about)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        except OSError as error:
            raise disk_failed(error) from error
        return said, files.chunks(file)

    # --- changing -----------------------------------------------------------------------------------------------------

    async def add(
        self,
        kind: OperationKind,
        about: object = None,
        body: Iterable[bytes] = (),
        size: int = 0,
        *,
        tenant: str,
        key: str,
        model: str,
        route: str,
        priority: int = 0,
        retry: bool = False,
    ) -> Operation:
        """A new operation, on disk when this returns. Raises OperationsFull or OperationStoreFull."""
        row = Operation(
            f"{kind.value}-{secrets.token_hex(16)}", kind, tenant, key, model, route, priority, retry, self._wall()
        )
        async with self._writing:
            self._expect_share(size, tenant, key, kind)
            self._expect_room(size, tenant, kind)
            try:
                written = await run_detached(lambda: self._files.write_request(row.id, about, body), "write request")
                row = replace(row, request_bytes=written)
                await run_detached(lambda: self._files.write_row(row), "write operation")
            except OSError as error:
                self._files.remove(row.id, files.ROW, files.REQUEST)
                raise disk_failed(error) from error
            self._take(row)
        return row

    async def start(self, id: str, request_id: str | None = None) -> None:
        """It runs from now on, as this request. Raises OperationStoreFull if the disk does not take that: then it must
        not run; NotFound for one that has ended."""
        await self._whole(self._start(id, request_id))

    async def _start(self, id: str, request_id: str | None) -> None:
        async with self._writing:
            row = self._rows.get(id)
            if row is None or row.status.is_over:
                raise NotFound(f"The operation {id} has ended.")
            row = replace(row, status=OperationStatus.RUNNING, started=self._time_of(row), runs=row.runs + 1)
            row = replace(row, request_id=request_id)
            try:
                await run_detached(lambda: self._files.write_row(row), "write operation")
            except OSError as error:
                raise disk_failed(error) from error
            self._take(row)

    async def end(
        self,
        id: str,
        status: OperationStatus,
        error: OperationError | None = None,
        result: ResultPart | None = None,
        request_id: str | None = None,
    ) -> Operation:
        """The first end counts; a later one changes nothing. A result that the disk does not take is a failure. Raises
        NotFound for one that has ended and is no longer kept."""
        return await self._whole(self._end(id, status, error, result, request_id))

    async def _end(
        self,
        id: str,
        status: OperationStatus,
        error: OperationError | None,
        result: ResultPart | None,
        request_id: str | None,
    ) -> Operation:
        async with self._writing:
            row = self._rows.get(id)
            if row is None:
                raise NotFound(f"There is no operation {id} any more.")
            if row.status.is_over:
                if result is not None:
                    result.discard()
                return row
            size = 0 if result is None else result.size
            row = replace(row, status=status, ended=self._time_of(row), error=error, request_bytes=0, result_bytes=size)
            row = replace(row, request_id=request_id or row.request_id)
            if status is OperationStatus.DONE:
                # The result first: if the gateway dies now, the next one finds it and counts this as done.
                row = await self._completed(row, result)
                await self._save_ended(row)
            else:
                await self._save_ended(row)
                row = await self._completed(row, result)
            self._files.remove(id, files.REQUEST)
            self._take(row)
            return row

    async def _whole(self, change: Coroutine[Any, Any, Changed]) -> Changed:
        """Carry out a change even if its caller is cancelled: a write that has begun cannot be stopped."""
        task = asyncio.get_running_loop().create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changed)
        return await asyncio.shield(task)

    def _changed(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            # The caller that would have been told may be gone.
            task.exception()

    async def _completed(self, row: Operation, result: ResultPart | None) -> Operation:
        if result is None:
            return row
        try:
            await run_detached(result.complete, "write result")
        except OSError as failure:
            result.discard()
            if row.kind is not OperationKind.JOB:
                # What is known of it is lost, not what was done.
                return replace(row, result_bytes=0)
            failed = disk_failed(failure)
            error = row.error or OperationError(failed.code, failed.public)
            return replace(row, status=OperationStatus.FAILED, error=error, result_bytes=0)
        self.shrink(row.id)
        return row

    def result(self, id: str) -> ResultPart:
        """Where the result of this operation is written. Raises OperationStoreFull."""
        try:
            file = self._files.create_result(id)
        except OSError as error:
            raise disk_failed(error) from error
        self._parts[id] = 0
        return ResultPart(self, self._files, id, file)

    async def tidy(self) -> None:
        """Remove what is too old or too much, and write again what the disk did not take. To be called regularly."""
        async with self._writing:
            for id in list(self._unsaved):
                await self._save_ended(self._rows[id])
            for row in self:
                if self._is_old(row) and row.id not in self._unsaved:
                    self._drop(row)
            for kind in OperationKind:
                self._make_room(0, 0, kind=kind)

    # --- room ---------------------------------------------------------------------------------------------------------

    def grow(self, id: str, size: int) -> None:
        """A result grows by this much. Raises ResultTooLarge or OperationStoreFull if that cannot be kept."""
        limit, grown = self._limits().bytes_max, self._parts[id] + size
        if grown > limit:
            raise ResultTooLarge(f"The result is larger than all results may be together ({limit:,} bytes).")
        row = self._rows.get(id)
        if row is not None and row.kind is not OperationKind.JOB:
            # Their results are small, and of bounded number.
            return
        if not self._make_room(size, 0, None if row is None else row.tenant):
            raise OperationStoreFull("There is no room for this result.", retry_after_s=RETRY_AFTER_S)
        self._parts[id] = grown
        self._used_bytes += size

    def shrink(self, id: str) -> None:
        """The part of a result is no longer counted as such. May be called again."""
        self._used_bytes -= self._parts.pop(id, 0)

    def _is_old(self, row: Operation) -> bool:
        keep_s = self._limits().keep_s if row.kind is OperationKind.JOB else OTHERS_KEEP_S
        if row.ended is None:
            return False
        if (ended := self._changed_at.get(row.id)) is not None:
            return ended < self._clock() - keep_s
        return (now := self._steady.now()) is not None and row.ended < now - keep_s

    def _expect_share(self, size: int, tenant: str, key: str, kind: OperationKind) -> None:
        """For one more unfinished operation of this tenant and key. Raises TooManyUnfinished."""
        limits, is_job = self._limits(), kind is OperationKind.JOB
        count_max = limits.unfinished_max if is_job else OTHERS_MAX // 2
        if is_job and count_max >= limits.count_max:
            # One key may have all.
            return
        bytes_max = limits.bytes_max * count_max // limits.count_max
        alike = [row for row in self._rows.values() if not row.status.is_over and _is_alike(row.kind, kind)]
        for whose in ([row for row in alike if row.key == key], [row for row in alike if row.tenant == tenant]):
            held = size + sum(map(_weight, whose)) if is_job else 0
            # One is always taken, however large it is.
            if len(whose) >= count_max or (whose and held > bytes_max):
                what, option = ("jobs", " (jobs.unfinished_per_key_max)") if is_job else ("operations", "")
                raise TooManyUnfinished(
                    f"{key or tenant} has {len(whose):,} {what} that have not ended, which is the share of one key or "
                    f"tenant{option}. Wait until some have ended, or cancel them.",
                    retry_after_s=RETRY_AFTER_S,
                )

    def _expect_room(self, size: int, tenant: str, kind: OperationKind) -> None:
        """For one more operation of this tenant. Raises OperationsFull or OperationStoreFull."""
        if self._make_room(size, 1, tenant, kind):
            return
        if self._is_crowded(kind, 1):
            what = "jobs" if kind is OperationKind.JOB else "operations"
            said = f"{self._alike(kind):,} {what} have not ended yet or are results of others; try again later."
            raise OperationsFull(said, retry_after_s=RETRY_AFTER_S)
        raise OperationStoreFull("There is no room to keep this request.", retry_after_s=RETRY_AFTER_S)

    def _make_room(
        self, size: int, count: int, tenant: str | None = None, kind: OperationKind = OperationKind.JOB
    ) -> bool:
        """Drop ended operations until this much more fits, for this tenant. False if it does not."""
        size = size if kind is OperationKind.JOB else 0
        while (is_crowded := self._is_crowded(kind, count)) or self._used_bytes + size > self._limits().bytes_max:
            victim = self._victim(tenant, kind if is_crowded else OperationKind.JOB)
            if victim is None:
                return False
            self._drop(victim)
        return True

    def _is_crowded(self, kind: OperationKind, count: int) -> bool:
        """True if so many more would be too many."""
        limit = self._limits().count_max if kind is OperationKind.JOB else OTHERS_MAX
        return self._alike(kind) + count > limit

    def _alike(self, kind: OperationKind) -> int:
        return sum(_is_alike(row.kind, kind) for row in self._rows.values())

    def _victim(self, tenant: str | None, kind: OperationKind) -> Operation | None:
        """The oldest that has ended, of the tenant that holds most: none pushes out the results of one that holds less.
        What has not ended is held too, but never dropped. Without a tenant all may be dropped."""
        held: Counter[str] = Counter()
        alike = [row for row in self._rows.values() if _is_alike(row.kind, kind)]
        for row in alike:
            held[row.tenant] += row.bytes + self._parts.get(row.id, 0) + ROW_BYTES
        ended = [
            row
            for row in alike
            if row.status.is_over
            and row.id not in self._unsaved
            and (tenant in (None, row.tenant) or held[row.tenant] >= held[tenant or ""])
        ]
        return min(ended, key=lambda row: (-held[row.tenant], row.ended or 0.0), default=None)

    def _take(self, row: Operation) -> None:
        before = self._rows.get(row.id)
        self._used_bytes += _weight(row) - (0 if before is None else _weight(before))
        self._rows[row.id] = row
        self._changed_at[row.id] = self._clock()
        self.publish(row)

    def _drop(self, row: Operation) -> None:
        del self._rows[row.id]
        self._changed_at.pop(row.id, None)
        self._used_bytes -= _weight(row)
        self._files.remove(row.id, files.ROW, files.REQUEST, files.RESULT)

    # --- disk ---------------------------------------------------------------------------------------------------------

    async def _save_ended(self, row: Operation) -> None:
        """The operation is over even if the disk does not take it."""
        try:
            await run_detached(lambda: self._files.write_row(row), "write operation")
            self._unsaved.discard(row.id)
        except OSError as failure:
            if row.id not in self._unsaved:
                _log.warning("an operation cannot be written", id=row.id, error=failure.strerror or str(failure))
            self._unsaved.add(row.id)


def _weight(row: Operation) -> int:
    """Its bytes, as far as they count towards what jobs may use."""
    return row.bytes if row.kind is OperationKind.JOB else 0


def _is_alike(one: OperationKind, other: OperationKind) -> bool:
    """True for kinds that are counted together."""
    return (one is OperationKind.JOB) == (other is OperationKind.JOB)
