"""The table of operations: what is kept, what is dropped, and what a crash at any point leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from greenroom.errors import NotFound, OperationsFull, OperationStoreFull, ResultTooLarge, TooManyUnfinished
from greenroom.runtime.clocks import BELIEVED_AFTER_S
from greenroom.runtime.observer import Hub
from greenroom.runtime.operations import files
from greenroom.runtime.operations.facts import end_with, facts_of
from greenroom.runtime.operations.files import Operation, OperationError, OperationFiles, OperationKind, OperationStatus
from greenroom.runtime.operations.table import RUNS_MAX, JobLimits, OperationTable
from tests.full_disk import full_disk
from tests.waiting import until

QUEUED, RUNNING = OperationStatus.QUEUED, OperationStatus.RUNNING
DONE, FAILED, CANCELLED = OperationStatus.DONE, OperationStatus.FAILED, OperationStatus.CANCELLED


class Rig:
    """A table, and what it has told. `again` is the table that a next gateway would have."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        self.folder = folder
        # One key may have all, unless a test is about that.
        share = {"unfinished_max": limits.get("count_max", 100)}
        self.limits = JobLimits(**{"keep_s": 100.0, "count_max": 100, "bytes_max": 100_000, **share} | limits)
        self.now = 1000.0
        # How far the wall clock is set ahead of its time.
        self.ahead_s = 0.0
        self.told: list[tuple[str, OperationStatus]] = []
        self.table = self.again()

    def again(self) -> OperationTable:
        table = self.of(OperationFiles(self.folder))
        table.read()
        self.table = table
        return table

    def of(self, stored: OperationFiles) -> OperationTable:
        return OperationTable(
            stored, lambda: self.limits, cast(Hub, self), lambda: self.now + self.ahead_s, lambda: self.now
        )

    def publish(self, what: str, about: dict[str, Any]) -> None:
        self.told.append((about["id"], OperationStatus(about["status"])))

    async def add(
        self,
        body: bytes = b"ask",
        *,
        tenant: str = "t",
        key: str = "k",
        retry: bool = False,
        kind: OperationKind = OperationKind.JOB,
    ) -> str:
        self.now += 1
        row = await self.table.add(
            kind,
            {"about": 1},
            [body],
            len(body),
            tenant=tenant,
            key=key,
            model="m",
            route="/r",
            priority=1,
            retry=retry,
        )
        return row.id

    async def end(self, id: str, result: bytes = b"answer") -> Operation:
        await self.table.start(id)
        part = self.table.result(id)
        part.write_head({"status": 200})
        part.write(result)
        return await self.table.end(id, DONE, None, part)

    def status(self, id: str) -> OperationStatus | None:
        row = self.table.get(id)
        return None if row is None else row.status

    def body_of(self, id: str) -> bytes | None:
        found = self.table.read_result(id, dict[str, int])
        return None if found is None else b"".join(found[1])

    @property
    def names(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    yield Rig(tmp_path / "jobs")


async def test_a_row_goes_its_way_and_tells_each_status(rig: Rig) -> None:
    id = await rig.add(b"body")
    about, body = rig.table.read_request(id, dict[str, int])
    assert (about, b"".join(body)) == ({"about": 1}, b"body")
    row = await rig.end(id)
    assert (row.status, row.runs, row.request_bytes) == (DONE, 1, 0)
    assert rig.body_of(id) == b"answer"
    assert [status for _, status in rig.told] == [QUEUED, RUNNING, DONE]
    assert rig.names == {f"{id}.json", f"{id}.result"}


async def test_only_the_first_end_counts(rig: Rig) -> None:
    id = await rig.add()
    assert (await rig.table.end(id, CANCELLED)).status is CANCELLED
    part = rig.table.result(id)
    part.write(b"late")
    assert (await rig.table.end(id, DONE, None, part)).status is CANCELLED
    assert rig.names == {f"{id}.json"}
    assert [status for _, status in rig.told] == [QUEUED, CANCELLED]


async def test_two_ends_at_once_are_one(rig: Rig) -> None:
    id = await rig.add()
    ends = await asyncio.gather(*(rig.table.end(id, status) for status in (CANCELLED, FAILED)))
    assert {row.status for row in ends} == {CANCELLED}


async def test_everything_survives_a_restart(rig: Rig) -> None:
    waits, done, cancelled = [await rig.add(), await rig.add(), await rig.add()]
    await rig.end(done)
    await rig.table.end(cancelled, CANCELLED)
    before = list(rig.table)
    assert list(rig.again()) == before
    assert rig.body_of(done) == b"answer"
    assert [rig.status(id) for id in (waits, done, cancelled)] == [QUEUED, DONE, CANCELLED]


@pytest.mark.parametrize("kind", [OperationKind.LOAD, OperationKind.UNLOAD])
async def test_a_move_that_had_not_begun_at_a_crash_has_failed(rig: Rig, kind: OperationKind) -> None:
    id = await rig.add(kind=kind)
    row = rig.again().get(id)
    assert row is not None and (row.status, row.error and row.error.code) == (FAILED, "restarted")


async def test_what_ran_at_a_crash_fails_or_is_queued_again(rig: Rig) -> None:
    once, again = await rig.add(), await rig.add(retry=True)
    for run in range(RUNS_MAX):
        for id in (once, again):
            if rig.status(id) is QUEUED:
                await rig.table.start(id)
        rig.table.result(again).write(b"half")
        rig.again()
        assert rig.status(once) is FAILED
        assert rig.status(again) is (QUEUED if run < RUNS_MAX - 1 else FAILED)
    row = rig.table.get(once)
    assert row is not None and row.error is not None and row.error.code == "restarted"
    # Settled on disk: the next start finds the same, and nothing half.
    assert {once, again} == {row.id for row in rig.again() if row.status is FAILED}
    assert rig.names == {f"{once}.json", f"{again}.json"}


async def test_a_crash_between_the_result_and_its_row_loses_nothing(rig: Rig) -> None:
    id = await rig.add(retry=True)
    await rig.table.start(id)
    part = rig.table.result(id)
    part.write_head({"status": 200})
    part.write(b"whole")
    part.complete()
    rig.again()
    assert rig.status(id) is DONE
    assert rig.body_of(id) == b"whole"


async def test_a_failure_with_an_answer_keeps_it(rig: Rig) -> None:
    id = await rig.add()
    await rig.table.start(id)
    part = rig.table.result(id)
    part.write_head({"status": 400})
    await rig.table.end(id, FAILED, OperationError("bad", "It was bad."), part)
    rig.again()
    row = rig.table.get(id)
    assert row is not None and row.error == OperationError("bad", "It was bad.")
    assert rig.table.read_result(id, dict[str, int]) is not None


async def test_files_without_a_row_go_and_rows_that_cannot_be_read_stay(rig: Rig) -> None:
    id, other = await rig.add(), await rig.add()
    (rig.folder / f"{id}.json").unlink()
    (rig.folder / f"{other}.json").write_text("{")
    (rig.folder / "job-note").write_text("not ours")
    assert list(rig.again()) == []
    assert rig.names == {f"{other}.json", f"{other}.request", "job-note"}


async def test_ended_ones_make_room_by_count_and_unfinished_never(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "jobs", count_max=3)
    first, second, waits = await rig.add(), await rig.add(), await rig.add()
    for id in (second, first):
        rig.now += 1
        await rig.end(id)
    await rig.add()
    assert rig.status(second) is None and rig.status(first) is DONE
    await rig.add()
    with pytest.raises(OperationsFull):
        await rig.add()
    assert rig.status(waits) is QUEUED
    assert not any(name.startswith(second) for name in rig.names)


async def test_no_key_and_no_tenant_has_more_unfinished_ones_than_its_share(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "jobs", count_max=10, bytes_max=10_000, unfinished_max=3)
    mine = [await rig.add(key="greedy", tenant=tenant) for tenant in ("a", "b", "c")]
    with pytest.raises(TooManyUnfinished, match="greedy has 3 jobs"):
        await rig.add(key="greedy", tenant="d")
    for key in ("one", "two"):
        await rig.add(key=key, tenant="a")
    with pytest.raises(TooManyUnfinished):
        await rig.add(key="three", tenant="a")
    await rig.end(mine[0])
    await rig.add(key="greedy", tenant="d")
    # Nor does it fill the disk space with fewer: one is taken in any case.
    large = await rig.add(b"x" * 4_000, key="large", tenant="large")
    with pytest.raises(TooManyUnfinished):
        await rig.add(b"x" * 100, key="large", tenant="large")
    await rig.table.end(large, CANCELLED)
    await rig.add(b"x" * 100, key="large", tenant="large")


async def test_ended_ones_make_room_by_size_first_those_of_the_greediest_tenant(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "jobs", bytes_max=10_000)
    modest = await rig.add(tenant="modest")
    await rig.end(modest, b"x" * 1000)
    greedy = [await rig.add(tenant="greedy") for _ in range(2)]
    for id in greedy:
        await rig.end(id, b"x" * 4000)
    last = await rig.add(tenant="greedy")
    await rig.end(last, b"x" * 4000)
    assert [rig.status(id) for id in (modest, *greedy, last)] == [DONE, None, DONE, DONE]
    kept = sum(path.stat().st_size for path in rig.folder.iterdir() if path.suffix == files.RESULT)
    assert kept <= 10_000


async def test_unfinished_ones_push_out_no_results_of_a_tenant_that_keeps_less(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "jobs", count_max=10)
    results = [await rig.add(tenant="modest") for _ in range(3)]
    for id in results:
        await rig.end(id)
    for _ in range(7):
        await rig.add(tenant="greedy")
    with pytest.raises(OperationsFull):
        await rig.add(tenant="greedy")
    assert [rig.status(id) for id in results] == [DONE] * 3
    await rig.add(tenant="modest")
    assert [rig.status(id) for id in results] == [None, DONE, DONE], "its own make room for its own"


async def test_what_cannot_fit_is_refused(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "jobs", bytes_max=1000)
    id = await rig.add(b"x" * 500)
    with pytest.raises(OperationStoreFull):
        await rig.add(b"x" * 600)
    part = rig.table.result(id)
    with pytest.raises(ResultTooLarge):
        part.write(b"x" * 1001)
    with pytest.raises(OperationStoreFull):
        part.write(b"x" * 900)
    part.discard()
    await rig.end(id, b"x" * 300)
    # All is given back.
    await rig.add(b"x" * 900)


async def test_old_results_go_with_their_rows(rig: Rig) -> None:
    waits, done = await rig.add(), await rig.add()
    await rig.end(done)
    rig.now += 99
    await rig.table.tidy()
    assert rig.status(done) is DONE
    rig.now += 2
    await rig.table.tidy()
    assert rig.status(done) is None
    with pytest.raises(NotFound):
        await rig.table.end(done, CANCELLED)
    assert rig.names == {f"{waits}.json", f"{waits}.request"}


@pytest.mark.parametrize("jump_s", [365 * 86_400.0, -365 * 86_400.0])
async def test_a_clock_that_jumps_makes_nothing_old_and_no_duration_long(rig: Rig, jump_s: float) -> None:
    earlier = await rig.add()
    await rig.end(earlier)
    rig.again()
    rig.limits = JobLimits(keep_s=10_000.0, count_max=100, bytes_max=100_000, unfinished_max=100)
    ran, runs = await rig.add(), await rig.add()
    await rig.table.start(ran)
    await rig.table.start(runs)
    for ahead_s in (jump_s, 0.0):
        rig.ahead_s = ahead_s
        for _ in range(3):
            rig.now += 60
            await rig.table.tidy()
        if ahead_s:
            await rig.table.end(ran, DONE)
    assert [rig.status(id) for id in (earlier, ran, runs)] == [DONE, DONE, RUNNING]
    rows = [rig.table.get(id) for id in (ran, runs)]
    assert [None if row is None else rig.table.ran_s(row) for row in rows] == [pytest.approx(180), pytest.approx(360)]
    # Each goes when its own time is over.
    rig.now += 20_000
    await rig.table.tidy()
    assert [rig.status(id) for id in (earlier, ran, runs)] == [None, None, RUNNING]


async def test_a_result_of_an_earlier_run_stays_until_the_clock_is_believed(rig: Rig) -> None:
    id = await rig.add()
    await rig.end(id)
    rig.ahead_s = 365 * 86_400.0
    rig.again()
    rig.now += BELIEVED_AFTER_S - 1
    await rig.table.tidy()
    assert rig.status(id) is DONE
    rig.now += 1
    await rig.table.tidy()
    assert rig.status(id) is None


async def test_a_result_that_is_being_read_outlives_its_row(rig: Rig) -> None:
    id = await rig.add()
    await rig.end(id, b"x" * 200)
    found = rig.table.read_result(id, dict[str, int])
    rig.now += 200
    await rig.table.tidy()
    assert found is not None and b"".join(found[1]) == b"x" * 200


async def test_a_full_disk_takes_nothing_half(rig: Rig) -> None:
    id = await rig.add()
    with full_disk():
        with pytest.raises(OperationStoreFull):
            await rig.add()
        with pytest.raises(OperationStoreFull):
            await rig.table.start(id)
        assert rig.status(id) is QUEUED
        part = rig.table.result(id)
        part.write(b"x" * 10)
        row = await rig.table.end(id, DONE, None, part)
        assert row.status is FAILED and row.error is not None and row.error.code == "job_store_full"
    assert len(list(rig.table)) == 1
    # Its end is written once the disk takes it.
    await rig.table.tidy()
    rig.again()
    assert rig.status(id) is FAILED
    assert rig.names == {f"{id}.json"}


@pytest.mark.parametrize("kind", [OperationKind.LOAD, OperationKind.DOWNLOAD])
async def test_what_was_done_is_done_though_the_disk_does_not_take_what_is_known_of_it(
    rig: Rig, kind: OperationKind
) -> None:
    id = await rig.add(kind=kind)
    await rig.table.start(id)
    with full_disk():
        await end_with(rig.table, id, DONE, None, {"model": "m"})
    assert rig.status(id) is DONE and await facts_of(rig.table, [id], dict) == {}


async def test_a_start_on_a_full_disk_settles_in_memory(rig: Rig) -> None:
    id = await rig.add()
    await rig.table.start(id)
    with full_disk():
        rig.again()
        assert rig.status(id) is FAILED
    rig.again()
    assert rig.status(id) is FAILED


async def test_what_has_ended_does_not_start(rig: Rig) -> None:
    id = await rig.add()
    await rig.table.end(id, CANCELLED)
    with pytest.raises(NotFound):
        await rig.table.start(id)
    assert rig.status(id) is CANCELLED


class HeldFiles(OperationFiles):
    """Writes that an operation runs only when it may."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.begun, self.may_write, self.written = threading.Event(), threading.Event(), threading.Event()

    def write_row(self, row: Operation) -> None:
        if row.status is RUNNING:
            self.begun.set()
            assert self.may_write.wait(10.0)
        super().write_row(row)
        self.written.set()


async def test_a_start_whose_caller_leaves_is_not_written_over_the_end(rig: Rig) -> None:
    held = HeldFiles(rig.folder)
    rig.table = rig.of(held)
    id = await rig.add(retry=True)
    starting = asyncio.create_task(rig.table.start(id))
    await asyncio.to_thread(held.begun.wait, 10.0)
    starting.cancel()
    ending = asyncio.create_task(rig.table.end(id, CANCELLED))
    await asyncio.wait({ending}, timeout=0.1)
    held.may_write.set()
    assert (await ending).status is CANCELLED
    await until(held.written.is_set, "the start is written")
    rig.again()
    assert rig.status(id) is CANCELLED


async def test_downloads_and_jobs_do_not_push_each_other_out(tmp_path: Path) -> None:
    rig = Rig(tmp_path, count_max=2, keep_s=10.0)
    download = await rig.add(kind=OperationKind.DOWNLOAD)
    await rig.end(download)
    jobs = [await rig.add() for _ in range(2)]
    for id in jobs:
        await rig.end(id)
    # Two jobs there are: the third takes the place of the first, although the download is older.
    await rig.end(await rig.add())
    assert [rig.status(id) for id in (download, *jobs)] == [DONE, None, DONE]
    # Ended downloads stay an hour, however short jobs do.
    rig.now += 3_500
    await rig.table.tidy()
    assert [rig.status(id) for id in (download, jobs[1])] == [DONE, None]
    rig.now += 200
    await rig.table.tidy()
    assert rig.status(download) is None


async def test_a_download_goes_on_after_any_number_of_restarts(rig: Rig) -> None:
    id = await rig.add(kind=OperationKind.DOWNLOAD, retry=True)
    for _ in range(RUNS_MAX + 2):
        await rig.table.start(id)
        rig.again()
        assert rig.status(id) is QUEUED


async def test_results_of_downloads_take_no_room_from_jobs(tmp_path: Path) -> None:
    rig = Rig(tmp_path, bytes_max=1_000)
    for _ in range(3):
        await rig.end(await rig.add(kind=OperationKind.DOWNLOAD), b"x" * 900)
    job = await rig.add(b"a" * 400)
    assert (await rig.end(job, b"b" * 500)).status is DONE
    rig.again()
    assert rig.body_of(job) == b"b" * 500
    assert len(list(rig.table)) == 4


async def test_there_are_only_so_many_downloads(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("greenroom.runtime.operations.table.OTHERS_MAX", 2)
    first, second = [await rig.add(kind=OperationKind.DOWNLOAD, key=key, tenant=key) for key in ("a", "b")]
    with pytest.raises(OperationsFull):
        await rig.add(kind=OperationKind.DOWNLOAD)
    with pytest.raises(TooManyUnfinished):
        await rig.add(kind=OperationKind.DOWNLOAD, key="a", tenant="a")
    await rig.add()
    await rig.end(first)
    await rig.add(kind=OperationKind.DOWNLOAD)
    assert (rig.status(first), rig.status(second)) == (None, QUEUED)
