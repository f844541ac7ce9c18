"""Work that is repeated: no error ends it, each row of failures is told once, and its end waits for what runs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from greenroom.base.repeated import Repeated
from tests.waiting import until


@dataclass
class Work:
    """Fails as it is told, and counts."""

    fails: Exception | None = None
    runs: int = 0
    told: list[str] = field(default_factory=list)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    waits: bool = False

    async def run(self) -> None:
        self.runs += 1
        if self.waits:
            await self.may_end.wait()
        if self.fails is not None:
            raise self.fails

    def tell(self, what: str, error: Exception) -> None:
        self.told.append(f"{what}: {error}")

    def repeated(self, pause_s: float | None = 0.001) -> Repeated:
        return Repeated(self.run, "counting", lambda: pause_s, self.tell)


@pytest.mark.parametrize(
    "error", [OSError("no disk"), RuntimeError("can't start new thread"), MemoryError(), KeyError(1)]
)
async def test_no_error_ends_it_and_a_row_of_them_is_told_once(error: Exception) -> None:
    work = Work(error)
    repeated = work.repeated()
    repeated.start()
    await until(lambda: work.runs >= 5, "it goes on")
    assert work.told == [f"counting failed and is tried again: {error}"]
    work.fails, before = None, work.runs
    await until(lambda: work.runs > before + 1, "it succeeds")
    work.fails = error
    await until(lambda: len(work.told) == 2, "the next row is told, too")
    await repeated.cancel()


async def test_a_pause_that_fails_does_not_end_it() -> None:
    work, failing = Work(), True

    def pause_s() -> float:
        if failing:
            raise MemoryError
        return 0.001

    repeated = Repeated(work.run, "counting", pause_s, work.tell)
    repeated.start()
    await asyncio.sleep(0.01)
    failing = False
    await until(lambda: work.runs >= 2, "it goes on")
    assert work.told == ["counting failed and is tried again: "]
    await repeated.stop()


async def test_it_begins_with_a_pause_and_runs_when_woken() -> None:
    work = Work()
    repeated = work.repeated(pause_s=None)
    repeated.start()
    await asyncio.sleep(0.01)
    assert work.runs == 0
    work.waits = True
    repeated.wake()
    await until(lambda: work.runs == 1, "it runs")
    # Meanwhile: it has not seen what this wake is about.
    repeated.wake()
    work.may_end.set()
    await until(lambda: work.runs == 2, "it runs again")
    await repeated.stop()


async def test_a_stop_waits_for_what_runs_and_a_cancel_does_not() -> None:
    work = Work(waits=True)
    repeated = work.repeated()
    repeated.start()
    await until(lambda: work.runs == 1, "it runs")
    stopping = asyncio.ensure_future(repeated.stop())
    await asyncio.sleep(0.01)
    assert not stopping.done()
    work.may_end.set()
    await stopping
    assert work.runs == 1
    work.may_end.clear()
    repeated.start()
    await until(lambda: work.runs == 2, "it runs again")
    await repeated.cancel()
    assert work.runs == 2


async def test_one_that_never_began_ends_at_once() -> None:
    repeated = Work().repeated()
    await repeated.stop()
    await repeated.cancel()
