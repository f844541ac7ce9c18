"""Each scheduler runs a gateway with real engines, and another policy is a matter of a reload."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.core.invariants import check
from greenroom.core.plain import PlainScheduler
from greenroom.core.policy.default import BoundedFirstCome
from greenroom.core.policy.fifo import FirstCome
from tests.docs.pages import package_of
from tests.harness import fake, gateway, tiny
from tests.integration.facts import at_rest, edit, is_loading, is_ready, pids
from tests.integration.raw import chat, http
from tests.models import tiny as tiny_model
from tests.waiting import until

PAGE = "docs/design/writing-a-scheduler.md"


def models(**more: Any) -> dict[str, Any]:
    """Two of llama.cpp, of which one fits at a time, with one answer at a time."""
    return {name: tiny(tiny_model(name), concurrency=1, **more) for name in ("alpha", "beta")}


async def in_turn(app: App, *asked: tuple[str, str]) -> list[tuple[str, str]]:
    """Ask these models, with a priority: one request when the one before has reached the scheduler. As they ended."""
    ended: list[tuple[str, str]] = []

    async def ask(model: str, priority: str) -> None:
        answer = await chat(app, model, headers={"X-Priority": priority})
        assert (answer.status, answer.text.split()[0]) == (200, model), answer.body
        ended.append((model, priority))

    tasks = []
    for model, priority in asked:
        tasks.append(asyncio.create_task(ask(model, priority)))
        await until(lambda: came(app) == len(tasks), "the request has come")
    await asyncio.gather(*tasks)
    return ended


def came(app: App) -> int:
    view = app.loop.scheduler.view
    return view.counters["grants"] + view.waitlist.depth


@pytest.mark.parametrize("name", ["default", "plain", "longest"])
async def test_models_that_do_not_fit_are_served_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.syspath_prepend(str(package_of(PAGE, tmp_path)))
    async with gateway(tmp_path, models(), budget_mib=150, scheduler={"implementation": name}) as app:
        asked = [(model, "normal") for model in ("alpha", "beta", "beta", "alpha", "beta")]
        assert sorted(await in_turn(app, *asked)) == sorted(asked)
        await at_rest(app)
        check(app.loop.scheduler, app.clock())  # type: ignore[arg-type]
        for order in ("unload", "load"):
            assert (await http(app, "POST", f"/api/v1/models/beta/{order}")).status < 300
        await until(lambda: is_ready(app, "beta"), "the operator's load")
        told = (await http(app, "POST", "/api/v1/explain", {"model": "alpha"})).json()
        assert (told["action"], [one["model"] for one in told["evict"]]) == ("swap", ["beta"])


async def test_the_plain_scheduler_serves_in_the_order_of_arrival_whatever_that_costs(tmp_path: Path) -> None:
    async with gateway(tmp_path, models(), budget_mib=150, scheduler={"implementation": "plain"}) as app:
        assert isinstance(app.loop.scheduler, PlainScheduler)
        asked = [("alpha", "normal"), ("beta", "low"), ("alpha", "normal"), ("beta", "high"), ("alpha", "high")]
        assert await in_turn(app, *asked) == asked
        assert app.loop.scheduler.view.counters["swaps"] == len(asked)


async def test_a_policy_is_changed_under_the_models_feet(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"model": fake("model")}) as app:
        assert (await chat(app, "model")).status == 200
        before = pids(app, "model")
        assert isinstance(app.loop.scheduler.state.policy, BoundedFirstCome)
        edit(tmp_path, lambda said: said.update(scheduler={"policy": "fifo"}))
        await app.reload()
        assert isinstance(app.loop.scheduler.state.policy, FirstCome)
        assert (await chat(app, "model")).status == 200
        assert pids(app, "model") == before


# --- what is explained is what then happens ---------------------------------------------------------------------------


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
