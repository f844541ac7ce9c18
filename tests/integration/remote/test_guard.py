"""Remote models in tasks: the provider counts its calls, which are none where the guard or a local model says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from tests.harness import fake, gateway
from tests.integration.facts import Journal, is_ready
from tests.integration.raw import Answer, chat, http
from tests.standins.standin_provider import Provider, long_before_midnight
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
    there: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await long_before_midnight()
    models = {"cloud": {"remote": "acme", "use_model_name": "large"}}
    remotes = {"acme": there.remote(cost={"input": 1000, "output": 5000}, budget_per_day=50)}
    off: dict[str, Any] = {"allowCloudFallback": False}
    async with gateway(tmp_path, models, remotes=remotes) as app:
        assert (await http(app, "GET", CONFIG)).json() == {"allowCloudFallback": True}
        for wrong in ({"allowCloudFallback": "false"}, {"allowCloudFallback": 0}, {}, {"allow": False}, [False]):
            assert (await http(app, "PUT", CONFIG, wrong)).status == 400
        assert (await http(app, "PUT", CONFIG, {**off, "port": 1})).status == 400
        answer = await http(app, "PUT", CONFIG, off)
        assert (answer.status, answer.json()) == (200, off)
    monkeypatch.setenv("MODEL_BOSS_ALLOW_CLOUD_FALLBACK", "true")
    async with gateway(tmp_path, models, remotes=remotes) as app:
        assert (await http(app, "GET", CONFIG)).json() == off
        for name in ("cloud", "acme:large"):
            assert (await chat(app, name, max_tokens=1)).status == 200
        await until(lambda: round(app.spending.spent("acme"), 6) == 4.0, "both are settled")
        (told,) = (await http(app, "GET", REMOTES)).json()["remotes"]
        spent = {"spent_today": 4.0, "budget_per_day": 50.0, "problem": None}
        assert told == {"name": "acme", "provider": "compatible", **spent}


CLOUD: dict[str, Any] = {"engine": "remote", "remote": "acme", "use_model_name": "acme-large"}


@asynccontextmanager
async def held(app: App, journal: Journal) -> AsyncIterator[None]:
    """A request for `here` that is served until this is left."""
    before = journal.count("request")
    asking = asyncio.create_task(chat(app, "here", token_s=600))
    await until(lambda: journal.count("request") > before, "the model is busy")
    yield
    asking.cancel()
    await asyncio.wait((asking,))


async def test_a_local_model_at_its_limit_is_not_replaced_by_a_remote_one(there: Provider, tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    tasks = {"t": {"candidates": ["here", "cloud"]}, "two": {"candidates": ["here", "cloud", "other"]}}
    models = {
        "here": fake("here", *journal.switches, limits={"concurrent_max": 1}),
        "other": fake("other"),
        "cloud": CLOUD,
    }
    async with gateway(tmp_path, models, tasks=tasks, remotes={"acme": there.remote()}) as app:
        await until(lambda: is_ready(app, "cloud"), "the remote model is ready")
        async with held(app, journal):
            refused = await chat(app, "t")
            assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
            assert (await chat(app, "two")).headers["x-model"] == "other"
        assert not there.calls


async def test_a_local_engine_that_answers_503_for_long_is_replaced(there: Provider, tmp_path: Path) -> None:
    models = {"full": fake("full", "--sse-weird", "error-503"), "cloud": CLOUD}
    tasks = {"t": {"candidates": ["full", "cloud"]}}
    async with gateway(tmp_path, models, tasks=tasks, remotes={"acme": there.remote()}) as app:
        await until(lambda: is_ready(app, "cloud"), "the remote model is ready")
        for _ in range(2):
            assert (await chat(app, "t", stream=True)).status == 503
            (full,) = [live for live in app.slots.live.values() if live.entry.id == "full"]
            assert full.unavailable_since is not None and not there.calls
            # Any other answer, also to a request that named the model itself, shows that it works.
            assert (await chat(app, "full")).status == 200
            assert full.unavailable_since is None
        assert (await chat(app, "t", stream=True)).status == 503
        full.unavailable_since = app.clock() - 3600
        assert (await chat(app, "t", stream=True)).headers["x-model"] == "cloud"
        assert (await chat(app, "t")).headers["x-model"] == "full" and len(there.calls) == 1


@pytest.mark.parametrize("how", ["error", "timeout"])
async def test_after_a_failed_load_the_last_is_asked_once_and_its_error_told(
    there: Provider, tmp_path: Path, how: str
) -> None:
    tasks = {"t": {"candidates": ["broken", "cloud"]}}
    models = {"broken": fake("broken", "--exit-before-bind"), "cloud": CLOUD}
    remote = there.remote(retries_max=0, first_byte_timeout_s=60 if how == "error" else 0.5)
    async with gateway(tmp_path, models, tasks=tasks, remotes={"acme": remote}) as app:
        if how == "error":
            there.script.append((500, "content-type: application/json\r\n", b"{}"))
        else:
            there.may_answer.clear()
        answer = await chat(app, "t")
        assert answer.status == (502 if how == "error" else 504), answer.body
        assert len(there.calls) == 1


async def test_a_remote_primary_without_a_first_byte_in_time_is_replaced(there: Provider, tmp_path: Path) -> None:
    tasks = {"t": {"candidates": ["cloud", "here"]}}
    remote = there.remote(retries_max=0, first_byte_timeout_s=2)
    models = {"here": fake("here"), "cloud": CLOUD}
    server = {"answer_idle_max_s": 0.5}
    async with gateway(tmp_path, models, tasks=tasks, remotes={"acme": remote}, server=server) as app:
        there.may_answer.clear()
        answer = await chat(app, "t")
        assert answer.status == 200 and answer.headers["x-model"] == "here", answer.body
        assert len(there.calls) == 1
        # Alone it has as long, and says what it has waited for.
        alone = await chat(app, "cloud")
        assert (alone.status, alone.error["code"]) == (504, "remote_timeout")


async def test_a_remote_primary_without_a_budget_gives_way_to_a_local_model(there: Provider, tmp_path: Path) -> None:
    tasks = {"t": {"candidates": ["cloud", "here"]}}
    remote = there.remote(cost={"input": 1_000, "output": 1_000}, budget_per_day=0)
    async with gateway(tmp_path, {"here": fake("here"), "cloud": CLOUD}, tasks=tasks, remotes={"acme": remote}) as app:
        await until(lambda: is_ready(app, "cloud"), "the remote model is ready")
        assert (await chat(app, "cloud")).status == 429
        answer = await chat(app, "t")
        assert answer.status == 200 and answer.headers["x-model"] == "here"
        assert not there.calls
