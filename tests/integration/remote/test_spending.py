"""What remote models cost: counted by the provider's own figures, stopped at the day's budget, kept over restarts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from redis import Redis

from greenroom.app import App
from tests.harness import gateway, write_config
from tests.integration.raw import Answer, chat, http
from tests.redis_server import redis_server
from tests.samples.sounds import FORM, form
from tests.standins.standin_provider import Provider, long_before_midnight
from tests.waiting import until

pytestmark = pytest.mark.asyncio

# A request of the stand-in uses 1,000 and 200 tokens: 2.
COST = {"input": 1000.0, "output": 5000.0}


@pytest_asyncio.fixture(autouse=True)
async def _early() -> None:
    await long_before_midnight()


def options(there: Provider, **keys: Any) -> dict[str, Any]:
    models = {"cloud": {"remote": "acme", "use_model_name": "large"}, "other": {"remote": "acme"}}
    remotes = {"acme": there.remote(cost=COST, retries_max=0, **keys)}
    return {"models": models, "remotes": remotes}


async def ask(app: App, model: str = "cloud", **more: Any) -> Answer:
    return await chat(app, model, max_tokens=1, **more)


async def has_spent(app: App, least: float, most: float | None = None) -> None:
    """Wait until what was spent lies there: a request is settled a moment after its answer."""

    def spent() -> float:
        return round(app.spending.spent("acme"), 6)

    await until(lambda: least <= spent() <= (least if most is None else most), lambda: f"it has spent {spent()}")


async def test_a_budget_is_a_hard_stop_also_after_a_restart(there: Provider, tmp_path: Path) -> None:
    said = options(there, budget_per_day=4.0)
    async with gateway(tmp_path, **said) as app:
        assert [(await ask(app)).status, (await ask(app, stream=True)).status] == [200, 200]
        await has_spent(app, 4.0)
        refused = await ask(app, "other")
        assert refused.status == 429 and refused.error["code"] == "remote_budget_spent"
        assert 0 < int(refused.headers["retry-after"]) <= 86_400 and refused.headers["x-should-retry"] == "false"
        assert "4 of today's budget of 4 are spent" in refused.error["message"]
    async with gateway(tmp_path, **said) as app:
        await has_spent(app, 4.0)
        assert (await ask(app)).status == 429
    assert len(there.calls) == 2
    async with gateway(tmp_path, **options(there, budget_per_day=7.0)) as app:
        assert (await ask(app)).status == 200
        await has_spent(app, 6.0)


async def test_what_was_spent_and_cannot_be_read_stops_all_until_an_operator_acts(
    there: Provider, tmp_path: Path
) -> None:
    said = options(there, budget_per_day=4.0)
    async with gateway(tmp_path, **said) as app:
        file = app.state_dir.path / "spending.json"
    file.write_text("{")
    async with gateway(tmp_path, **said) as app:
        refused = await ask(app)
        assert (refused.status, refused.error["code"]) == (503, "remote_spending_unknown") and not there.calls
        assert refused.headers["x-should-retry"] == "false" and "remove it to count from 0" in refused.error["message"]
        (shown,) = (await http(app, "GET", "/api/v1/remotes")).json()["remotes"]
        assert "spending.json cannot be read" in shown["problem"]
        file.unlink()
        await app.reload()
        assert (await ask(app)).status == 200
        (shown,) = (await http(app, "GET", "/api/v1/remotes")).json()["remotes"]
        assert shown["problem"] is None


async def test_requests_at_once_do_not_pass_it_together(there: Provider, tmp_path: Path) -> None:
    async with gateway(tmp_path, **options(there, budget_per_day=3.0)) as app:
        there.may_answer.clear()
        # Each may cost 2 and a little for its prompt.
        asked = [asyncio.create_task(chat(app, "cloud", max_tokens=400)) for _ in range(5)]
        await until(lambda: sum(task.done() for task in asked) == 4, "all but one are refused")
        await until(lambda: len(there.calls) == 1, "that one is sent")
        there.may_answer.set()
        assert sorted([(await task).status for task in asked]) == [200, 429, 429, 429, 429]
        await has_spent(app, 2.0)


async def test_gateways_with_one_store_share_the_budget_and_the_switch(there: Provider, tmp_path: Path) -> None:
    said = options(there, budget_per_day=3.0)
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    with redis_server(tmp_path / "redis") as redis:
        said["limits"] = {"store": redis.url}
        async with gateway(folders[0], **said) as first, gateway(folders[1], **said) as second:
            assert (await ask(first)).status == 200
            with Redis.from_url(redis.url) as client:
                # The stand-in uses more than it was allowed: that is told afterwards.
                await until(lambda: b"2.0" in _sums(client), "the store is told what it has cost")
            refused = await chat(second, "cloud", max_tokens=400)
            assert (refused.status, refused.error["code"]) == (429, "remote_budget_spent") and len(there.calls) == 1
            assert (await http(first, "PUT", "/api/v1/config", {"allowCloudFallback": False})).status == 200
            with Redis.from_url(redis.url) as client:
                assert client.get("greenroom:{remote}:allow_cloud_fallback") == b"false"
            redis.kill()
            kept = await http(first, "PUT", "/api/v1/config", {"allowCloudFallback": True})
            assert (kept.status, kept.error["code"]) == (507, "config_not_kept")
            assert not first.remote.fallback.is_allowed


def _sums(client: Redis) -> list[bytes]:
    return [cost for key in client.keys("greenroom:{remote}:spent:*") for cost in client.hvals(key)]


async def test_costs_go_by_the_models_name_and_by_what_was_cached(there: Provider, tmp_path: Path) -> None:
    there.usage["prompt_tokens_details"] = {"cached_tokens": 600}  # type: ignore[assignment]
    costs = {"large": {"input": 1000.0, "output": 0.0, "cached_input": 100.0}}
    async with gateway(tmp_path, **options(there, costs=costs)) as app:
        assert (await ask(app)).status == 200
        await has_spent(app, 0.46)
        assert (await ask(app, "other")).status == 200
        await has_spent(app, 2.46)


async def test_what_a_provider_did_not_answer_is_free_and_what_was_left_is_not(there: Provider, tmp_path: Path) -> None:
    async with gateway(tmp_path, **options(there, first_byte_timeout_s=600)) as app:
        for status in (400, 401, 429, 500):
            there.script.append((status, "content-type: application/json\r\n", b"{}"))
            assert (await ask(app)).status in (400, 429, 502)
        await has_spent(app, 0.0)
        there.may_answer.clear()
        leaving = asyncio.create_task(chat(app, "cloud", max_tokens=400))
        await until(lambda: len(there.calls) == 5, "it was asked")
        leaving.cancel()
        await until(lambda: not app.tickets.open, "the caller has left")
        await has_spent(app, 2.01, 2.2)


async def test_pictures_cost_what_the_provider_says_under_its_newer_names(there: Provider, tmp_path: Path) -> None:
    async with gateway(tmp_path, **options(there)) as app:
        asked = {"model": "cloud", "prompt": "a cat"}
        for usage in ({"input_tokens": 1000, "output_tokens": 200, "total_tokens": 1200}, {"total_tokens": 1200}):
            said = json.dumps({"created": 1, "data": [{"b64_json": "aaaa"}], "usage": usage}).encode()
            there.script.append((200, "content-type: application/json\r\n", said))
        assert (await http(app, "POST", "/v1/images/generations", asked)).status == 200
        await has_spent(app, 2.0)
        # What is not known counts as expected: 1,000 tokens, and a few for the prompt.
        assert (await http(app, "POST", "/v1/images/generations", asked)).status == 200
        await has_spent(app, 7.0, 7.1)


async def test_a_form_for_several_pictures_is_entered_with_all_of_them(there: Provider, tmp_path: Path) -> None:
    async with gateway(tmp_path, **options(there, budget_per_day=12.0)) as app:
        fields = [("model", "cloud"), ("prompt", "a cat"), ("n", "3")]
        body, twice = form(fields, b"PNG", name="image"), form([*fields, ("n", "1")], b"PNG", name="image")
        refused = await http(app, "POST", "/v1/images/edits", body=body, headers=FORM)
        assert refused.status == 429 and "this request may cost 15" in refused.error["message"], refused.body
        assert (await http(app, "POST", "/v1/images/edits", body=twice, headers=FORM)).status == 400
        assert not there.calls


async def test_a_stream_that_tells_no_tokens_counts_by_its_length(there: Provider, tmp_path: Path) -> None:
    async with gateway(tmp_path, **options(there)) as app:
        event = {"choices": [{"index": 0, "delta": {"content": "word " * 100}, "finish_reason": None}]}
        said = b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n"
        for _ in range(2):
            there.script.append((200, "content-type: text/event-stream\r\n", said))
        assert (await chat(app, "cloud", max_tokens=100_000, stream=True)).status == 200
        # Of its hundred words and what is around them, four bytes are a token; a few are for the prompt.
        await has_spent(app, len(said) // 4 * 0.005, len(said) // 4 * 0.005 + 0.1)
        before = app.spending.spent("acme")
        assert (await chat(app, "cloud", max_tokens=20, stream=True)).status == 200
        await has_spent(app, before + 0.1, before + 0.2)


async def test_a_reload_that_renames_a_model_changes_its_price(there: Provider, tmp_path: Path) -> None:
    said = options(there, costs={"small": {"input": 10.0, "output": 50.0}})
    said["models"]["cloud"]["use_model_name"] = "small"
    async with gateway(tmp_path, **said) as app:
        assert (await ask(app)).status == 200
        await has_spent(app, 0.02)
        said["models"]["cloud"]["use_model_name"] = "large"
        write_config(tmp_path, **said)
        await app.reload()
        assert (await ask(app)).status == 200 and there.calls[-1].body["model"] == "large"
        await has_spent(app, 2.02)


# Waits twice for a handshake to be given up, ten seconds each time.
@pytest.mark.slow
async def test_what_was_never_sent_is_free(tmp_path: Path) -> None:
    """The provider takes connections and never ends a TLS handshake."""
    await long_before_midnight()
    taken: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda reader, writer: taken.append(writer), "127.0.0.1", 0)
    keys = {"base_url": f"https://127.0.0.1:{silent.sockets[0].getsockname()[1]}/v1", "cost": COST, "retries_max": 0}
    models = {"left": {"remote": "acme"}, "late": {"remote": "slow"}}
    remotes = {"acme": keys, "slow": {**keys, "first_byte_timeout_s": 0.3}}
    async with gateway(tmp_path, models, remotes=remotes) as app:
        leaving = asyncio.create_task(ask(app, "left"))
        await until(lambda: taken, "it connects")
        assert app.spending.spent("acme") > 0
        leaving.cancel()
        await until(lambda: not app.tickets.open, "the caller has left")
        await has_spent(app, 0.0)
        assert (await ask(app, "late")).error["code"] == "remote_timeout"
        await until(lambda: app.spending.spent("slow") == 0.0, "it was never sent")
    silent.close()
    for writer in taken:
        writer.transport.abort()


async def test_what_was_sent_and_lost_counts_as_expected(there: Provider, tmp_path: Path) -> None:
    async with gateway(tmp_path, **options(there)) as app:
        there.script.append((0, "", b""))
        assert (await chat(app, "cloud", max_tokens=400)).status == 502
        await has_spent(app, 2.01, 2.2)


async def test_a_caller_that_leaves_between_two_tries_pays_nothing(there: Provider, tmp_path: Path) -> None:
    said = options(there)
    said["remotes"]["acme"]["retries_max"] = 1
    async with gateway(tmp_path, **said) as app:
        there.script.append((503, "content-type: application/json\r\nretry-after: 25\r\n", b"{}"))
        leaving = asyncio.create_task(ask(app))
        await until(lambda: any(live.pool.idle_count for live in app.slots.live.values()), "the refusal has come")
        assert app.spending.spent("acme") > 0
        leaving.cancel()
        await until(lambda: not app.tickets.open, "the caller has left")
        await has_spent(app, 0.0)
