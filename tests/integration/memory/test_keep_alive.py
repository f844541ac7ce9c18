"""How long a model stays, by its callers' word or a pin; and what callers see of caches and of sleep."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.core.model import ModelId
from tests.harness import fake, gateway
from tests.integration.facts import Journal
from tests.integration.raw import Answer, Raw, asking, chat, http
from tests.samples.sounds import FORM, form
from tests.waiting import until


def keep_alive_s(app: App, model: str = "m") -> float | None:
    (slot,) = app.loop.scheduler.state.slots_of(ModelId(model))
    return slot.keep_alive_s


async def unload_in_s(app: App, model: str = "m") -> float | None:
    said: float | None = (await http(app, "GET", f"/api/v1/models/{model}")).json()["unload_in_s"]
    return said


async def test_zero_lets_the_engine_go_as_soon_as_it_is_idle(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    async with gateway(tmp_path, {"m": fake("m", *journal.switches)}) as app:
        assert (await chat(app, "m", keep_alive=0)).status == 200
        await until(lambda: not app.loop.scheduler.state.slots and not app.slots.live, "the engine is gone")
        assert (await chat(app, "m", keep_alive="0s")).status == 200
        assert journal.count("start") == 2


async def test_a_keep_alive_of_zero_does_not_unload_before_waiting_requests(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    model = fake("m", *journal.switches, "--load-s", "0.2", concurrency=1)
    async with gateway(tmp_path, {"m": model}) as app:
        answers = await asyncio.gather(*(chat(app, "m", keep_alive=0) for _ in range(4)))
        assert [answer.status for answer in answers] == [200] * 4
        assert journal.count("start") == 1


async def test_latest_word_counts_and_silence_leaves_it(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m", ttl_s=7)}) as app:
        await chat(app, "m")
        assert keep_alive_s(app) is None
        assert 0 < (await unload_in_s(app) or 0) <= 7
        said: dict[str, Any]
        for said, stays_s in (
            ({"keep_alive": 600}, 600),
            ({"keep_alive": "1h30m"}, 5_400),
            ({"x_keep_alive_s": 42}, 42),
        ):
            await chat(app, "m", **said)
            await chat(app, "m")
            assert keep_alive_s(app) == stays_s
            left_s = await unload_in_s(app)
            assert left_s is not None and stays_s - 60 < left_s <= stays_s
            await chat(app, "m", keep_alive=-1)
            assert keep_alive_s(app) == -1
            assert await unload_in_s(app) is None


async def test_operator_bounds_what_callers_say(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"m": fake("m")}, scheduler={"keep_alive_max_s": 300}) as app:
        for said, gets in ((-1, 300.0), (600, 300.0), ("200s", 200.0)):
            assert (await chat(app, "m", keep_alive=said)).status == 200
            assert keep_alive_s(app) == gets, said


async def test_form_may_say_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    body = form([("model", "m"), ("keep_alive", "2m"), ("language", "en")], b"x")
    async with gateway(tmp_path, {"m": fake("m", *journal.switches)}) as app:
        answer = await http(app, "POST", "/v1/audio/transcriptions", body=body, headers=FORM)
        assert answer.status == 200, answer.body
        assert "keep_alive" not in answer.json()["fields"] and "language" in answer.json()["fields"]
        assert keep_alive_s(app) == 120.0


ONE_AT_A_TIME: dict[str, Any] = {"gpus": [{"memory_mib": 1_000, "margin_mib": 0}]}
MODELS: dict[str, Any] = {"a": fake("a", memory_mib=900), "b": fake("b", memory_mib=900)}


async def _pin(app: App, model: str, body: dict[str, Any] | None = None) -> Answer:
    return await http(app, "POST", f"/api/v1/models/{model}/pin", body)


async def _shown(app: App, model: str) -> tuple[bool, str]:
    seen = (await http(app, "GET", f"/api/v1/models/{model}")).json()
    return seen["pinned"], seen["tier"]


async def test_nothing_evicts_a_model_that_was_pinned(tmp_path: Path) -> None:
    async with gateway(tmp_path, MODELS, **ONE_AT_A_TIME) as app:
        assert (await chat(app, "a")).status == 200
        said = await _pin(app, "a")
        assert (said.status, said.json()) == (200, {"model": "a", "pinned": True})
        assert await _shown(app, "a") == (True, "ready")
        refused = await chat(app, "b")
        assert (refused.status, refused.error["code"]) == (503, "model_too_large")
        # A reload that changes nothing about it keeps it pinned.
        await app.reload()
        assert await _shown(app, "a") == (True, "ready")
        assert (await _pin(app, "a", {"pinned": False})).json()["pinned"] is False
        assert (await chat(app, "b")).status == 200
        assert await _shown(app, "a") == (False, "cold")


async def test_only_models_that_there_are_can_be_pinned(tmp_path: Path) -> None:
    async with gateway(tmp_path, MODELS, **ONE_AT_A_TIME) as app:
        assert (await _pin(app, "none")).status == 404
        assert (await _pin(app, "a", {"pinned": "perhaps"})).status == 400
        assert await _shown(app, "a") == (False, "cold")


# Every order by which an operator makes a model leave: the path, and the body or the query by which it is forced.
TAKING: dict[str, tuple[str, str, dict[str, Any]]] = {
    "evictModel": ("POST", "/v1/models/load", {"modelId": "b", "evictModel": "a"}),
    "evictModel, by an alias": ("POST", "/v1/models/load", {"model": "b", "evictModel": "also"}),
    "evict": ("POST", "/api/v1/models/b/load", {"evict": ["a"]}),
    "evict, answered at once": ("POST", "/api/v1/models/b/load?wait=false", {"evict": ["a"]}),
    "unload": ("POST", "/api/v1/models/a/unload", {}),
    "unload, by an alias": ("POST", "/api/v1/models/also/unload", {"grace_s": 1}),
    "unload of the runner's API": ("POST", "/v1/models/unload", {"modelId": "a"}),
    "unload of llama.cpp's API": ("POST", "/models/unload", {"model": "a"}),
    "unload of llama-swap's API": ("POST", "/api/models/unload/a", {}),
    "unload of llama-swap's API, in the query": ("POST", "/api/models/unload/a", {}),
    "unload of all": ("POST", "/api/models/unload", {}),
    "unload of all, in the query": ("POST", "/api/models/unload", {}),
    "unload of all by GET": ("GET", "/unload", {}),
}


async def test_no_order_takes_a_pinned_model_unless_it_is_forced(tmp_path: Path) -> None:
    models = {"a": fake("a", memory_mib=900, aliases=["also"], pinned=True), "b": fake("b", memory_mib=900)}
    async with gateway(tmp_path, models, **ONE_AT_A_TIME) as app:

        async def ask(order: str, *, force: bool) -> Answer:
            method, path, body = TAKING[order]
            if order.endswith("in the query") or method == "GET":
                return await http(app, method, f"{path}?force=true" if force else path)
            return await http(app, method, path, {**body, "force": True} if force else body)

        for order in TAKING:
            assert (await chat(app, "a")).status == 200, order
            refused = await ask(order, force=False)
            assert (refused.status, refused.error["code"]) == (409, "model_pinned"), order
            assert "a is pinned" in refused.error["message"] and "force=true" in refused.error["message"]
            assert await _shown(app, "a") == (True, "ready")
            assert (await ask(order, force=True)).status in (200, 202), order
            await until(lambda: not app.loop.scheduler.view.slots_of(ModelId("a")), f"it has left: {order}")


async def test_unloading_all_leaves_what_is_pinned_and_says_so(tmp_path: Path) -> None:
    models = {"a": fake("a", memory_mib=400), "b": fake("b", memory_mib=400)}
    async with gateway(tmp_path, models, **ONE_AT_A_TIME) as app:
        for model in models:
            assert (await chat(app, model)).status == 200
        await _pin(app, "a")
        assert (await http(app, "GET", "/unload")).status == 409
        assert (await _shown(app, "a"), await _shown(app, "b")) == ((True, "ready"), (False, "cold"))
        # What is not in memory is not taken out of it, and no model leaves for itself.
        assert (await http(app, "POST", "/v1/models/load", {"modelId": "a", "evictModel": "a"})).status == 202
        await _pin(app, "b")
        assert (await http(app, "POST", "/api/v1/models/b/unload")).status == 200


async def test_to_force_a_pinned_model_out_takes_what_to_unload_it_takes(tmp_path: Path) -> None:
    models = {"a": fake("a", memory_mib=900, pinned=True), "b": fake("b", memory_mib=900)}
    keys = [
        {"name": "loads", "key": "loads-key", "verbs": ["load"]},
        {"name": "loads-b", "key": "loads-b-key", "verbs": ["load"], "models": ["b"]},
        {"name": "asks", "key": "asks-key"},
    ]
    async with gateway(tmp_path, models, server={"api_keys": keys}, **ONE_AT_A_TIME) as app:

        async def ask(key: str, method: str, path: str, body: dict[str, Any]) -> Answer:
            return await http(app, method, path, body, headers={"Authorization": f"Bearer {key}-key"})

        for order in ("evictModel", "evict", "unload"):
            method, path, body = TAKING[order]
            assert (await ask("asks", "POST", "/v1/chat/completions", asking("a"))).status == 200
            forced = {**body, "force": True}
            assert (await ask("asks", method, path, forced)).error["code"] == "not_allowed"
            # A model that a key does not see is none that it can take.
            assert (await ask("loads-b", method, path, forced)).error["code"] == "model_not_found"
            unpinned = await ask("loads", "POST", "/api/v1/models/a/pin", {"pinned": False})
            assert unpinned.error["code"] == "not_allowed"
            assert (await ask("loads", method, path, body)).error["code"] == "model_pinned"
            assert (await ask("loads", method, path, forced)).status in (200, 202)
            await until(lambda: not app.loop.scheduler.view.slots_of(ModelId("a")), f"it has left: {order}")


MIB = 2**20


@pytest.mark.parametrize("stream", [False, True])
async def test_of_an_engine_that_does_not_tell_nothing_is_made_up(tmp_path: Path, stream: bool) -> None:
    async with gateway(tmp_path, {"a": fake("a")}) as app:
        answer = await chat(app, "a", stream=stream, headers={"X-Cache-Mode": "none", "X-Cache-Tag": "session-1"})
        gone = await chat(app, "a", headers={"X-Request-Timeout-S": "0.2"}, token_s=5)
        remembered = await http(app, "GET", f"/api/v1/requests/{answer.headers['x-request-id']}")
    assert (answer.headers["x-cache-hit"], answer.headers["x-cache-tokens-reused"]) == ("unknown", "0")
    assert "x-gpu-time-ms" not in answer.headers
    loaded_ms, ready_ms = (int(one.headers["x-queue-wait-ms"]) for one in (answer, gone))
    assert gone.status >= 400 and 0 <= ready_ms < loaded_ms, "only the first waited for its model"
    assert (remembered.json()["cached_tokens"], remembered.json()["gpu_time_ms"]) == (None, None)


async def test_a_models_file_is_read_ahead_while_its_caller_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ready model answers slowly; the other, which will replace it, is read meanwhile and never loaded."""
    plain = os.preadv

    def nothing_cached(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        """Also where temporary files lie in memory."""
        if flags & os.RWF_NOWAIT:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return plain(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", nothing_cached)
    (tmp_path / "b.gguf").write_bytes(bytes(3 * MIB))
    models = {
        "a": fake("a", "--token-s", "0.2", "--tokens", "500"),
        "b": {"path": str(tmp_path / "b.gguf"), "memory_mib": 100},
    }
    async with (
        gateway(tmp_path, models, budget_mib=100) as app,
        await Raw.open(app) as busy,
        await Raw.open(app) as raw,
    ):
        busy.ask(asking("a", stream=True))
        await busy.head()
        raw.ask(asking("b"))
        counts = app.metrics._prefetched
        await until(lambda: counts.at("b").value == 3 * MIB, "the file was read")
        assert not any(slot.model == "b" and slot.move for slot in app.loop.scheduler.state.slots.values())
        raw.leave()
        busy.leave()
        await asyncio.sleep(0)
