"""Models that share a process on GPUs that a file describes, or that several gateways share: whose memory is whose."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.core.model import DeviceId, MoveKind, SlotId, Tier
from greenroom.runtime.memory.devices import HOST, WORKER_GPU_MIB
from greenroom.runtime.memory.readings import THIS_MACHINE
from tests.harness import gateway, write_config
from tests.integration.hosted_rig import Folder, move, nothing_left, tier, until_in, worker_of
from tests.integration.memory.test_gpu_probe import stranger
from tests.integration.raw import chat, http
from tests.integration.sharing_rig import described, in_store, sharing, taking
from tests.integration.sharing_rig import sections as shared_sections
from tests.redis_server import RedisServer
from tests.standins import fake_gpu
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]
__all__ = ["nothing_left"]
A, B = DeviceId("GPU-aaaa"), DeviceId("GPU-bbbb")


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = fake_gpu.describe(tmp_path / "gpus.json", fake_gpu.gpu(A, 10_000), fake_gpu.gpu(B, 10_000))
    monkeypatch.setenv("CUDA_FAKE_GPUS", str(file))
    return file


def sections(file: Path) -> dict[str, Any]:
    memory = {"probe": "file", "file": str(file), "look_every_s": 0.1, "spare_worker": False}
    return {"gpus": [], "memory": memory}


@contextlib.asynccontextmanager
async def on(file: Path, models: dict[str, Any]) -> AsyncIterator[App]:
    async with gateway(file.parent, models, **sections(file)) as app:
        yield app


def slot_of(app: App, model: str) -> SlotId:
    return next(slot.id for slot in app.hosted_slots.there.values() if slot.entry.id == model)


def seen(app: App, model: str, gpu: DeviceId = A) -> int:
    return app.memory_watch.seen_of(slot_of(app, model)).get(gpu, 0)


def foreign(app: App, gpu: DeviceId = A) -> int:
    return app.loop.scheduler.state.ledger.foreign.get(gpu, 0)


async def test_each_slot_of_a_process_is_seen_with_its_own_and_the_rest_is_the_workers(gpus: Path) -> None:
    folders = {
        "alpha": Folder(gpus.parent, "alpha", mib=2_000, own_mib=700),
        "beta": Folder(gpus.parent, "beta", mib=1_000, own_mib=700),
    }
    models = {name: folder.model(memory_mib=2_500, devices=["gpu0"]) for name, folder in folders.items()}
    async with on(gpus, models) as app:
        await chat(app, "alpha")
        await chat(app, "beta")
        await until(lambda: (seen(app, "alpha"), seen(app, "beta")) == (2_000, 1_000), "each is seen")
        await until(lambda: app.memory_watch.last.shares.own_mib.get(A) == 700, "the worker's own is seen")
        assert foreign(app) == 0, "it is within what is set aside"
        status = (await http(app, "GET", "/api/v1/gpus")).json()
        assert status["gpus"][0]["strangers"] == [] and status["gpus"][0]["used_mib"] == 3_700
        await move(app, MoveKind.SLEEP, "alpha")
        assert app.loop.scheduler.state.ledger.held_by(slot_of(app, "alpha")).keys() == {HOST}
        await until(lambda: (seen(app, "alpha"), seen(app, "beta")) == (0, 1_000), "one has left the GPU")


async def test_what_a_worker_takes_beyond_what_is_set_aside_is_counted_as_used(gpus: Path) -> None:
    folder = Folder(gpus.parent, "alpha", mib=2_000, own_mib=WORKER_GPU_MIB + 500)
    async with on(gpus, {"alpha": folder.model(memory_mib=2_500, devices=["gpu0"])}) as app:
        await chat(app, "alpha")
        await until(lambda: foreign(app) == 500, "what is beyond it is told")
        os.kill(worker_of(app, "alpha"), signal.SIGKILL)
        await until(lambda: foreign(app) == 0, "and is gone with the process")
        await until_in(app, "alpha", Tier.ASLEEP)


async def test_memory_for_a_worker_is_set_aside_where_hosted_models_may_be_placed(gpus: Path) -> None:
    folder = Folder(gpus.parent, "alpha")
    models = {"alpha": folder.model(devices=["gpu1"])}
    async with on(gpus, models) as app:
        margins = {device.id: device.margin_mib for device in app.loop.scheduler.state.devices}
        assert margins[B] - margins[A] == WORKER_GPU_MIB
        write_config(gpus.parent, {**models, "beta": folder.model(devices=["gpu0"])}, **sections(gpus))
        await app.reload()
        margins = {device.id: device.margin_mib for device in app.loop.scheduler.state.devices}
        assert margins[A] == margins[B]


async def test_a_swap_frees_the_memory_before_the_other_wakes(gpus: Path) -> None:
    folders = {name: Folder(gpus.parent, name, mib=6_000, own_mib=500) for name in ("alpha", "beta")}
    models = {name: folder.model(memory_mib=6_000, devices=["gpu0"]) for name, folder in folders.items()}
    async with on(gpus, models) as app:
        for name in ("alpha", "beta", "alpha", "beta"):
            assert (await chat(app, name)).text.startswith(name)
        assert folders["alpha"].events() == ["open", "wake", "sleep", "wake", "sleep"], "never out of memory"


async def test_models_on_two_gpus_have_a_worker_each(gpus: Path) -> None:
    folders = {name: Folder(gpus.parent, name, mib=100) for name in ("alpha", "beta")}
    models = {
        name: folder.model(devices=[gpu]) for (name, folder), gpu in zip(folders.items(), ("gpu0", "gpu1"), strict=True)
    }
    async with on(gpus, models) as app:
        await chat(app, "alpha")
        await chat(app, "beta")
        assert worker_of(app, "alpha") != worker_of(app, "beta")
        assert [folder.lines("open")[0]["gpus"] for folder in folders.values()] == [A, B]
        await move(app, MoveKind.UNLOAD, "beta")
        await until(lambda: len(app.hosted_slots.workers) == 1, "a worker without slots gives its GPU back")


async def test_a_prepared_model_is_opened_for_the_gpu_it_will_wake_on(gpus: Path) -> None:
    folder = Folder(gpus.parent, "alpha", mib=100)
    async with on(gpus, {"alpha": folder.model(devices=["gpu1"])}) as app:
        await move(app, MoveKind.PREPARE, "alpha")
        (opened,) = folder.lines("open")
        assert (opened["gpus"], opened["options"]["device"]) == (B, "auto")
        assert (await chat(app, "alpha")).status == 200


async def test_a_model_for_the_host_sees_no_gpu(gpus: Path) -> None:
    folder = Folder(gpus.parent, "alpha")
    async with on(gpus, {"alpha": folder.model(device="cpu")}) as app:
        assert (await chat(app, "alpha")).status == 200
        (opened,) = folder.lines("open")
        assert (opened["gpus"], opened["options"]["device"]) == ("", "cpu")
        # What its cgroup leaves it, which the worker cannot see by itself.
        assert 0 < opened["options"]["host_free_bytes"] <= (THIS_MACHINE.look().total_mib << 20)


async def test_a_request_waits_for_a_foreign_process_that_took_the_memory_of_a_sleeper(gpus: Path) -> None:
    folder = Folder(gpus.parent, "alpha", mib=6_000)
    async with on(gpus, {"alpha": folder.model(memory_mib=6_000, devices=["gpu0"])}) as app:
        await move(app, MoveKind.PREPARE, "alpha")
        with stranger(gpus, 5_000):
            await until(lambda: foreign(app) == 5_000, "the stranger is seen")
            waiting = asyncio.create_task(chat(app, "alpha"))
            await until(lambda: list(app.loop.scheduler.state.waitlist), "the request waits")
            assert tier(app, "alpha") is Tier.ASLEEP and folder.events() == ["open"]
        assert (await waiting).status == 200


@pytest.fixture
def one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = described(tmp_path, (A, 10_000))
    monkeypatch.setenv("CUDA_FAKE_GPUS", str(file))
    return file


async def test_a_sleeper_gives_its_gpu_to_the_store_and_a_wake_takes_it_again(
    one_gpu: Path, redis: RedisServer
) -> None:
    folder = Folder(one_gpu.parent, "alpha", mib=6_000)
    memory = {**shared_sections(one_gpu, redis.url)["memory"], "spare_worker": False}
    models = {"alpha": folder.model(memory_mib=6_000, ttl_s=0)}
    async with (
        sharing("one", one_gpu, redis.url, models, memory=memory) as one,
        sharing("two", one_gpu, redis.url, {"beta": taking("beta", one_gpu, 6_000)}) as two,
    ):
        assert (await chat(one, "alpha")).status == 200
        assert (await in_store(one))["alpha"].claim[A] >= 6_000
        await move(one, MoveKind.SLEEP, "alpha")
        assert "alpha" not in await in_store(one)
        assert (await chat(two, "beta")).status == 200
        await move(two, MoveKind.UNLOAD, "beta")
        assert (await chat(one, "alpha")).status == 200
        assert folder.events() == ["open", "wake", "sleep", "wake"]
        assert (await in_store(one))["alpha"].claim[A] >= 6_000
        os.kill(worker_of(one, "alpha"), signal.SIGKILL)
        await until_in(one, "alpha", Tier.ASLEEP)
        await one.mover.cleanup.finished()
        assert "alpha" not in await in_store(one)
        await move(one, MoveKind.UNLOAD, "alpha")
        await until(lambda: not one.hosted_slots.workers, "nothing is left")
