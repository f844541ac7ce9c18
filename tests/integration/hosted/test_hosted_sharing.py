"""Hosted models on GPUs that several gateways share: a model that sleeps holds nothing there."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from greenroom.core.model import MoveKind, Tier
from tests.integration.hosted_rig import Folder, move, nothing_left, until_in, worker_of
from tests.integration.raw import chat
from tests.integration.sharing_rig import A, described, grown_up, in_store, sections, sharing, taking
from tests.redis_server import RedisServer, redis_server
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]
__all__ = ["nothing_left"]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as server:
        yield grown_up(server)


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = described(tmp_path, (A, 10_000))
    monkeypatch.setenv("CUDA_FAKE_GPUS", str(file))
    return file


async def test_a_sleeper_gives_its_gpu_to_the_store_and_a_wake_takes_it_again(gpus: Path, redis: RedisServer) -> None:
    folder = Folder(gpus.parent, "alpha", mib=6_000)
    memory = {**sections(gpus, redis.url)["memory"], "spare_worker": False}
    models = {"alpha": folder.model(memory_mib=6_000, ttl_s=0)}
    async with (
        sharing("one", gpus, redis.url, models, memory=memory) as one,
        sharing("two", gpus, redis.url, {"beta": taking("beta", gpus, 6_000)}) as two,
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
        await one.mover.cleaned_up()
        assert "alpha" not in await in_store(one)
        await move(one, MoveKind.UNLOAD, "alpha")
        await until(lambda: not one.hosted_slots.workers, "nothing is left")
