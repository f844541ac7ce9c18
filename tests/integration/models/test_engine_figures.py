"""Figures that engines tell of their cache: shown in /metrics and in the status, harmless if they are bad."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.core.model import ModelId, MoveKind
from tests.harness import gateway, served, tiny
from tests.integration.facts import Journal
from tests.integration.orders import view
from tests.integration.raw import chat, http
from tests.models import tiny as tiny_gguf
from tests.waiting import until


@contextlib.asynccontextmanager
async def serving(folder: Path, kind: str, faults: str = "") -> AsyncIterator[tuple[App, Journal]]:
    journal = Journal(folder)
    model = served(kind, folder / "server", *journal.switches, faults=faults)
    async with gateway(folder, {"alpha": model}) as app:
        await often(app)
        yield app, journal


async def often(app: App) -> None:
    """Not every five seconds, so that the test need not wait."""
    await app.figures.close()
    app.figures = type(app.figures)(app.slots, app.is_ready, every_s=0.05, hosted=app.hosted_moves.figures)
    app.figures.start()


async def cache(app: App) -> Any:
    return (await view(app, "alpha"))["cache"]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_figures_are_shown_while_it_is_ready(tmp_path: Path, kind: str) -> None:
    async with serving(tmp_path, kind) as (app, _):
        assert await cache(app) is None
        for _ in range(3):
            await chat(app, "alpha")

        shown = {"kv_used": 0.25, "prefix_queries": 30, "prefix_hits": 20}

        async def are_told() -> bool:
            return bool(await cache(app) == {**shown, "kv_tokens": 2_048})

        await until(are_told, "they are told")
        metrics = (await http(app, "GET", "/metrics")).body.decode()
        assert 'greenroom_engine_kv_cache_used_ratio{model="alpha"} 0.25' in metrics
        assert 'greenroom_engine_prefix_queries_total{model="alpha"} 30.0' in metrics
        assert 'greenroom_engine_prefix_hits_total{model="alpha"} 20.0' in metrics
        await app.operations.move(MoveKind.SLEEP, ModelId("alpha"))

        async def are_gone() -> bool:
            return await cache(app) is None

        await until(are_gone, "a model that is asleep has no cache")


@pytest.mark.parametrize("fault", ["metrics-garbage", "metrics-hangs"])
async def test_bad_figures_are_none_and_disturb_nothing(tmp_path: Path, fault: str) -> None:
    async with serving(tmp_path, "vllm", fault) as (app, journal):
        await chat(app, "alpha")
        await until(lambda: journal.count("request", path="/metrics") >= 1, "it was asked")
        assert (await chat(app, "alpha")).text.startswith("alpha")
        assert await cache(app) is None
        if fault == "metrics-hangs":
            assert journal.count("request", path="/metrics") == 1, "never twice at once"


async def test_llama_cpp_tells_by_its_slots(tmp_path: Path) -> None:
    model = tiny(tiny_gguf("alpha"), ctx_size=2_048)
    async with gateway(tmp_path, {"alpha": model}) as app:
        await often(app)
        body = {"model": "alpha", "prompt": "x " * 100, "max_tokens": 1}
        answer = await http(app, "POST", "/v1/completions", body)
        tokens = answer.json()["usage"]["prompt_tokens"]

        async def is_told() -> bool:
            shown = await cache(app)
            return shown is not None and shown["kv_used"] > 0

        await until(is_told, "it is told")
        shown = await cache(app)
        assert shown["kv_tokens"] == 2_048 and shown["prefix_queries"] is None
        assert tokens <= round(shown["kv_used"] * 2_048) <= tokens + 2
        metrics = (await http(app, "GET", "/metrics")).body.decode()
        assert 'greenroom_engine_kv_cache_used_ratio{model="alpha"} 0.' in metrics
        assert 'greenroom_engine_prefix_queries_total{model="alpha"}' not in metrics, "it does not count them"
        assert 'greenroom_prefix_cache_hit_ratio{model="alpha"} 0.0' in metrics
        await http(app, "POST", "/v1/completions", body)
        assert 'cache_hit_ratio{model="alpha"} 0.5' in (await http(app, "GET", "/metrics")).body.decode()
        resources = (await http(app, "GET", "/v1/capabilities")).json()["resources"]
        assert resources["kvCacheSizeMB"] == 1, "of so small a model, rounded up"
        assert resources["kvCacheUtilization"] == round(shown["kv_used"], 3)
