"""Runs blocking work in a thread that can be left behind.

Owns one thread for each call. The exit of the process waits for the loop's own thread pool; a thread that hangs here (a
dead disk, a dead network mount) does not delay it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class SystemShort(OSError):
    """The system gives no thread, or no memory. It may a moment later: work that failed so can be tried again."""


async def run_detached(
    work: Callable[[], Result], name: str, *, unclaimed: Callable[[Result], object] | None = None
) -> Result:
    """Return or raise what `work` does. Raises SystemShort if there is no thread for it, or no memory.

    If this is cancelled, the thread runs on by itself. Then `unclaimed` gets its result, to release what that holds.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except MemoryError:
            tell(_fail, done, SystemShort(errno.ENOMEM, os.strerror(errno.ENOMEM)))
        except Exception as error:
            tell(_fail, done, error)
        else:
            tell(succeed, result)

    def succeed(result: Result) -> None:
        if not done.done():
            done.set_result(result)
        elif unclaimed is not None:
            unclaimed(result)

    def tell(how: Callable[..., None], *said: object) -> None:
        # A closed loop raises this; no caller is left then.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(how, *said)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except (RuntimeError, MemoryError) as error:
        raise SystemShort(errno.EAGAIN, "no thread can be started (a limit of processes, or of memory)") from error
    try:
        return await done
    except asyncio.CancelledError:
        # The result may have come in the same moment.
        if unclaimed is not None and not done.cancelled() and done.exception() is None:
            unclaimed(done.result())
        raise


def _fail(done: asyncio.Future[Result], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)
