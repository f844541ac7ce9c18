"""A slot whose model's thread does not obey: memory that a computation may still use is never freed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, cast

import pytest

from greenroom.workers.serving.http import HttpServer
from greenroom.workers.torch_host.control.preparing import prepare
from greenroom.workers.torch_host.control.resources import SlotEngine, WorkerResources
from greenroom.workers.torch_host.control.worker_slot import WorkerSlot
from greenroom.workers.torch_host.failures import Failure, Stuck, is_fatal
from greenroom.workers.torch_host.weights.device_weights import DeviceWeights, WakeResult


class FakeWeights:
    is_awake = False

    def wake(self) -> WakeResult:
        self.is_awake = True
        return WakeResult(1, [1], 0.0)

    def sleep(self) -> float:
        self.is_awake = False
        return 0.0


class FakeEngine:
    """Fails where it is told to."""

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}

    def on_wake(self) -> None:
        self._do("wake")

    def on_sleep(self) -> None:
        self._do("sleep")

    def _do(self, what: str) -> None:
        if what in self.errors:
            raise self.errors[what]


class FakeServer:
    async def close(self) -> None:
        """There are no connections."""


class Rig:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.weights, self.engine = FakeWeights(), FakeEngine()
        resources = WorkerResources(loop, on_fatal=lambda error, say: say(), prepare=prepare)
        parts: tuple[Any, ...] = (self.weights, self.engine, FakeServer())
        weights, engine, served = parts
        self.has_let_go = False
        cleanup = ExitStack()
        cleanup.callback(self._let_go)
        self.hosted = WorkerSlot(
            cast(DeviceWeights, weights),
            cast(SlotEngine, engine),
            cast(HttpServer, served),
            resources,
            cleanup,
            host_bytes=0,
        )

    def _let_go(self) -> None:
        self.has_let_go = True


@pytest.fixture
def rig() -> Iterator[Rig]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield Rig(loop)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_wake_that_fails_leaves_it_asleep(rig: Rig) -> None:
    rig.engine.errors["wake"] = Failure("the thread has ended")
    with pytest.raises(Failure, match="has ended"):
        rig.hosted.wake()
    assert not rig.weights.is_awake


@pytest.mark.parametrize("order", ["wake", "sleep", "close"])
def test_memory_is_not_taken_from_a_thread_that_does_not_obey_and_the_process_is_to_end(rig: Rig, order: str) -> None:
    if order != "wake":
        rig.hosted.wake()
    rig.engine.errors = dict.fromkeys(("wake", "sleep"), Stuck("it did not obey"))
    moves: dict[str, Callable[[], Any]] = {
        "wake": rig.hosted.wake,
        "sleep": rig.hosted.sleep,
        "close": rig.hosted.close,
    }
    with pytest.raises(Stuck) as caught:
        moves[order]()
    assert is_fatal(caught.value)
    assert rig.weights.is_awake
    assert not rig.has_let_go


def test_a_close_that_fails_otherwise_lets_go_all_the_same(rig: Rig) -> None:
    rig.hosted.wake()
    rig.engine.errors["sleep"] = Failure("odd")
    with pytest.raises(Failure, match="odd"):
        rig.hosted.close()
    assert rig.has_let_go
