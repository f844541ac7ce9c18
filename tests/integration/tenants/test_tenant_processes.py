"""`isolate_tenants`: an engine that cannot keep tenants apart has a process for each, or lets them share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.errors import ConfigError
from tests.harness import fake, gateway, served, tiny
from tests.integration.facts import Journal, edit
from tests.integration.raw import Answer, chat, http
from tests.models import tiny as tiny_gguf
from tests.waiting import until

PROMPT = "one two three four five six seven eight nine ten " * 4
KEYS: list[dict[str, Any]] = [{"name": name, "key": f"{name}-key"} for name in ("lab", "shop")]
KEYS += [{"name": "ops", "key": "ops-key", "admin": True}]


def told(who: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {who}-key"}


async def ask(app: App, who: str, model: str = "alpha", **more: Any) -> Answer:
    answer = await chat(app, model, headers=told(who), **more)
    assert answer.status == 200, answer.body
    return answer


def processes(app: App) -> dict[str | None, int]:
    """The process of each tenant's instance; None is the model itself."""
    return {live.entry.tenant: live.child.pid for live in app.slots.live.values()}


async def test_each_tenant_has_a_process_of_its_own(tmp_path: Path) -> None:
    models = {"alpha": fake("alpha", aliases=["first"], isolate_tenants="process")}
    async with gateway(tmp_path, models, server={"api_keys": KEYS}) as app:
        for who in ("lab", "shop", "lab"):
            assert (await ask(app, who, "first")).json()["model"] == "alpha"
        running = processes(app)
        assert set(running) == {"lab", "shop"} and len(set(running.values())) == 2
        ids = {live.entry.tenant: live.entry.id for live in app.slots.live.values()}
        # Not by name either, and neither is told of the other's.
        for who in ("lab", "shop", "ops"):
            assert (await chat(app, ids["shop"], headers=told(who))).status == 404
        assert (await http(app, "POST", f"/upstream/{ids['shop']}/echo", {}, headers=told("ops"))).status == 404
        shown = await http(app, "GET", f"/v1/models/{ids['shop']}", headers=told("lab"))
        listed = await http(app, "GET", "/v1/models", headers=told("lab"))
        assert shown.status == 404 and [one["id"] for one in listed.json()["data"]] == ["alpha"]
        status = (await http(app, "GET", "/api/v1/status", headers=told("ops"))).json()["models"]
        assert {"alpha", *ids.values()} <= {one["id"] for one in status}
        records = (await http(app, "GET", "/api/v1/requests", headers=told("ops"))).json()["requests"]
        assert {one["model"] for one in records if one["status"] == 200} == {"alpha"}
        # An operator ends one tenant's process; the other's serves on.
        path = f"/api/v1/models/{ids['lab']}/unload"
        assert (await http(app, "POST", path, headers=told("ops"))).status == 200
        assert processes(app) == {"shop": running["shop"]}


async def test_callers_without_a_tenant_use_the_model_itself(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"alpha": fake("alpha", isolate_tenants="process")}) as app:
        assert (await chat(app, "alpha")).status == 200
        assert (await chat(app, "alpha", headers={"X-Tenant-ID": "lab"})).status == 200
        assert set(processes(app)) == {None, "lab"}


async def test_tenants_make_room_for_each_other_where_memory_holds_one(tmp_path: Path) -> None:
    models = {"alpha": fake("alpha", isolate_tenants="process")}
    async with gateway(tmp_path, models, budget_mib=150) as app:
        seen = []
        for tenant in ("lab", "shop", "lab"):
            assert (await chat(app, "alpha", headers={"X-Tenant-ID": tenant})).status == 200
            seen.append(processes(app))
    assert [set(one) for one in seen] == [{"lab"}, {"shop"}, {"lab"}] and seen[0] != seen[2], "a new process"


async def test_a_reload_changes_and_ends_instances_with_their_model(tmp_path: Path) -> None:
    models = {name: fake(name, isolate_tenants="process") for name in ("alpha", "beta")}
    async with gateway(tmp_path, models, server={"api_keys": KEYS}) as app:
        await ask(app, "lab", "alpha")
        await ask(app, "lab", "beta")
        before = {live.entry.public_id: live.child.pid for live in app.slots.live.values()}
        edit(tmp_path, lambda said: said["models"]["alpha"].update(description="only words"))
        edit(tmp_path, lambda said: said["models"]["beta"]["cmd"].extend(["--token-s", "0"]))
        assert (await http(app, "POST", "/api/v1/reload", headers=told("ops"))).status == 200
        await ask(app, "lab", "alpha")
        await ask(app, "lab", "beta")

        def is_new() -> bool:
            now = {live.entry.public_id: live.child.pid for live in app.slots.live.values()}
            return now["alpha"] == before["alpha"] and now["beta"] != before["beta"] and len(app.slots.live) == 2

        await until(is_new, "the changed one was replaced, the other not")
        edit(tmp_path, lambda said: said["models"].pop("beta"))
        assert (await http(app, "POST", "/api/v1/reload", headers=told("ops"))).status == 200
        await until(lambda: {live.entry.public_id for live in app.slots.live.values()} == {"alpha"}, "it has ended")
        assert not [entry.id for entry in app.catalog if entry.id.startswith("beta")]


async def test_flush_tells_which_instances_cannot_be_flushed(tmp_path: Path) -> None:
    models = {"alpha": fake("alpha", isolate_tenants="process")}
    async with gateway(tmp_path, models, server={"api_keys": KEYS}) as app:
        await ask(app, "lab")
        order = {"scope": "tenant", "tenantId": "shop"}
        assert (await http(app, "POST", "/v1/cache/flush", order, headers=told("ops"))).json()["flushed"] is True
        order = {"scope": "model", "modelId": "alpha"}
        flushed = (await http(app, "POST", "/v1/cache/flush", order, headers=told("ops"))).json()
        assert flushed["flushed"] is False and "alpha+tenant-1" in flushed["reason"]


@pytest.mark.parametrize("isolate", ["off", None])
async def test_off_lets_tenants_share_on_llama_cpp(tmp_path: Path, isolate: str | None) -> None:
    said = {} if isolate is None else {"isolate_tenants": isolate, "args": ["--cache-ram", "16"], "concurrency": 8}
    models = {"alpha": tiny(tiny_gguf("alpha"), ctx_size=4096, **said)}
    async with gateway(tmp_path, models, server={"api_keys": KEYS}) as app:
        body = {"model": "alpha", "prompt": PROMPT, "max_tokens": 1}
        found = [await http(app, "POST", "/v1/completions", body, headers=told(who)) for who in ("lab", "shop")]
        assert [int(answer.headers["x-cache-tokens-reused"]) > 100 for answer in found] == [False, isolate == "off"]
        none = await http(app, "POST", "/v1/completions", body, headers=told("shop") | {"X-Cache-Mode": "none"})
        assert none.headers["x-cache-tokens-reused"] == "0"
        order = {"scope": "tenant", "tenantId": "lab"}
        flushed = (await http(app, "POST", "/v1/cache/flush", order, headers=told("ops"))).json()
        assert flushed["flushed"] is (isolate is None), "no part of it is the tenant's"


@pytest.mark.parametrize("isolate", ["off", None])
async def test_off_lets_tenants_share_on_vllm(tmp_path: Path, isolate: str | None) -> None:
    journal = Journal(tmp_path)
    said = {} if isolate is None else {"isolate_tenants": isolate}
    models = {"alpha": served("vllm", tmp_path / "vllm", *journal.switches, **said)}
    async with gateway(tmp_path, models, server={"api_keys": KEYS}) as app:
        for who in ("lab", "shop"):
            await ask(app, who)
        assert bool(journal.lines("asked")[-1]["is_cached"]) is (isolate == "off")


async def test_drafts_from_answers_of_other_tenants_show_and_are_refused(tmp_path: Path) -> None:
    """llama.cpp's `ngram-mod` remembers tokens of all answers: what it drafts for a tenant's first request tells."""
    shared = tiny(tiny_gguf("alpha", loop=True), ctx_size=4096, args=["--spec-type", "ngram-mod"])
    with pytest.raises(ConfigError, match=r"--spec-type .* isolate_tenants"):
        async with gateway(tmp_path, {"alpha": shared}):
            pass
    drafted = {}
    for how in ("off", "process"):
        async with gateway(tmp_path, {"alpha": shared | {"isolate_tenants": how}}, server={"api_keys": KEYS}) as app:
            for who in ("lab", "shop"):
                body = {"model": "alpha", "prompt": PROMPT, "max_tokens": 60, "temperature": 0}
                answer = await http(app, "POST", "/v1/completions", body, headers=told(who))
                drafted[how, who] = answer.json()["timings"].get("draft_n", 0)
    assert drafted["off", "shop"] > drafted["off", "lab"], "the second learns from the first"
    assert drafted["process", "shop"] == drafted["process", "lab"]
