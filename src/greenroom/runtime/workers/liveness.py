"""Whether a worker still answers. One that is stopped, or stuck where nothing of its own can see it, is ended.

Owns one question every few seconds for as long as the worker lives. What it serves comes back elsewhere: its models are
asleep when it has ended. Never judges what it says: any answer is one.
"""

from __future__ import annotations

import asyncio
import contextlib

from greenroom.runtime.workers.control_link import OpFailed, WorkerLost
from greenroom.runtime.workers.worker_host import Worker
from greenroom.telemetry.logs import get_logger

_log = get_logger("workers")

ASK_EVERY_S = 10.0
# A worker that reads a folder in a way of Transformers' own, or makes its first kernels, may be busy for seconds.
ANSWER_MAX_S = 60.0


async def feel(worker: Worker) -> None:
    """Until it has ended, by itself or because it did not answer."""
    while not await _is_gone(worker):
        try:
            async with asyncio.timeout(ANSWER_MAX_S):
                await worker.ask("look")
        except OpFailed:
            continue
        except WorkerLost:
            return
        except TimeoutError:
            _log.warning("a worker does not answer and is ended", worker=worker.id, after_s=ANSWER_MAX_S)
            worker.end()
            return


async def _is_gone(worker: Worker) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ASK_EVERY_S):
            await worker.gone.wait()
    return worker.gone.is_set()
