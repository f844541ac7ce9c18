"""The official Anthropic package against real models on llama.cpp, and an engine that calls tools as told."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from tests.harness import url
from tests.integration.clients.conftest import HELLO, LISTED, PNG, SCHEMA
from tests.integration.facts import Journal, counters
from tests.integration.raw import http
from tests.later import Later
from tests.waiting import PATIENCE_S

anthropic = Later("anthropic")

WEATHER: Any = {"name": "weather", "description": "The weather of a town.", "input_schema": SCHEMA}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(app: App) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=url(app), api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


async def test_a_message(client: anthropic.AsyncAnthropic) -> None:
    answer = await client.messages.create(model="claude-sonnet-5", messages=HELLO, max_tokens=20, system="Be brief.")
    [block] = answer.content
    assert (block.type, block.text) == ("text", " alpha says hello")
    assert (answer.stop_reason, answer.model, answer.role) == ("end_turn", "claude-sonnet-5", "assistant")
    assert answer.usage.output_tokens == 4
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) > 5


async def test_a_stream(client: anthropic.AsyncAnthropic) -> None:
    async with client.messages.stream(model="alpha", messages=HELLO, max_tokens=20) as stream:
        texts = [text async for text in stream.text_stream]
        answer = await stream.get_final_message()
    assert len(texts) > 1 and "".join(texts) == " alpha says hello"
    assert (answer.stop_reason, answer.usage.output_tokens) == ("end_turn", 4)


async def test_an_answer_that_is_cut_says_so(client: anthropic.AsyncAnthropic) -> None:
    answer = await client.messages.create(model="alpha", messages=HELLO, max_tokens=2)
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 2)


async def test_a_picture_is_seen_where_the_model_can(client: anthropic.AsyncAnthropic) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": PNG}
    said: Any = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]}]
    answer = await client.messages.create(model="sees", messages=said, max_tokens=20)
    [block] = answer.content
    assert block.type == "text" and block.text == " sees says hello"
    with pytest.raises(anthropic.BadRequestError):
        elsewhere: Any = {"type": "url", "url": "http://169.254.169.254/key"}
        said[0]["content"][0]["source"] = elsewhere
        await client.messages.create(model="sees", messages=said, max_tokens=20)


async def test_tokens_are_counted_as_they_are_served(client: anthropic.AsyncAnthropic) -> None:
    counted = await client.messages.count_tokens(model="alpha", messages=HELLO)
    answer = await client.messages.create(model="alpha", messages=HELLO, max_tokens=1)
    served = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert counted.input_tokens == served
    # An engine that does not speak this path is asked for the shortest answer.
    assert (await client.messages.count_tokens(model="told", messages=HELLO)).input_tokens > 0


async def test_the_tokens_of_a_stream_are_in_the_record(app: App, client: anthropic.AsyncAnthropic) -> None:
    raw = await client.messages.with_raw_response.create(
        model="alpha", messages=HELLO, max_tokens=20, stream=True, extra_headers={"X-Tenant-ID": "lab"}
    )
    async for _ in await raw.parse():
        pass
    record = (await http(app, "GET", f"/api/v1/requests/{raw.headers['x-request-id']}")).json()
    assert (record["tenant"], record["status"], record["completion_tokens"], record["route"]) == (
        "lab",
        200,
        4,
        "messages",
    )
    assert raw.headers["content-type"].startswith("text/event-stream")


async def test_models(client: anthropic.AsyncAnthropic) -> None:
    listed = [model async for model in client.models.list()]
    assert {model.id for model in listed} == LISTED
    one = await client.models.retrieve("claude-sonnet-5")
    assert (one.id, one.type, one.display_name) == ("alpha", "model", "alpha") and one.created_at.year > 2000


# --- tools and thoughts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_called_and_its_result_is_sent_back(
    app: App, client: anthropic.AsyncAnthropic, journal: Journal, stream: bool
) -> None:
    asked: dict[str, Any] = {"model": "told", "max_tokens": 50, "tools": [WEATHER], "tool_choice": {"type": "any"}}
    said: list[Any] = [{"role": "user", "content": "tool:weather:Ulm"}]
    answer = await final(client, stream, messages=said, **asked)
    [block] = answer.content
    assert (block.type, block.name, block.input) == ("tool_use", "weather", {"town": "Ulm"})
    assert answer.stop_reason == "tool_use"
    said.append({"role": "assistant", "content": [block.model_dump(include={"type", "id", "name", "input"})]})
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
    said.append({"role": "user", "content": [result, {"type": "text", "text": "thanks"}]})
    answer = await final(client, stream, messages=said, **asked)
    assert answer.content[0].type == "text"
    sent = json.loads(journal.lines("request")[-1]["body"])
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "tool", "user"]
    assert sent["messages"][1]["tool_calls"][0]["id"] == sent["messages"][2]["tool_call_id"] == block.id
    assert sent["tool_choice"] == "required"
    assert sent["tools"][0]["function"]["parameters"] == WEATHER["input_schema"]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_thought_is_a_block_of_its_own(client: anthropic.AsyncAnthropic, stream: bool) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    answer = await final(
        client,
        stream,
        model="told",
        max_tokens=2000,
        messages=[{"role": "user", "content": "think:hard"}],
        thinking=thinking,
    )
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[0].thinking == "hard"


async def final(client: anthropic.AsyncAnthropic, stream: bool, **asked: Any) -> Any:
    if not stream:
        return await client.messages.create(**asked)
    async with client.messages.stream(**asked) as events:
        return await events.get_final_message()


# --- what goes wrong ------------------------------------------------------------------------------------------------


async def test_errors_have_the_shape_that_the_package_reads(app: App, client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        await client.messages.create(model="nobody", messages=HELLO, max_tokens=5)
    assert caught.value.body["type"] == "error" and caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.messages.create(model="bag", messages=HELLO, max_tokens=5)
    assert "does not do chat" in str(refused.value)
    pdf: Any = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="}}
    with pytest.raises(anthropic.BadRequestError, match="document with a source of type base64"):
        await client.messages.create(model="alpha", messages=[{"role": "user", "content": [pdf]}], max_tokens=5)


async def test_tools_of_anthropics_own_servers_are_left_out(client: anthropic.AsyncAnthropic) -> None:
    tool: Any = {"type": "web_search_20250305", "name": "web_search"}
    servers = {"mcp_servers": [{"type": "url", "name": "x", "url": "https://example.org"}]}
    answer = await client.messages.create(model="alpha", messages=HELLO, max_tokens=5, tools=[tool], extra_body=servers)
    assert answer.content[0].text == " alpha says hello"  # type: ignore[union-attr]
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        await client.messages.create(
            model="alpha", messages=HELLO, max_tokens=5, tools=[tool], tool_choice={"type": "any"}
        )


async def test_an_engines_own_error_keeps_its_status_and_words(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"context|exceed"):
        await client.messages.create(model="alpha", messages=[{"role": "user", "content": "hi " * 3000}], max_tokens=5)


async def test_nothing_is_left_at_the_end(app: App) -> None:
    assert counters(app)["running"] == 0
