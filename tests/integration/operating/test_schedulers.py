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
from greenroom.core.scheduler import DefaultScheduler
from tests.docs.pages import package_of
from tests.harness import fake, gateway, tiny
from tests.integration.facts import at_rest, is_ready, pids
from tests.integration.operating.test_reload import edit
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


async def test_only_a_restart_changes_the_scheduler(tmp_path: Path) -> None:
    async with gateway(tmp_path, models()) as app:
        edit(tmp_path, lambda said: said.update(scheduler={"implementation": "plain"}))
        answer = await http(app, "POST", "/api/v1/reload")
        assert (answer.status, answer.error["code"]) == (422, "invalid_config")
        assert "only a restart can change scheduler.implementation" in answer.error["message"]
        assert isinstance(app.loop.scheduler, DefaultScheduler)


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
