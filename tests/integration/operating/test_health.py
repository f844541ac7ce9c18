"""The three health checks of running gateways: what an orchestrator sees when memory, models or the queue run out."""

from __future__ import annotations

import asyncio
from pathlib import Path

from greenroom.app import App
from tests.harness import fake, gateway
from tests.integration.raw import Raw, chat, http, request_bytes
from tests.waiting import until

OUT_OF_MEMORY = {"cmd": ["/bin/sh", "-c", "echo 'CUDA error: out of memory' >&2; exit 1 # ${PORT}"], "memory_mib": 100}
BROKEN = {"cmd": ["/bin/sh", "-c", "exit 1 # ${PORT}"], "memory_mib": 100}


async def checks(app: App) -> dict[str, tuple[int, str]]:
    """The status and word of each."""
    found = {}
    for path in ("/health", "/healthz", "/readyz"):
        answer = await http(app, "GET", path)
        found[path] = (answer.status, answer.json()["status"])
    return found


WELL = {"/health": (200, "healthy"), "/healthz": (200, "ok"), "/readyz": (200, "ok")}


async def test_a_gpu_out_of_memory_is_told_by_health_until_it_may_be_tried_again(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m"), "big": OUT_OF_MEMORY}) as app:
        assert await checks(app) == WELL
        assert (await chat(app, "big")).status >= 500
        assert await checks(app) == {**WELL, "/health": (503, "out_of_memory")}
        # The others are served, and a probe that restarts the container sees nothing.
        assert (await chat(app, "m")).status == 200
        for _ in range(600):
            if (await checks(app)) == WELL:
                return
            await asyncio.sleep(0.1)
        raise AssertionError("it stays out of memory")


async def test_only_when_every_model_fails_is_it_unhealthy(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": BROKEN, "b": BROKEN}) as app:
        assert (await chat(app, "a")).status >= 500
        assert await checks(app) == WELL
        await asyncio.gather(chat(app, "a"), chat(app, "b"))
        assert await checks(app) == {**WELL, "/health": (503, "failed")}


async def test_a_full_queue_takes_it_out_of_service_and_does_not_restart_it(tmp_path: Path) -> None:
    models = {"slow": fake("slow", "--tokens", "3", "--token-s", "1", concurrency=1)}
    async with gateway(tmp_path, models, scheduler={"queue_depth_max": 1}) as app:
        # Ready first: a request that waits for a load is one that waits.
        assert (await chat(app, "slow", tokens=0)).status == 200
        calls = [asyncio.ensure_future(chat(app, "slow"))]
        await until(lambda: app.tickets.open, "one is answered")
        calls.append(asyncio.ensure_future(chat(app, "slow", tokens=0)))
        await until(lambda: app.loop.scheduler.view.waitlist.depth == 1, "one waits")
        full = {"/health": (503, "saturated"), "/healthz": (200, "ok"), "/readyz": (503, "saturated")}
        assert await checks(app) == full
        assert [answer.status for answer in await asyncio.gather(*calls)] == [200, 200]
        assert await checks(app) == WELL


async def test_a_gateway_that_shuts_down_is_alive_and_not_ready(tmp_path: Path) -> None:
    models = {"slow": fake("slow", "--tokens", "4", "--token-s", "1")}
    async with gateway(tmp_path, models) as app:
        running = asyncio.ensure_future(chat(app, "slow"))
        await until(
            lambda: any(slot.is_serving and slot.move is None for slot in app.loop.view.slots.values()), "it is loaded"
        )
        # A probe's connection, from before: new ones may be refused.
        async with await Raw.open(app) as probe:
            probe.send(request_bytes("GET", "/health", None))
            assert (await probe.answer()).status == 200
            app.shut_down()
            for path, status in (("/health", 503), ("/readyz", 503), ("/healthz", 200)):
                probe.send(request_bytes("GET", path, None))
                assert (await probe.answer()).status == status, path
        assert (await running).status == 200
