"""What every engine promises, whichever it is: start, ready, serve, stream, cancel, sleep, wake, prepare, stop, crash.

Engines that cannot sleep promise to say so. Each test brings its models to where it begins.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from tests.contract.engines.engine_gateway import EngineGateway, until_busy, until_quiet
from tests.integration.facts import at_rest
from tests.integration.faults import assert_ended_by, is_alive, rest_of
from tests.integration.raw import asking, chat, http
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOGETHER = 6
SOME = 400
# What the endless model computes at least for an answer that fills its context, in hundredths of a second.
A_WHOLE_ANSWER_TICKS = 400


# --- start, ready ---------------------------------------------------------------------------------------------------


async def test_start_is_answered_when_it_is_ready(gate: EngineGateway) -> None:
    await gate.cold("alpha")
    moved = await gate.done("load", "alpha")
    assert moved["tier"] == "ready" and sum(moved["memory"].values()) >= 100
    view = await gate.view("alpha")
    assert (view["tier"], view["status"]) == ("ready", "loaded")
    assert is_alive(view["pid"])
    assert view["last_error"] is None


async def test_start_of_what_is_ready_changes_nothing(gate: EngineGateway) -> None:
    pid = await gate.ready("alpha")
    (slot,) = (await gate.view("alpha"))["slots"]
    assert await gate.ready("alpha") == pid
    assert [again["id"] for again in (await gate.view("alpha"))["slots"]] == [slot["id"]]


async def test_request_starts_what_is_cold(gate: EngineGateway) -> None:
    await gate.cold("alpha")
    await gate.says("alpha")
    assert (await gate.view("alpha"))["tier"] == "ready"


# --- serve ----------------------------------------------------------------------------------------------------------


async def test_chat_is_answered_with_its_tokens_counted(gate: EngineGateway) -> None:
    answer = await chat(gate.app, "alpha")
    body = answer.json()
    assert "alpha" in answer.text
    assert body["object"] == "chat.completion" and body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens"] > 0 and body["usage"]["completion_tokens"] > 0
    request = (await http(gate.app, "GET", f"/api/v1/requests/{answer.headers['x-request-id']}")).json()
    assert request["completion_tokens"] == body["usage"]["completion_tokens"]


async def test_completion_is_answered(gate: EngineGateway) -> None:
    answer = await http(gate.app, "POST", "/v1/completions", {"model": "alpha", "prompt": "hi", "max_tokens": 8})
    assert answer.status == 200, answer.body
    assert "alpha" in answer.json()["choices"][0]["text"]


async def test_many_at_once_are_all_answered_by_the_model_they_named(gate: EngineGateway) -> None:
    asked = [model for model in ("alpha", "bravo") for _ in range(TOGETHER)]
    said = await asyncio.gather(*(gate.says(model) for model in asked))
    assert len({text for text in said if "alpha" in text}) == 1
    assert len({text for text in said if "bravo" in text}) == 1
    await at_rest(gate.app)


# --- stream ---------------------------------------------------------------------------------------------------------


async def test_stream_says_the_same_piece_by_piece(gate: EngineGateway) -> None:
    answer = await chat(gate.app, "alpha", stream=True, temperature=0)
    assert answer.status == 200 and answer.whole
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, last = answer.data
    assert last == "[DONE]"
    deltas = [choice["delta"].get("content") for event in events for choice in event["choices"]]
    pieces = [piece for piece in deltas if piece]
    assert len(pieces) > 1
    assert "".join(pieces) == await gate.says("alpha")


async def test_stream_ends_with_its_usage_when_that_is_asked_for(gate: EngineGateway) -> None:
    answer = await chat(gate.app, "alpha", stream=True, stream_options={"include_usage": True})
    assert answer.data[-1] == "[DONE]"
    assert answer.data[-2]["choices"] == [] and answer.data[-2]["usage"]["completion_tokens"] > 0


# --- cancel ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_client_that_leaves_is_worked_for_no_longer(gate: EngineGateway, how: str) -> None:
    pid = await gate.ready("endless")
    async with gate.listening("endless") as raw:
        await until_busy(raw, pid)
        raw.leave(how)
        await at_rest(gate.app)
        assert await until_quiet(pid) < A_WHOLE_ANSWER_TICKS / 4, "it went on with an answer that no client reads"
    assert (await gate.view("endless"))["in_flight"] == 0


# --- sleep, wake, prepare -------------------------------------------------------------------------------------------


async def test_ready_model_is_put_to_sleep_or_the_order_is_refused(gate: EngineGateway) -> None:
    pid = await gate.ready("alpha")
    ready_mib = (await gate.view("alpha"))["memory"].get("gpu0", 0)
    answer = await gate.order("sleep", "alpha")
    view = await gate.view("alpha")
    if gate.kind.can_sleep:
        assert answer.status == 200 and answer.json()["tier"] == "asleep", answer.body
        assert (view["tier"], view["status"]) == ("asleep", "sleeping")
        kept_mib = view["memory"].get("gpu0", 0)
        assert (kept_mib > 0) is gate.kind.sleeps_in_process and kept_mib < max(1, ready_mib)
        assert view["memory"]["host"] > 0
    else:
        assert (answer.status, answer.error["code"]) == (422, "unsupported")
        assert "alpha" in answer.error["message"]
        assert (view["tier"], view["pid"]) == ("ready", pid), "nothing was changed"


async def test_request_wakes_what_is_asleep_and_hears_the_same(gate: EngineGateway) -> None:
    said = await gate.says("alpha")
    await gate.order("sleep", "alpha")
    assert await gate.says("alpha") == said
    assert (await gate.view("alpha"))["tier"] == "ready"


async def test_sleep_and_wake_many_times_over(gate: EngineGateway) -> None:
    said = await gate.says("alpha")
    for _ in range(8):
        await gate.order("sleep", "alpha")
        assert await gate.says("alpha") == said
    assert len((await gate.view("alpha"))["slots"]) == 1


async def test_cold_model_is_prepared_beside_one_that_serves_or_the_order_is_refused(gate: EngineGateway) -> None:
    await gate.cold("bravo")
    await gate.ready("endless")
    async with gate.listening("endless") as raw:
        answer = await gate.order("prepare", "bravo")
        assert await raw.chunk(), "the other goes on"
    view = await gate.view("bravo")
    if gate.kind.outlives_its_process:
        assert answer.status == 200 and answer.json()["tier"] == "asleep", answer.body
        assert "gpu0" not in view["memory"] and view["memory"]["host"] > 0
        await gate.says("bravo")
    else:
        assert (answer.status, answer.error["code"]) == (422, "unsupported")
        assert view["tier"] == "cold" and not view["slots"]


# --- stop -----------------------------------------------------------------------------------------------------------


async def test_stopped_model_holds_nothing_any_more(gate: EngineGateway) -> None:
    await gate.ready("alpha")
    moved = await gate.done("unload", "alpha")
    assert (moved["tier"], moved["memory"]) == ("cold", {})
    view = await gate.view("alpha")
    assert (view["tier"], view["pid"], view["slots"]) == ("cold", None, [])


async def test_answer_may_be_finished_before_its_model_stops(gate: EngineGateway) -> None:
    await gate.ready("endless")
    async with gate.listening("endless", tokens=SOME) as raw:
        stopped = asyncio.create_task(gate.done("unload", "endless", grace_s=60))
        rest = await rest_of(raw)
    assert rest.whole and rest.data[-1] == "[DONE]"
    assert not any("error" in event for event in rest.data[:-1])
    assert (await stopped)["tier"] == "cold"


async def test_answer_without_end_is_cut_after_the_grace(gate: EngineGateway) -> None:
    await gate.ready("endless")
    async with gate.listening("endless") as raw:
        await gate.done("unload", "endless", grace_s=0)
        assert_ended_by(await rest_of(raw), "unloaded", 503)
    await at_rest(gate.app)


# --- crash ----------------------------------------------------------------------------------------------------------


Way = Callable[[EngineGateway, int], Awaitable[None]]


async def killed(gate: EngineGateway, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def segfault(gate: EngineGateway, pid: int) -> None:
    os.kill(pid, signal.SIGSEGV)


@pytest.mark.parametrize("way", [killed, segfault])
async def test_answer_in_the_middle_of_a_crash_ends_with_an_error_and_the_next_is_given(
    gate: EngineGateway, way: Way
) -> None:
    pid = await gate.ready("endless")
    async with gate.listening("endless") as raw:
        await way(gate, pid)
        rest = await rest_of(raw)
    # Between two events it is told, within one it can only be cut.
    if rest.whole:
        assert_ended_by(rest, "engine_lost", 502)
    assert b"[DONE]" not in rest.body
    await at_rest(gate.app)
    await until(lambda: not is_alive(pid), "it is gone")
    await gate.begins("endless")
    assert (await gate.view("endless"))["pid"] != pid


async def test_a_crash_while_idle_is_noticed_and_the_next_request_answered(gate: EngineGateway) -> None:
    said = await gate.says("alpha")
    pid = await gate.ready("alpha")
    (slot,) = (await gate.view("alpha"))["slots"]
    os.kill(pid, signal.SIGKILL)

    async def is_off_stage() -> bool:
        return bool((await gate.view("alpha"))["tier"] != "ready")

    await until(is_off_stage, "the gateway knows")
    view = await gate.view("alpha")
    if gate.kind.outlives_its_process:
        assert view["tier"] == "asleep", "its weights are the gateway's and were not lost"
        assert "gpu0" not in view["memory"] and view["memory"]["host"] > 0
    else:
        assert view["tier"] == "cold" and view["memory"] == {}
    assert await gate.says("alpha") == said
    assert await gate.ready("alpha") != pid
    (again,) = (await gate.view("alpha"))["slots"]
    assert (again["id"] == slot["id"]) is gate.kind.outlives_its_process, (
        "a sleeping slot was woken, a cold one was loaded anew"
    )


async def test_request_before_its_first_byte_survives_a_crash(gate: EngineGateway) -> None:
    pid = await gate.ready("alpha")
    os.kill(pid, signal.SIGSTOP)
    asked = asyncio.create_task(chat(gate.app, "alpha", temperature=0))
    await until(lambda: gate.app.loop.scheduler.state.grants, "it was given to the engine")
    os.kill(pid, signal.SIGKILL)
    answer = await asked
    assert answer.status == 200 and "alpha" in answer.text, answer.body


async def test_models_are_listed_with_what_they_can_do(gate: EngineGateway) -> None:
    await gate.ready("alpha")
    cards = {card["id"]: card for card in (await http(gate.app, "GET", "/v1/models")).json()["data"]}
    assert cards["alpha"]["status"]["value"] == "loaded"
    assert cards["alpha"]["capabilities"] in (["chat", "completions"], None)


async def test_request_that_no_engine_can_answer_is_the_callers_fault(gate: EngineGateway) -> None:
    """Refused by the gateway or by the engine, and the engine goes on."""
    answer = await http(gate.app, "POST", "/v1/chat/completions", {**asking("alpha"), "stream": "maybe"})
    assert answer.status == 400, answer.body
    await gate.says("alpha")
