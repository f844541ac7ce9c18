"""What callers and operators see of models in our own workers: tiers, caches by tenant and tag, figures."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from greenroom.core.model import MoveKind
from tests.harness import gateway
from tests.integration.raw import Answer, http
from tests.integration.tenants import test_tenants_timed as timed_tenants
from tests.integration.tenants.test_tenants_timed import assert_nothing_is_left, assert_time_tells_nothing, prompt_of
from tests.models import tiny_hf
from tests.torch_python import hosted
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEYS = [{"name": name, "key": f"{name}-key", "admin": name == "admin"} for name in ("lab", "shop", "admin")]
# Longer than a block of the cache, of which only whole ones are kept.
TEXT = " ".join(f"word{number}" for number in range(40))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    models = {name: hosted(tiny_hf(name)) for name in ("alpha", "bravo")}
    async with gateway(tmp_path_factory.mktemp("surface"), models, server={"api_keys": KEYS}) as app:
        yield app


async def call(app: App, method: str, path: str, value: Any = None, key: str = "admin", **headers: str) -> Answer:
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return await http(app, method, path, value, headers={"Authorization": f"Bearer {key}-key", **named})


async def ask(app: App, key: str, text: str = TEXT, *, stream: bool = False, **headers: str) -> Mapping[str, str]:
    body = {"model": "alpha", "messages": [{"role": "user", "content": text}], "max_tokens": 2, "stream": stream}
    answer = await call(app, "POST", "/v1/chat/completions", body, key, **headers)
    assert answer.status == 200, answer.body
    return answer.headers


async def flush(app: App, key: str = "admin", **order: Any) -> int:
    answer = await call(app, "POST", "/v1/cache/flush", order, key)
    assert answer.status == 200, answer.body
    removed: int = answer.json()["entriesRemoved"]
    assert (removed > 0) == (answer.json()["memoryFreedMB"] > 0)
    return removed


async def test_a_prompt_that_was_there_before_is_reused_and_the_answer_says_so(app: App) -> None:
    await flush(app, scope="all")
    first, second = await ask(app, "lab"), await ask(app, "lab")
    assert (first["x-cache-hit"], first["x-cache-tokens-reused"]) == ("false", "0")
    assert second["x-cache-hit"] == "true" and int(second["x-cache-tokens-reused"]) > 0
    assert int(second["x-gpu-time-ms"]) >= 0


async def test_the_head_of_a_stream_says_what_was_reused_and_the_request_is_remembered_with_it(app: App) -> None:
    await flush(app, scope="all")
    first, second = await ask(app, "lab", stream=True), await ask(app, "lab", stream=True)
    assert (first["x-cache-hit"], first["x-cache-tokens-reused"]) == ("false", "0")
    assert second["x-cache-hit"] == "true" and int(second["x-cache-tokens-reused"]) > 0
    remembered = (await call(app, "GET", f"/api/v1/requests/{second['x-request-id']}")).json()
    assert remembered["cached_tokens"] == int(second["x-cache-tokens-reused"])


async def test_tenants_and_tags_do_not_share_whatever_the_header_says(app: App) -> None:
    await flush(app, scope="all")
    await ask(app, "lab")
    assert (await ask(app, "shop", X_Tenant_ID="lab"))["x-cache-hit"] == "false"
    assert (await ask(app, "lab", X_Cache_Tag="session-1"))["x-cache-hit"] == "false"
    assert (await ask(app, "lab", X_Cache_Mode="none"))["x-cache-hit"] == "false"
    assert (await ask(app, "lab", X_Cache_Tag="session-1"))["x-cache-hit"] == "true"


async def test_a_flush_forgets_what_it_names_and_nothing_else(app: App) -> None:
    await flush(app, scope="all")
    for tag in ("one", "two"):
        await ask(app, "lab", X_Cache_Tag=tag)
    await ask(app, "shop")
    assert await flush(app, "lab", scope="tag", tag="one") > 0
    assert (await ask(app, "lab", X_Cache_Tag="one"))["x-cache-hit"] == "false"
    assert (await ask(app, "lab", X_Cache_Tag="two"))["x-cache-hit"] == "true"
    assert await flush(app, "lab", scope="tenant") > 0
    assert (await ask(app, "shop"))["x-cache-hit"] == "true"
    assert await flush(app, scope="model", modelId="alpha") > 0
    assert await flush(app, scope="all") == 0


async def test_sleep_and_prepare_bring_models_into_the_green_room_and_a_request_brings_them_back(app: App) -> None:
    await ask(app, "lab")
    slept = await call(app, "POST", "/api/v1/models/alpha/sleep")
    prepared = await call(app, "POST", "/api/v1/models/bravo/prepare")
    assert (slept.json()["tier"], prepared.json()["tier"]) == ("asleep", "asleep")
    status = (await call(app, "GET", "/api/v1/status")).json()
    assert status["green_room"]["models"] == ["alpha", "bravo"]
    assert status["green_room"]["used_mib"] > 0
    # A model that was asleep has forgotten what it had cached.
    assert (await ask(app, "lab"))["x-cache-hit"] == "false"
    assert (await call(app, "GET", "/api/v1/models/alpha")).json()["tier"] == "ready"
    metrics = (await call(app, "GET", "/metrics")).body.decode()
    figures = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert float(figures['greenroom_moves_total{kind="wake",model="alpha",outcome="done"}']) >= 1
    assert float(figures['greenroom_moves_total{kind="prepare",model="bravo",outcome="done"}']) == 1
    assert float(figures['greenroom_prepare_bytes_total{model="bravo"}']) > 0
    assert float(figures['greenroom_worker_starts_total{purpose="needed"}']) >= 1


# --- time tells no tenant of another ----------------------------------------------------------------------------------


async def test_time_to_the_first_token_tells_nothing_and_the_worker_tells_its_cache(tmp_path: Path) -> None:
    models = {"alpha": hosted(tiny_hf("timed", hidden=256, layers=4), ctx_size=4_096, cache_tokens=16_384)}
    async with gateway(tmp_path, models, server={"api_keys": timed_tenants.KEYS}) as app:
        await assert_time_tells_nothing(app, words=400)
        await timed_tenants.ask(app, "lab", "once more")
        live = next(iter(app.slots.live.values()))
        await until(lambda: live.figures is not None, "its worker was asked")
        assert live.figures is not None and live.figures.kv_bytes is not None
        resources = (await http(app, "GET", "/v1/capabilities", headers={"Authorization": "Bearer ops-key"})).json()
        shown = resources["resources"]["kvCacheSizeMB"]
        assert shown == -(-live.figures.kv_bytes // 2**20) and shown > 0


@pytest.mark.parametrize("leave", [MoveKind.SLEEP, MoveKind.UNLOAD])
async def test_nothing_is_left(tmp_path: Path, leave: MoveKind) -> None:
    async with gateway(tmp_path, {"alpha": hosted(tiny_hf("alpha"))}, server={"api_keys": timed_tenants.KEYS}) as app:
        await assert_nothing_is_left(app, prompt_of(7, 50), leave)
