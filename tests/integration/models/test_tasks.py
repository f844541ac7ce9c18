"""Tasks through a running gateway: which model answers, what its engine is sent, and what happens if it fails."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from tests.harness import fake, gateway
from tests.integration.facts import Journal, at_rest, is_ready
from tests.integration.raw import Answer, chat, http
from tests.samples.sounds import FORM, form

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEYS = [
    {"name": "ops", "key": "ops-key-0123456789abcdef", "admin": True},
    {"name": "narrow", "key": "narrow-key-0123456789ab", "models": ["small"]},
    {"name": "stranger", "key": "stranger-key-012345678", "models": ["breaks"]},
]


class Gate:
    def __init__(self, app: App, journal: Journal) -> None:
        self.app = app
        self.journal = journal

    async def chat(self, model: str, *, key: str = "ops-key-0123456789abcdef", **more: Any) -> Answer:
        return await chat(self.app, model, headers={"Authorization": f"Bearer {key}"}, **more)

    async def ask(
        self, method: str, path: str, body: Any = None, *, key: str = KEYS[0]["key"], **headers: str
    ) -> Answer:
        return await http(self.app, method, path, body, headers={"Authorization": f"Bearer {key}", **headers})

    def sent(self, answer: Answer) -> dict[str, Any]:
        """What the engine that answered was sent."""
        (line,) = self.journal.lines("request", id=answer.headers["x-request-id"], name=answer.headers["x-model"])
        body: dict[str, Any] = json.loads(line["body"])
        return body


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gate(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gate]:
    folder = tmp_path_factory.mktemp("tasks")
    journal = Journal(folder)
    record = (*journal.switches, "--record")
    models = {
        "large": fake("large", *record, set_params={"temperature": 0.9, "top_k": 5}),
        "small": fake("small", *record, abilities=["chat", "transcription"], strict_json=True),
        "never": fake("never", *record),
        "breaks": fake("breaks", *record, "--sse-weird", "error-500"),
        "crashes": fake("crashes", *record, "--crash-at", "request"),
        "unborn": fake("unborn", *record, "--exit-before-bind"),
        "dies": fake("dies", *record, "--crash-at", "request"),
        "dies-too": fake("dies-too", *record, "--crash-at", "request"),
        "busy": fake("busy", *record, "--sse-weird", "error-429"),
        "huge": fake("huge", *record, memory_mib=10**9),
        "few": fake("few", *record, limits={"requests_per_minute": 1}),
        "dumb": fake("dumb", *record, abilities=["embeddings"]),
    }
    tasks = {
        "coding": {
            "candidates": ["large", "small"],
            "set_params": {"temperature": 0.1},
            "priority": "low",
            "keep_alive_s": 600,
            "description": "Writes code.",
        },
        "warm": {"candidates": ["never", "small"]},
        "fragile": {"candidates": ["breaks", "small"]},
        "falling": {"candidates": ["crashes", "breaks", "small"]},
        "hopeless": {"candidates": ["crashes", "breaks"]},
        "last-dies": {"candidates": ["breaks", "dies"], "prefer_first_s": 600},
        "only-one-starts": {"candidates": ["unborn", "dies-too"]},
        "huge-first": {"candidates": ["huge", "busy"]},
        "huge-last": {"candidates": ["busy", "huge"]},
        "huge-and-broken": {"candidates": ["huge", "breaks"]},
        "unborn-first": {"candidates": ["unborn", "busy"]},
        "limited": {"candidates": ["few", "small"]},
        "limited-and-huge": {"candidates": ["few", "huge"]},
        "only-few": {"candidates": ["few"]},
        "picky": {"candidates": ["dumb", "large", "small"], "require": {"strict_json": True}},
        "vectors": {"candidates": ["small"]},
        "hidden": {"candidates": ["large"], "unlisted": True},
    }
    async with gateway(folder, models, tasks=tasks, server={"api_keys": KEYS}) as app:
        gate = Gate(app, journal)
        # Both are there in every test, whichever ran before it.
        for name in ("large", "small"):
            assert (await gate.chat(name)).status == 200
        yield gate
        await at_rest(app)


async def test_the_first_candidate_answers_with_what_task_and_model_set(gate: Gate) -> None:
    answer = await gate.chat("coding", temperature=0.5, top_k=1)
    assert answer.status == 200 and answer.headers["x-model"] == "large"
    sent = gate.sent(answer)
    assert (sent["model"], sent["temperature"], sent["top_k"]) == ("large", 0.1, 5)
    record = (await gate.ask("GET", f"/api/v1/requests/{answer.headers['x-request-id']}")).json()
    assert (record["model"], record["asked_as"], record["priority"]) == ("large", "coding", 2)


async def test_a_later_candidate_that_is_warm_answers_for_one_that_is_cold(gate: Gate) -> None:
    assert (await gate.chat("small")).status == 200
    for stream in (False, True):
        answer = await gate.chat("warm", stream=stream)
        assert answer.status == 200 and answer.headers["x-model"] == "small"
        assert gate.sent(answer)["model"] == "small"
    assert not is_ready(gate.app, "never")


async def test_an_answer_that_failed_before_its_first_byte_comes_from_the_next(gate: Gate) -> None:
    await gate.chat("small")
    assert (await gate.chat("breaks")).status == 200
    answer = await gate.chat("fragile", stream=True)
    assert answer.status == 200 and answer.headers["x-model"] == "small" and "data: [DONE]" in answer.events
    tried = [line["name"] for line in gate.journal.lines("request", id=answer.headers["x-request-id"])]
    assert tried == ["breaks", "small"]


async def test_each_candidate_is_tried_once_and_the_last_error_is_told(gate: Gate) -> None:
    answer = await gate.chat("falling", stream=True)
    assert answer.status == 200 and answer.headers["x-model"] == "small"
    tried = [line["name"] for line in gate.journal.lines("request", id=answer.headers["x-request-id"])]
    assert sorted(tried) == sorted(set(tried)) and tried[-1] == "small"
    failed = await gate.chat("hopeless", stream=True)
    # Which of the two is the last depends on what is ready.
    assert failed.status in (500, 502), failed.body
    tried = [line["name"] for line in gate.journal.lines("request", id=failed.headers["x-request-id"])]
    assert "breaks" in tried and sorted(tried) == sorted(set(tried))


@pytest.mark.parametrize(("task", "tried"), [("last-dies", ["breaks", "dies"]), ("only-one-starts", ["dies-too"])])
async def test_the_last_candidate_is_not_asked_again_after_it_is_lost(gate: Gate, task: str, tried: list[str]) -> None:
    """Its process ends before the first byte: that of a model alone would be asked again, once."""
    await gate.chat("breaks")
    failed = await gate.chat(task, stream=True)
    assert failed.status == 502, failed.body
    asked = gate.journal.lines("request", id=failed.headers["x-request-id"])
    assert [line["name"] for line in asked] == tried


@pytest.mark.parametrize(
    ("task", "status"), [("huge-first", 429), ("huge-last", 429), ("huge-and-broken", 500), ("unborn-first", 429)]
)
async def test_the_last_error_is_that_of_a_model_that_was_asked(gate: Gate, task: str, status: int) -> None:
    """The others cannot serve: one is too large for the devices, the load of the other fails."""
    for name, known in (("breaks", 200), ("busy", 200), ("unborn", 503)):
        assert (await gate.chat(name)).status == known
    failed = await gate.chat(task, stream=True)
    assert (failed.status, failed.error["message"]) == (status, "the engine failed as told")
    assert len(gate.journal.lines("request", id=failed.headers["x-request-id"])) == 1


async def test_a_request_that_returns_to_its_first_candidate_asks_that_one(tmp_path: Path) -> None:
    """The second one is warm, is asked first, and fails."""
    journal = Journal(tmp_path)
    record = (*journal.switches, "--record")
    models = {
        "first": fake("first", *record, set_params={"top_k": 5}),
        "breaks": fake("breaks", *record, "--sse-weird", "error-500", set_params={"top_k": 9}),
    }
    async with gateway(tmp_path, models, tasks={"t": {"candidates": ["first", "breaks"]}}) as app:
        await chat(app, "breaks")
        answer = await chat(app, "t", stream=True)
        assert answer.status == 200 and answer.headers["x-model"] == "first"
        sent = [json.loads(line["body"]) for line in journal.lines("request", id=answer.headers["x-request-id"])]
        assert [(body["model"], body["top_k"]) for body in sent] == [("breaks", 9), ("first", 5)]


async def test_a_model_at_its_own_limit_is_passed_over(gate: Gate) -> None:
    await gate.chat("small")
    assert (await gate.chat("few")).status == 200
    answer = await gate.chat("limited")
    assert answer.status == 200 and answer.headers["x-model"] == "small"
    for task in ("only-few", "limited-and-huge"):
        refused = await gate.chat(task)
        assert refused.status == 429 and refused.error["message"] == "Model few exceeded 1 req/min"
        # However many models it has: its end is recorded, because it came to the scheduler.
        assert gate.app.activity.get(refused.headers["x-request-id"]).status == 429


async def test_a_key_gets_the_models_that_it_may_use_and_sees_no_others(gate: Gate) -> None:
    answer = await gate.chat("coding", key="narrow-key-0123456789ab")
    assert answer.status == 200 and answer.headers["x-model"] == "small"
    hidden = await gate.chat("coding", key="stranger-key-012345678")
    unknown = await gate.chat("nothing", key="stranger-key-012345678")
    assert (hidden.status, hidden.error["code"]) == (404, "model_not_found") == (unknown.status, unknown.error["code"])
    listed = (await gate.ask("GET", "/v1/models", key="narrow-key-0123456789ab")).json()["data"]
    cards = {card["id"]: card for card in listed}
    assert {"small", "coding", "warm", "vectors"} <= cards.keys() and not {"large", "hidden"} & cards.keys()
    assert cards["coding"]["meta"] == {"candidates": ["small"]} and cards["coding"]["description"] == "Writes code."
    shown = await gate.ask("GET", "/v1/models/coding", key="stranger-key-012345678")
    assert shown.status == 404
    tags = (await gate.ask("GET", "/api/tags", key="narrow-key-0123456789ab")).json()["models"]
    assert "coding:latest" in [one["name"] for one in tags]
    for key, status in (("narrow-key-0123456789ab", 200), ("stranger-key-012345678", 404)):
        shown = await gate.ask("POST", "/api/show", {"model": "coding:latest"}, key=key)
        assert shown.status == status, shown.body


async def test_what_a_task_requires_and_what_a_route_needs_pass_models_over(gate: Gate) -> None:
    answer = await gate.chat("picky")
    assert answer.status == 200 and answer.headers["x-model"] == "small"
    refused = await gate.ask("POST", "/v1/embeddings", {"model": "vectors", "input": "a"})
    assert (refused.status, refused.error["code"]) == (400, "no_candidate")
    assert refused.error["message"].endswith("small: it does not do embeddings.")


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
    ],
)
async def test_strict_json_is_asked_of_models_that_promise_it(gate: Gate, asked: dict[str, Any]) -> None:
    assert (await gate.chat("coding", **asked)).headers["x-model"] == "small"


async def test_every_dialect_may_name_a_task(gate: Gate) -> None:
    messages = [{"role": "user", "content": "hi"}]
    claude = await gate.ask("POST", "/v1/messages", {"model": "coding", "max_tokens": 9, "messages": messages})
    assert claude.status == 200 and claude.headers["x-model"] == "large" == claude.json()["model"]
    ollama = await gate.ask("POST", "/api/chat", {"model": "warm", "stream": False, "messages": messages})
    assert ollama.status == 200 and ollama.headers["x-model"] == "small" == ollama.json()["model"]
    openai = await gate.ask("POST", "/v1/responses", {"model": "coding", "input": "hi"})
    assert openai.status == 200 and openai.headers["x-model"] == "large" == openai.json()["model"]


async def test_llama_cpps_routes_tell_of_the_first_model_of_a_task_and_load_no_task(gate: Gate) -> None:
    for key, model in ((KEYS[0]["key"], "large"), ("narrow-key-0123456789ab", "small")):
        props = await gate.ask("GET", "/props?model=coding", key=key)
        assert props.status == 200 and props.json()["model_alias"] == model
        assert (await gate.ask("GET", "/slots?model=coding", key=key)).status == 200
    assert (await gate.ask("GET", "/props?model=coding", key="stranger-key-012345678")).status == 404
    for order in ("load", "unload"):
        refused = await gate.ask("POST", f"/models/{order}", {"model": "coding"})
        assert (refused.status, refused.error["param"]) == (400, "model")
        assert refused.error["message"] == f"coding is a task: say which of its models to {order} (large, small)."


async def test_orders_for_a_task_are_told_its_models(gate: Gate) -> None:
    named = [("POST", f"/v1/models/{order}", {"model": "coding"}) for order in ("load", "unload")]
    named += [("POST", f"/api/v1/models/coding/{order}", {}) for order in ("load", "unload", "sleep", "prepare", "pin")]
    for method, path, body in [
        *named,
        ("GET", "/api/v1/models/coding/logs", None),
        ("GET", "/api/v1/models/coding", None),
    ]:
        refused = await gate.ask(method, path, body)
        assert (refused.status, refused.error["code"]) == (404, "model_not_found"), path
        assert refused.error["message"] == "coding is a task. Name one of its models: large, small.", path
    stranger = await gate.ask("GET", "/api/v1/models/coding", key="stranger-key-012345678")
    assert stranger.error["message"].startswith("There is no model coding.")


async def test_a_form_may_name_a_task(gate: Gate) -> None:
    body, headers = form([("model", "warm")], b"RIFF"), {"Authorization": f"Bearer {KEYS[0]['key']}", **FORM}
    answer = await http(gate.app, "POST", "/v1/audio/transcriptions", body=body, headers=headers)
    assert answer.status == 200 and answer.headers["x-model"] == "small", answer.body


async def test_an_explanation_names_every_candidate(gate: Gate) -> None:
    await gate.chat("small")
    told = (await gate.ask("POST", "/api/v1/explain", {"model": "warm"})).json()
    assert (told["task"], told["model"], told["action"]) == ("warm", "small", "serve")
    assert [(one["model"], one["verdict"]) for one in told["candidates"]] == [("never", "slower"), ("small", "chosen")]
    told = (await gate.ask("POST", "/api/v1/explain", {"model": "picky"})).json()
    assert {one["model"]: one["verdict"] for one in told["candidates"]} == {
        "small": "chosen",
        "dumb": "left_out",
        "large": "left_out",
    }


async def test_a_reload_changes_tasks_at_once(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": fake("a"), "b": fake("b")}, tasks={"t": {"candidates": ["a"]}}) as app:
        assert (await chat(app, "t")).headers["x-model"] == "a"
        assert app.path is not None
        text = app.path.read_text().replace("candidates:\n    - a", "candidates:\n    - b\n    pin_primary: true")
        app.path.write_text(text)
        changes = await app.reload()
        assert changes.at_once == ("tasks",)
        assert (await chat(app, "t")).headers["x-model"] == "b"
