"""The end of all jobs: after it nothing of them runs any more."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

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


@pytest.mark.parametrize("turns", range(6))
async def test_nothing_begins_anew_while_or_after_jobs_close(turns: int) -> None:
    """Whatever it was about to do in the turn of the loop in which it is closed."""
    table = EmptyTable()
    services = SimpleNamespace(
        inference=None, is_draining=lambda: False, queue_depth_max=lambda: 10, clock=asyncio.get_running_loop().time
    )
    jobs = Jobs(cast(Any, table), cast(Any, services), tidy_every_s=0.0)
    jobs.start()
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        await jobs.close()
    tidied = table.tidied
    for _ in range(20):
        await asyncio.sleep(0)
    assert table.tidied == tidied
