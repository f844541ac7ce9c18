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


async def test_a_model_whose_devices_are_not_there_is_refused_by_their_names(tmp_path: Path) -> None:
    models = {"astray": fake("astray", devices=["gpu7"]), "there": fake("there", devices=["gpu1", "gpu7"])}
    async with gateway(tmp_path, models, gpus=[{"memory_mib": 1_000}] * 2) as app:
        only = "astray may use only gpu7 (`devices`), and this machine has gpu0, gpu1 and host."
        answer = await chat(app, "astray")
        assert (answer.status, answer.error["code"]) == (503, "model_too_large")
        assert answer.error["message"].startswith(only), answer.error
        ordered = await http(app, "POST", "/api/v1/models/astray/load")
        assert (ordered.status, ordered.error["code"]) == (503, "model_too_large")
        assert ordered.error["message"].startswith(only), ordered.error
        assert (await explain(app, "astray"))["detail"].startswith(only)
        (device,) = (await explain(app, "there"))["devices"]
        assert device["name"] == "gpu1"
        assert (await chat(app, "there")).status == 200


async def test_leases_that_hold_the_memory_are_named(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": fake("a")}, budget_mib=150, server={"wait_max_s": 0.2}) as app:
        lease = {"mib": 100, "name": "train", "id": "train-1"}
        assert (await http(app, "POST", "/api/v1/leases", lease)).status == 201
        told = await explain(app, "a")
        assert (told["action"], told["why"], told["leases"], told["eta_s"]) == ("wait", "leased", ["train"], None)
        refused = await chat(app, "a")
        assert refused.status == 503 and "memory that is leased (train)" in refused.json()["error"]["message"]


async def test_a_lease_that_would_be_recalled_is_named(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": fake("a")}, budget_mib=150) as app:
        lease = {"mib": 100, "name": "train", "preemptible": True, "priority": "low"}
        assert (await http(app, "POST", "/api/v1/leases", lease)).status == 201
        (evicted,) = (await explain(app, "a"))["evict"]
        assert (evicted["model"], evicted["is_lease"]) == ("train", True)


async def test_pinned_models_in_the_way_are_named(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": fake("a", pinned=True), "b": fake("b")}, budget_mib=150) as app:
        assert (await chat(app, "a")).status == 200
        told = await explain(app, "b")
        assert (told["why"], told["detail"]) == ("too_large", "It would fit without pinned models: unpin a.")
