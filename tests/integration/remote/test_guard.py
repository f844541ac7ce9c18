"""The guard over tasks, which counts what reaches a provider, and the switch that operators change."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from tests.harness import fake, gateway
from tests.integration.raw import Answer, chat, http
from tests.standins.standin_provider import KEY, Provider, long_before_midnight, provider
from tests.waiting import until

pytestmark = pytest.mark.asyncio
JSON = "content-type: application/json\r\n"
STRICT = {"response_format": {"type": "json_object"}}
TASKS = {
    "local-first": {"candidates": ["local", "cloud"]},
    "broken-first": {"candidates": ["broken", "cloud"]},
    "cloud-first": {"candidates": ["cloud", "local"]},
    "cloud-only": {"candidates": ["cloud"]},
    "promised": {"candidates": ["broken", "promises"]},
}


@pytest_asyncio.fixture
async def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Provider]:
    monkeypatch.setenv("STANDIN_KEY", KEY)
    monkeypatch.delenv("MODEL_BOSS_ALLOW_CLOUD_FALLBACK", raising=False)
    async with provider(tmp_path) as one:
        yield one


@pytest_asyncio.fixture
async def app(there: Provider, tmp_path: Path) -> AsyncIterator[App]:
    models: dict[str, Any] = {
        "local": fake("local"),
        "broken": fake("broken", "--exit-before-bind"),
        "cloud": {"remote": "acme"},
        "promises": {"remote": "acme", "strict_json": True},
    }
    async with gateway(tmp_path, models, tasks=TASKS, remotes={"acme": there.remote(retries_max=0)}) as app:
        yield app


async def ask(app: App, task: str, **more: Any) -> Answer:
    return await chat(app, task, **more)


async def test_the_switch_strips_remote_models_but_the_first(app: App, there: Provider) -> None:
    answer = await ask(app, "local-first")
    assert (answer.status, answer.headers["x-model"], there.calls) == (200, "local", [])
    answer = await ask(app, "broken-first")
    assert (answer.status, answer.headers["x-model"], len(there.calls)) == (200, "cloud", 1)
    # Nor does strict JSON fall to a model that does not promise it, with the switch on.
    assert (await ask(app, "broken-first", **STRICT)).status >= 400 and len(there.calls) == 1
    assert (await ask(app, "promised", **STRICT)).status == 200 and len(there.calls) == 2
    assert (await http(app, "PUT", "/api/v1/config", {"allowCloudFallback": False})).status == 200
    assert (await ask(app, "broken-first")).status >= 400
    assert (await ask(app, "promised", **STRICT)).status >= 400
    assert (await ask(app, "local-first")).headers["x-model"] == "local"
    assert len(there.calls) == 2
    # The list is never emptied, and a model by its own name is never blocked.
    for name in ("cloud-first", "cloud-only", "cloud", "acme:any"):
        assert (await ask(app, name)).status == 200
    assert len(there.calls) == 6


async def test_a_provider_that_fails_falls_to_the_next_candidate(app: App, there: Provider) -> None:
    for status in (429, 500, 401):
        there.script.append((status, JSON, b"{}"))
        answer = await ask(app, "cloud-first", stream=True)
        assert (answer.status, answer.headers["x-model"]) == (200, "local")
    assert len(there.calls) == 3
    # One that says what is wrong with the request has answered it.
    there.script.append((400, JSON, b'{"error": {"message": "theirs"}}'))
    assert (await ask(app, "cloud-first")).status == 400


CONFIG, REMOTES = "/api/v1/config", "/api/v1/remotes"


async def test_the_switch_is_kept_and_never_blocks_a_model_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_KEY", KEY)
    await long_before_midnight()
    monkeypatch.delenv("MODEL_BOSS_ALLOW_CLOUD_FALLBACK", raising=False)
    async with provider(tmp_path) as there:
        models = {"cloud": {"remote": "acme", "use_model_name": "large"}}
        remotes = {"acme": there.remote(cost={"input": 1000, "output": 5000}, budget_per_day=50)}
        async with gateway(tmp_path, models, remotes=remotes) as app:
            assert (await http(app, "GET", CONFIG)).json() == {"allowCloudFallback": True}
            for wrong in ({"allowCloudFallback": "false"}, {"allowCloudFallback": 0}, {}, {"allow": False}, [False]):
                assert (await http(app, "PUT", CONFIG, wrong)).status == 400
            more = {"allowCloudFallback": False, "port": 1}
            assert (await http(app, "PUT", CONFIG, more)).status == 400
            answer = await http(app, "PUT", CONFIG, {"allowCloudFallback": False})
            assert (answer.status, answer.json()) == (200, {"allowCloudFallback": False})
        monkeypatch.setenv("MODEL_BOSS_ALLOW_CLOUD_FALLBACK", "true")
        async with gateway(tmp_path, models, remotes=remotes) as app:
            assert (await http(app, "GET", CONFIG)).json() == {"allowCloudFallback": False}
            for name in ("cloud", "acme:large"):
                assert (await chat(app, name, max_tokens=1)).status == 200
            await until(lambda: round(app.spending.spent("acme"), 6) == 4.0, "both are settled")
            (told,) = (await http(app, "GET", REMOTES)).json()["remotes"]
            spent = {"spent_today": 4.0, "budget_per_day": 50.0, "problem": None}
            assert told == {"name": "acme", "provider": "compatible", **spent}
