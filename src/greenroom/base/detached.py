"""Runs blocking work in a thread that can be left behind.

Owns one thread for each call. The exit of the process waits for the loop's own thread pool; a thread that hangs here (a
dead disk, a dead network mount) does not delay it.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

# A thread begins within microseconds, on a machine that swaps within seconds. One without memory never does.
BEGINS_WITHIN_S = 15.0
TELL_AGAIN_S = 0.1


class SystemShort(OSError):
    """The system gives no thread, or no memory. It may a moment later: work that failed so can be tried again."""


async def run_detached(
    work: Callable[[], Result], name: str, *, unclaimed: Callable[[Result], object] | None = None
) -> Result:
    """Return or raise what `work` does. Raises SystemShort if there is no thread for it, or no memory.

    If this is cancelled, the thread runs on by itself. Then `unclaimed` gets its result, to release what that holds.
    """
    loop = asyncio.get_running_loop()

    def run() -> None:
        if not begun.acquire(blocking=False):
            return
        try:
            result = work()
        except MemoryError:
            tell(_fail, done, short)
        except BaseException as error:
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
            while True:
                try:
                    loop.call_soon_threadsafe(how, *said)
                    return
                except MemoryError:
                    time.sleep(TELL_AGAIN_S)

    def give_up() -> None:
        if begun.acquire(blocking=False):
            _fail(done, SystemShort(errno.ENOMEM, f"there was no memory to begin to {name}"))

    try:
        # All that needs memory comes before the thread: a caller that is told of a failure may try again.
        done: asyncio.Future[Result] = loop.create_future()
        begun = threading.Lock()
        short = SystemShort(errno.ENOMEM, os.strerror(errno.ENOMEM))
        giving_up = loop.call_later(BEGINS_WITHIN_S, give_up)
        try:
            # Not `threading.Thread`: the loop would wait without end for a thread that has no memory to begin.
            _thread.start_new_thread(run, ())
        except BaseException:
            giving_up.cancel()
            raise
    except (RuntimeError, MemoryError) as error:
        raise SystemShort(errno.EAGAIN, "no thread can be started (a limit of processes, or of memory)") from error
    try:
        return await done
    except asyncio.CancelledError:
        # The result may have come in the same moment.
        if unclaimed is not None and not done.cancelled() and done.exception() is None:
            unclaimed(done.result())
        raise
    finally:
        giving_up.cancel()


def _fail(done: asyncio.Future[Result], error: BaseException) -> None:
    if done.done():
        return
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        done.set_exception(error)
    else:
        # A future does not take it, or the loop would end by it.
        done.set_exception(RuntimeError(f"the work ended by {error!r}"))
