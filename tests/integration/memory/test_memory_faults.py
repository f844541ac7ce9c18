"""Memory that is not what it was thought to be: engines that need more, strangers, memory that comes back late.

GPUs are described by a file, and fake engines take their memory there: one that wants more than there is dies as on a
real GPU, so that an engine that came up is one that had room.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.core.model import DeviceId, ModelId, MoveKind, Need
from greenroom.runtime.memory.book import FILE_NAME as NEEDS_FILE
from greenroom.runtime.timeouts import MemoryTimeouts, Timeouts
from tests.harness import FAKE_ENGINE, fake, gateway, gateway_process, tiny
from tests.integration.facts import Journal, at_rest, is_loading, is_ready, pids
from tests.integration.faults import dial
from tests.integration.raw import asking, chat, http
from tests.models import tiny as tiny_model
from tests.standins import fake_gpu
from tests.waiting import until

pytestmark = pytest.mark.slow

A, B = "GPU-aaaa", "GPU-bbbb"
ROOT = str(FAKE_ENGINE.parents[2])
NEVER_S = 300
LONG_BACKOFF = {"backoff_s": 100}


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    """One GPU of 10,000 MiB."""
    return fake_gpu.describe(tmp_path / "gpus.json", fake_gpu.gpu(A, 10_000))


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path)


@contextlib.asynccontextmanager
async def on(file: Path, models: dict[str, Any], **sections: Any) -> AsyncIterator[App]:
    memory = {"probe": "file", "file": str(file), "look_every_s": 0.2, "gpu_margin_mib": 0}
    async with gateway(file.parent, models, gpus=[], memory=memory, **sections) as app:
        yield app


def taking(name: str, file: Path, mib: int, *switches: str, **keys: Any) -> dict[str, Any]:
    """A model whose engine takes so much of the GPUs it may see, and writes down what it does."""
    said = (f"--gpu-file={file}", f"--gpu-mib={mib}", f"--journal={Journal(file.parent).path}")
    return fake(name, *said, *switches, **{"memory_mib": mib, **keys})


def used_mib(app: App, gpu: int = 0) -> int:
    return app.memory_watch.last.reading.gpus[gpu].used_mib


def foreign_mib(app: App, device: str = A) -> int:
    return app.loop.scheduler.state.ledger.foreign.get(DeviceId(device), 0)


def need_of(app: App, model: str) -> Need:
    return app.loop.scheduler.view.models[ModelId(model)].need


def claim_of(app: App, model: str) -> dict[str, int]:
    (slot,) = app.loop.scheduler.state.slots_of(ModelId(model))
    return {str(device): mib for device, mib in slot.claim.items()}


async def load(app: App, model: str) -> None:
    await app.operations.move(MoveKind.LOAD, ModelId(model))


async def unload(app: App, model: str) -> None:
    await app.operations.move(MoveKind.UNLOAD, ModelId(model))


async def served(app: App, model: str, **more: Any) -> None:
    answer = await chat(app, model, **more)
    assert answer.status == 200, answer.body
    assert answer.text.startswith(model)


# --- an engine that needs more than was thought ---------------------------------------------------------------------


async def test_load_that_runs_out_of_memory_gets_more_room_also_after_a_restart(gpus: Path, journal: Journal) -> None:
    idle = taking("idle", gpus, 7_000)
    greedy = taking("greedy", gpus, 4_000, memory_mib=2_500)
    models = {"idle": idle, "greedy": greedy}
    async with on(gpus, models) as app:
        await served(app, "idle")
        await served(app, "greedy")
        assert (journal.count("start", name="greedy"), journal.count("start", name="idle")) == (2, 1)
        assert not pids(app, "idle"), "it made room"
        assert (learned := need_of(app, "greedy")).gpu_mib > 3_000
        await at_rest(app)
    async with on(gpus, models) as app:
        assert need_of(app, "greedy") == learned
        shown = (await http(app, "GET", "/api/v1/models/greedy")).json()["need"]
        assert (shown["gpu_mib"], shown["source"], shown["measured_gpu_mib"]) == (learned.gpu_mib, "raised", 4_000)
        await served(app, "idle")
        await served(app, "greedy")
        assert journal.count("start", name="greedy") == 3, "it fitted at once"


async def test_engine_that_can_never_fit_fails_with_numbers_and_for_good(gpus: Path, journal: Journal) -> None:
    other = taking("other", gpus, 3_000)
    huge = taking("huge", gpus, 12_000, memory_mib=2_000)
    async with on(gpus, {"other": other, "huge": huge}, scheduler=LONG_BACKOFF) as app:
        await served(app, "other")
        for answer in await asyncio.gather(*(chat(app, "huge", stream=number == 0) for number in range(3))):
            assert answer.status == 507, answer.body
            assert answer.error["code"] == "model_out_of_memory"
            assert "CUDA error: out of memory" in answer.error["message"]
            (numbers,) = answer.error["memory"].values()
            assert numbers["given_mib"] > 2_000 and numbers["capacity_mib"] == 10_000
            assert f"{numbers['free_mib']:,} of 10,000 MiB" in answer.error["message"]
            assert "memory_mib" in answer.error["message"]
        assert journal.count("start", name="huge") == 2, "once, and once more with more room"

        # Within the back-off nothing is started, and the caller hears the same.
        again = await chat(app, "huge")
        assert (again.status, again.error["code"]) == (507, "model_out_of_memory")
        assert int(again.headers["retry-after"]) > 10
        assert journal.count("start", name="huge") == 2
        assert journal.count("start", name="other") == 1 and is_ready(app, "other"), "no model left for it in vain"
        await until(lambda: used_mib(app) == 3_000, "its memory is back")
        await at_rest(app)


async def test_engine_of_which_nothing_is_known_is_fitted_from_its_second_load_on(gpus: Path, journal: Journal) -> None:
    unknown = taking("unknown", gpus, 3_500, memory_mib=None)
    async with on(gpus, {"unknown": unknown}) as app:
        assert need_of(app, "unknown") == Need()
        await served(app, "unknown")
        assert claim_of(app, "unknown") == {}
        await until(lambda: need_of(app, "unknown").gpu_mib == 3_500, "it was measured")
        await unload(app, "unknown")
        await served(app, "unknown")
        assert claim_of(app, "unknown")[A] == 3_500
    async with on(gpus, {"unknown": unknown}) as app:
        assert need_of(app, "unknown").gpu_mib == 3_500
        shown = (await http(app, "GET", "/api/v1/models/unknown")).json()["need"]
        assert (shown["source"], shown["measured_gpu_mib"]) == ("measured", 3_500)


async def test_engine_of_which_nothing_is_known_is_made_room_for_when_it_runs_out(gpus: Path, journal: Journal) -> None:
    idle = taking("idle", gpus, 7_000)
    unknown = taking("unknown", gpus, 5_000, memory_mib=None)
    async with on(gpus, {"idle": idle, "unknown": unknown}) as app:
        await served(app, "idle")
        await served(app, "unknown")
        assert journal.count("start", name="unknown") == 2
        assert not pids(app, "idle")


# --- an engine that grows while it serves ---------------------------------------------------------------------------


async def test_growth_while_serving_is_remembered(gpus: Path) -> None:
    growing = taking("growing", gpus, 1_000, "--gpu-grow-mib", "700", memory_mib=None)
    async with on(gpus, {"growing": growing}) as app:
        await served(app, "growing")
        await until(lambda: used_mib(app) == 1_700, "it has grown")
        await unload(app, "growing")
        assert need_of(app, "growing").gpu_mib == 1_700


async def test_growth_while_serving_outlasts_a_gateway_that_is_killed(gpus: Path) -> None:
    growing = {"growing": taking("growing", gpus, 1_000, "--gpu-grow-mib", "700", memory_mib=None)}
    memory = {"probe": "file", "file": str(gpus), "look_every_s": 0.2, "gpu_margin_mib": 0}
    needs = gpus.parent / "state" / NEEDS_FILE
    with gateway_process(gpus.parent, growing, gpus=[], memory=memory) as gate:
        async with await dial(gate.port) as raw:
            raw.ask(asking("growing"))
            assert (await raw.answer()).status == 200
        await until(lambda: needs.exists() and '"gpu_mib": 1700' in needs.read_text(), "it is written down")
    async with on(gpus, growing) as app:
        assert need_of(app, "growing").gpu_mib == 1_700


async def test_engine_that_dies_of_its_growth_fails_its_request_and_no_other(gpus: Path, journal: Journal) -> None:
    other = taking("other", gpus, 3_000)
    growing = taking("growing", gpus, 1_000, "--gpu-grow-mib", "9000")
    async with on(gpus, {"other": other, "growing": growing}, scheduler=LONG_BACKOFF) as app:
        await served(app, "other")
        answer = await chat(app, "growing")
        assert answer.status in (502, 503), answer.body
        assert answer.error["code"] in ("engine_lost", "model_load_failed")
        assert journal.count("start", name="growing") <= 2, "tried again once, not for ever"
        await served(app, "other")
        assert journal.count("start", name="other") == 1
        await until(lambda: used_mib(app) == 3_000, "the memory of the dead is back")
        await at_rest(app)


# --- strangers ------------------------------------------------------------------------------------------------------


async def test_a_stranger_that_fills_the_gpu_evicts_no_model_and_is_waited_for(gpus: Path, journal: Journal) -> None:
    fake_gpu.describe(gpus, fake_gpu.gpu(A, 40_000))
    ready = taking("ready", gpus, 8_000)
    cold = taking("cold", gpus, 20_000)
    async with on(gpus, {"ready": ready, "cold": cold}) as app:
        await served(app, "ready")
        fake_gpu.describe(gpus, fake_gpu.gpu(A, 40_000, 30_000))
        await until(lambda: foreign_mib(app) == 30_000, "the stranger is seen")
        waiting = asyncio.create_task(chat(app, "cold"))
        await until(lambda: app.loop.scheduler.state.waitlist.depth == 1, "the request waits")
        for _ in range(3):
            await app.memory_watch.look_now()
            await served(app, "ready")
        assert not waiting.done() and journal.count("start", name="cold") == 0
        assert journal.count("start", name="ready") == 1, "no model left, because that would have made no room"

        fake_gpu.describe(gpus, fake_gpu.gpu(A, 40_000, 0))
        answer = await waiting
        assert answer.status == 200, answer.body
        assert journal.count("start", name="cold") == 1
        assert journal.count("start", name="ready") == 1


async def test_a_request_that_cannot_wait_for_foreign_memory_is_told_how_much_is_missing(gpus: Path) -> None:
    fake_gpu.describe(gpus, fake_gpu.gpu(A, 40_000, 30_000))
    cold = taking("cold", gpus, 20_000)
    async with on(gpus, {"cold": cold}, server={"wait_max_s": 0.5}) as app:
        answer = await chat(app, "cold")
        assert answer.status == 503, answer.body
        assert answer.error["memory"] == {"needs_mib": 20_000, "free_mib": 10_000, "capacity_mib": 40_000}
        assert "20,000" in answer.error["message"] and "10,000" in answer.error["message"]
        assert int(answer.headers["retry-after"]) >= 1


async def test_a_foreign_process_that_leaves_enough_room_changes_nothing_else(gpus: Path, journal: Journal) -> None:
    """Only models that really make room leave, and only for a model that comes."""
    fake_gpu.describe(gpus, fake_gpu.gpu(A, 40_000))
    one, two = taking("one", gpus, 8_000), taking("two", gpus, 8_000)
    async with on(gpus, {"one": one, "two": two}) as app:
        await served(app, "one")
        fake_gpu.describe(gpus, fake_gpu.gpu(A, 40_000, 30_000))
        await until(lambda: foreign_mib(app) == 30_000, "the stranger is seen")
        assert is_ready(app, "one")
        await served(app, "two")
        assert not pids(app, "one")
        assert journal.count("start") == 2


# --- memory that comes back late ------------------------------------------------------------------------------------


def lingering(folder: Path, model: dict[str, Any], file: Path, mib: int) -> dict[str, Any]:
    """The same model, whose memory stays used by no visible process when its engine is stopped."""
    program = folder / "lingering.py"
    program.write_text(
        "import os, signal, subprocess, sys\n"
        f"sys.path.insert(0, {ROOT!r})\n"
        "from pathlib import Path\n"
        "from tests.standins import fake_gpu\n"
        "engine = subprocess.Popen(sys.argv[1:])\n"
        "def leave(*_):\n"
        f"    fake_gpu.describe(Path({str(file)!r}), fake_gpu.gpu({A!r}, 10_000, {mib}))\n"
        "    engine.kill()\n"
        "    os._exit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "engine.wait()\n"
    )
    return {**model, "cmd": [sys.executable, str(program), *model["cmd"]]}


async def test_nothing_is_started_in_memory_that_is_not_back_yet(gpus: Path, journal: Journal) -> None:
    slow = lingering(gpus.parent, taking("slow", gpus, 6_000), gpus, 6_000)
    next_one = taking("next", gpus, 6_000)
    async with on(gpus, {"slow": slow, "next": next_one}) as app:
        await served(app, "slow")
        waiting = asyncio.create_task(chat(app, "next"))
        await until(lambda: not pids(app, "slow") and foreign_mib(app) == 6_000, "the engine is gone, not its memory")
        for _ in range(5):
            await app.memory_watch.look_now()
            await asyncio.sleep(0.02)
        assert app.loop.scheduler.state.slots_of(ModelId("slow")), "it has left only when its memory has"
        assert journal.count("start", name="next") == 0

        fake_gpu.describe(gpus, fake_gpu.gpu(A, 10_000, 0))
        answer = await waiting
        assert answer.status == 200, answer.body
        assert journal.count("start", name="next") == 1


async def test_memory_that_does_not_come_back_is_told_and_given_up(
    gpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = lingering(gpus.parent, taking("slow", gpus, 6_000), gpus, 6_000)
    timeouts = Timeouts(memory=MemoryTimeouts(back_s=0.3))
    async with on(gpus, {"slow": slow}, timeouts=timeouts) as app:
        await served(app, "slow")
        await unload(app, "slow")
        assert foreign_mib(app) == 6_000, "it is a stranger's now"
    assert "memory has not come back" in (said := capsys.readouterr().err)
    assert f"{A}=6000" in said


# --- an engine that dies while it loads, and engines that start together --------------------------------------------


async def test_kill_9_while_loading_gives_the_memory_back(gpus: Path, journal: Journal) -> None:
    slow = taking("slow", gpus, 8_000, "--load-s", "1000", load_timeout_s=NEVER_S)
    other = taking("other", gpus, 8_000)
    async with on(gpus, {"slow": slow, "other": other}, scheduler=LONG_BACKOFF) as app:
        waiting = asyncio.create_task(chat(app, "slow"))
        await until(lambda: journal.count("start") == 1 and is_loading(app, "slow"), "the engine loads")
        await until(lambda: used_mib(app) == 8_000, "it has taken its memory")
        os.kill(journal.lines("start")[0]["pid"], signal.SIGKILL)
        answer = await waiting
        assert (answer.status, answer.error["code"]) == (503, "model_load_failed"), "killed is not out of memory"
        assert "SIGKILL" in answer.error["message"]
        await served(app, "other")
        assert need_of(app, "slow").gpu_mib == 8_000
        await at_rest(app)


async def test_engines_that_start_at_once_never_take_more_than_there_is(gpus: Path, journal: Journal) -> None:
    names = [f"m{number}" for number in range(5)]
    models = {name: taking(name, gpus, 4_000, "--load-s", "0.1") for name in names}
    async with on(gpus, models) as app:
        await asyncio.gather(*(served(app, name) for name in names for _ in range(2)))
        # An engine that had found no room would have died and been started again.
        assert journal.count("start") == journal.count("ready")
        assert {line["name"] for line in journal.lines("ready")} == set(names)
        assert used_mib(app) <= 10_000
        await at_rest(app)


# --- on which GPUs --------------------------------------------------------------------------------------------------


@pytest.fixture
def two(gpus: Path) -> Path:
    return fake_gpu.describe(gpus, fake_gpu.gpu(A, 10_000), fake_gpu.gpu(B, 10_000))


def environ(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(word.partition("=")[::2] for word in words if word)


async def test_engines_see_the_gpus_they_were_given(two: Path) -> None:
    models = {
        "second": taking("second", two, 1_000, devices=["gpu1"]),
        "host": fake("host", memory_mib=50, device="cpu"),
    }
    async with on(two, models) as app:
        for name, seen in (("second", B), ("host", "")):
            await served(app, name)
            assert environ(pids(app, name)[0])["CUDA_VISIBLE_DEVICES"] == seen
        await until(lambda: used_mib(app, 1) == 1_000, "it is where it was put")
        assert used_mib(app, 0) == 0


async def test_model_that_fits_no_gpu_is_split_if_its_engine_asks_for_its_gpus(two: Path) -> None:
    whole = taking("whole", two, 14_000)
    split = taking("split", two, 14_000, env={"COUNT": "${GPU_COUNT}", "SPLIT": "${TENSOR_SPLIT}"})
    async with on(two, {"whole": whole, "split": split}) as app:
        refused = await chat(app, "whole")
        assert (refused.status, refused.error["code"]) == (503, "model_too_large")
        assert "14,000" in refused.error["message"] and "10,000" in refused.error["message"]
        assert "cannot be spread over several GPUs, which have 10,000, 10,000 MiB." in refused.error["message"]

        await served(app, "split")
        seen = environ(pids(app, "split")[0])
        assert (seen["CUDA_VISIBLE_DEVICES"], seen["COUNT"], seen["SPLIT"]) == (f"{A},{B}", "2", "7000,7000")
        assert claim_of(app, "split") == {A: 7_000, B: 7_000}
        await until(lambda: used_mib(app, 0) == used_mib(app, 1) == 7_000, "it is on both")


async def test_llama_cpp_itself_understands_what_it_is_told(tmp_path: Path) -> None:
    """Split over simulated GPUs, on the host alone, with a smaller KV cache: the real program starts and answers."""
    models = {
        "split": tiny(tiny_model("alpha"), memory_mib=150),
        "host": tiny(tiny_model("beta"), device="cpu"),
        "small": tiny(tiny_model("beta"), cache_type_k="q8_0", cache_type_v="q8_0", flash_attn="on", memory_mib=10),
    }
    simulated = [{"memory_mib": 100, "margin_mib": 0}] * 2
    async with gateway(tmp_path, models, gpus=simulated) as app:
        for name in models:
            answer = await chat(app, name, max_tokens=1)
            assert answer.status == 200, answer.body
            words = Path(f"/proc/{pids(app, name)[0]}/cmdline").read_bytes().decode().split("\0")
            assert ("--tensor-split" in words, "--no-op-offload" in words) == (name == "split", name == "host")
