"""Requests that cannot be answered: each is a 400 that names its field, and no model moves for it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from tests.harness import fake, gateway, tiny
from tests.integration.facts import Journal, is_ready
from tests.integration.raw import CHAT, http
from tests.models import tiny as tiny_model
from tests.samples.sounds import FORM, form

pytestmark = pytest.mark.asyncio(loop_scope="module")

HI = [{"role": "user", "content": "hi"}]
ASK: dict[str, Any] = {"messages": HI}
FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
COMPLETIONS, EMBEDDINGS, RERANK = "/v1/completions", "/v1/embeddings", "/v1/rerank"
RANK: dict[str, Any] = {"query": "a", "documents": ["b"]}
MESSAGE: dict[str, Any] = {"max_tokens": 5, "messages": HI}


def saying(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {}, "messages"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": {"role": "user"}}, "messages"),
    (CHAT, {"messages": ["hi"]}, "messages"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages"),
    (CHAT, {"messages": [{"role": 5, "content": "hi"}]}, "messages"),
    (CHAT, saying(5), "messages"),
    (CHAT, saying({"type": "text", "text": "hi"}), "messages"),
    (CHAT, {**ASK, "temperature": "hot"}, "temperature"),
    (CHAT, {**ASK, "temperature": []}, "temperature"),
    (CHAT, {**ASK, "top_p": "x"}, "top_p"),
    (CHAT, {**ASK, "max_tokens": -2}, "max_tokens"),
    (CHAT, {**ASK, "max_tokens": "many"}, "max_tokens"),
    (CHAT, {**ASK, "max_completion_tokens": {}}, "max_completion_tokens"),
    (CHAT, {**ASK, "n": 0}, "n"),
    (CHAT, {**ASK, "stream": "yes"}, "stream"),
    (CHAT, {**ASK, "tools": {"type": "function"}}, "tools"),
    (CHAT, {**ASK, "tools": "f"}, "tools"),
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": 5}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature"),
    ("/generate", {}, "prompt"),
    (EMBEDDINGS, {}, "input"),
    (EMBEDDINGS, {"input": []}, "input"),
    (EMBEDDINGS, {"input": 5}, "input"),
    (RERANK, {}, "query"),
    (RERANK, {"query": "a"}, "documents"),
    (RERANK, {"query": "a", "documents": []}, "documents"),
    (RERANK, {"query": 5, "documents": ["b"]}, "query"),
    ("/rerank", {"query": "a", "documents": 5}, "documents"),
    ("/v1/images/generations", {}, "prompt"),
    ("/v1/images/generations", {"prompt": 5}, "prompt"),
    ("/v1/images/generations", {"prompt": "a", "n": 0}, "n"),
    ("/v1/audio/speech", {}, "input"),
    ("/v1/audio/speech", {"input": None}, "input"),
    ("/v1/messages", {"max_tokens": 5}, "messages"),
    ("/v1/messages", {**MESSAGE, "temperature": "hot"}, "temperature"),
    ("/v1/messages", {**MESSAGE, "max_tokens": 0}, "max_tokens"),
    ("/v1/messages", {**MESSAGE, **saying(5)}, "messages"),
    ("/v1/messages", {**MESSAGE, "messages": []}, "messages"),
    ("/v1/messages/count_tokens", {}, "messages"),
    ("/v1/messages/count_tokens", {"messages": []}, "messages"),
    ("/v1/responses", {}, "input"),
    ("/v1/responses", {"input": []}, "input"),
    ("/v1/responses", {"input": [{"role": "user", "content": 5}]}, "input"),
    ("/v1/responses", {"input": "a", "temperature": "hot"}, "temperature"),
    ("/v1/responses", {"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    ("/v1/responses", {"input": "a", "tools": {}}, "tools"),
    ("/api/chat", {"messages": "hi"}, "messages"),
    ("/api/chat", {**ASK, "options": {"temperature": "hot"}}, "options"),
    ("/api/generate", {"prompt": 5}, "prompt"),
    ("/api/embed", {}, "input"),
    ("/api/embeddings", {}, "prompt"),
    ("/tokenize", {"model": "real", "prompt": 5}, "prompt"),
    # llama.cpp takes functions only, as vLLM and SGLang do.
    (CHAT, {"model": "real", **ASK, "tools": [{"type": "web_search"}]}, "tools"),
    (CHAT, {"model": "real", **ASK, "tools": [FUNCTION, {"type": "custom", "custom": {"name": "x"}}]}, "tools"),
    (CHAT, {"model": "real", **ASK, "tools": [{"type": None, "function": {"name": "f"}}]}, "tools"),
    (CHAT, {"model": "real", **ASK, "tools": [5]}, "tools"),
    (CHAT, {"model": "real", **ASK, "tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"model": "real", **ASK, "tools": [FUNCTION, {"function": "f"}]}, "tools"),
]
# What some engine answers is not refused.
PASSED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {**ASK, "temperature": None, "tools": None, "max_tokens": None, "n": None, "stream": None, "unknown": {}}),
    (CHAT, {**ASK, "temperature": "0.5", "max_tokens": 4.0, "n": 1.0, "top_p": 1, "seed": 2**63}),
    (CHAT, {**ASK, "max_tokens": -1, "max_completion_tokens": 0, "tools": []}),
    (CHAT, {"messages": [{"role": "assistant", "content": None, "tool_calls": []}, {"role": "tool"}, *HI]}),
    (CHAT, {"messages": [{"role": "robot", "content": [{"type": "text", "text": "hi"}]}]}),
    (CHAT, {**ASK, "tools": [{"type": "web_search"}]}),
    (COMPLETIONS, {"prompt": ""}),
    (COMPLETIONS, {"prompt": [1, 2]}),
    (COMPLETIONS, {"prompt": {"prompt_string": "a"}}),
    (COMPLETIONS, {"prompt_embeds": "AA=="}),
    (EMBEDDINGS, {"input": ["a", 1]}),
    (EMBEDDINGS, {"content": "a"}),
    (RERANK, {"query": {"content": []}, "texts": ["b"]}),
    (RERANK, RANK),
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory, journal: Journal) -> AsyncIterator[App]:
    """Models of which one fits beside a small one, whose operator sets what its callers leave out."""
    models = {
        "here": fake("here", memory_mib=600),
        "other": fake("other", *journal.switches, memory_mib=600),
        "real": tiny(tiny_model("alpha"), memory_mib=600),
        "set": fake("set", memory_mib=100, set_params={"prompt": "a", "n": 1}, strip_params=["temperature"]),
    }
    tasks = {"either": {"candidates": ["real", "other"]}}
    async with gateway(tmp_path_factory.mktemp("refused"), models, budget_mib=1000, tasks=tasks) as app:
        yield app


async def test_a_request_that_every_engine_refuses_moves_no_model(app: App, journal: Journal) -> None:
    assert (await http(app, "POST", CHAT, {"model": "here", **ASK})).status == 200
    for path, body, param in REFUSED:
        answer = await http(app, "POST", path, {"model": "other", **body})
        assert answer.status == 400, (path, body, answer.body)
        told = answer.json()["error"]
        # Anthropic's and Ollama's errors have only their words.
        named = told["param"] == param if "param" in told else param in json.dumps(told)
        assert named, (path, body, told)
    heard = await http(app, "POST", "/v1/audio/transcriptions", body=form([("model", "other")]), headers=FORM)
    assert heard.status == 400 and "file" in heard.error["message"]
    assert is_ready(app, "here") and not is_ready(app, "real") and not journal.lines()


async def test_what_some_engine_answers_is_passed_on(app: App) -> None:
    for path, body in PASSED:
        answer = await http(app, "POST", path, {"model": "other", **body})
        assert answer.status == 200, (path, body, answer.body)


async def test_a_model_of_a_task_that_takes_no_such_tools_is_passed_over(app: App) -> None:
    answer = await http(app, "POST", CHAT, {"model": "either", **ASK, "tools": [{"type": "web_search"}]})
    assert (answer.status, answer.headers["x-model"]) == (200, "other"), answer.body


async def test_what_the_operator_sets_or_strips_is_not_asked_of_the_caller(app: App) -> None:
    answer = await http(app, "POST", COMPLETIONS, {"model": "set", "n": 0, "temperature": "hot"})
    assert answer.status == 200, answer.body


async def test_a_request_that_names_no_model_is_told_which_field_it_lacks(app: App) -> None:
    answer = await http(app, "POST", CHAT, ASK)
    assert (answer.status, answer.error["param"]) == (400, "model")
    assert "no field model" in answer.error["message"]
