"""A thread that is left behind: what its work holds is released."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from greenroom.base.detached import SystemShort, run_detached
from tests.waiting import PATIENCE_S, until, until_now


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


async def test_a_result_that_comes_after_a_cancel_is_handed_back() -> None:
    begun, may_end, left = threading.Event(), threading.Event(), list[str]()

    def work() -> str:
        begun.set()
        may_end.wait(PATIENCE_S)
        return "locks"

    task = asyncio.ensure_future(run_detached(work, "work", unclaimed=left.append))
    await until(begun.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert left == []
    may_end.set()
    await until(lambda: left == ["locks"])


async def test_a_result_that_comes_with_a_cancel_is_handed_back() -> None:
    begun, may_end, left = threading.Event(), threading.Event(), list[str]()

    def work() -> str:
        begun.set()
        may_end.wait(PATIENCE_S)
        return "locks"

    before = threads()
    task = asyncio.ensure_future(run_detached(work, "such work", unclaimed=left.append))
    await until(begun.is_set)
    may_end.set()
    # The loop stands still until the thread has told its result. The cancel comes after that, and before the waiter.
    until_now(lambda: threads() <= before)
    asyncio.get_running_loop().call_soon(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert left == ["locks"]


async def test_a_result_that_is_waited_for_is_not_handed_back() -> None:
    left = list[str]()
    assert await run_detached(lambda: "locks", "work", unclaimed=left.append) == "locks"
    assert left == []


@pytest.mark.parametrize("refusal", [RuntimeError("can't start new thread"), MemoryError()])
async def test_a_system_without_a_thread_is_an_error_of_the_system(
    monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    def refused(*said: object) -> None:
        raise refusal

    # What the kernel does at a limit of processes: tests/integration/failures/test_resources_run_out.py.
    monkeypatch.setattr("_thread.start_new_thread", refused)
    with pytest.raises(SystemShort, match="no thread can be started") as raised:
        await run_detached(lambda: 1, "work")
    # That would say that something is locked.
    assert not isinstance(raised.value, BlockingIOError)


async def test_work_without_memory_is_an_error_of_the_system() -> None:
    def work() -> None:
        raise MemoryError

    with pytest.raises(SystemShort, match="Cannot allocate memory"):
        await run_detached(work, "work")


@pytest.mark.parametrize("part", ["create_future", "call_later"])
async def test_nothing_is_begun_where_there_is_no_memory_to_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def refused(*said: object) -> None:
        raise MemoryError

    done = list[int]()
    monkeypatch.setattr(asyncio.get_running_loop(), part, refused)
    with pytest.raises(SystemShort):
        await run_detached(lambda: done.append(1), "work")
    monkeypatch.undo()
    assert await run_detached(lambda: done.append(2), "work") is None
    assert done == [2]


@pytest.mark.parametrize("error", [StopIteration(), SystemExit(), asyncio.CancelledError()])
async def test_no_error_leaves_the_caller_waiting(error: BaseException) -> None:
    def work() -> None:
        raise error

    with pytest.raises(RuntimeError, match=f"the work ended by {type(error).__name__}"):
        async with asyncio.timeout(PATIENCE_S):
            await run_detached(work, "work")
