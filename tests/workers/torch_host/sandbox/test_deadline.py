from __future__ import annotations

import asyncio
import threading
import time

import pytest

from greenroom.workers.torch_host.sandbox.deadline import DeadlineExceeded, run_with_deadline
from tests.waiting import until

WAIT_S = 30


def spin() -> None:
    while True:
        pass


async def gone(name: str) -> None:
    """Until no thread of this name is left."""
    await until(lambda: not any(thread.name == name for thread in threading.enumerate()))


async def test_what_the_work_returns_or_raises_comes_back() -> None:
    assert await run_with_deadline(lambda: 7, WAIT_S, "seven") == 7
    with pytest.raises(KeyError):
        await run_with_deadline(lambda: {}["x"], WAIT_S, "missing")
    with pytest.raises(TimeoutError):
        await run_with_deadline(raise_timeout, WAIT_S, "its own timeout")


def raise_timeout() -> None:
    raise TimeoutError


async def test_work_that_loops_is_ended_and_its_thread_is_gone() -> None:
    with pytest.raises(DeadlineExceeded):
        await run_with_deadline(spin, 0.05, "spinning")
    await gone("spinning")


async def test_work_that_catches_every_exception_is_ended_too() -> None:
    def stubborn() -> None:
        while True:
            try:
                spin()
            except Exception:
                continue

    with pytest.raises(DeadlineExceeded):
        await run_with_deadline(stubborn, 0.05, "stubborn")
    await gone("stubborn")


async def test_work_that_sleeps_is_ended_when_it_wakes() -> None:
    with pytest.raises(DeadlineExceeded):
        await run_with_deadline(lambda: [time.sleep(0.2) for _ in range(1000)], 0.05, "sleeping")
    await gone("sleeping")


async def test_work_ends_when_its_caller_is_cancelled() -> None:
    task = asyncio.create_task(run_with_deadline(spin, WAIT_S, "cancelled"))
    await until(lambda: any("cancelled" in thread.name for thread in threading.enumerate()), "it has begun")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await gone("cancelled")
