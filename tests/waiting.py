"""Wait for a fact rather than for a time: the one way in which tests wait for what nothing tells them of."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable

# Generous: the machine may be busy. Nothing waits this long when all is well.
PATIENCE_S = 150.0
POLL_S = 0.005


async def until(
    fact: Callable[[], object], what: object = "a fact", within_s: float = PATIENCE_S, every_s: float = POLL_S
) -> None:
    """Return once `fact()`, awaited if it can be, is true; fail after `within_s`. Looks `every_s`, at each turn if 0.

    `what` is named by the failure; called first if it can be."""
    deadline = time.monotonic() + within_s
    while not await _asked(fact):
        assert time.monotonic() < deadline, _late(what, within_s)
        await asyncio.sleep(every_s)


def until_now(fact: Callable[[], object], what: object = "a fact", within_s: float = PATIENCE_S) -> None:
    """The same for tests and programs without a loop."""
    deadline = time.monotonic() + within_s
    while not fact():
        assert time.monotonic() < deadline, _late(what, within_s)
        time.sleep(POLL_S)


async def until_still(measure: Callable[[], int], for_s: float = 0.3) -> None:
    """Return once `measure()` is above 0 and has not changed for so long: what can move has moved."""
    before, since = measure(), time.monotonic()

    def is_still() -> bool:
        nonlocal before, since
        if (now := measure()) != before or not now:
            before, since = now, time.monotonic()
        return time.monotonic() - since >= for_s

    await until(is_still, "nothing moves any more")


async def _asked(fact: Callable[[], object]) -> object:
    answer = fact()
    return await answer if inspect.isawaitable(answer) else answer


def _late(what: object, within_s: float) -> str:
    return f"not within {within_s} s: {what() if callable(what) else what}"
