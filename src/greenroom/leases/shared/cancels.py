"""A cancel that a library hides is heard all the same.

Redis' client limits each send by `asyncio.wait_for`, which before Python 3.12 forgets a cancel that comes in the moment
in which what it waits for ends. Whoever had cancelled would wait for ever for an end that nobody begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cancels_heard() -> Iterator[None]:
    """Raise CancelledError at the end if this task was cancelled meanwhile, whatever became of it inside."""
    task = asyncio.current_task()
    assert task is not None, "only tasks can be cancelled"
    before = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError
