"""The official Ollama package against real models on llama.cpp, and an engine that calls tools as told."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from greenroom.core.model import ModelId
from tests.harness import url
from tests.integration.clients.conftest import HELLO, LISTED, PNG, SCHEMA
from tests.integration.facts import Journal, at_rest, is_ready
from tests.integration.raw import http
from tests.later import Later
from tests.waiting import PATIENCE_S, until

ollama = Later("ollama")

WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather of a town.", "parameters": SCHEMA},
}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(app: App) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(host=url(app), timeout=PATIENCE_S) as client:
        yield client


async def test_a_chat(client: ollama.AsyncClient) -> None:
    answer = await client.chat(model="llama3", messages=HELLO, options={"num_predict": 20})
    assert (answer.message.content, answer.done, answer.done_reason) == (" alpha says hello", True, "stop")
    assert (answer.model, answer.eval_count) == ("llama3", 4) and (answer.prompt_eval_count or 0) > 2
    assert (answer.eval_duration or 0) > 0


async def test_a_chat_as_a_stream(client: ollama.AsyncClient) -> None:
    parts = [part async for part in await client.chat(model="alpha", messages=HELLO, stream=True)]
    assert len(parts) > 2 and "".join(part.message.content or "" for part in parts) == " alpha says hello"
    assert [part.done for part in parts][-2:] == [False, True] and parts[-1].eval_count == 4


async def test_a_prompt(client: ollama.AsyncClient) -> None:
    answer = await client.generate(model="alpha", prompt="hi", system="Be brief.", options={"num_predict": 2})
    assert answer.response == " alpha says" and answer.done_reason == "length"
    parts = [part async for part in await client.generate(model="alpha", prompt="hi", stream=True)]
    assert "".join(part.response or "" for part in parts) == " alpha says hello"


async def test_answers_stream_unless_the_body_says_no(app: App) -> None:
    answer = await http(app, "POST", "/api/chat", {"model": "alpha", "messages": HELLO})
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.body.splitlines()]
    assert lines[-1]["done"] is True and len(lines) > 3
    answer = await http(app, "POST", "/api/chat", {"model": "alpha", "messages": HELLO, "stream": False})
    assert answer.json()["message"]["content"] == " alpha says hello"


async def test_embeddings(client: ollama.AsyncClient) -> None:
    answer = await client.embed(model="bag", input=["good", "good", "bad"])
    good, again, bad = answer.embeddings
    assert good == pytest.approx(again, abs=1e-6) and good != pytest.approx(bad, abs=1e-2)
    one = await client.embeddings(model="bag", prompt="good")
    assert one.embedding == pytest.approx(good, abs=1e-6)


async def test_a_picture_is_seen_where_the_model_can(client: ollama.AsyncClient) -> None:
    said: Any = [{"role": "user", "content": "what?", "images": [PNG]}]
    assert (await client.chat(model="sees", messages=said)).message.content == " sees says hello"
    with pytest.raises(ollama.ResponseError, match="vision"):
        await client.chat(model="alpha", messages=said)


async def test_models_are_listed_shown_and_running(client: ollama.AsyncClient) -> None:
    await client.chat(model="alpha", messages=HELLO)
    listed = {model.model for model in (await client.list()).models}
    assert listed == {f"{name}:latest" for name in LISTED}
    shown = await client.show("llama3")
    assert shown.capabilities is not None and "completion" in shown.capabilities
    assert shown.details is not None and shown.details.family == "llamacpp"
    assert (await client.show("bag")).capabilities == ["embedding"]
    running = {model.model: model for model in (await client.ps()).models}
    assert "alpha:latest" in running and "dies:latest" not in running
    # Every name in the lists can be asked for.
    assert (await client.show("bag:latest")).capabilities == ["embedding"]
    assert (await client.chat(model="alpha:latest", messages=HELLO)).message.content == " alpha says hello"
    with pytest.raises(ollama.ResponseError) as caught:
        await client.show("nobody")
    assert caught.value.status_code == 404 and "nobody" in caught.value.error


async def test_nothing_said_loads_and_no_time_to_stay_unloads(app: App, client: ollama.AsyncClient) -> None:
    answer = await client.generate(model="told", prompt="", keep_alive="10m")
    assert (answer.response, answer.done_reason) == ("", "load") and is_ready(app, "told")
    answer = await client.generate(model="told", prompt="", keep_alive=0)
    assert answer.done_reason == "unload"
    await until(lambda: not is_ready(app, "told"), "it leaves")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_is_not_loaded_to_let_it_leave(app: App, stream: bool) -> None:
    for path, said in (
        ("/api/generate", {"prompt": "", "keep_alive": 0}),
        ("/api/chat", {"messages": [], "keep_alive": 0}),
        ("/api/chat", {"messages": [], "keep_alive": "0m0s"}),
    ):
        answer = await http(app, "POST", path, {"model": "idle", "stream": stream, **said})
        assert answer.status == 200 and answer.json()["done_reason"] == "unload" and answer.json()["done"] is True
        kind = "application/x-ndjson" if stream else "application/json"
        assert answer.headers["content-type"] == kind and answer.headers["x-request-id"]
    assert not app.loop.scheduler.state.slots_of(ModelId("idle"))


async def test_a_client_that_waits_gets_lines_it_can_read(app: App, client: ollama.AsyncClient) -> None:
    parts = [part async for part in await client.chat(model="slow", messages=HELLO, stream=True)]
    assert parts[0].message.content == "" and parts[0].done is False
    assert "".join(part.message.content or "" for part in parts).startswith("slow")


# --- tools and thoughts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_called_and_its_result_is_sent_back(
    client: ollama.AsyncClient, journal: Journal, stream: bool
) -> None:
    said: list[Any] = [{"role": "user", "content": "tool:weather:Ulm"}]
    [call] = await calls(client, stream, said)
    assert (call.function.name, call.function.arguments) == ("weather", {"town": "Ulm"})
    said.append({"role": "assistant", "content": "", "tool_calls": [call.model_dump()]})
    said.append({"role": "tool", "tool_name": "weather", "content": "rain"})
    assert await calls(client, stream, said) == []
    sent = json.loads(journal.lines("request")[-1]["body"])
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "tool"]
    assert sent["messages"][1]["tool_calls"][0]["id"] == sent["messages"][2]["tool_call_id"]
    assert sent["tools"] == [WEATHER]


async def calls(client: ollama.AsyncClient, stream: bool, said: list[Any]) -> list[Any]:
    if not stream:
        return list((await client.chat(model="told", messages=said, tools=[WEATHER])).message.tool_calls or ())
    parts = [part async for part in await client.chat(model="told", messages=said, tools=[WEATHER], stream=True)]
    return [call for part in parts for call in part.message.tool_calls or ()]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_thought_stands_beside_what_is_said(client: ollama.AsyncClient, stream: bool) -> None:
    said: Any = [{"role": "user", "content": "think:hard"}]
    if stream:
        parts = [part async for part in await client.chat(model="told", messages=said, think=True, stream=True)]
        assert "".join(part.message.thinking or "" for part in parts) == "hard"
    else:
        assert (await client.chat(model="told", messages=said, think=True)).message.thinking == "hard"


# --- what goes wrong ------------------------------------------------------------------------------------------------


async def test_errors_have_the_shape_that_the_package_reads(client: ollama.AsyncClient) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        await client.chat(model="nobody", messages=HELLO)
    assert caught.value.status_code == 404 and caught.value.error.startswith("There is no model nobody")
    with pytest.raises(ollama.ResponseError, match="does not do embeddings"):
        await client.embed(model="alpha", input="hi")
    with pytest.raises(ollama.ResponseError, match="raw"):
        await client.generate(model="alpha", prompt="hi", raw=True)
    with pytest.raises(ollama.ResponseError, match=r"context|exceed"):
        await client.generate(model="alpha", prompt="hi " * 3000)


async def test_an_engine_that_is_lost_ends_a_stream_with_an_error(app: App, client: ollama.AsyncClient) -> None:
    parts = []
    with pytest.raises(ollama.ResponseError, match="engine"):
        async for part in await client.chat(model="dies", messages=HELLO, stream=True):
            parts.append(part)
    assert parts and not parts[-1].done
    await at_rest(app)


async def test_pulls_and_deletions_are_refused_by_name(client: ollama.AsyncClient) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        await client.pull("not a model")
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError) as caught:
        await client.delete("nobody")
    assert caught.value.status_code == 404
