"""What is explained is what then happens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from greenroom.app import App
from tests.harness import fake, gateway
from tests.integration.facts import is_loading
from tests.integration.raw import chat, http
from tests.waiting import until


async def explain(app: App, model: str, **more: Any) -> dict[str, Any]:
    answer = await http(app, "POST", "/api/v1/explain", {"model": model, **more})
    assert answer.status == 200, answer.body
    told: dict[str, Any] = answer.json()
    return told


async def decisions(app: App, query: str = "") -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = (await http(app, "GET", f"/api/v1/decisions{query}")).json()["decisions"]
    return told


async def test_explanations_come_true(tmp_path: Path) -> None:
    models = {"a": fake("a", "--load-s", "0.6"), "b": fake("b"), "huge": fake("huge", memory_mib=10_000)}
    async with gateway(tmp_path, models, budget_mib=150) as app:
        # 1. Cold, and there is room.
        told = await explain(app, "a")
        assert (told["action"], told["move"], told["evict"]) == ("swap", "load", [])
        assert not app.loop.scheduler.state.slots and await decisions(app) == []
        # 2. On its way.
        answer = asyncio.create_task(chat(app, "a"))
        await until(lambda: is_loading(app, "a"), "it loads")
        assert (await explain(app, "a"))["action"] == "join"
        assert (await answer).status == 200
        # 3. Ready.
        assert (await explain(app, "a"))["action"] == "serve"
        # 4. Too much for this machine.
        told = await explain(app, "huge")
        assert (told["action"], told["why"]) == ("refuse", "too_large")
        # 5. Cold, and another has to leave; which is then decided so, for that reason.
        told = await explain(app, "b", priority="high", stream=True)
        assert told["action"] == "swap"
        (evicted,) = told["evict"]
        assert (evicted["model"], evicted["to"]) == ("a", "cold")
        assert "idle" in evicted["why"]
        last = (await decisions(app))[-1]["seq"]
        assert (await chat(app, "b", x_priority="high", stream=True)).status == 200
        done = await decisions(app, f"?since={last}")
        assert [(one["what"], one["model"]) for one in done] == [("unload", "a"), ("load", "b")]
        assert (done[0]["why"], done[0]["for_model"], done[0]["slot"]) == ("evicted", "b", evicted["slot"])
        assert [one["seq"] for one in done] == [last + 1, last + 2]
        assert abs(done[0]["at"] - app.activity.recent(1)[0].arrived_at) < 60


async def test_pinned_models_in_the_way_are_named(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": fake("a", pinned=True), "b": fake("b")}, budget_mib=150) as app:
        assert (await chat(app, "a")).status == 200
        told = await explain(app, "b")
        assert (told["why"], told["detail"]) == ("too_large", "It would fit without pinned models: unpin a.")
