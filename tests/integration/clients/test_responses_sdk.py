"""The official OpenAI package's Responses against a real model on llama.cpp, and an engine that calls tools as told."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from tests.harness import fake, gateway, tiny
from tests.integration.facts import Journal
from tests.later import Later
from tests.models import tiny as tiny_model

openai = Later("openai")

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    "strict": False,
}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory, journal: Journal) -> AsyncIterator[App]:
    models = {
        "alpha": tiny(tiny_model("alpha")),
        "told": fake("told", *journal.switches, "--record"),
        "dies": fake("dies", "--crash-at", "token:2"),
    }
    async with gateway(tmp_path_factory.mktemp("responses"), models, budget_mib=1000) as app:
        yield app


async def test_a_response(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="alpha", input="hi", instructions="Be brief.", max_output_tokens=20)
    assert (answer.output_text, answer.status, answer.model) == (" alpha says hello", "completed", "alpha")
    assert answer.usage is not None and answer.usage.output_tokens == 4 and answer.usage.input_tokens > 4
    assert (answer.instructions, answer.max_output_tokens) == ("Be brief.", 20)


async def test_a_stream(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(model="alpha", input=[{"role": "user", "content": "hi"}]) as stream:
        texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        answer = await stream.get_final_response()
    assert len(texts) > 1 and "".join(texts) == answer.output_text == " alpha says hello"


async def test_an_answer_that_is_cut_says_so(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="alpha", input="hi", max_output_tokens=2)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_called_and_its_result_is_sent_back(
    client: openai.AsyncOpenAI, journal: Journal, stream: bool
) -> None:
    said: list[Any] = [{"role": "user", "content": "tool:weather:Ulm"}]
    [call] = (await final(client, stream, model="told", input=said, tools=[WEATHER])).output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"town": "Ulm"})
    said += [
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    answer = await final(client, stream, model="told", input=said, tools=[WEATHER])
    assert answer.output_text.startswith("told")
    sent = json.loads(journal.lines("request")[-1]["body"])
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "tool"]
    assert sent["messages"][2]["tool_call_id"] == call.call_id


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_thought_is_an_item_of_its_own(client: openai.AsyncOpenAI, stream: bool) -> None:
    answer = await final(client, stream, model="told", input="think:hard")
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text == "hard"


async def final(client: openai.AsyncOpenAI, stream: bool, **asked: Any) -> Any:
    if not stream:
        return await client.responses.create(**asked)
    async with client.responses.stream(**asked) as events:
        return await events.get_final_response()


async def test_what_would_be_stored_is_refused_by_name(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="store"):
        await client.responses.create(model="alpha", input="hi", store=True)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        await client.responses.create(model="alpha", input="hi", previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="nobody", input="hi")


async def test_an_engine_that_is_lost_ends_a_stream_with_an_error(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.APIError, match="engine"):
        async for _ in await client.responses.create(model="dies", input="hi", stream=True):
            pass
