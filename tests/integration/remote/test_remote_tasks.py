"""Remote models in tasks: the provider counts its calls, which are none where a local model can serve."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.harness import fake, gateway
from tests.integration.facts import is_ready
from tests.integration.raw import chat
from tests.standin_provider import KEY, Provider, provider
from tests.waiting import until

pytestmark = pytest.mark.asyncio
CLOUD: dict[str, Any] = {"engine": "remote", "remote": "acme", "use_model_name": "acme-large"}


@pytest_asyncio.fixture
async def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Provider]:
    monkeypatch.setenv("STANDIN_KEY", KEY)
    async with provider(tmp_path) as one:
        yield one


async def test_a_cold_or_busy_local_model_is_waited_for(there: Provider, tmp_path: Path) -> None:
    tasks = {"t": {"candidates": ["here", "cloud"], "prefer_first_s": 0}}
    models = {"here": fake("here", concurrency=1), "cloud": CLOUD}
    async with gateway(tmp_path, models, tasks=tasks, remotes={"acme": there.remote()}) as app:
        await until(lambda: is_ready(app, "cloud"), "the remote model is ready")
        for _ in range(3):
            assert (await chat(app, "t")).headers["x-model"] == "here"
        assert not there.calls


async def test_a_local_model_that_fails_is_replaced_and_the_answer_says_by_whom(
    there: Provider, tmp_path: Path
) -> None:
    tasks = {"t": {"candidates": ["broken", "cloud"]}, "late": {"candidates": ["broken", "cloud"]}}
    models = {"broken": fake("broken", "--exit-before-bind"), "cloud": CLOUD}
    async with gateway(tmp_path, models, tasks=tasks, remotes={"acme": there.remote()}) as app:
        answer = await chat(app, "t")
        assert answer.status == 200 and answer.headers["x-model"] == "cloud"
        (call,) = there.calls
        assert call.body["model"] == "acme-large"


async def test_a_remote_primary_whose_budget_is_spent_gives_way_to_a_local_model(
    there: Provider, tmp_path: Path
) -> None:
    tasks = {"t": {"candidates": ["cloud", "here"]}}
    remote = there.remote(cost={"input": 1_000, "output": 1_000}, budget_per_day=0)
    async with gateway(tmp_path, {"here": fake("here"), "cloud": CLOUD}, tasks=tasks, remotes={"acme": remote}) as app:
        await until(lambda: is_ready(app, "cloud"), "the remote model is ready")
        assert (await chat(app, "cloud")).status == 429
        answer = await chat(app, "t")
        assert answer.status == 200 and answer.headers["x-model"] == "here"
        assert not there.calls
