"""The pool of workers: one for each program, Python and set of GPUs, one for each slot that needs its own, and a spare.

Owns their starts and ends. A spare has imported everything and touched no GPU, so that a first model, or the slots of a
crashed worker, need not wait for imports. Never opens or moves slots: `moves/` does.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from greenroom.core.model import SlotId
from greenroom.engines.base import HostedEngine, HostKey
from greenroom.errors import GreenroomError
from greenroom.process.logs import LogRing
from greenroom.process.spawn import Exit
from greenroom.process.state_dir import StateDir
from greenroom.runtime.observer import Observer
from greenroom.runtime.timeouts import TIMEOUTS, WorkerTimeouts
from greenroom.runtime.workers.worker import Worker, start_worker, watch_liveness
from greenroom.telemetry.logs import get_logger

_log = get_logger("workers")


@dataclass(slots=True, eq=False)
class _Start:
    """A start under way, and how many loads wait for it. It is cancelled when none is left."""

    task: asyncio.Task[Worker]
    waiting: int = 0


class WorkerPool:
    """`on_lost` is called for every worker that ended without being asked to, while its slots are still known."""

    def __init__(
        self,
        state_dir: StateDir,
        observer: Observer,
        on_lost: Callable[[Worker, Exit], None],
        *,
        keeps_spare: bool,
        timeouts: WorkerTimeouts = TIMEOUTS.workers,
        start: Callable[..., Awaitable[Worker]] = start_worker,
    ) -> None:
        self._state_dir = state_dir
        self._observer = observer
        self._on_lost = on_lost
        self._keeps_spare = keeps_spare
        self._timeouts = timeouts
        self._start_worker = start
        self._numbers = itertools.count(1)
        self.workers: dict[str, Worker] = {}
        self._by_key: dict[HostKey, Worker] = {}
        self._starts: dict[HostKey, _Start] = {}
        # Spares, and those that start, by their bare keys; and tasks that watch or stop workers.
        self._spares: dict[HostKey, Worker] = {}
        self._coming: dict[HostKey, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    # --- slots come and go ------------------------------------------------------------------------------------------

    async def let_in(self, engine: HostedEngine, key: HostKey, slot: SlotId, log: LogRing) -> Worker:
        """The worker for this slot, started if necessary. Raises LoadFailed. `let_out` must follow."""
        while True:
            if (worker := self._there(key)) is not None:
                worker.let_in(slot, log)
                return worker
            await self._started(engine, key, log)

    def let_out(self, worker: Worker, slot: SlotId) -> None:
        """This slot has left the worker. A worker without slots becomes the spare, or ends."""
        worker.let_out(slot)
        if not worker.slots and not worker.is_lost and worker.key is not None:
            self._by_key.pop(worker.key, None)
            self._retire(worker)

    def want_spare(self, engine: HostedEngine, key: HostKey) -> None:
        """Start a spare soon, if there is none and slots with this key could use it."""
        bare = key.bare
        if not key.may_take_spare or bare in self._coming or not self._wants_spare(bare):
            return
        task = asyncio.get_running_loop().create_task(self._start_spare(engine, bare), name=f"spare {key.python}")
        self._coming[bare] = task
        task.add_done_callback(lambda _: self._coming.pop(bare, None))

    async def close(self) -> None:
        """End all workers that are left, such as spares."""
        self._is_closed = True
        for task in (*self._coming.values(), *(start.task for start in self._starts.values())):
            task.cancel()
        await _ended(*self._coming.values(), *(start.task for start in self._starts.values()))
        for worker in list(self.workers.values()):
            self._stop(worker)
        await _ended(*self._tasks)

    # --- starting ---------------------------------------------------------------------------------------------------

    def _there(self, key: HostKey) -> Worker | None:
        worker = self._by_key.get(key)
        if worker is not None and not worker.is_lost:
            return worker
        spare = self._spare(key.bare) if key.may_take_spare else None
        if spare is not None:
            del self._spares[key.bare]
            self._settle(spare, key)
        return spare

    def _spare(self, bare: HostKey) -> Worker | None:
        spare = self._spares.get(bare)
        return None if spare is None or spare.is_lost else spare

    def _settle(self, worker: Worker, key: HostKey) -> None:
        worker.key = key
        self._by_key[key] = worker

    async def _started(self, engine: HostedEngine, key: HostKey, log: LogRing) -> None:
        """Wait for the start of a worker with this key, or start one. The last waiter to be cancelled cancels it."""
        start = self._starts.get(key)
        if start is None:
            work = self._start(engine, key, log, is_spare=False)
            task = asyncio.get_running_loop().create_task(work, name=f"start worker {key.python}")
            start = self._starts[key] = _Start(task)
            task.add_done_callback(lambda _: self._starts.pop(key, None))
        start.waiting += 1
        try:
            self._settle(await asyncio.shield(start.task), key)
        except asyncio.CancelledError:
            if start.waiting == 1 and not start.task.done():
                start.task.cancel()
                await _ended(start.task)
            elif start.waiting == 1 and (worker := _result(start.task)) is not None and not worker.slots:
                # It was ready just when the last waiter left; with another waiter it would have a slot.
                self._retire(worker)
            raise
        finally:
            start.waiting -= 1

    async def _start(self, engine: HostedEngine, key: HostKey, log: LogRing, *, is_spare: bool) -> Worker:
        worker = await self._start_worker(engine, key, next(self._numbers), self._state_dir, log, self._timeouts)
        self.workers[worker.id] = worker
        worker.child.on_exit(lambda exit: self._on_exit(worker, exit))
        self._own(watch_liveness(worker), f"pulse {worker.id}")
        self._observer.worker_started(worker.id, spare=is_spare)
        return worker

    async def _start_spare(self, engine: HostedEngine, bare: HostKey) -> None:
        await asyncio.sleep(self._timeouts.spare_after_s)
        if not self._wants_spare(bare):
            return
        try:
            worker = await self._start(engine, bare, LogRing(), is_spare=True)
        except GreenroomError as error:
            _log.warning("no spare worker", python=bare.python, why=error.message)
            return
        # Meanwhile a worker that lost its last slot may have become the spare. One is enough.
        if self._wants_spare(bare):
            self._spares[bare] = worker
        else:
            self._stop(worker)

    # --- ending -----------------------------------------------------------------------------------------------------

    def _retire(self, worker: Worker) -> None:
        """Handle a worker without slots. One without GPU memory may become the spare; any other ends."""
        key, worker.key = worker.key, None
        is_bare = key is not None and key.may_take_spare and key.gpus != () and worker.device == "cpu"
        if key is not None and is_bare and self._wants_spare(key.bare):
            self._spares[key.bare] = worker
        else:
            self._stop(worker)

    def _wants_spare(self, bare: HostKey) -> bool:
        return self._keeps_spare and not self._is_closed and self._spare(bare) is None

    def _stop(self, worker: Worker) -> None:
        worker.is_stopping = True
        self._own(worker.stop(), f"stop {worker.id}")

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_exit(self, worker: Worker, exit: Exit) -> None:
        self.workers.pop(worker.id, None)
        if worker.key is not None and self._by_key.get(worker.key) is worker:
            del self._by_key[worker.key]
        self._spares = {bare: spare for bare, spare in self._spares.items() if spare is not worker}
        if not worker.is_stopping:
            self._observer.worker_lost(worker.id, len(worker.slots), str(exit))
            self._own(worker.stop(), f"clear up {worker.id}")
            self._on_lost(worker, exit)
        worker.gone.set()


def _result(task: asyncio.Task[Worker]) -> Worker | None:
    return None if task.cancelled() or task.exception() is not None else task.result()


async def _ended(*tasks: asyncio.Task[Any]) -> None:
    if tasks:
        await asyncio.wait(tasks)
