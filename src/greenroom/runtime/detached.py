"""Work that may block, done beside the loop by a thread that nobody has to wait for.

Owns nothing that lasts: one thread a call. Unlike the loop's own pool of threads, whose work is waited for when the
process ends, a thread that hangs here (a dead disk, a dead network mount) is simply left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def run_detached(work: Callable[[], Result], name: str) -> Result:
    """What `work` returns or raises. Cancelled, it is no longer waited for and goes on alone."""
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
        # A loop that has been closed meanwhile refuses this; then nobody is left to hear it.
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
