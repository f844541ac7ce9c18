"""Two tenants with the same prompt on a real llama.cpp: reuse within a tenant and tag, none across; true flushes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from tests.harness import gateway, served, tiny
from tests.integration.facts import Journal
from tests.integration.raw import Answer, http
from tests.models import tiny as tiny_gguf

ASK, FLUSH = "/v1/completions", "/v1/cache/flush"
PROMPT = "one two three four five six seven eight nine ten " * 4
KEYS = [{"name": name, "key": f"{name}-key"} for name in ("lab", "shop")]
KEYS += [{"name": "ops", "key": "ops-key", "admin": True}]  # type: ignore[dict-item]


@pytest_asyncio.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    models = {"alpha": tiny(tiny_gguf("alpha"), ctx_size=4096, parallel=4)}
    async with gateway(tmp_path, models, server={"api_keys": KEYS}) as app:
        yield app


def told(who: str, tag: str = "", **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {who}-key", **({"X-Cache-Tag": tag} if tag else {}), **more}


async def ask(app: App, who: str, tag: str = "", prompt: str = PROMPT, **more: Any) -> Answer:
    headers = told(who, tag, **more.pop("headers", {}))
    body = {"model": "alpha", "prompt": prompt, "max_tokens": 2, **more}
    answer = await http(app, "POST", ASK, body, headers=headers)
    assert answer.status == 200, answer.body
    return answer


async def reused(app: App, who: str, tag: str = "", **more: Any) -> int:
    """Tokens that were reused, by the engine's own count and by our header, which must be the same."""
    answer = await ask(app, who, tag, **more)
    tokens = int(answer.json()["timings"]["cache_n"])
    assert answer.headers["x-cache-tokens-reused"] == str(tokens)
    assert (
        answer.headers["x-cache-hit"] == ("true" if tokens else "false") and int(answer.headers["x-gpu-time-ms"]) >= 0
    )
    return tokens


async def flushed(app: App, **order: str) -> Any:
    answer = await http(app, "POST", FLUSH, order, headers=told("ops"))
    assert answer.status == 200, answer.body
    return answer.json()


async def test_prefixes_are_reused_within_a_tenant_and_tag_and_not_across(app: App) -> None:
    assert not await reused(app, "lab")
    assert await reused(app, "lab") > 100
    assert not await reused(app, "shop"), "the same prompt of another tenant"
    assert not await reused(app, "lab", "session")
    assert await reused(app, "lab", "session") > 100 and await reused(app, "shop") > 100
    assert not await reused(app, "shop", "new", id_slot=0, cache_prompt=True), "nor by asking"


async def test_a_second_tenant_leaves_the_first_ones_prompt(app: App) -> None:
    assert not await reused(app, "lab") and not await reused(app, "shop")
    assert await reused(app, "lab") > 100, "there were three other slots"


async def test_mode_none_neither_reuses_nor_leaves_a_prompt(app: App) -> None:
    assert not await reused(app, "lab") and await reused(app, "lab")
    assert not await reused(app, "lab", headers={"X-Cache-Mode": "none"})
    other = "other words, of which nothing is known yet, and more of them " * 3
    assert not await reused(app, "lab", prompt=other, headers={"X-Cache-Mode": "none"})
    assert await reused(app, "lab", prompt=other) < 10, "but the first letters of its own prompt before"


async def test_flush_by_tag_tenant_model_and_all_shows_in_the_next_request(app: App) -> None:
    scopes = (("lab", ""), ("lab", "t"), ("shop", ""))
    orders = (
        ({"scope": "tag", "tag": "t"}, {("lab", "t")}),
        ({"scope": "tenant", "tenantId": "shop"}, {("shop", "")}),
        ({"scope": "tenant", "tenantId": "lab"}, {("lab", ""), ("lab", "t")}),
        ({"scope": "model", "modelId": "alpha"}, set(scopes)),
        ({"scope": "all"}, set(scopes)),
    )
    for scope in (*scopes, *scopes):
        await ask(app, *scope)
    for order, gone in orders:
        assert all([await reused(app, *scope) for scope in scopes])
        answer = await flushed(app, **order)
        assert answer["flushed"] is True and answer["entriesRemoved"] > 100 * len(gone)
        assert {scope for scope in scopes if not await reused(app, *scope)} == gone, order


async def test_other_paths_of_the_engine_are_closed_while_tenants_are_kept_apart(app: App) -> None:
    path, body = "/upstream/alpha/completion", {"prompt": PROMPT, "n_predict": 1}
    assert (await http(app, "POST", path, body, headers=told("ops"))).status == 200, "nothing to keep apart yet"
    await ask(app, "lab")
    assert (await http(app, "POST", path, body, headers=told("ops"))).status == 403
    text = {"content": "hi"}
    assert (await http(app, "POST", "/upstream/alpha/tokenize", text, headers=told("ops"))).status == 200
    assert (await http(app, "GET", "/upstream/alpha/props", headers=told("ops"))).status == 200


async def test_mixed_requests_of_five_tenants_never_meet_in_four_slots(tmp_path: Path) -> None:
    """All prompts begin alike, and each tenant's own goes on for longer: what is reused of another is seen."""
    models = {"alpha": tiny(tiny_gguf("alpha"), ctx_size=4096, parallel=4)}
    async with gateway(tmp_path, models) as app:
        chance, sent = random.Random(7), dict.fromkeys("abcde", 0)

        async def one(tenant: str) -> None:
            prompt = "the same words for all of them, again and again. " * 2 + tenant * (20 + 10 * sent[tenant])
            is_first, sent[tenant] = sent[tenant] == 0, sent[tenant] + 1
            body = {"model": "alpha", "prompt": prompt, "max_tokens": 1}
            answer = await http(app, "POST", ASK, body, headers={"X-Tenant-ID": tenant})
            assert answer.status == 200
            found[tenant].append((is_first, int(answer.headers["x-cache-tokens-reused"])))

        found: dict[str, list[tuple[bool, int]]] = {tenant: [] for tenant in "abcde"}
        await asyncio.gather(*(one(chance.choice("abcde")) for _ in range(100)))
        pid = next(iter(app.slots.live.values())).child.pid
        firsts = [tokens for figures in found.values() for is_first, tokens in figures if is_first]
        assert firsts == [0] * 5, "the first of each tenant finds nothing, though the beginning was computed for others"
        assert sum(tokens > 0 for figures in found.values() for _, tokens in figures) > 10, "but their own"
        os.kill(pid, signal.SIGKILL)
        for tenant in "abbaa":
            body = {"model": "alpha", "prompt": PROMPT, "max_tokens": 1}
            answer = await http(app, "POST", ASK, body, headers={"X-Tenant-ID": tenant})
            found[tenant].append((False, int(answer.headers["x-cache-tokens-reused"])))
    assert [found["a"][-3][1], found["b"][-2][1]] == [0, 0], "a new process knows nothing"
    assert found["b"][-1][1] > 100 and found["a"][-1][1] > 100


@pytest.mark.slow
async def test_several_answers_to_a_long_prompt_find_room_whatever_is_kept(app: App) -> None:
    """A prompt that fills more than half of the context, after others that do: llama.cpp erases only what is idle."""
    tenants = ("lab", "lab", "shop", "lab", "shop", "lab")
    for number, who in enumerate(tenants):
        answer = await ask(app, who, prompt=f"w{number} " * 600, n=4)
        assert len(answer.json()["choices"]) == 4 and int(answer.headers["x-cache-tokens-reused"]) < 10
    again = await asyncio.gather(*(ask(app, who, prompt="x y " * 500, n=3) for who in ("lab", "shop", "lab", "shop")))
    assert [len(answer.json()["choices"]) for answer in again] == [3] * 4
    assert await reused(app, "shop", prompt="x y " * 500, n=1) > 900, "what it left in its own slot is still there"


async def test_flush_gives_engines_with_a_salt_another_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    models = {"alpha": served("vllm", tmp_path / "vllm", *journal.switches)}
    async with gateway(tmp_path, models, server={"api_keys": KEYS}) as app:

        async def is_cached(who: str, tag: str = "") -> bool:
            await ask(app, who, tag)
            return bool(journal.lines("asked")[-1]["is_cached"])

        scopes = (("lab", ""), ("lab", "t"), ("shop", ""))
        for order, gone in (
            ({"scope": "tag", "tag": "t"}, {("lab", "t")}),
            ({"scope": "tenant", "tenantId": "lab"}, {("lab", ""), ("lab", "t")}),
            ({"scope": "model", "modelId": "alpha"}, set(scopes)),
            ({"scope": "all"}, set(scopes)),
        ):
            for scope in scopes:
                await ask(app, *scope)
            assert all([await is_cached(*scope) for scope in scopes])
            assert await flushed(app, **order) == {"flushed": True, "entriesRemoved": None, "memoryFreedMB": None}
            assert {scope for scope in scopes if not await is_cached(*scope)} == gone, order
