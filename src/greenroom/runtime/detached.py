"""Runs blocking work in a thread that can be left behind.

Owns one thread for each call. The exit of the process waits for the loop's own thread pool; a thread that hangs here (a
dead disk, a dead network mount) does not delay it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def run_detached(work: Callable[[], Result], name: str) -> Result:
    """Return or raise what `work` does. If this is cancelled, the thread runs on by itself."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except Exception as error:
            tell(_fail, done, error)
        else:
            tell(_succeed, done, result)

    def tell(how: Callable[..., None], *said: object) -> None:
        # A closed loop raises this; no caller is left then.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(how, *said)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done


def _succeed(done: asyncio.Future[Result], result: Result) -> None:
    if not done.done():
        done.set_result(result)


def _fail(done: asyncio.Future[Result], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)
