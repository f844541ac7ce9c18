"""A gateway on GPUs that a file describes: what is seen there is what it plans with."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.config import loader
from greenroom.core.model import DeviceId, ModelId
from greenroom.errors import ConfigError
from tests.harness import fake, gateway, tiny, write_config
from tests.integration.raw import chat, http
from tests.models import tiny as tiny_model
from tests.standins import fake_gpu
from tests.waiting import until

pytestmark = pytest.mark.slow

A, B = "GPU-aaaa", "GPU-bbbb"


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    return fake_gpu.describe(tmp_path / "gpus.json", fake_gpu.gpu(A, 10_000), fake_gpu.gpu(B, 4_000))


def on_gpu(name: str, file: Path, mib: int, **keys: Any) -> dict[str, Any]:
    switches = (*("--gpu-file", str(file)), *("--gpu-mib", str(mib)))
    return fake(name, *switches, env={"PYTHONDONTWRITEBYTECODE": "1"}, **{"memory_mib": mib, **keys})


@contextlib.asynccontextmanager
async def on(file: Path, models: dict[str, Any], **memory: Any) -> AsyncIterator[App]:
    said = {"probe": "file", "file": str(file), "look_every_s": 0.1, **memory}
    async with gateway(file.parent, models, gpus=[], memory=said) as app:
        yield app


@contextlib.contextmanager
def stranger(file: Path, mib: int) -> Iterator[int]:
    """A process that is not ours and takes memory of the first GPU."""
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert fake_gpu.take(file, mib, process.pid)
        yield process.pid
        process.kill()


def foreign(app: App, device: str) -> int:
    return app.loop.scheduler.state.ledger.foreign.get(DeviceId(device), 0)


async def test_an_engine_is_seen_on_the_gpu_it_was_given_and_its_memory_comes_back(gpus: Path) -> None:
    async with on(gpus, {"m": on_gpu("m", gpus, 3_000, devices=["gpu1"])}) as app:
        assert "m" in (await chat(app, "m")).text
        (slot,) = app.loop.scheduler.state.slots.values()
        await until(lambda: app.memory_watch.seen_of(slot.id) == {B: 3_000}, "the engine is seen")
        shown = (await http(app, "GET", "/api/v1/gpus")).json()
        first, second = shown["gpus"]
        assert (first["id"], first["used_mib"], first["holders"]) == (A, 0, [])
        assert (second["id"], second["used_mib"], second["foreign_mib"], second["strangers"]) == (B, 3_000, 0, [])
        assert [(who["model"], who["claim_mib"], who["seen_mib"]) for who in second["holders"]] == [("m", 3_000, 3_000)]
        before = app.memory_watch.last.reading
        app.slots.live[slot.id].child.kill()
        assert await app.memory_watch.back(before, {DeviceId(B): 3_000}, 60) == {}
        await until(lambda: app.memory_watch.last.reading.gpus[1].used_mib == 0, "nothing is used")


async def test_what_grows_beyond_its_claim_counts_as_it_is(gpus: Path) -> None:
    growing = on_gpu("m", gpus, 1_000)
    growing["cmd"] += ["--gpu-grow-mib", "500"]
    async with on(gpus, {"m": growing}) as app:
        assert "m" in (await chat(app, "m")).text
        (slot,) = app.loop.scheduler.state.slots.values()
        (device,) = slot.claim
        await until(lambda: app.memory_watch.peak_of(slot.id) == {device: 1_500}, "the growth is seen")
        assert app.loop.scheduler.state.ledger.held_by(slot.id) == {device: 1_500}
        assert foreign(app, device) == 0


async def test_strangers_at_the_start_are_avoided_and_named(gpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with stranger(gpus, 8_000) as pid:
        async with on(gpus, {"m": on_gpu("m", gpus, 3_000, preload=True)}) as app:
            assert foreign(app, A) == 8_000
            await until(lambda: len(app.slots.live) == 1, "the model is loaded")
            (slot,) = app.loop.scheduler.state.slots.values()
            assert list(slot.claim) == [B]
            (one,) = (await http(app, "GET", "/api/v1/gpus")).json()["gpus"][0]["strangers"]
            assert (one["pid"], one["used_mib"]) == (pid, 8_000)
            assert one["name"]
    assert f"pid={pid}" in capsys.readouterr().err


async def test_where_pids_are_hidden_what_is_used_beyond_claims_is_foreign(gpus: Path) -> None:
    fake_gpu.describe(gpus, fake_gpu.gpu(A, 10_000, 700), pids_visible=False)
    async with on(gpus, {"m": on_gpu("m", gpus, 3_000)}) as app:
        assert foreign(app, A) == 700
        assert "m" in (await chat(app, "m")).text
        await until(lambda: app.memory_watch.last.reading.gpus[0].used_mib == 3_700, "the engine is seen")
        await app.memory_watch.look_now()
        assert foreign(app, A) == 700
        assert (await http(app, "GET", "/api/v1/status")).json()["probe"]["pids_visible"] is False


async def test_an_engine_that_cannot_use_the_gpu_is_told(gpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As llama.cpp of the package index, which is built for the CPU alone."""
    async with on(gpus, {"alpha": tiny(tiny_model("alpha"), memory_mib=None)}) as app:
        assert (await chat(app, "alpha")).text.strip() == "alpha says hello"
        record = app.loop.scheduler.view.models[ModelId("alpha")]
        await until(lambda: not record.need.gpu_mib, "it was measured")
    assert " model computes on the CPU model=alpha planned_gpu_mib=" in capsys.readouterr().err


async def test_a_probe_that_begins_to_fail_stops_no_request(gpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with on(gpus, {"m": on_gpu("m", gpus, 3_000)}) as app:
        whole = gpus.read_text()
        gpus.write_text("broken")
        await until(lambda: app.memory_watch.failure is not None, "the failure is noticed")
        assert "does not describe GPUs" in (await http(app, "GET", "/api/v1/status")).json()["probe"]["failure"]
        gpus.write_text(whole)
        await until(lambda: app.memory_watch.failure is None, "it recovers")
        assert "m" in (await chat(app, "m")).text
    assert "can be looked at again" in capsys.readouterr().err


async def test_a_file_that_is_not_there_refuses_the_start(tmp_path: Path) -> None:
    path = write_config(tmp_path, {}, gpus=[], memory={"probe": "file", "file": "none.json"})
    with pytest.raises(ConfigError, match=r"memory\.probe: file does not work here.*none\.json"):
        await App.start(loader.load(path).config, path)


async def test_a_device_that_is_not_there_is_warned_of(gpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with on(gpus, {"m": on_gpu("m", gpus, 100, devices=["gpu7"])}):
        pass
    assert "there is no such device" in caplog.text


async def test_two_names_of_one_gpu_are_one_device(gpus: Path) -> None:
    async with on(gpus, {"m": on_gpu("m", gpus, 100, devices=["gpu1", "GPU-b", B])}) as app:
        entry = app.catalog.find("m")
        assert entry is not None and entry.spec.devices == (B,)
