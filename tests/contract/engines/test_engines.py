"""What every engine promises, whichever it is: start, ready, serve, stream, cancel, sleep, wake, prepare, stop, crash.

Engines that cannot sleep promise to say so. Each test brings its models to where it begins.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from tests.contract.engines.house import House, until_busy, until_quiet
from tests.harness import until
from tests.integration.facts import at_rest
from tests.integration.faults import assert_ended_by, is_alive, rest_of
from tests.integration.orders import eventually
from tests.integration.raw import asking, chat, http

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOGETHER = 6
SOME = 200
# What the endless model computes at least for an answer that fills its context, in hundredths of a second.
A_WHOLE_ANSWER_TICKS = 400


# --- start, ready ---------------------------------------------------------------------------------------------------


async def test_start_is_answered_when_it_is_ready(house: House) -> None:
    await house.cold("alpha")
    moved = await house.done("load", "alpha")
    assert moved["tier"] == "ready" and sum(moved["memory"].values()) >= 100
    view = await house.view("alpha")
    assert (view["tier"], view["status"]) == ("ready", "loaded")
    assert is_alive(view["pid"])
    assert view["last_error"] is None


async def test_start_of_what_is_ready_changes_nothing(house: House) -> None:
    pid = await house.ready("alpha")
    (slot,) = (await house.view("alpha"))["slots"]
    assert await house.ready("alpha") == pid
    assert [again["id"] for again in (await house.view("alpha"))["slots"]] == [slot["id"]]


async def test_request_starts_what_is_cold(house: House) -> None:
    await house.cold("alpha")
    await house.says("alpha")
    assert (await house.view("alpha"))["tier"] == "ready"


# --- serve ----------------------------------------------------------------------------------------------------------


async def test_chat_is_answered_with_its_tokens_counted(house: House) -> None:
    answer = await chat(house.app, "alpha")
    body = answer.json()
    assert "alpha" in answer.text
    assert body["object"] == "chat.completion" and body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens"] > 0 and body["usage"]["completion_tokens"] > 0
    request = (await http(house.app, "GET", f"/api/v1/requests/{answer.headers['x-request-id']}")).json()
    assert request["completion_tokens"] == body["usage"]["completion_tokens"]


async def test_completion_is_answered(house: House) -> None:
    answer = await http(house.app, "POST", "/v1/completions", {"model": "alpha", "prompt": "hi", "max_tokens": 8})
    assert answer.status == 200, answer.body
    assert "alpha" in answer.json()["choices"][0]["text"]


async def test_many_at_once_are_all_answered_by_the_model_they_named(house: House) -> None:
    asked = [model for model in ("alpha", "bravo") for _ in range(TOGETHER)]
    said = await asyncio.gather(*(house.says(model) for model in asked))
    assert len({text for text in said if "alpha" in text}) == 1
    assert len({text for text in said if "bravo" in text}) == 1
    await at_rest(house.app)


# --- stream ---------------------------------------------------------------------------------------------------------


async def test_stream_says_the_same_piece_by_piece(house: House) -> None:
    answer = await chat(house.app, "alpha", stream=True, temperature=0)
    assert answer.status == 200 and answer.whole
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, last = answer.data
    assert last == "[DONE]"
    deltas = [choice["delta"].get("content") for event in events for choice in event["choices"]]
    pieces = [piece for piece in deltas if piece]
    assert len(pieces) > 1
    assert "".join(pieces) == await house.says("alpha")


async def test_stream_ends_with_its_usage_when_that_is_asked_for(house: House) -> None:
    answer = await chat(house.app, "alpha", stream=True, stream_options={"include_usage": True})
    assert answer.data[-1] == "[DONE]"
    assert answer.data[-2]["choices"] == [] and answer.data[-2]["usage"]["completion_tokens"] > 0


# --- cancel ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_client_that_leaves_is_worked_for_no_longer(house: House, how: str) -> None:
    pid = await house.ready("endless")
    async with house.listening("endless") as raw:
        await until_busy(raw, pid)
        raw.leave(how)
        await at_rest(house.app)
        assert await until_quiet(pid) < A_WHOLE_ANSWER_TICKS / 4, "it went on with what nobody hears"
    assert (await house.view("endless"))["in_flight"] == 0


# --- sleep, wake, prepare -------------------------------------------------------------------------------------------


async def test_ready_model_is_put_to_sleep_or_the_order_is_refused(house: House) -> None:
    pid = await house.ready("alpha")
    answer = await house.order("sleep", "alpha")
    view = await house.view("alpha")
    if house.kind.can_sleep:
        assert answer.status == 200 and answer.json()["tier"] == "asleep", answer.body
        assert (view["tier"], view["status"]) == ("asleep", "sleeping")
        assert "gpu0" not in view["memory"] and view["memory"]["host"] > 0
    else:
        assert (answer.status, answer.error["code"]) == (422, "unsupported")
        assert "alpha" in answer.error["message"]
        assert (view["tier"], view["pid"]) == ("ready", pid), "nothing was changed"


async def test_request_wakes_what_is_asleep_and_hears_the_same(house: House) -> None:
    said = await house.says("alpha")
    await house.order("sleep", "alpha")
    assert await house.says("alpha") == said
    assert (await house.view("alpha"))["tier"] == "ready"


async def test_sleep_and_wake_many_times_over(house: House) -> None:
    said = await house.says("alpha")
    for _ in range(8):
        await house.order("sleep", "alpha")
        assert await house.says("alpha") == said
    assert len((await house.view("alpha"))["slots"]) == 1


async def test_cold_model_is_prepared_beside_one_that_serves_or_the_order_is_refused(house: House) -> None:
    await house.cold("bravo")
    await house.ready("endless")
    async with house.listening("endless") as raw:
        answer = await house.order("prepare", "bravo")
        assert await raw.chunk(), "the other goes on"
    view = await house.view("bravo")
    if house.kind.can_sleep:
        assert answer.status == 200 and answer.json()["tier"] == "asleep", answer.body
        assert "gpu0" not in view["memory"] and view["memory"]["host"] > 0
        await house.says("bravo")
    else:
        assert (answer.status, answer.error["code"]) == (422, "unsupported")
        assert view["tier"] == "cold" and not view["slots"]


# --- stop -----------------------------------------------------------------------------------------------------------


async def test_stopped_model_holds_nothing_any_more(house: House) -> None:
    await house.ready("alpha")
    moved = await house.done("unload", "alpha")
    assert (moved["tier"], moved["memory"]) == ("cold", {})
    view = await house.view("alpha")
    assert (view["tier"], view["pid"], view["slots"]) == ("cold", None, [])


async def test_answer_may_be_finished_before_its_model_stops(house: House) -> None:
    await house.ready("endless")
    async with house.listening("endless", tokens=SOME) as raw:
        stopped = asyncio.create_task(house.done("unload", "endless", grace_s=60))
        rest = await rest_of(raw)
    assert rest.whole and rest.data[-1] == "[DONE]"
    assert not any("error" in event for event in rest.data[:-1])
    assert (await stopped)["tier"] == "cold"


async def test_answer_without_end_is_cut_after_the_grace(house: House) -> None:
    await house.ready("endless")
    async with house.listening("endless") as raw:
        await house.done("unload", "endless", grace_s=0)
        assert_ended_by(await rest_of(raw), "unloaded", 503)
    await at_rest(house.app)


# --- crash ----------------------------------------------------------------------------------------------------------


Way = Callable[[House, int], Awaitable[None]]


async def killed(house: House, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def segfault(house: House, pid: int) -> None:
    os.kill(pid, signal.SIGSEGV)


@pytest.mark.parametrize("way", [killed, segfault])
async def test_answer_in_the_middle_of_a_crash_ends_with_an_error_and_the_next_is_given(house: House, way: Way) -> None:
    pid = await house.ready("endless")
    async with house.listening("endless") as raw:
        await way(house, pid)
        rest = await rest_of(raw)
    # Between two events it is told, within one it can only be cut.
    if rest.whole:
        assert_ended_by(rest, "engine_lost", 502)
    assert b"[DONE]" not in rest.body
    await at_rest(house.app)
    await until(lambda: not is_alive(pid), "it is gone")
    await house.begins("endless")
    assert (await house.view("endless"))["pid"] != pid


async def test_crash_while_nobody_asks_is_noticed_and_the_next_request_answered(house: House) -> None:
    said = await house.says("alpha")
    pid = await house.ready("alpha")
    (slot,) = (await house.view("alpha"))["slots"]
    os.kill(pid, signal.SIGKILL)

    async def is_off_stage() -> bool:
        return bool((await house.view("alpha"))["tier"] != "ready")

    await eventually(is_off_stage, "the gateway knows")
    view = await house.view("alpha")
    if house.kind.can_sleep:
        assert view["tier"] == "asleep", "its weights are the gateway's and were not lost"
        assert "gpu0" not in view["memory"] and view["memory"]["host"] > 0
    else:
        assert view["tier"] == "cold" and view["memory"] == {}
    assert await house.says("alpha") == said
    assert await house.ready("alpha") != pid
    (again,) = (await house.view("alpha"))["slots"]
    assert (again["id"] == slot["id"]) is house.kind.can_sleep, "who slept was woken, who was cold was loaded anew"


async def test_request_before_its_first_byte_survives_a_crash(house: House) -> None:
    pid = await house.ready("alpha")
    os.kill(pid, signal.SIGSTOP)
    asked = asyncio.create_task(chat(house.app, "alpha", temperature=0))
    await until(lambda: house.app.loop.scheduler.state.grants, "it was given to the engine")
    os.kill(pid, signal.SIGKILL)
    answer = await asked
    assert answer.status == 200 and "alpha" in answer.text, answer.body


async def test_models_are_listed_with_what_they_can_do(house: House) -> None:
    await house.ready("alpha")
    cards = {card["id"]: card for card in (await http(house.app, "GET", "/v1/models")).json()["data"]}
    assert cards["alpha"]["status"]["value"] == "loaded"
    assert cards["alpha"]["capabilities"] in (["chat", "completions"], None)


async def test_request_that_no_engine_can_answer_is_the_callers_fault(house: House) -> None:
    """Whoever finds it out, the gateway or the engine, and the engine goes on."""
    answer = await http(house.app, "POST", "/v1/chat/completions", {**asking("alpha"), "stream": "maybe"})
    assert answer.status == 400, answer.body
    await house.says("alpha")
