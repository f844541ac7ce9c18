"""Figures that engines tell of their cache, and how far a load is by what was read of the model's file."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.core.model import ModelId, MoveKind
from tests.harness import FAKE_ENGINE, gateway, served, tiny
from tests.integration.facts import Journal, view
from tests.integration.raw import chat, http
from tests.models import tiny as tiny_gguf
from tests.models import tiny as tiny_model
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
    app.figures = type(app.figures)(app.shell, app.hosted_moves, every_s=0.05)
    app.parts = (*app.parts, app.figures)
    app.figures.begin()


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


MIB = 1024 * 1024
FILE_MIB = 400

# Takes as many MiB of its model as the file `upto` beside it says, by reading or by mapping, then serves.
SLOW_READER = """
import mmap, os, pathlib, sys, time

path = sys.argv[sys.argv.index("--model") + 1]
upto, is_mapped, taken = pathlib.Path(path).with_name("upto"), sys.argv[1] == "mmap", 0

def wait_for_the_end_of(name):
    while upto.with_name(name).exists():
        time.sleep(0.01)

with open(path, "rb") as file:
    pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    while taken < int(upto.read_text()):
        if is_mapped:
            for at in range(taken << 20, taken + 1 << 20, mmap.PAGESIZE):
                pages[at]
        else:
            file.read(1 << 20)
        taken += 1
        while taken == int(upto.read_text()) < FILE_MIB:
            time.sleep(0.01)
    wait_for_the_end_of("mapped")
    # As loaders do that copy to a GPU.
    pages.close()
wait_for_the_end_of("starting")
socket = sys.argv[sys.argv.index("--host") + 1]
os.execv(sys.executable, [sys.executable, "-I", "-S", FAKE_ENGINE, "--name", "alpha", "--uds", socket])
"""


def slow_reader(folder: Path, way: str) -> dict[str, Any]:
    (folder / "m.gguf").write_bytes(tiny_model("alpha").read_bytes())
    with (folder / "m.gguf").open("r+b") as file:
        file.truncate(FILE_MIB * MIB)
    script = folder / "reader.py"
    script.write_text(SLOW_READER.replace("FILE_MIB", str(FILE_MIB)).replace("FAKE_ENGINE", repr(str(FAKE_ENGINE))))
    program = folder / "llama-server"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {script} {way} "$@"\n')
    program.chmod(0o755)
    return tiny(folder / "m.gguf", program=str(program), load_timeout_s=300)


def let_it_take(upto: Path, mib: int) -> None:
    upto.with_suffix(".new").write_text(str(mib))
    upto.with_suffix(".new").rename(upto)


async def told(app: App, task: str) -> dict[str, Any]:
    answer = await http(app, "GET", f"/v1/models/load/{task}")
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("way", ["read", "mmap"])
async def test_a_first_load_tells_how_far_it_is_by_what_was_read(tmp_path: Path, way: str) -> None:
    upto, mapped, starting = (tmp_path / name for name in ("upto", "mapped", "starting"))
    let_it_take(upto, FILE_MIB // 4)
    mapped.touch()
    starting.touch()
    async with gateway(tmp_path, {"alpha": slow_reader(tmp_path, way)}) as app:
        taken = (await http(app, "POST", "/v1/models/load", {"modelId": "alpha"})).json()
        seen: list[float] = []

        async def is_at(least: float) -> bool:
            status = await told(app, taken["taskId"])
            assert status["status"] == "loading", status
            seen.append(status["progress"])
            return seen[-1] >= least

        await until(lambda: is_at(0.24))
        quarter = await told(app, taken["taskId"])
        assert 0.24 <= quarter["progress"] <= 0.32 and not quarter["estimated"]
        assert quarter["eta"] > 0
        shown = (await http(app, "GET", "/v1/capabilities")).json()["models"]["loading"]
        assert [(one["id"], one["eta"] is None) for one in shown] == [("alpha", False)]

        let_it_take(upto, FILE_MIB * 3 // 4)
        await until(lambda: is_at(0.74))
        assert seen[-1] < 0.85
        let_it_take(upto, FILE_MIB)
        await until(lambda: is_at(0.98))
        mapped.unlink()
        # It lets go of the file: what was told stays, and is never all.
        for _ in range(30):
            await asyncio.sleep(0.01)
            assert await is_at(0.98)
        assert seen == sorted(seen) and seen[-1] <= 0.99

        starting.unlink()

        async def is_done() -> bool:
            return (await told(app, taken["taskId"]))["status"] == "completed"

        await until(is_done)
        assert (await told(app, taken["taskId"]))["progress"] == 1.0
