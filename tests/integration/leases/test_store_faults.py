"""The shared lease store is gone, stands still or forgets; holders die or stand still. What is loaded goes on."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from greenroom.app import App
from greenroom.core.model import DeviceId
from tests.harness import GatewayProcess, gateway, write_config
from tests.integration.facts import Journal, is_ready, pids
from tests.integration.leases.trainer import trainer
from tests.integration.raw import chat, http
from tests.integration.sharing_rig import (
    HOST,
    A,
    described,
    in_store,
    others,
    sections,
    sharing,
    store_is_down,
    taking,
)
from tests.redis_server import RedisServer
from tests.standins import fake_gpu
from tests.waiting import until

pytestmark = pytest.mark.slow

# Leases do not lapse in tests that look for what happens at once.
LONG_TTL_S = 600.0
AT_ONCE_S = 20.0


async def refused_at_once(app: App, model: str) -> None:
    answer = await asyncio.wait_for(chat(app, model), AT_ONCE_S)
    assert (answer.status, answer.error["code"]) == (503, "lease_store_unavailable"), answer.body
    assert int(answer.headers["retry-after"]) >= 1


async def test_gateway_starts_without_its_store_says_why_and_loads_when_it_comes(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis")
    gpus = described(tmp_path, (A, 10_000))
    try:
        models = {"a": taking("a", gpus, 6_000), "free": taking("free", gpus, 0)}
        async with sharing("one", gpus, server.url, models) as app:
            await refused_at_once(app, "a")
            order = await asyncio.wait_for(http(app, "POST", "/api/v1/models/a/load", {}), AT_ONCE_S)
            assert (order.status, order.error["code"]) == (503, "lease_store_unavailable"), order.body
            assert "lease store does not answer" in order.error["message"]
            health = await http(app, "GET", "/health")
            assert (health.status, health.json()["status"], health.json()["leaseStore"]) == (503, "failed", "down")
            store = (await http(app, "GET", "/api/v1/status")).json()["lease_store"]
            assert not store["up"] and "cannot be reached" in store["why"]
            assert (await chat(app, "free")).status == 200, "what takes no memory needs no grant"
            server.start()
            await until(lambda: not store_is_down(app), "it is heard of")
            assert (await chat(app, "a")).status == 200
            assert (await http(app, "GET", "/health")).json()["leaseStore"] == "up"
    finally:
        server.kill()


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_a_store_that_is_gone_costs_new_loads_only(tmp_path: Path, redis: RedisServer, how: str) -> None:
    gpus = described(tmp_path, (A, 10_000))
    models = {"a": taking("a", gpus, 6_000), "b": taking("b", gpus, 3_000), "c": taking("c", gpus, 6_000)}
    async with sharing("one", gpus, redis.url, models) as app:
        assert (await chat(app, "a")).status == 200
        before = (await in_store(app))["a"]
        engine = pids(app, "a")
        if how == "killed":
            redis.kill()
        else:
            redis.pause()
        # It waits already when the outage is noticed, so that it may wait on.
        waits = asyncio.ensure_future(chat(app, "b"))
        await until(lambda: store_is_down(app), "the outage is noticed")
        await refused_at_once(app, "c")
        for _ in range(3):
            assert (await chat(app, "a")).status == 200
        assert not waits.done()
        if how == "killed":
            redis.start()
        else:
            redis.go_on()
        assert (await asyncio.wait_for(waits, 60)).status == 200
        assert pids(app, "a") == engine, "nothing happened to what was loaded"
        after = (await in_store(app))["a"]
        assert (after.id, after.token, after.claim) == (before.id, before.token, before.claim)


async def test_a_store_that_forgot_all_hears_of_holders_before_it_grants(tmp_path: Path, redis: RedisServer) -> None:
    gpus = described(tmp_path, (A, 10_000))
    async with (
        sharing("one", gpus, redis.url, {"a": taking("a", gpus, 6_000)}, ttl_s=3) as one,
        sharing("two", gpus, redis.url, {"b": taking("b", gpus, 6_000), "c": taking("c", gpus, 3_000)}, ttl_s=3) as two,
    ):
        assert (await chat(one, "a")).status == 200
        before = (await in_store(one))["a"]
        asks = asyncio.ensure_future(chat(two, "c"))
        redis.restart_empty()
        assert (await asks).status == 200
        held = await in_store(two)
        assert (held["a"].id, held["a"].token, held["a"].state) == (before.id, before.token, "held")
        assert held["c"].token > before.token
        await until(lambda: others(two) == {"a": {A: 6_000}}, "the other knows of it again")


async def test_memory_of_a_trainer_that_is_killed_comes_back_at_once(tmp_path: Path, redis: RedisServer) -> None:
    gpus = described(tmp_path, (A, 10_000))
    async with sharing("one", gpus, redis.url, {"a": taking("a", gpus, 6_000)}, ttl_s=LONG_TTL_S) as app:
        with trainer(redis.url, HOST, 8_000, gpus, ttl_s=LONG_TTL_S) as training:
            await until(lambda: training.holds, "the trainer holds its memory")
            asks = asyncio.ensure_future(chat(app, "a"))
            await until(lambda: others(app) == {"train": {A: 8_000}}, "the gateway knows of it")
            training.kill()
            assert (await asks).status == 200


async def looked_again(app: App) -> None:
    """Memory was looked at some times more, so that whatever could begin has begun."""
    for _ in range(5):
        before = app.memory_watch.last
        await until(lambda before=before: app.memory_watch.last is not before, "it is looked at")  # type: ignore[misc]


async def test_a_trainer_that_stands_still_loses_its_lease_but_not_its_memory(
    tmp_path: Path, redis: RedisServer
) -> None:
    gpus = described(tmp_path, (A, 10_000))
    async with sharing("one", gpus, redis.url, {"a": taking("a", gpus, 6_000)}) as app:
        with trainer(redis.url, HOST, 8_000, gpus) as training:
            await until(lambda: training.holds, "the trainer holds its memory")
            await until(lambda: others(app) == {"train": {A: 8_000}}, "the gateway knows of it")
            training.process.send_signal(signal.SIGSTOP)
            asks = asyncio.ensure_future(chat(app, "a"))
            await until(lambda: not others(app), "its lease has lapsed")
            await looked_again(app)
            assert not asks.done() and not pids(app, "a"), "free on paper only"
            training.process.send_signal(signal.SIGCONT)
            await until(lambda: "lost" in training.said, "it finds out")
            training.kill()
            assert (await asks).status == 200


async def test_what_a_killed_gateway_held_is_given_back_at_once_by_another(tmp_path: Path, redis: RedisServer) -> None:
    gpus = described(tmp_path, (A, 10_000))
    folder = tmp_path / "doomed"
    folder.mkdir()
    config = write_config(
        folder, {"a": taking("a", gpus, 8_000, preload=True)}, **sections(gpus, redis.url, ttl_s=LONG_TTL_S)
    )
    doomed = GatewayProcess(folder, config)
    try:
        async with sharing("one", gpus, redis.url, {"b": taking("b", gpus, 8_000)}, ttl_s=LONG_TTL_S) as app:
            await until(lambda: others(app) == {"a": {A: 8_000}}, "its model is there")
            doomed.kill()
            assert (await chat(app, "b")).status == 200
            assert is_ready(app, "b") and set(await in_store(app)) == {"b"}
    finally:
        doomed.kill()
        assert doomed.nothing_left()


async def test_nothing_is_started_where_a_stranger_took_the_memory_since_the_last_look(tmp_path: Path) -> None:
    """Also without a store: what is free by the ledger must be free on the GPU."""
    gpus = described(tmp_path, (A, 10_000))
    journal = Journal(tmp_path)
    memory = {**sections(gpus, "")["memory"], "look_every_s": 5}
    model = taking("a", gpus, 6_000, *journal.switches)
    async with gateway(tmp_path, {"a": model}, gpus=[], memory=memory) as app:
        # Looks are taken in turn: after this one, that of the start is over, and the next is seconds away.
        await app.memory_watch.look_now()
        assert fake_gpu.take(gpus, 8_000)
        assert not app.loop.scheduler.state.ledger.foreign.get(DeviceId(A)), "the probe has not looked"
        asks = asyncio.ensure_future(chat(app, "a"))
        await until(lambda: app.loop.scheduler.state.ledger.foreign.get(DeviceId(A)) == 8_000, "it is seen")
        await looked_again(app)
        assert not asks.done() and not journal.count("start")
        fake_gpu.leave(gpus)
        assert (await asks).status == 200 and journal.count("start") == 1
