"""The official OpenAI package and curl, against real models on llama.cpp: what users of both do every day."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
from httpx2 import AsyncClient

from greenroom.app import App
from tests.harness import url
from tests.integration.clients.conftest import HELLO, LISTED, SCHEMA
from tests.integration.facts import Journal, at_rest, counters
from tests.integration.raw import http
from tests.later import Later
from tests.waiting import PATIENCE_S

openai = Later("openai")


pytestmark = pytest.mark.asyncio(loop_scope="module")


# --- what is asked --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "name"), [("alpha", "alpha"), ("gpt-4o", "alpha"), ("org/bravo", "bravo")])
async def test_chat(client: openai.AsyncOpenAI, model: str, name: str) -> None:
    answer = await client.chat.completions.create(model=model, messages=HELLO, max_tokens=20)
    assert answer.choices[0].message.content == f" {name} says hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


async def test_chat_as_a_stream(client: openai.AsyncOpenAI) -> None:
    chunks = [chunk async for chunk in await client.chat.completions.create(model="alpha", messages=HELLO, stream=True)]
    said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert said == " alpha says hello"
    assert all(chunk.usage is None for chunk in chunks)
    usage: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [chunk async for chunk in await client.chat.completions.create(model="alpha", messages=HELLO, **usage)]
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 4


async def test_stream_that_is_left_is_ended_at_the_engine(app: App, client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model="counts", messages=HELLO, stream=True, max_tokens=3000)
    async for _ in stream:
        break
    assert counters(app)["running"] == 1
    await stream.close()
    await at_rest(app)
    record = app.activity.recent(1, "counts")[0]
    assert (record.status, (record.completion_tokens or 0) < 3000) == (499, True)


async def test_raw_answer_carries_our_headers(app: App, client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model="alpha",
        messages=HELLO,
        extra_headers={"X-Priority": "high", "X-Tenant-ID": "lab"},
        extra_body={"x_client_id": "me"},
    )
    shown = (await http(app, "GET", f"/api/v1/requests/{raw.headers['x-request-id']}")).json()
    assert (shown["tenant"], shown["client"], shown["priority"], shown["status"]) == ("lab", "me", 0, 200)
    assert int(raw.headers["x-queue-wait-ms"]) >= 0


async def test_embeddings(client: openai.AsyncOpenAI) -> None:
    answer = await client.embeddings.create(model="bag", input=["good", "good", "bad"])
    good, again, bad = (row.embedding for row in answer.data)
    # The same text at two places of a batch is equal up to rounding, which depends on the processor.
    assert good == pytest.approx(again, abs=1e-6)
    assert good != pytest.approx(bad, abs=1e-2)
    assert len(good) == len(bad) > 1


async def test_models(client: openai.AsyncOpenAI) -> None:
    listed = {model.id: model async for model in client.models.list()}
    assert set(listed) == LISTED
    assert listed["alpha"].owned_by == "greenroom"
    # By id with a slash (which this package does not encode), by alias, and one that is not listed.
    assert (await client.models.retrieve("org/bravo")).id == "org/bravo"
    assert (await client.models.retrieve("gpt-4o")).id == "alpha"
    assert (await client.models.retrieve("hidden")).id == "hidden"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("org/nobody")


async def test_listing_says_what_is_loaded_and_loads_nothing(app: App, client: openai.AsyncOpenAI) -> None:
    await client.chat.completions.create(model="alpha", messages=HELLO)
    slots = set(app.loop.scheduler.state.slots)
    status = {model.id: model.status["value"] async for model in client.models.list()}  # type: ignore[attr-defined]
    assert status["alpha"] == "loaded"
    assert status["stalls"] == "unloaded"
    assert set(app.loop.scheduler.state.slots) == slots


# --- what goes wrong ------------------------------------------------------------------------------------------------


async def test_unknown_model_is_a_not_found_error(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="nobody", messages=HELLO)
    assert (caught.value.code, caught.value.param, caught.value.type) == ("model_not_found", "model", "not_found_error")
    assert caught.value.request_id is not None


async def test_bad_request_is_a_bad_request_error(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="alpha", messages=HELLO, extra_body={"x_priority": "urgent"})
    assert caught.value.param == "x_priority"
    # What only the engine can find wrong is told by it.
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model="alpha", messages=cast(Any, "not a list"))


async def test_failed_load_is_a_status_error_that_says_why_and_when_to_retry(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(model="broken", messages=HELLO)
    assert (caught.value.status_code, caught.value.code) == (503, "model_load_failed")
    assert "could not open the model file" in caught.value.body["details"]  # type: ignore[index]
    assert int(caught.value.response.headers["retry-after"]) >= 1


async def test_package_does_not_repeat_what_can_only_fail_again(app: App, client: openai.AsyncOpenAI) -> None:
    """`x-should-retry: false` is what the package goes by."""
    before = app.edge.stats.requests
    with pytest.raises(openai.NotFoundError):
        await client.with_options(max_retries=3).chat.completions.create(model="nobody", messages=HELLO)
    assert app.edge.stats.requests == before + 1


async def test_timeout_of_the_client_frees_its_place(app: App, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.APITimeoutError):
        await client.with_options(timeout=1.0).chat.completions.create(model="stalls", messages=HELLO)
    await at_rest(app)
    assert (await client.chat.completions.create(model="alpha", messages=HELLO)).choices


# --- the synchronous client -----------------------------------------------------------------------------------------


# --- curl -----------------------------------------------------------------------------------------------------------


async def curl(app: App, path: str, *arguments: str, stdin: bytes = b"") -> tuple[str, str]:
    """What curl printed, and what it told of the conversation (-v)."""
    process = await asyncio.create_subprocess_exec(
        *("curl", "-sSv", "--max-time", str(PATIENCE_S), *arguments, url(app) + path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, told = await process.communicate(stdin)
    assert process.returncode == 0, told.decode()
    return out.decode(), told.decode()


async def test_curl_sends_a_large_body_after_100_continue(app: App, tmp_path: Path) -> None:
    """Above 1 MiB curl asks first. The body is spooled and reaches the engine whole."""
    question = {"model": "alpha", "messages": HELLO, "metadata": {"pad": "x" * (3 * 1024 * 1024)}}
    file = tmp_path / "question.json"
    file.write_text(json.dumps(question))
    out, told = await curl(
        app, "/v1/chat/completions", "-H", "Content-Type: application/json", "--data-binary", f"@{file}"
    )
    assert "> Expect: 100-continue" in told
    assert "< HTTP/1.1 100" in told
    assert json.loads(out)["choices"][0]["message"]["content"] == " alpha says hello"
    await at_rest(app)


async def test_curl_is_told_no_before_it_sends_a_body_that_is_too_large(app: App) -> None:
    """Nothing of the 100 MiB is sent: the refusal comes instead of 100 Continue."""
    out, told = await curl(
        app,
        "/v1/chat/completions",
        *("-H", "Content-Type: application/json", "-H", "Expect: 100-continue", "-H", "Content-Length: 104857600"),
        *("--data-binary", "@-"),
        stdin=b"{}",
    )
    assert "< HTTP/1.1 413" in told
    assert "< HTTP/1.1 100" not in told
    assert json.loads(out)["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("stream_options", [None, {"include_usage": True}])
async def test_facts_at_the_end_trouble_no_client(app: App, client: openai.AsyncOpenAI, stream_options: Any) -> None:
    """In a comment for those that read the bytes; the client sees the same events as without."""
    body: Any = {"model": "alpha", "messages": HELLO, "max_tokens": 20, "stream": True}
    body |= {} if stream_options is None else {"stream_options": stream_options}
    said = [
        [chunk async for chunk in await client.chat.completions.create(**body, extra_headers=headers)]
        for headers in ({}, {"X-Facts": "comment"})
    ]
    raw = await http(app, "POST", "/v1/chat/completions", body, headers={"X-Facts": "comment"})
    texts = ["".join(c.choices[0].delta.content or "" for c in chunks if c.choices) for chunks in said]
    assert texts[0] == texts[1] != "" and len(said[0]) == len(said[1])
    facts, done = raw.body.decode().rstrip().split("\n\n")[-2:]
    assert done == "data: [DONE]"
    told = dict(part.split("=") for part in facts.removeprefix(": facts ").split())
    assert told["cache_hit"] == "true" and int(told["cache_tokens_reused"]) > 0 and int(told["gpu_time_ms"]) >= 0


# --- LangChain --------------------------------------------------------------------------------------------------------


langchain_openai, messages = Later("langchain_openai"), Later("langchain_core.messages")

WEATHER: dict[str, Any] = {"title": "weather", "description": "The weather in a town.", **SCHEMA}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def options(app: App) -> AsyncIterator[dict[str, Any]]:
    """Of its clients, which never close connections and report nothing to a service of theirs."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2"):
            patch.setenv(name, "false")
        async with AsyncClient(timeout=PATIENCE_S) as http:
            yield {"base_url": f"{url(app)}/v1", "api_key": "none", "max_retries": 0, "http_async_client": http}


def asking(model: str, options: dict[str, Any]) -> langchain_openai.ChatOpenAI:
    return langchain_openai.ChatOpenAI(model=model, **options)


async def test_langchain_chats(options: dict[str, Any]) -> None:
    answer = await asking("alpha", options).ainvoke("hi", max_tokens=20)
    assert answer.text.strip() == "alpha says hello"
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] == 4
    assert answer.response_metadata["finish_reason"] == "stop"
    with pytest.raises(openai.NotFoundError, match="nobody"):
        await asking("nobody", options).ainvoke("hi")


async def test_langchain_reads_a_stream(options: dict[str, Any]) -> None:
    chunks = [chunk async for chunk in asking("alpha", options).astream("hi", stream_usage=True)]
    assert len(chunks) > 2, "it comes in pieces"
    assert "".join(chunk.text for chunk in chunks).strip() == "alpha says hello"
    counts = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata is not None]
    assert [count["output_tokens"] for count in counts] == [4]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_called_and_its_result_is_sent_back(
    options: dict[str, Any], journal: Journal, stream: bool
) -> None:
    bound = asking("told", options).bind_tools([WEATHER])
    said: list[Any] = [messages.HumanMessage("tool:weather:Ulm")]
    asked = await _answer(bound, said, stream)
    [call] = asked.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"town": "Ulm"}) and call["id"]
    said += [asked, messages.ToolMessage("rain", tool_call_id=call["id"])]
    last = await _answer(bound, said, stream)
    assert "told" in last.text and not last.tool_calls
    sent = json.loads(journal.lines("request")[-1]["body"])
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "tool"]
    assert sent["messages"][1]["tool_calls"][0]["id"] == sent["messages"][2]["tool_call_id"]
    assert sent["tools"][0]["function"]["name"] == "weather"


async def _answer(model: Any, said: list[Any], stream: bool) -> messages.AIMessage:
    if not stream:
        whole: messages.AIMessage = await model.ainvoke(said)
        return whole
    merged = None
    async for chunk in model.astream(said):
        merged = chunk if merged is None else merged + chunk
    assert merged is not None
    return messages.AIMessage(merged.content, tool_calls=merged.tool_calls)


async def test_langchain_embeds(options: dict[str, Any]) -> None:
    # Without the check, which counts tokens with a table that it fetches.
    embeddings = langchain_openai.OpenAIEmbeddings(model="bag", check_embedding_ctx_length=False, **options)
    first, second, other = await embeddings.aembed_documents(["good", "good", "bad"])
    assert second == pytest.approx(first, abs=1e-5) and other != pytest.approx(first, abs=1e-5)
    assert await embeddings.aembed_query("good") == pytest.approx(first, abs=1e-5)
