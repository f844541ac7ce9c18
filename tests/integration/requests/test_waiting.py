"""What callers hear while they wait: heartbeats in time and in kind, errors in place, which request is first."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness import fake, gateway
from tests.integration.facts import Journal, at_rest, counters, is_loading
from tests.integration.raw import Answer, Raw, asking, chat, http
from tests.waiting import until

# Heartbeats soon and often, so that a test need not wait long for them.
QUICK = {"heartbeat_after_s": 0.4, "heartbeat_every_s": 0.2}


def beats(events: list[str]) -> list[str]:
    return [event for event in events if event.startswith(": waiting")]


# --- streaming ------------------------------------------------------------------------------------------------------


async def test_nothing_is_committed_before_heartbeat_after_s_and_then_a_comment_is(tmp_path: Path) -> None:
    models = {"slow": fake("slow", "--load-s", "1.2")}
    async with gateway(tmp_path, models, server=QUICK) as app, await Raw.open(app) as raw:
        began = time.monotonic()
        raw.ask(asking("slow", stream=True))
        status, headers = await raw.head()
        assert time.monotonic() - began >= QUICK["heartbeat_after_s"]
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert headers["x-accel-buffering"] == "no"
        assert headers["x-request-id"].startswith("r-")
        answer = await raw.rest(status, headers)
    assert answer.whole
    # The wait of more than a second was filled with several, the first said where the caller stood.
    assert len(beats(answer.events)) >= 2
    assert answer.events[0].startswith(": waiting model=slow position=1")
    assert answer.data[-1] == "[DONE]"
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in answer.data[:-1]) == "slow 1 2 3"


async def test_quick_answer_has_no_heartbeat(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"quick": fake("quick")}, server={"heartbeat_every_s": 0.05}) as app:
        answer = await chat(app, "quick", stream=True)
    assert answer.events[0].startswith("data: ")
    assert not beats(answer.events)


async def test_heartbeats_go_on_until_the_first_data_and_not_beyond(tmp_path: Path) -> None:
    """The engine has the request and thinks before its first token, and again, longer, after it."""
    models = {"thinker": fake("thinker", "--token-s", "1.0", "--tokens", "2")}
    async with gateway(tmp_path, models, server=QUICK) as app:
        await chat(app, "thinker", tokens=0)
        answer = await chat(app, "thinker", stream=True)
    kinds = ["beat" if event.startswith(":") else "data" for event in answer.events]
    assert kinds.count("beat") >= 2
    assert kinds == sorted(kinds), "a heartbeat came after the first data"


async def heard(tmp_path: Path, kind: str, by: str) -> Answer:
    """The stream of a model that loads, with this kind of heartbeat by the configuration or the request."""
    server = {**QUICK, "heartbeat": kind if by == "config" else "comment"}
    headers = {"X-Heartbeat": kind} if by == "header" else {}
    async with gateway(tmp_path, {"slow": fake("slow", "--load-s", "0.8")}, server=server) as app:
        answer = await chat(app, "slow", stream=True, headers=headers)
        # A kind that is none of the three is the caller's mistake.
        assert (await chat(app, "slow", headers={"X-Heartbeat": "drum"})).status == 400
    assert not beats(answer.events)
    return answer


@pytest.mark.parametrize("by", ["config", "header"])
async def test_heartbeat_chunk_is_an_empty_piece_of_the_answer(tmp_path: Path, by: str) -> None:
    answer = await heard(tmp_path, "chunk", by)
    first = answer.data[0]
    assert (first["object"], first["model"]) == ("chat.completion.chunk", "slow")
    assert first["choices"] == [{"index": 0, "finish_reason": None, "delta": {}}]
    assert first["id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("by", ["config", "header"])
async def test_heartbeat_off_sends_nothing_until_the_answer(tmp_path: Path, by: str) -> None:
    answer = await heard(tmp_path, "off", by)
    assert answer.events[0].startswith("data: ")
    assert "x-queue-wait-ms" in answer.headers, "the engine's own head was passed on, not one of ours"


async def test_failure_after_the_first_heartbeat_is_one_event_and_no_done(tmp_path: Path) -> None:
    models = {"broken": fake("broken", "--crash-at", "load", "--load-s", "1.6")}
    async with gateway(tmp_path, models, server=QUICK) as app:
        answer = await chat(app, "broken", stream=True)
    assert (answer.status, answer.whole) == (200, True)
    error = only_error(answer.data)
    assert (error["status"], error["code"], error["type"]) == (503, "model_load_failed", "engine_error")
    assert error["retry_after_s"] >= 1


def only_error(data: list[Any]) -> dict[str, Any]:
    assert len(data) == 1, data
    assert set(data[0]) == {"error"}
    found: dict[str, Any] = data[0]["error"]
    return found


# --- not streaming --------------------------------------------------------------------------------------------------


async def test_wait_ends_at_wait_max_s_with_model_loading_and_the_load_goes_on(tmp_path: Path) -> None:
    models = {"slow": fake("slow", "--load-s", "1.5")}
    async with gateway(tmp_path, models, server={"wait_max_s": 0.3}) as app:
        began = time.monotonic()
        answer = await chat(app, "slow")
        assert time.monotonic() - began >= 0.3
        assert (answer.status, answer.error["code"]) == (503, "model_loading")
        assert 1 <= int(answer.headers["retry-after"]) <= 120
        assert "x-should-retry" not in answer.headers
        assert counters(app)["waiting"] == 0
        assert is_loading(app, "slow")
        await until(lambda: not is_loading(app, "slow"), "loaded")
        assert (await chat(app, "slow")).text == "slow 1 2 3"


async def test_wait_that_ends_before_the_load_has_begun_is_not_told_as_a_load(tmp_path: Path) -> None:
    models = {"busy": fake("busy", "--token-s", "0.5", "--tokens", "100"), "next": fake("next")}
    async with gateway(tmp_path, models, budget_mib=150, server={"wait_max_s": 2}) as app, await Raw.open(app) as raw:
        raw.ask(asking("busy", stream=True))
        await raw.head()
        answer = await chat(app, "next")
        assert (answer.status, answer.error["code"]) == (503, "model_loading")
        assert answer.error["loading"]["state"] == "waiting"
        assert answer.error["message"] == "next is not ready yet; it waits for room or for its turn. Ask again."


async def test_wait_that_is_known_to_be_too_long_is_refused_at_once(tmp_path: Path) -> None:
    """The first load taught how long one takes; with a budget below that no request waits in vain."""
    models = {"slow": fake("slow", "--load-s", "2.5"), "other": fake("other")}
    async with gateway(tmp_path, models, budget_mib=150) as app:
        assert (await chat(app, "slow")).status == 200
        assert (await chat(app, "other")).status == 200
        answer = await chat(app, "slow", x_budget_s=2.4)
        assert (answer.status, answer.error["code"]) == (503, "model_loading")
        assert (app.activity.recent(1)[0].total_s or 0.0) < 2.4, "it was kept waiting in vain"
        assert answer.error["loading"]["eta_s"] >= 1
        # Nothing was loaded for a request that could not have waited for it.
        assert not is_loading(app, "slow")


# --- the queue ------------------------------------------------------------------------------------------------------


async def test_urgent_requests_go_first_by_body_and_by_header(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    models = {"one": fake("one", *journal.switches, concurrency=1)}
    async with gateway(tmp_path, models) as app:
        holder = await Raw.open(app)
        holder.ask(asking("one", stall_after=0))
        await until(lambda: journal.count("request") == 1, "busy")
        asked: list[tuple[str, dict[str, str], dict[str, Any]]] = [
            ("low", {"X-Priority": "low"}, {}),
            ("normal", {}, {}),
            ("numbered", {}, {"x_priority": 50}),
            ("high", {"X-Priority": "high"}, {}),
            # What the body says counts, not the header.
            ("highest", {"X-Priority": "low"}, {"x_priority": -1}),
            ("second normal", {}, {"x_priority": "normal"}),
        ]
        calls: dict[str, asyncio.Task[Any]] = {}
        for number, (name, headers, body) in enumerate(asked):
            calls[name] = asyncio.create_task(chat(app, "one", headers=headers, **body))
            await until(lambda n=number: counters(app)["waiting"] == n + 1, "queued")
        holder.leave()
        answers = dict(zip(calls, await asyncio.gather(*calls.values()), strict=True))
    order = [line["id"] for line in journal.lines("request")][1:]
    name_of = {answer.headers["x-request-id"]: name for name, answer in answers.items()}
    assert [name_of[one] for one in order] == ["highest", "high", "normal", "second normal", "low", "numbered"]


# --- why requests waited --------------------------------------------------------------------------------------------


async def test_metrics_tell_a_model_that_was_not_there_from_one_that_was_full(tmp_path: Path) -> None:
    """Two callers of a model that loads for 0.5 s, and then answers one request at a time, for 0.6 s each."""
    models = {"slow": fake("slow", "--load-s", "0.5", "--tokens", "2", "--token-s", "0.3", concurrency=1)}
    async with gateway(tmp_path, models) as app:
        began = time.monotonic()
        await asyncio.gather(chat(app, "slow"), chat(app, "slow"))
        took_s = time.monotonic() - began
        await at_rest(app)
        body = (await http(app, "GET", "/metrics")).body.decode()
    name, label = "greenroom_queue_wait_cause_seconds", 'model="slow"'
    series = dict(line.rsplit(" ", 1) for line in body.splitlines() if line.startswith(name))
    not_there, full = (f'cause="{cause}",{label}' for cause in ("not_there", "full"))
    assert float(series[f"{name}_count{{{not_there}}}"]) == 2
    assert float(series[f"{name}_sum{{{not_there}}}"]) >= 2 * 0.5
    # Only the second caller waited for the first, and neither for itself.
    assert 0.6 <= float(series[f"{name}_sum{{{full}}}"]) <= took_s - 1.0
    waited = next(line for line in body.splitlines() if line.startswith("greenroom_queue_wait_seconds_sum"))
    parts = sum(float(series[f"{name}_sum{{{part}}}"]) for part in (not_there, full))
    assert parts == pytest.approx(float(waited.split()[-1]))
