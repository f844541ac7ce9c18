"""The end of all jobs: after it nothing of them runs any more."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest

from greenroom.config.live import GatewayState
from greenroom.config.schema import Config
from greenroom.core.scheduler import DefaultScheduler
from greenroom.runtime.operations.files import Operation, OperationKind
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.server.inference.jobs.jobs import Jobs
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
    return Jobs(cast(Any, table), nothing, nothing, nothing, GatewayState(Config()), loop, **said)


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
    jobs.start()
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        await jobs.close()
    tidied = table.tidied
    for _ in range(20):
        await asyncio.sleep(0)
    assert table.tidied == tidied
