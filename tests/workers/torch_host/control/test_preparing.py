"""A model on its way to sleep, and one that wakes or closes: nothing is left when a part fails."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from greenroom.workers.serving.http import HttpServer
from greenroom.workers.torch_host.control import preparing
from greenroom.workers.torch_host.control.preparing import PreparedText, prepare
from greenroom.workers.torch_host.control.resources import DeviceContext, SlotEngine, WorkerResources
from greenroom.workers.torch_host.control.slot_options import Opening, SlotOptions
from greenroom.workers.torch_host.control.slots import WorkerSlot
from greenroom.workers.torch_host.failures import BadModel, Failure, Stuck, is_fatal
from greenroom.workers.torch_host.text.tokens import TextCodec
from greenroom.workers.torch_host.weights import reading
from greenroom.workers.torch_host.weights.device_weights import DeviceWeights, WakeResult
from greenroom.workers.torch_host.weights.upload import CopyRate
from greenroom.workers.torch_host.weights.weight_file import WeightFile
from tests.workers.torch_host.samples import tiny

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("llama"), "llama")


def prepared(folder: Path, descriptor: int, filled: bool = False) -> PreparedText:
    order = SlotOptions("s", "m", folder, Path("unused"), filled=filled, device="cpu", cache_tokens=512)
    around = DeviceContext(torch.device("cpu"), CopyRate(), on_fatal=lambda error, say: say())
    return prepare(order, descriptor, around, Opening())


def let_go(made: PreparedText) -> None:
    made.engine.close()
    made.weights.close()
    made.text.close()


def noted(call: Callable[..., Any], note: Callable[[], None]) -> Callable[..., Any]:
    def noting(*given: Any, **named: Any) -> Any:
        note()
        return call(*given, **named)

    return noting


def test_tokenizer_and_device_weights_are_made_meanwhile(
    llama: Path, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads wait here until both are under way, and both say whether a read had begun before."""
    reads, text, weights = threading.Event(), threading.Event(), threading.Event()
    early: list[str] = []

    def note(name: str, begun: threading.Event) -> Callable[[], None]:
        def begin() -> None:
            if not reads.is_set():
                early.append(name)
            begun.set()

        return begin

    fill = WeightFile.fill

    def fill_beside(self: WeightFile, *what: Any) -> int:
        assert text.wait(DEADLINE_S)
        assert weights.wait(DEADLINE_S)
        return fill(self, *what)

    monkeypatch.setattr(WeightFile, "fill", fill_beside)
    monkeypatch.setattr(reading._ReadJob, "_next", noted(reading._ReadJob._next, reads.set))
    monkeypatch.setattr(TextCodec, "load", noted(TextCodec.load, note("text", text)))
    monkeypatch.setattr(preparing, "DeviceWeights", noted(DeviceWeights, note("stage", weights)))
    let_go(prepared(llama, descriptor))
    assert text.is_set()
    assert weights.is_set()
    assert early == []


def test_a_model_of_transformers_is_prepared(tmp_path: Path, descriptor: int, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny.store_oddly(tiny.make_model(tmp_path, "llama"))
    with caplog.at_level("INFO"):
        made = prepared(folder, descriptor)
    assert "weights are loaded by Transformers" in caplog.text
    assert made.read_bytes > 0
    let_go(made)


def test_what_another_worker_filled_is_prepared_without_reading(llama: Path, descriptor: int) -> None:
    let_go(prepared(llama, descriptor))
    made = prepared(llama, descriptor, filled=True)
    assert made.read_bytes == 0
    assert os.fstat(descriptor).st_size <= made.host_bytes < os.fstat(descriptor).st_size + 8192
    let_go(made)


def break_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextCodec, "load", broken)


def break_engine_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "EngineLoop", broken)


def break_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightFile, "fill", broken)


def broken(*_: object, **__: object) -> Any:
    raise BadModel("broken on purpose")


@pytest.mark.parametrize("spoil", [break_text, break_engine_loop, break_reading])
def test_whatever_fails_leaves_neither_thread_nor_mapping(
    spoil: Callable[[pytest.MonkeyPatch], None],
    llama: Path,
    descriptor: int,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    before = set(threading.enumerate())
    spoil(monkeypatch)
    # Nothing may wait for the next round of the garbage collector: the memory is another model's by then.
    gc.disable()
    request.addfinalizer(gc.enable)
    with pytest.raises(BadModel, match="broken on purpose") as caught:
        prepared(llama, descriptor)
    assert [thread for thread in threading.enumerate() if thread not in before] == []
    if spoil is break_text:
        # Not even while the error is still being told: the model was whole by then, and bound to its arena.
        assert mappings(os.fstat(descriptor).st_ino) == 0
    del caught
    assert mappings(os.fstat(descriptor).st_ino) == 0


def mappings(inode: int) -> int:
    with open("/proc/self/maps") as lines:
        return sum(1 for line in lines if line.split()[4] == str(inode) and "memfd:arena" in line)


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
