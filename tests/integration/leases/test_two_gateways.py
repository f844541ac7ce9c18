"""Two gateways, one Redis, one set of GPUs: which one gets memory, and that none is ever given what another has."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import greenroom
from greenroom.app import App
from greenroom.core.model import ModelId, MoveKind
from greenroom.errors import LeaseDenied
from greenroom.leases.shared.redis_store import RedisStore
from greenroom.leases.shared.stored import SlotAsk
from tests.integration.facts import is_ready, pids
from tests.integration.leases.trainer import trainer
from tests.integration.leases.two_gateways_chaos import ANSWERS, WAITS, Chaos
from tests.integration.raw import chat, http
from tests.integration.sharing_rig import HOST, A, B, described, in_store, others, sharing, taking
from tests.redis_server import RedisServer, redis_server
from tests.waiting import until

pytestmark = pytest.mark.slow

CHAOS_S = 25.0
# However many are killed meanwhile: the bound within which a trainer has its share.
GRANTED_WITHIN_S = 45.0


@asynccontextmanager
async def listening(app: App) -> AsyncIterator[set[str]]:
    """The kinds of what happens at a gateway from now on."""
    kinds: set[str] = set()

    async def listen() -> None:
        with app.hub.subscribe() as events:
            async for event in events:
                kinds.add(event.kind)

    task = asyncio.create_task(listen())
    try:
        yield kinds
    finally:
        task.cancel()


async def until_true(look: Callable[[], Awaitable[dict[str, Any]]], is_so: Callable[[Any], bool]) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    async def looked() -> bool:
        seen.clear()
        seen.update(await look())
        return is_so(seen)

    await until(looked, lambda: seen)
    return seen


async def test_a_model_is_a_lease_that_the_other_gateway_plans_around(tmp_path: Path, redis: RedisServer) -> None:
    gpus = described(tmp_path, (A, 10_000))
    one_model, two_model = {"a": taking("a", gpus, 6_000)}, {"b": taking("b", gpus, 3_000)}
    async with sharing("one", gpus, redis.url, one_model) as one, sharing("two", gpus, redis.url, two_model) as two:
        assert (await chat(one, "a")).status == 200
        await until(lambda: others(two) == {"a": {A: 6_000}}, "the other hears of it")
        assert (await chat(two, "b")).status == 200
        held = await in_store(one)
        assert {name: (lease.kind, lease.state, dict(lease.claim)) for name, lease in held.items()} == {
            "a": ("slot", "held", {A: 6_000}),
            "b": ("slot", "held", {A: 3_000}),
        }
        await one.operations.move(MoveKind.UNLOAD, ModelId("a"))
        assert set(await in_store(one)) == {"b"}
        await until(lambda: not others(two), "the other hears of that too")


@pytest.mark.parametrize("second_mib", [10_000, 6_000])
async def test_a_split_model_that_others_keep_out_stands_in_line_for_its_share_of_every_gpu(
    tmp_path: Path, redis: RedisServer, second_mib: int
) -> None:
    gpus = described(tmp_path, (A, 10_000), (B, second_mib))
    small = {"a": taking("a", gpus, 5_000, devices=["gpu0"]), "b": taking("b", gpus, 5_000, devices=["gpu1"])}
    # Its engine asks which GPUs it has, so it can be split; it fits no single one.
    big = taking("big", gpus, 0, memory_mib=12_000, env={"COUNT": "${GPU_COUNT}"})
    async with sharing("one", gpus, redis.url, small) as one, sharing("two", gpus, redis.url, {"big": big}) as two:
        for _ in range(2):
            assert (await chat(one, "a")).status == 200
            assert (await chat(one, "b")).status == 200
            assert (await chat(two, "big")).status == 200
            assert not is_ready(one, "a") and not is_ready(one, "b") and is_ready(two, "big")
            held = (await in_store(two))["big"]
            assert set(held.claim) == {A, B} and sum(held.claim.values()) >= 12_000 and held.kind == "slot"


async def test_a_swap_in_one_gateway_holds_the_newcomer_before_the_victim_goes(
    tmp_path: Path, redis: RedisServer
) -> None:
    gpus = described(tmp_path, (A, 10_000))
    models = {name: taking(name, gpus, 6_000) for name in ("a", "b")}
    async with sharing("one", gpus, redis.url, models) as one:
        for name in ("a", "b", "a"):
            assert (await chat(one, name)).status == 200
            assert set(await in_store(one)) == {name}


async def test_what_a_gateway_leaves_at_its_end_is_given_back(tmp_path: Path, redis: RedisServer) -> None:
    gpus = described(tmp_path, (A, 10_000))
    async with sharing("two", gpus, redis.url, {}) as two:
        async with sharing("one", gpus, redis.url, {"a": taking("a", gpus, 6_000)}) as one:
            assert (await chat(one, "a")).status == 200
        assert await in_store(two) == {}
        await asyncio.sleep(0)


async def test_a_trainer_is_given_what_idle_models_of_both_gateways_hold(tmp_path: Path, redis: RedisServer) -> None:
    gpus = described(tmp_path, (A, 10_000))
    async with (
        sharing("one", gpus, redis.url, {"a": taking("a", gpus, 5_000)}) as one,
        sharing("two", gpus, redis.url, {"b": taking("b", gpus, 5_000)}) as two,
    ):
        assert (await chat(one, "a")).status == 200
        assert (await chat(two, "b")).status == 200
        with trainer(redis.url, HOST, 8_000, gpus) as training:
            # Neither could make so much room alone.
            await until(lambda: training.holds, "the trainer has its memory")
            assert not is_ready(one, "a") and not is_ready(two, "b")
            asks = asyncio.ensure_future(chat(one, "a"))
            await until(lambda: others(two) == {"train": {A: 8_000}}, "both know of it")
            assert not asks.done()
            training.finish()
            assert (await asks).status == 200


async def test_a_busy_model_is_not_cut_short_for_a_trainer(tmp_path: Path, redis: RedisServer) -> None:
    gpus = described(tmp_path, (A, 10_000))
    model = taking("a", gpus, 6_000, "--token-s", "0.3", "--tokens", "8")
    async with sharing("one", gpus, redis.url, {"a": model}) as one:
        answer = asyncio.ensure_future(chat(one, "a"))
        await until(lambda: is_ready(one, "a"), "it is loaded")
        with trainer(redis.url, HOST, 8_000, gpus) as training:
            assert (await answer).status == 200
            await until(lambda: training.holds, "the trainer has its memory")


async def test_a_busy_pinned_model_leaves_at_once_where_another_has_its_memory(
    tmp_path: Path, redis: RedisServer
) -> None:
    gpus = described(tmp_path, (A, 10_000))
    model = taking("a", gpus, 6_000, "--token-s", "0.3", "--tokens", "1000", pinned=True)
    other = RedisStore(redis.url, HOST, ttl_s=600.0)
    async with (
        contextlib.AsyncExitStack() as ending,
        sharing("one", gpus, redis.url, {"a": model}, ttl_s=600.0) as one,
        listening(one) as told,
    ):
        ending.push_async_callback(other.close)
        answer = asyncio.ensure_future(chat(one, "a"))
        await until(lambda: is_ready(one, "a"), "it is loaded")
        held = (await in_store(one))["a"]

        async def took_its_place() -> bool:
            # As if it had lapsed. The gateway may be quicker and take it again.
            await other.release(held.id, kind="slot")
            with contextlib.suppress(LeaseDenied):
                await other.hold(SlotAsk("you/s1", "theirs", {A: 9_000}, ttl_s=600.0), gateway="you")
                return True
            return False

        await until(took_its_place, "another holds its memory")
        cut = await answer
        assert (cut.status, cut.error["code"]) == (503, "unloaded") and "lease_lost" in cut.error["message"]
        await until(lambda: not pids(one, "a"), "its engine has ended")
        assert "lease_lost" in told
        decisions = (await http(one, "GET", "/api/v1/decisions?model=a&what=unload")).json()
        assert "lease_lost" in json.dumps(decisions)
        metrics = (await http(one, "GET", "/metrics")).body.decode()
        assert 'greenroom_evictions_total{model="a",reason="lease_lost"} 1.0' in metrics
        await other.release("you/s1", kind="slot")


async def test_leases_asked_for_over_http_are_kept_in_the_shared_store(tmp_path: Path, redis: RedisServer) -> None:
    gpus = described(tmp_path, (A, 10_000), (B, 10_000))
    async with (
        sharing("one", gpus, redis.url, {"a": taking("a", gpus, 6_000, devices=["gpu0"])}) as one,
        sharing("two", gpus, redis.url, {}) as two,
    ):
        assert (await chat(one, "a")).status == 200
        body = {"mib": 8_000, "devices": ["gpu0"], "wait_s": 60, "id": "job", "name": "tune", "ttl_s": 600}
        made = await http(two, "POST", "/api/v1/leases", body)
        assert (made.status, made.json()["claim"]) == (201, {A: 8_000}) and not is_ready(one, "a")
        shown = await http(one, "GET", "/api/v1/leases/job")
        assert (shown.status, shown.json()["token"]) == (200, made.json()["token"])
        renewed = await http(one, "POST", "/api/v1/leases/job/renew", {"token": made.json()["token"]})
        assert renewed.status == 200
        for app, outcome in ((one, ""), (two, 'greenroom_lease_asks_total{outcome="granted"} 1.0')):
            await until(lambda app=app: [one.state for one in app.leasing.known()] == ["held"], "it is heard of")
            text = (await http(app, "GET", "/metrics")).body.decode()
            assert "\ngreenroom_leases 1.0\n" in text and outcome in text
            assert f'\ngreenroom_lease_memory_mib{{device="{A}"}} 8000.0\n' in text
        refused = await http(one, "POST", "/api/v1/leases", {"mib": 8_000, "devices": ["gpu0"]})
        assert (refused.status, refused.error["code"]) == (503, "lease_denied")
        assert (await http(one, "POST", "/api/v1/leases", {"mib": 1, "devices": ["gpu9"]})).status == 400
        assert (await http(one, "DELETE", "/api/v1/leases/job")).status == 204
        gone = await http(two, "GET", "/api/v1/leases/job")
        assert (gone.status, gone.error["code"]) == (404, "lease_unknown")


async def test_a_program_that_holds_through_one_gateway_is_recalled_for_another(
    tmp_path: Path, redis: RedisServer
) -> None:
    gpus = described(tmp_path, (A, 10_000))
    urgent = {"a": taking("a", gpus, 6_000, priority="high")}
    async with (
        sharing("one", gpus, redis.url, urgent, ttl_s=30.0) as one,
        sharing("two", gpus, redis.url, {}, ttl_s=30.0) as two,
        listening(one) as told_by_one,
        listening(two) as told_by_two,
    ):
        body = {"mib": 8_000, "id": "job", "name": "tune", "priority": "low", "preemptible": True, "grace_s": 2}
        made = (await http(two, "POST", "/api/v1/leases", body)).json()
        assert made["recall_in_s"] is None
        asks = asyncio.ensure_future(chat(one, "a"))

        async def renewed() -> dict[str, Any]:
            shown: dict[str, Any] = (
                await http(two, "POST", "/api/v1/leases/job/renew", {"token": made["token"]})
            ).json()
            return shown

        shown = await until_true(renewed, lambda lease: lease["recall_in_s"] is not None)
        assert 0 < shown["recall_in_s"] <= 2 and not shown["overdue"]
        # One that does not heed it is reported by both, and stays.
        await until_true(renewed, lambda lease: lease["overdue"])
        await until(lambda: {"recall", "lease_overdue"} <= told_by_one & told_by_two, "both have reported it")
        assert not asks.done()
        assert (await http(two, "DELETE", f"/api/v1/leases/job?token={made['token']}")).status == 204
        assert (await asks).status == 200


async def test_a_program_that_holds_in_redis_itself_is_recalled_for_a_model(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = described(tmp_path, (A, 10_000))
    monkeypatch.setenv("GREENROOM_HOST", HOST)
    async with sharing("one", gpus, redis.url, {"a": taking("a", gpus, 6_000, priority="high")}, ttl_s=30.0) as one:
        wanted = greenroom.lease(8_000, priority="low", preemptible=True, grace_s=20, url=redis.url)
        async with wanted as held:
            asks = asyncio.ensure_future(chat(one, "a"))
            await until(lambda: held.recall_in_s is not None, "it hears that it is to leave")
            assert held.recall_in_s is not None and 0 < held.recall_in_s <= 20 and not held.lost
        assert (await asks).status == 200


@pytest.mark.timeout(600)
async def test_two_gateways_and_a_trainer_share_gpus_while_each_is_killed_in_turn(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server:
        chaos = Chaos(tmp_path, server, seed=4)
        try:
            await chaos.run(CHAOS_S)
            await chaos.quiet_down()
            found = chaos.found
            assert found.samples > 50 and not found.over
            # What was granted was there, for every engine that started and for the trainer.
            assert not chaos.out_of_memory and not found.full
            assert found.statuses[200] >= ANSWERS, found.statuses
            # The last of these is without faults; each is one wait of the trainer from its start on.
            assert len(found.waits_s) > WAITS and max(found.waits_s) < GRANTED_WITHIN_S, found.waits_s
        finally:
            chaos.close()
