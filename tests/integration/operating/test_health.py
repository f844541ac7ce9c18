"""The three health checks of running gateways, the second port that has them, and requests during the start."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.config import loader
from greenroom.config.diff import Changes
from greenroom.config.part import Apply, Part
from greenroom.config.schema import Config
from greenroom.errors import ConfigError
from tests.harness import fake, gateway, write_config
from tests.integration.facts import edit
from tests.integration.raw import Answer, asking, chat, http
from tests.integration.versions.test_versions import models, options
from tests.ports import free_port
from tests.waiting import PATIENCE_S

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


KEYS = [{"name": "plain", "key": "plain-key"}, {"name": "admin", "key": "admin-key", "admin": True}]
PLAIN, ADMIN = {"Authorization": "Bearer plain-key"}, {"Authorization": "Bearer admin-key"}
MODELS = {"m": fake("m"), "shy": fake("shy", unlisted=True)}


async def watched(app: App, path: str, method: str = "GET", **more: Any) -> Answer:
    """Ask the second port."""
    assert app.metrics_edge is not None
    return await http(app, method, path, edge=app.metrics_edge, **more)


async def test_second_port_serves_metrics_and_health_checks(tmp_path: Path) -> None:
    async with gateway(tmp_path, MODELS, server={"metrics_port": 0}) as app:
        assert app.metrics_edge is not None
        assert app.metrics_edge.addresses != app.edge.addresses
        for path in ("/health", "/healthz", "/readyz"):
            assert (await watched(app, path)).status == 200
            assert (await http(app, "GET", path)).status == 200
        assert b"\ngreenroom_uptime_seconds " in (await watched(app, "/metrics")).body
        assert (await watched(app, "/metrics", "HEAD")).status == 200
        assert b"\ngreenroom_uptime_seconds " in (await http(app, "GET", "/metrics")).body


async def test_nothing_else_is_reachable_there(tmp_path: Path) -> None:
    async with gateway(tmp_path, MODELS, server={"metrics_port": 0, "api_keys": KEYS}) as app:
        others = ["/", "/v1/models", "/api/v1/status", "/api/v1/openapi.json", "/upstream/m/metrics", "/metrics/"]
        spellings = ["/%6detrics", "//metrics", "/metrics/../v1/models"]
        for path in (*others, *spellings):
            assert (await watched(app, path, headers=ADMIN)).status == 404, path
        asked = await watched(app, "/v1/chat/completions", "POST", value=asking("m"), headers=ADMIN)
        assert (asked.status, asked.error["code"]) == (404, "not_found")
        assert (await watched(app, "/api/v1/reload", "POST", headers=ADMIN)).status == 404
        assert (await watched(app, "/metrics", "POST", headers=ADMIN)).status == 404
        assert (await watched(app, "/metrics", body=b"x", headers=ADMIN)).status == 413


async def test_keys_count_there_as_on_the_first_port(tmp_path: Path) -> None:
    async with gateway(tmp_path, MODELS, server={"metrics_port": 0, "api_keys": KEYS}) as app:
        assert (await watched(app, "/metrics")).status == 401
        assert (await watched(app, "/metrics", headers={"Host": "rebound.example.org"})).status == 403
        assert (await watched(app, "/healthz")).status == 200
        assert b'model="shy"' not in (await watched(app, "/metrics", headers=PLAIN)).body
        assert b'model="shy"' in (await watched(app, "/metrics", headers=ADMIN)).body


async def test_metrics_can_be_off(tmp_path: Path) -> None:
    async with gateway(tmp_path, MODELS, server={"metrics": False, "metrics_port": 0}) as app:
        assert app.metrics_edge is None
        assert (await http(app, "GET", "/metrics")).status == 404
        assert (await http(app, "GET", "/healthz")).status == 200


async def test_port_that_is_taken_is_named_by_its_key_and_the_first_is_closed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_server(("127.0.0.1", 0)) as free:
        taken, first = other.getsockname()[1], free.getsockname()[1]
        free.close()
        with pytest.raises(ConfigError) as refused:
            async with gateway(tmp_path, MODELS, server={"port": first, "metrics_port": taken}):
                pass
        assert refused.value.message.startswith(f"server.metrics_port: cannot listen on 127.0.0.1:{taken}: ")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", first))


CALLERS = 8


async def first_answer(port: int) -> tuple[int, str | None]:
    """The status and the version of the first answer that this port gives, asked without a pause until it is there."""
    body = json.dumps(asking("m", max_tokens=2)).encode()
    sent = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    sent += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            await asyncio.sleep(0)
            continue
        writer.write(sent)
        answer = (await reader.read()).decode()
        writer.close()
        found = [line for line in answer.splitlines() if line.lower().startswith("x-model-version")]
        return int(answer.split()[1]), found[0].split()[1] if found else None


async def test_requests_that_come_during_the_start_are_answered_by_the_promised_version(tmp_path: Path) -> None:
    port = free_port()
    callers = [asyncio.create_task(first_answer(port)) for _ in range(CALLERS)]
    async with gateway(tmp_path, models(tmp_path), server={"port": port}, **options(tmp_path)):
        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.gather(*callers) == [(200, "1")] * CALLERS


# --- what one part refuses, none does ---------------------------------------------------------------------------------


class Refusing(Part):
    """The last that is asked: all others have drafted what they would do."""

    async def draft(self, new: Config, changes: Changes) -> Apply:
        raise ConfigError("not this one")


async def test_a_configuration_that_one_part_refuses_changes_no_other(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": fake("a")}) as app:
        before, parts = app.config, app.parts
        edit(tmp_path, lambda said: said["models"].update(b=fake("b")))
        edit(tmp_path, lambda said: said["server"].update(api_keys=[{"name": "me", "key": "secret"}]))
        app.parts = (*parts, Refusing())
        with pytest.raises(ConfigError, match="not this one"):
            await app.reload()
        assert app.config is before and app.catalog.find("b") is None
        assert (await chat(app, "nowhere")).status == 404, "no key is asked for"
        app.parts = parts
        await app.reload()
        assert app.catalog.find("b") is not None
        assert (await chat(app, "nowhere")).status == 401


async def test_a_part_that_does_not_open_leaves_none_open(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = write_config(tmp_path, {"a": fake("a")}, server={"port": port, "record_events": str(tmp_path)})
    with pytest.raises(OSError):
        await App.start(loader.load(path).config, path)
    with socket.create_server(("127.0.0.1", port)):
        pass
    # The state directory is free, too.
    async with gateway(tmp_path, {"a": fake("a")}) as app:
        assert (await chat(app, "nowhere")).status == 404
