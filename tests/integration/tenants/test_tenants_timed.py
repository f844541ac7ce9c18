"""Two tenants with one prompt: neither counters nor time tell of the other; and very many are told apart at first."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from greenroom.access.keys import LIVE_MAX
from greenroom.app import App
from greenroom.core.model import ModelId, MoveKind
from greenroom.telemetry.metrics import UNNAMED_SERIES_MAX
from tests.harness import fake, gateway, served, tiny
from tests.integration.facts import Journal, at_rest
from tests.integration.raw import Answer, Raw, asking, chat, http
from tests.models import tiny as tiny_gguf


@pytest.mark.slow
async def test_time_to_the_first_token_tells_nothing_on_llama_cpp(tmp_path: Path) -> None:
    models = {"alpha": tiny(tiny_gguf("timed", hidden=256, layers=4), ctx_size=8_192)}
    async with gateway(tmp_path, models, server={"api_keys": KEYS}) as app:
        await assert_time_tells_nothing(app, words=400)


async def test_nothing_is_left_on_llama_cpp_after_an_unload(tmp_path: Path) -> None:
    models = {"alpha": tiny(tiny_gguf("alpha"), ctx_size=4_096)}
    async with gateway(tmp_path, models, server={"api_keys": KEYS}) as app:
        await assert_nothing_is_left(app, prompt_of(7, 50), MoveKind.UNLOAD)


@pytest.mark.parametrize("leave", [MoveKind.SLEEP, MoveKind.UNLOAD])
async def test_nothing_is_left_on_vllm(tmp_path: Path, leave: MoveKind) -> None:
    journal = Journal(tmp_path)

    async def is_cached(app: App, who: str, prompt: str) -> int:
        await ask(app, who, prompt)
        return int(journal.lines("asked")[-1]["is_cached"])

    models = {"alpha": served("vllm", tmp_path / "vllm", *journal.switches)}
    async with gateway(tmp_path, models, server={"api_keys": KEYS}) as app:
        await assert_nothing_is_left(app, prompt_of(7, 50), leave, is_cached)


NAMED = [{"name": "batch", "key": "gr-batch", "tenant": "team"}, {"name": "alice", "key": "gr-alice", "admin": True}]


def make_up_names(app: App) -> None:
    for number in range(UNNAMED_SERIES_MAX):
        app.metrics.request_done(
            model="a",
            tenant=f"made-up-{number}",
            route="chat",
            status=200,
            seconds=1,
            wait_s=0,
            not_there_s=0,
            first_byte_s=None,
        )


async def counted(app: App, key: str = "") -> dict[str, float]:
    """Requests to model a, by tenant."""
    await at_rest(app)
    shown = await http(app, "GET", "/metrics", headers={"x-api-key": key} if key else {})
    assert shown.status == 200
    begin = 'greenroom_tenant_requests_total{model="a",tenant="'
    lines = [line for line in shown.body.decode().splitlines() if line.startswith(begin)]
    return {line[len(begin) :].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


async def test_without_keys_a_name_too_many_shares_a_label_unless_it_has_a_weight(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": fake("a")}, scheduler={"tenant_weights": {"lab": 2}}) as app:
        make_up_names(app)
        for tenant in ("late", "later", "lab"):
            assert (await chat(app, "a", headers={"X-Tenant-ID": tenant})).status == 200
        assert (await chat(app, "a")).status == 200
        by_tenant = await counted(app)
        assert (by_tenant["other"], by_tenant["lab"], by_tenant[""]) == (2, 1, 1)
        assert len(by_tenant) == UNNAMED_SERIES_MAX + 3


async def test_tenants_of_keys_are_told_apart_however_many_names_there_were(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": fake("a")}, server={"api_keys": NAMED}) as app:
        make_up_names(app)
        for key in ("gr-batch", "gr-alice"):
            assert (await chat(app, "a", headers={"x-api-key": key, "X-Tenant-ID": "late"})).status == 200
        by_tenant = await counted(app, "gr-alice")
        assert (by_tenant["team"], by_tenant["alice"]) == (1, 1)
        assert "other" not in by_tenant and "late" not in by_tenant


@pytest.mark.slow
async def test_tenants_beyond_those_that_are_told_apart_share_no_prefixes(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    async with gateway(tmp_path, {"v": served("vllm", tmp_path / "vllm", *journal.switches)}) as app:
        async with await Raw.open(app) as raw:
            for number in range(LIVE_MAX):
                raw.ask(asking("none"), headers={"X-Tenant-ID": f"t{number}"})
                if number % 50 == 49:
                    assert {(await raw.answer()).status for _ in range(50)} == {404}
        for tenant in ("t0", "t0", "late", "later", "late"):
            assert (await chat(app, "v", headers={"X-Tenant-ID": tenant})).status == 200
        salts = [line["salt"] for line in journal.lines("asked")]
        assert salts[0] == salts[1] and len(set(salts[1:])) == 4, salts


# --- what each reuses, by counters and by the time to the first token -------------------------------------------------


KEYS: list[dict[str, Any]] = [{"name": name, "key": f"{name}-key"} for name in ("lab", "shop")]
KEYS += [{"name": "ops", "key": "ops-key", "admin": True}]
ROUNDS, ROUNDS_MAX = 2, 60
# A prompt that is reused takes a small part of the time.
FASTER = 2.0


async def ask(app: App, who: str, prompt: str, model: str = "alpha") -> Answer:
    body = {"model": model, "prompt": prompt, "max_tokens": 1}
    answer = await http(app, "POST", "/v1/completions", body, headers={"Authorization": f"Bearer {who}-key"})
    assert answer.status == 200, answer.body
    return answer


async def reused(app: App, who: str, prompt: str) -> int:
    return int((await ask(app, who, prompt)).headers["x-cache-tokens-reused"])


def prompt_of(number: int, words: int) -> str:
    """No two begin alike."""
    return f"{number}{number} and " + " ".join(f"{number + word}" for word in range(words))


async def assert_time_tells_nothing(app: App, words: int) -> None:
    """Of one token, the time is that to the first: of a tenant's first request, of its second, of another tenant's.

    The least of many times is compared, which a busy machine does not change: it only takes more rounds to be seen."""
    await ask(app, "lab", "warm")
    await ask(app, "shop", "warm")
    took: dict[str, list[float]] = {"first": [], "own": [], "other": []}
    for number in range(1, ROUNDS_MAX + 1):
        prompt = prompt_of(number, words)
        for what, who in (("first", "lab"), ("own", "lab"), ("other", "shop")):
            began = time.perf_counter()
            tokens = int((await ask(app, who, prompt)).headers["x-cache-tokens-reused"])
            took[what].append(time.perf_counter() - began)
            assert tokens > words if what == "own" else tokens < 20, (what, tokens)
        first, own, other = (min(times) for times in took.values())
        if number >= ROUNDS and min(first, other) > FASTER * own:
            break
    assert first > FASTER * own, f"this prompt is too short to tell: {took}"
    assert other > FASTER * own, f"the second tenant's answer comes as if it were known: {took}"


async def assert_nothing_is_left(
    app: App, prompt: str, leave: MoveKind, reused: Callable[[App, str, str], Awaitable[int]] = reused
) -> None:
    """Asleep and awake again, or stopped and started: no tenant finds another's, and each its own afterwards."""
    await ask(app, "lab", prompt)
    assert await reused(app, "lab", prompt) > 0
    await app.operations.move(leave, ModelId("alpha"))
    assert await reused(app, "shop", prompt) == 0, "the first after it came back"
    await ask(app, "lab", prompt)
    assert await reused(app, "shop", prompt) > 0 and await reused(app, "lab", prompt) > 0
