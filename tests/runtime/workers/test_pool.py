"""Which workers there are, and that arenas of those that ended are given back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from greenroom.core.model import DeviceId, SlotId
from greenroom.engines.base import HostedEngine, HostKey
from greenroom.process.logs import LogRing, SharedLog
from greenroom.process.spawn import Child, Exit
from greenroom.process.state_dir import StateDir
from greenroom.runtime.observer import Hub, Observer
from greenroom.runtime.timeouts import WorkerTimeouts
from greenroom.runtime.workers.hosted_slots import Arena
from greenroom.runtime.workers.pool import WorkerPool
from greenroom.runtime.workers.worker import Worker
from greenroom.telemetry.metrics import Metrics
from tests.waiting import until

KEY = HostKey("worker.py", "python", gpus=None)
FIRST, SECOND = SlotId("s1"), SlotId("s2")
ENGINE = cast(HostedEngine, None)


class FakeChild:
    """A process that ends when it is told to."""

    pid = 1

    def __init__(self) -> None:
        self.exit: Exit | None = None
        self._tell: Callable[[Exit], None] = lambda exit: None

    @property
    def is_running(self) -> bool:
        return self.exit is None

    def on_exit(self, callback: Callable[[Exit], None]) -> None:
        self._tell = callback

    async def stop(self, term_s: float) -> Exit:
        if self.exit is None:
            self.exit = Exit(0, None)
            self._tell(self.exit)
        return self.exit


class Starts:
    """Starts of workers, each of which waits until it may go on."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.begun = 0
        self.on_let_in: Callable[[], Any] = lambda: None
        self.made: list[Worker] = []

    async def start(
        self, engine: object, key: object, number: int, state_dir: object, log: object, timeouts: object
    ) -> Worker:
        self.begun += 1
        await self.gate.wait()
        starts = self

        class Fake(Worker):
            def let_in(self, slot: SlotId, log: LogRing) -> None:
                super().let_in(slot, log)
                starts.on_let_in()

        worker = Fake(f"worker{number}", cast(Child, FakeChild()), SharedLog(), f"/nowhere/w{number}.sock")
        worker.device = "cpu"
        self.made.append(worker)
        return worker


def made(starts: Starts) -> WorkerPool:
    return WorkerPool(
        cast(StateDir, None),
        Observer(Hub(), Metrics()),
        lambda worker, exit: None,
        keeps_spare=True,
        timeouts=WorkerTimeouts(spare_after_s=0.0),
        start=starts.start,
    )


async def test_a_spare_that_comes_after_another_worker_became_the_spare_is_ended() -> None:
    starts = Starts()
    all_hosts = made(starts)
    worker = await all_hosts.let_in(ENGINE, KEY, FIRST, LogRing())
    starts.gate.clear()
    all_hosts.want_spare(ENGINE, KEY)
    await until(lambda: starts.begun == 2, "the spare starts")
    all_hosts.let_out(worker, FIRST)
    starts.gate.set()
    await until(lambda: len(starts.made) == 2, "the spare is there")
    await until(lambda: list(all_hosts.workers.values()) == [worker], "one spare is left")
    assert await all_hosts.let_in(ENGINE, KEY, SECOND, LogRing()) is worker
    await all_hosts.close()


@pytest.mark.parametrize("key", [replace(KEY, env=(("A", "1"),)), replace(KEY, cwd="/somewhere")])
async def test_no_spare_is_started_for_models_that_could_not_take_it(key: HostKey) -> None:
    starts = Starts()
    all_hosts = made(starts)
    await all_hosts.let_in(ENGINE, key, FIRST, LogRing())
    all_hosts.want_spare(ENGINE, key)
    # A neighbour of the same Python that could take it still has one.
    await all_hosts.let_in(ENGINE, KEY, SECOND, LogRing())
    assert starts.begun == 2, "a spare would have begun to start before"
    all_hosts.want_spare(ENGINE, KEY)
    await until(lambda: len(starts.made) == 3, "the spare is there")
    await all_hosts.close()


async def test_two_programs_in_one_python_never_mix() -> None:
    starts = Starts()
    all_hosts = made(starts)
    other = replace(KEY, program="other.py")
    worker = await all_hosts.let_in(ENGINE, KEY, FIRST, LogRing())
    assert await all_hosts.let_in(ENGINE, other, SECOND, LogRing()) is not worker
    all_hosts.let_out(worker, FIRST)
    # The first program's worker is a spare now, for that program alone.
    all_hosts.want_spare(ENGINE, other)
    await until(lambda: len(starts.made) == 3, "the other program has a spare of its own")
    assert await all_hosts.let_in(ENGINE, replace(other, alone="s3"), SlotId("s3"), LogRing()) is not worker
    assert await all_hosts.let_in(ENGINE, KEY, FIRST, LogRing()) is worker
    await all_hosts.close()


async def test_a_worker_is_kept_for_its_slot_when_another_that_waited_for_it_is_called_off() -> None:
    starts = Starts()
    all_hosts = made(starts)
    starts.gate.clear()
    stays = asyncio.create_task(all_hosts.let_in(ENGINE, KEY, FIRST, LogRing()))
    leaves = asyncio.create_task(all_hosts.let_in(ENGINE, KEY, SECOND, LogRing()))
    # In the very moment in which the worker is there: the first has taken it, the second has not been told yet.
    starts.on_let_in = leaves.cancel
    await until(lambda: starts.begun == 1, "a worker starts")
    starts.gate.set()
    worker = await stays
    await asyncio.wait((leaves,))
    assert leaves.cancelled() and list(worker.slots) == [FIRST]
    # It is no spare: a slot that would take a spare gets another one.
    assert not worker.is_lost
    assert await all_hosts.let_in(ENGINE, replace(KEY, gpus=(DeviceId("GPU-b"),)), SECOND, LogRing()) is not worker
    await all_hosts.close()
    assert not all_hosts.workers


def test_the_next_worker_fills_another_file_than_the_one_that_ended_in_the_middle() -> None:
    arena = Arena("s1")
    straggler = os.dup(arena.fd)
    os.ftruncate(straggler, 8192)
    arena.empty()
    assert os.fstat(straggler).st_size == arena.size_bytes == 0
    # Also where the worker itself had emptied it.
    os.pwrite(straggler, b"late", 0)
    assert arena.size_bytes == 0
    os.close(straggler)
    arena.close()
    arena.close()
