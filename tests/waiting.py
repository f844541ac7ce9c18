"""Wait for a fact rather than for a time: the one way in which tests wait for what nothing tells them of."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable

# Generous: the machine may be busy. Nothing waits this long when all is well.
PATIENCE_S = 150.0
POLL_S = 0.005
# A question that takes a while, such as a request, is asked less often: the cores are for what is waited for.
PAUSES_A_QUESTION = 4
POLL_MAX_S = 0.05


async def until(
    fact: Callable[[], object], what: object = "a fact", within_s: float = PATIENCE_S, every_s: float = POLL_S
) -> None:
    """Return once `fact()`, awaited if it can be, is true; fail after `within_s`. Looks `every_s`, at each turn if 0.

    `what` is named by the failure; called first if it can be."""
    began = time.monotonic()
    deadline = began + within_s
    while not await _asked(fact):
        now = time.monotonic()
        assert now < deadline, _late(what, within_s)
        await asyncio.sleep(_pause(now - began, every_s))
        began = time.monotonic()


def until_now(fact: Callable[[], object], what: object = "a fact", within_s: float = PATIENCE_S) -> None:
    """The same for tests and programs without a loop."""
    began = time.monotonic()
    deadline = began + within_s
    while not fact():
        now = time.monotonic()
        assert now < deadline, _late(what, within_s)
        time.sleep(_pause(now - began, POLL_S))
        began = time.monotonic()


async def until_still(measure: Callable[[], int], for_s: float = 0.3) -> None:
    """Return once `measure()` is above 0 and has not changed for so long: what can move has moved."""
    before, since = measure(), time.monotonic()

    def is_still() -> bool:
        nonlocal before, since
        if (now := measure()) != before or not now:
            before, since = now, time.monotonic()
        return time.monotonic() - since >= for_s

    await until(is_still, "nothing moves any more")


def _pause(question_s: float, every_s: float) -> float:
    return max(every_s, min(PAUSES_A_QUESTION * question_s, POLL_MAX_S)) if every_s else 0.0


async def _asked(fact: Callable[[], object]) -> object:
    answer = fact()
    return await answer if inspect.isawaitable(answer) else answer


def _late(what: object, within_s: float) -> str:
    return f"not within {within_s} s: {what() if callable(what) else what}"
