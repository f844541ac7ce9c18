"""Downloads: orders to fetch models, carried out a few at a time by programs of their own.

Owns which of the waiting downloads runs, how far each is, and what its end means. The rows and their files are those of
`table.py`. A download that ran when the gateway ended waits again at the next start, and goes on where it was; one
for an update, which has ended with the gateway, does not. Fetches nothing itself: `library/fetcher.py` does.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from greenroom.base.detached import run_detached
from greenroom.config.diff import Changes
from greenroom.config.environment import hub_cache
from greenroom.config.part import Apply, Part
from greenroom.config.schema import Config
from greenroom.errors import BadRequest, OperationStoreFull, ShuttingDown
from greenroom.library.download_locks import disown
from greenroom.library.fetcher import (
    Done,
    Failed,
    FetchPlan,
    FetchProcess,
    FetchProgress,
    Report,
    fetched_files,
    fetched_paths,
    start_fetch,
)
from greenroom.library.library import Library
from greenroom.library.orders import DownloadOrder, FetchPlace, OrderRules, expect_listed, place_of
from greenroom.runtime.operations.facts import end_with, facts_of
from greenroom.runtime.operations.files import Operation, OperationError, OperationKind, OperationStatus
from greenroom.runtime.shell import Shell
from greenroom.telemetry.logs import get_logger

_log = get_logger("downloads")

ROUTE: Final = "/v1/models/download"
# By which downloads of updates are known: no key of a caller has an empty name.
NO_KEY: Final = ""
# A program that ended without a word is started again, so often in a row without a byte in between.
LOST_MAX: Final = 3
# The rate is that of the last seconds.
RATE_WINDOW_S: Final = 10.0
TELL_EVERY_S: Final = 1.0
MIB: Final = 1024 * 1024
# Of a download, in what is kept of it; the sums are of all.
FILES_KEPT_MAX: Final = 200
_LOST: Final = Failed("fetcher_lost", "The program that fetches ended without a word, again and again.")


@dataclass(frozen=True, slots=True)
class DownloadFile:
    path: str
    bytes: int
    total_bytes: int | None = None


class DownloadFacts(msgspec.Struct, frozen=True):
    """What is known of a download beside its row, in the words of its view; kept when it has ended."""

    destination: str = ""
    commit: str | None = None
    bytes: int = 0
    total_bytes: int | None = None
    files_downloaded: int = 0
    files_total: int = 0
    files: tuple[DownloadFile, ...] = ()
    rate: float | None = None
    waiting: bool = False

    @property
    def progress(self) -> float | None:
        return None if not self.total_bytes else min(1.0, self.bytes / self.total_bytes)

    @property
    def eta_s(self) -> float | None:
        return None if not self.rate or self.total_bytes is None else (self.total_bytes - self.bytes) / self.rate


@dataclass(slots=True)
class LiveDownload:
    """A download that runs."""

    id: str
    process: FetchProcess | None = None
    is_cancelled: bool = False
    place: str = ""
    plan: FetchPlan | None = None
    have: dict[str, int] = field(default_factory=dict)
    waits: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)
    told_at: float = 0.0
    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def hear(self, report: Report) -> None:
        match report:
            case FetchPlan():
                self.plan = report
                self._seen.clear()
            case FetchProgress():
                self.have |= report.files
                self.waits = report.waiting
                now = time.monotonic()
                self._seen.append((now, self.bytes))
                while now - self._seen[0][0] > RATE_WINDOW_S:
                    self._seen.popleft()
            case Done():
                self.place = report.path

    @property
    def bytes(self) -> int:
        return sum(self.have.values())

    @property
    def rate(self) -> float | None:
        if len(self._seen) < 2 or (passed_s := self._seen[-1][0] - self._seen[0][0]) <= 0:
            return None
        return max(0.0, (self._seen[-1][1] - self._seen[0][1]) / passed_s)

    def facts(self) -> DownloadFacts:
        planned = [] if self.plan is None else self.plan.files
        sizes = [file.bytes for file in planned]
        known = [size for size in sizes if size is not None]
        whole = sum(file.bytes is not None and self.have.get(file.path, -1) >= file.bytes for file in planned)
        return DownloadFacts(
            destination=self.place,
            commit=None if self.plan is None else self.plan.commit,
            bytes=self.bytes,
            total_bytes=sum(known) if planned and len(known) == len(sizes) else None,
            files_downloaded=whole,
            files_total=len(planned),
            files=tuple(
                DownloadFile(file.path, self.have.get(file.path, 0), file.bytes) for file in planned[:FILES_KEPT_MAX]
            ),
            rate=self.rate,
            waiting=self.waits,
        )

    def facts_when_done(self) -> DownloadFacts:
        """Everything planned is here. A file of unknown size is as large as what came."""
        facts = self.facts()
        files = tuple(
            DownloadFile(file.path, size, size)
            for file in facts.files
            for size in (file.bytes if file.total_bytes is None else file.total_bytes,)
        )
        total = facts.bytes if facts.total_bytes is None else facts.total_bytes
        return msgspec.structs.replace(
            facts, bytes=total, total_bytes=total, files=files, files_downloaded=facts.files_total, rate=None
        )


class Downloads(Part):
    def __init__(self, shell: Shell, library: Library) -> None:
        self._shell = shell
        self._table = shell.table
        self.library = library
        self._live: dict[str, LiveDownload] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        # Set and replaced whenever one ends.
        self._next_end = asyncio.Event()

    # --- asked for by callers -----------------------------------------------------------------------------------------

    @property
    def rules(self) -> OrderRules:
        """What may be ordered now."""
        config = self._shell.config
        return OrderRules.of(config.library.hosts, os.environ, exact_names=config.governance.is_on)

    async def submit(self, order: DownloadOrder, *, tenant: str, key: str, retry: bool = True) -> Operation:
        """Keep this order; it is carried out when its turn comes. Raises BadRequest if it has no place to go to.
        Without `retry` it does not go on after a restart; a later order does, with what it has fetched. Also raises
        ShuttingDown, OperationsFull and OperationStoreFull.
        """
        if self._shell.is_draining:
            raise ShuttingDown("The gateway is shutting down and takes no more downloads.")
        await self._place(order)
        kind, name = OperationKind.DOWNLOAD, order.name
        row = await self._table.add(kind, order, tenant=tenant, key=key, model=name, route=ROUTE, retry=retry)
        self.pump()
        return row

    async def _place(self, order: DownloadOrder) -> FetchPlace:
        roots, cache = self.library.roots, hub_cache(os.environ)
        return await run_detached(lambda: place_of(order, roots, cache), "look at a destination")

    async def cancel(self, id: str) -> Operation:
        """End it now. What it has fetched stays, and a later order goes on with it. One that has ended stays as it is.
        Raises NotFound if it has made room for others meanwhile."""
        live = self._live.get(id)
        if live is not None:
            live.is_cancelled = True
            if live.process is not None:
                live.process.stop()
            await live.over.wait()
        row = await self._table.end(id, OperationStatus.CANCELLED)
        self._tell_end()
        self.pump()
        return row

    async def ended(self, id: str) -> Operation | None:
        """Wait until it has ended; None if it is not kept any more."""
        while (row := self.get(id)) is not None and not row.status.is_over:
            await self._next_end.wait()
        return row

    def get(self, id: str) -> Operation | None:
        row = self._table.get(id)
        return row if row is not None and row.kind is OperationKind.DOWNLOAD else None

    def newest_first(self) -> Iterable[Operation]:
        return (row for row in reversed(list(self._table)) if row.kind is OperationKind.DOWNLOAD)

    async def facts(self, rows: Sequence[Operation]) -> list[DownloadFacts]:
        """Of each row, as it is now."""
        live = {id: download.facts() for id, download in self._live.items()}
        ended = [row.id for row in rows if row.id not in live and row.status.is_over and row.result_bytes]
        read = await facts_of(self._table, ended, DownloadFacts)
        return [live.get(row.id) or read.get(row.id) or DownloadFacts() for row in rows]

    def ran_s(self, row: Operation) -> float | None:
        """How long it runs, or ran; None if it never did."""
        return self._table.ran_s(row)

    # --- running ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Go on with the downloads of earlier runs."""
        self.pump()

    async def draft(self, new: Config, changes: Changes) -> Apply:
        return self.pump

    async def close(self) -> None:
        """End the programs. The next start goes on where they were."""
        self._is_closed = True
        for live in self._live.values():
            if live.process is not None:
                live.process.stop()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _tell_end(self) -> None:
        self._next_end.set()
        self._next_end = asyncio.Event()

    def pump(self) -> None:
        """Run the oldest that wait, as many as may run; share the bandwidth among all."""
        if self._is_closed or self._shell.is_draining:
            return
        room = self._shell.config.library.downloads_max - len(self._live)
        waiting = [
            row
            for row in self._table
            if row.kind is OperationKind.DOWNLOAD and row.status is OperationStatus.QUEUED and row.id not in self._live
        ]
        for row in waiting[: max(0, room)]:
            live = self._live[row.id] = LiveDownload(row.id)
            task = asyncio.get_running_loop().create_task(self._run(live))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        for live in self._live.values():
            if live.process is not None:
                live.process.set_rate(self._rate())

    def _rate(self) -> float | None:
        mib_s = self._shell.config.library.bandwidth_mib_s
        return None if mib_s is None else mib_s * MIB / max(1, len(self._live))

    async def _run(self, live: LiveDownload) -> None:
        try:
            outcome = await self._outcome(live)
            if not self._is_closed or live.is_cancelled or outcome is not _LOST:
                await self._finish(live, outcome)
        except Exception as bug:
            _log.bug("download broke", bug, download=live.id)
            await self._table.end(live.id, OperationStatus.FAILED, OperationError("internal_error", "It broke."))
        finally:
            del self._live[live.id]
            live.over.set()
            self._tell_end()
        self.pump()

    async def _outcome(self, live: LiveDownload) -> Done | Failed:
        """How it ended. A cancelled download, and one that the gateway's own end has cut, is `_LOST`."""
        try:
            order, rest = await run_detached(
                lambda: self._table.read_request(live.id, DownloadOrder), "read a download"
            )
            for _ in rest:
                pass
            expect_listed(order, self.rules)
            place = await self._place(order)
            live.place = place.path
            if live.is_cancelled or self._is_closed:
                return _LOST
            await self._table.start(live.id)
            return await self._fetched(live, order, place)
        except (BadRequest, OperationStoreFull) as refusal:
            return Failed(refusal.code, refusal.message)
        except (OSError, msgspec.MsgspecError) as error:
            return Failed("order_lost", f"The order cannot be read or the program not started: {error}.")

    async def _fetched(self, live: LiveDownload, order: DownloadOrder, place: FetchPlace) -> Done | Failed:
        lost = 0
        while lost < LOST_MAX and not live.is_cancelled and not self._is_closed:
            before = live.bytes
            end = await self._fetch(live, order, place)
            if isinstance(end, Done):
                self.library.fetched(*fetched_files(order, live.plan, end))
            if end is not None:
                return end
            lost = 1 if live.bytes > before else lost + 1
        return _LOST

    async def _fetch(self, live: LiveDownload, order: DownloadOrder, place: FetchPlace) -> Done | Failed | None:
        """One run of the program. None if it ended without a word."""
        process = live.process = await start_fetch(order, place, self._rate())
        end: Done | Failed | None = None
        try:
            # It may have been cancelled while the program was started.
            if live.is_cancelled or self._is_closed:
                process.stop()
            async for report in process.reports():
                live.hear(report)
                self._tell(live)
                if isinstance(report, Done | Failed):
                    end = report
                    break
        finally:
            live.process = None
            printed = await process.close()
        if end is None and not live.is_cancelled and not self._is_closed:
            _log.warning("a fetch was lost", download=live.id, printed=printed[-500:])
        return end

    def _tell(self, live: LiveDownload) -> None:
        now, row = time.monotonic(), self._table.get(live.id)
        if row is not None and self._table.listeners and now - live.told_at >= TELL_EVERY_S:
            live.told_at = now
            self._table.publish(row, live.facts().progress)

    async def _finish(self, live: LiveDownload, outcome: Done | Failed) -> None:
        if isinstance(outcome, Done):
            await self._let_library_find(live, outcome)
            await end_with(self._table, live.id, OperationStatus.DONE, None, live.facts_when_done())
            _log.info("download is there", download=live.id, path=outcome.path)
        elif live.is_cancelled:
            await end_with(self._table, live.id, OperationStatus.CANCELLED, None, live.facts())
        else:
            error = OperationError(outcome.code, outcome.message)
            await end_with(self._table, live.id, OperationStatus.FAILED, error, live.facts())
            _log.warning("download failed", download=live.id, code=outcome.code, error=outcome.message)

    async def _let_library_find(self, live: LiveDownload, done: Done) -> None:
        """What is said to be here can be asked for. It is here even if the library breaks."""
        try:
            row = self._table.get(live.id)
            if row is None or row.key != NO_KEY:
                # A user has ordered it, even if an update fetched it before.
                await run_detached(lambda: disown(fetched_paths(live.plan, done)), "keep what was ordered")
            await self.library.refresh()
        except Exception as bug:
            _log.bug("the library did not look", bug)
