"""The real LangChain client for OpenAI against real models on llama.cpp, and an engine that calls tools as told."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from httpx2 import AsyncClient

from greenroom.app import App
from tests.harness import fake, gateway, tiny, url
from tests.integration.facts import Journal
from tests.later import Later
from tests.models import tiny as tiny_model
from tests.models import tiny_embedding
from tests.waiting import PATIENCE_S

langchain_openai, messages, openai = Later("langchain_openai"), Later("langchain_core.messages"), Later("openai")
pytestmark = pytest.mark.asyncio(loop_scope="module")

WEATHER: dict[str, Any] = {
    "title": "weather",
    "description": "The weather in a town.",
    "type": "object",
    "properties": {"town": {"type": "string"}},
    "required": ["town"],
}


@dataclass(frozen=True)
class Served:
    app: App
    journal: Journal
    # LangChain never closes its own.
    http: AsyncClient

    def chat(self, model: str) -> langchain_openai.ChatOpenAI:
        return langchain_openai.ChatOpenAI(model=model, **self.options())

    def options(self) -> dict[str, Any]:
        base_url = url(self.app) + "/v1"
        return {"base_url": base_url, "api_key": "none", "max_retries": 0, "http_async_client": self.http}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder: Path = tmp_path_factory.mktemp("langchain")
    journal = Journal(folder)
    models = {
        "alpha": tiny(tiny_model("alpha")),
        "bag": tiny(tiny_embedding(), embedding=True),
        "told": fake("told", *journal.switches, "--record"),
    }
    with pytest.MonkeyPatch.context() as patch:
        # Nothing is reported to a service of theirs.
        patch.setenv("LANGSMITH_TRACING", "false")
        patch.setenv("LANGCHAIN_TRACING_V2", "false")
        async with gateway(folder, models, budget_mib=350) as app, AsyncClient(timeout=PATIENCE_S) as http:
            yield Served(app, journal, http)


async def test_chat(served: Served) -> None:
    answer = await served.chat("alpha").ainvoke("hi", max_tokens=20)
    assert answer.text.strip() == "alpha says hello"
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] == 4
    assert answer.response_metadata["finish_reason"] == "stop"
    with pytest.raises(openai.NotFoundError, match="nobody"):
        await served.chat("nobody").ainvoke("hi")


async def test_chat_as_a_stream(served: Served) -> None:
    chunks = [chunk async for chunk in served.chat("alpha").astream("hi", stream_usage=True)]
    assert len(chunks) > 2, "it comes in pieces"
    assert "".join(chunk.text for chunk in chunks).strip() == "alpha says hello"
    counts = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata is not None]
    assert [count["output_tokens"] for count in counts] == [4]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_called_and_its_result_is_sent_back(served: Served, stream: bool) -> None:
    bound = served.chat("told").bind_tools([WEATHER])
    said: list[Any] = [messages.HumanMessage("tool:weather:Ulm")]
    asked = await _answer(bound, said, stream)
    [call] = asked.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"town": "Ulm"}) and call["id"]
    said += [asked, messages.ToolMessage("rain", tool_call_id=call["id"])]
    last = await _answer(bound, said, stream)
    assert "told" in last.text and not last.tool_calls
    sent = json.loads(served.journal.lines("request")[-1]["body"])
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


async def test_embeddings(served: Served) -> None:
    # Without the check, which counts tokens with a table that it fetches.
    embeddings = langchain_openai.OpenAIEmbeddings(model="bag", check_embedding_ctx_length=False, **served.options())
    first, second, other = await embeddings.aembed_documents(["good", "good", "bad"])
    assert second == pytest.approx(first, abs=1e-5) and other != pytest.approx(first, abs=1e-5)
    assert await embeddings.aembed_query("good") == pytest.approx(first, abs=1e-5)
