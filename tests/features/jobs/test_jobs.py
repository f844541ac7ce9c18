"""Jobs that keep their place and end once; and pictures that are held while they are written."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import pytest

from greenroom.config.part import GatewayState
from greenroom.config.schema import Config
from greenroom.core.scheduler import DefaultScheduler
from greenroom.features.jobs.jobs import Jobs
from greenroom.features.pictures.answers import PictureAnswers
from greenroom.features.pictures.store import Picture, PictureStore
from greenroom.http.body import BodyBudget
from greenroom.http.limits import EdgeLimits
from greenroom.http.request import Head
from greenroom.runtime.operations.files import Operation, OperationFiles, OperationKind
from greenroom.runtime.operations.table import KeepLimits
from greenroom.runtime.scheduler_loop import SchedulerLoop
from tests.waiting import PATIENCE_S


class EmptyTable:
    """A table without rows, which counts how often it is tidied."""

    def __init__(self) -> None:
        self.tidied = 0

    def __iter__(self) -> Any:
        return iter(())

    async def tidy(self) -> None:
        self.tidied += 1
        await asyncio.sleep(0)


def jobs_of(table: EmptyTable, **said: Any) -> Jobs:
    """Jobs that nobody runs."""
    nothing: Any = None
    loop = SchedulerLoop(DefaultScheduler(nothing), time.monotonic)
    shell = SimpleNamespace(table=table, live=GatewayState(Config()), loop=loop)
    return Jobs(cast(Any, shell), nothing, nothing, nothing, nothing, **said)


class FixedTable(EmptyTable):
    """A table with these rows, the oldest first."""

    def __init__(self, *rows: Operation) -> None:
        super().__init__()
        self._rows = rows

    def __iter__(self) -> Any:
        return iter(self._rows)

    def ran_s(self, row: Operation) -> float | None:
        return None


def test_a_job_keeps_its_place_when_the_clock_is_set_back() -> None:
    def queued(id: str, priority: int, created: float) -> Operation:
        return Operation(id, OperationKind.JOB, "t", "k", "m", "/r", priority, False, created)

    rows = [queued("before", 1, 9_000.0), queued("urgent", 0, 8_999.0), queued("after", 1, 5_000.0)]
    jobs = jobs_of(FixedTable(*rows))
    assert {row.id: facts.position for row, facts in jobs.facts(rows)} == {"urgent": 1, "before": 2, "after": 3}


@pytest.mark.parametrize("turns", range(6))
async def test_nothing_begins_anew_while_or_after_jobs_close(turns: int) -> None:
    """Whatever it was about to do in the turn of the loop in which it is closed."""
    table = EmptyTable()
    jobs = jobs_of(table, tidy_every_s=0.0)
    jobs.begin()
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        await jobs.close()
    tidied = table.tidied
    for _ in range(20):
        await asyncio.sleep(0)
    assert table.tidied == tidied


ANSWER = json.dumps({"data": [{"b64_json": base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()}]}).encode()
HEAD = Head(b"POST", b"/v1/images/generations", [(b"host", b"localhost")], "1.1", "", keep_alive=True)


class SlowStore(PictureStore):
    """Counts the answers whose pictures it is given at the same time."""

    at_once = most = 0

    async def keep(self, tenant: str, pictures: Sequence[Picture]) -> list[str]:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            # Long enough for every other answer to be read meanwhile.
            await asyncio.sleep(0.05)
            return await super().keep(tenant, pictures)
        finally:
            self.at_once -= 1


class HeldFiles(OperationFiles):
    """A disk that takes nothing until it may."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.begun, self.may_write = threading.Event(), threading.Event()

    def create_result(self, id: str) -> BinaryIO:
        self.begun.set()
        assert self.may_write.wait(PATIENCE_S)
        return super().create_result(id)


class CountingStore(PictureStore):
    calls = 0

    async def keep(self, tenant: str, pictures: Sequence[Picture]) -> list[str]:
        self.calls += 1
        return await super().keep(tenant, pictures)


async def test_a_caller_that_leaves_while_a_disk_hangs_lets_no_other_answer_into_memory(tmp_path: Path) -> None:
    held = HeldFiles(tmp_path)
    store = CountingStore(held, lambda: KeepLimits(100, 10, 10_000), lambda: 0.0)
    await store.open()
    bodies = BodyBudget(EdgeLimits())
    answers = PictureAnswers(store, bodies, GatewayState(Config()))

    def asked() -> asyncio.Task[object]:
        one = answers.for_request(HEAD, "ann", "m")
        body = one.body()
        body.append(ANSWER)
        return asyncio.create_task(one.remade(200, [], body))

    leaves = asked()
    await asyncio.to_thread(held.begun.wait, PATIENCE_S)
    others = [asked() for _ in range(5)]
    await asyncio.sleep(0)
    leaves.cancel()
    others[0].cancel()
    await asyncio.sleep(0.2)
    assert store.calls == 1
    held.may_write.set()
    await asyncio.gather(*others[1:])
    assert store.calls == 5 and bodies.memory_bytes == 0
    await store.close()


async def test_answers_are_made_one_at_a_time(tmp_path: Path) -> None:
    store = SlowStore(OperationFiles(tmp_path), lambda: KeepLimits(100, 10, 10_000), lambda: 0.0)
    await store.open()
    bodies = BodyBudget(EdgeLimits())
    answers = PictureAnswers(store, bodies, GatewayState(Config()))

    async def made() -> bytes:
        one = answers.for_request(HEAD, "ann", "m")
        body = one.body()
        body.append(ANSWER)
        return (await one.remade(200, [], body))[2]

    urls = [json.loads(answer)["data"][0]["url"] for answer in await asyncio.gather(*(made() for _ in range(3)))]
    assert len(set(urls)) == 3 and store.most == 1
    assert bodies.memory_bytes == 0
    await store.close()


async def test_a_spooled_answer_is_read_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk, or an answer of hundreds of megabytes, holds up no other request."""
    readers: list[threading.Thread] = []
    pread = os.pread

    def noted(fd: int, length: int, offset: int) -> bytes:
        readers.append(threading.current_thread())
        return pread(fd, length, offset)

    monkeypatch.setattr(os, "pread", noted)
    store = PictureStore(OperationFiles(tmp_path), lambda: KeepLimits(100, 10, 10_000), lambda: 0.0)
    store.open()
    bodies = BodyBudget(EdgeLimits(body_in_memory_max=1), str(tmp_path))
    one = PictureAnswers(store, bodies, GatewayState(Config())).for_request(HEAD, "ann", "m")
    body = one.body()
    body.append(ANSWER)
    assert (await one.remade(200, [], body))[0] == 200
    assert readers and threading.main_thread() not in readers
    assert (bodies.spool_bytes, bodies.memory_bytes, len(store)) == (0, 0, 1)
    await store.close()
