"""What of a request reaches an engine, byte by byte, and what never does. The engine writes down what it was sent."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from tests.harness import fake, gateway
from tests.integration.facts import Journal, at_rest
from tests.integration.raw import CHAT, Answer, Raw, asking, http, request_bytes
from tests.samples.sounds import FORM, form

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class JournaledGateway:
    app: App
    journal: Journal

    async def post(
        self, body: bytes, *, path: str = CHAT, headers: Mapping[str, str] | None = None
    ) -> tuple[Answer, dict[str, Any]]:
        """The answer, and the request as the engine got it."""
        answer = await http(self.app, "POST", path, body=body, headers=headers)
        return answer, self.sent(answer)

    def sent(self, answer: Answer) -> dict[str, Any]:
        (line,) = self.journal.lines("request", id=answer.headers["x-request-id"])
        return line


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gate(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[JournaledGateway]:
    folder = tmp_path_factory.mktemp("rewritten")
    journal = Journal(folder)
    record = (*journal.switches, "--record")
    models = {
        "plain": fake("plain", *record, aliases=["other-name", "with/slash:q4"]),
        "org/name": fake("org/name", *record),
        "renamed": fake("renamed", *record, use_model_name="the-real-one"),
        "edited": fake(
            "edited", *record, strip_params=["top_k", "user"], set_params={"temperature": 0.5, "extra": {"a": [1]}}
        ),
        "split": fake("split", *record, "--split-bytes", "7"),
    }
    async with gateway(folder, models, server={"forward_headers": ["X-Trace", "Cookie", "Authorization"]}) as app:
        yield JournaledGateway(app, journal)


HI = b'"messages": [{"role": "user", "content": "hi"}]'

# --- bodies ---------------------------------------------------------------------------------------------------------


async def test_repeated_model_cannot_route_one_and_ask_for_another(gate: JournaledGateway) -> None:
    answer, sent = await gate.post(b'{"model": "org/name", %b, "model": "plain", "mod\\u0065l": "plain"}' % HI)
    assert answer.text.startswith("plain")
    assert sent["body"].count("plain") == 1
    assert "org/name" not in sent["body"]


@pytest.mark.parametrize("alias", ["other-name", "with/slash:q4"])
async def test_alias_is_routed_and_sent_as_it_was_asked(gate: JournaledGateway, alias: str) -> None:
    answer, sent = await gate.post(json.dumps(asking(alias)).encode())
    assert answer.text.startswith("plain")
    assert sent["model"] == alias


async def test_use_model_name_is_what_the_engine_is_asked_for(gate: JournaledGateway) -> None:
    _, sent = await gate.post(b'{"model": "renamed", %b}' % HI)
    assert sent["model"] == "the-real-one"


async def test_parameters_are_stripped_and_set(gate: JournaledGateway) -> None:
    asked = b'{"model": "edited", "top_k": 1, "user": "me", "temperature": 2.0, "seed": 1, %b}' % HI
    _, sent = await gate.post(asked)
    body = json.loads(sent["body"])
    assert body.pop("messages") and body == {"model": "edited", "seed": 1, "temperature": 0.5, "extra": {"a": [1]}}


# --- usage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["plain", "split"])
async def test_usage_is_asked_for_and_dropped_when_the_caller_did_not_ask(gate: JournaledGateway, model: str) -> None:
    body = asking(model, stream=True, stream_options={"keep": 1})
    answer, sent = await gate.post(json.dumps(body).encode())
    assert json.loads(sent["body"])["stream_options"] == {"keep": 1, "include_usage": True}
    assert answer.data[-1] == "[DONE]"
    assert len(answer.data) == 6, "four tokens, the finish, [DONE]"
    assert all(event["choices"] for event in answer.data[:-1])
    record = gate.app.activity.get(answer.headers["x-request-id"])
    assert record is not None
    assert (record.completion_tokens, record.estimated) == (4, False)


# --- headers --------------------------------------------------------------------------------------------------------


async def test_headers_reach_the_engine_by_allow_list_only(gate: JournaledGateway) -> None:
    said = {
        "Authorization": "Bearer secret-key",
        "Cookie": "session=secret",
        "X-Api-Key": "secret-key",
        "Accept": "application/json",
        "Accept-Encoding": "gzip",
        "X-Trace": "kept",
        "X-Cache-Tag": "secret-tag",
        "X-Tenant-ID": "lab",
        "X-Priority": "low",
        "X-Client-ID": "me",
        "X-Forwarded-For": "10.0.0.1",
        "X-Request-ID": "chosen-by-the-caller",
        "User-Agent": "tests",
        "Connection": "keep-alive, x-trace-2",
        "X-Trace-2": "not named",
    }
    answer, sent = await gate.post(b'{"model": "plain", %b}' % HI, headers=said)
    got = dict(sent["headers"])
    # Named in forward_headers or not: keys and cookies are never forwarded.
    assert set(got) == {"host", "content-length", "content-type", "accept", "x-trace", "x-request-id"}
    assert (got["x-trace"], got["accept"], got["host"]) == ("kept", "application/json", "localhost")
    assert got["x-request-id"] == answer.headers["x-request-id"]
    assert "secret" not in json.dumps(sent)
    record = gate.app.activity.get(answer.headers["x-request-id"])
    assert record is not None
    assert (record.tenant, record.priority) == ("lab", 2)


# --- forms ----------------------------------------------------------------------------------------------------------


async def test_form_is_routed_by_a_model_that_follows_a_large_file(gate: JournaledGateway) -> None:
    """3 MiB are more than is kept in memory: the file is spooled and passed on whole."""
    file = bytes(range(256)) * (3 * 1024 * 4)
    fields = [("x_client_id", "me"), ("language", "en"), ("model", "plain")]
    body = form([], file).removesuffix(b"--b0undary--\r\n") + form(fields)
    answer, _ = await gate.post(body, path="/v1/audio/transcriptions", headers=FORM)
    assert answer.status == 200
    said = answer.json()
    assert (said["text"], said["model"]) == ("plain heard", "plain")
    assert said["fields"] == ["file", "language", "model"], "our own field is not forwarded"
    assert said["sizes"]["file"] == len(file)
    await at_rest(gate.app)


# --- pass-through ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["org/name", "org%2Fname", "org%2fname"])
async def test_upstream_passes_path_query_and_body_as_they_are(gate: JournaledGateway, spelling: str) -> None:
    path = f"/upstream/{spelling}/echo/a%2Fb/%C3%A9//c?q=1&q=%26&empty="
    answer = await http(gate.app, "PUT", path, body=b'{"model": "untouched", "x_mine": 1}')
    said = answer.json()
    assert answer.status == 200
    assert (said["name"], said["method"]) == ("org/name", "PUT")
    assert said["path"] == "/echo/a%2Fb/%C3%A9//c?q=1&q=%26&empty="
    assert said["json"] == {"model": "untouched", "x_mine": 1}


async def test_upstream_of_an_unknown_model_is_not_found(gate: JournaledGateway) -> None:
    for path in ("/upstream/nobody/echo/", "/upstream/", "/upstream/org/echo/"):
        answer = await http(gate.app, "GET", path)
        assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model"), path


async def test_head_reaches_the_engine_and_its_answer_has_no_body(gate: JournaledGateway) -> None:
    async with await Raw.open(gate.app) as raw:
        raw.send(request_bytes("HEAD", "/upstream/plain/echo/x", None))
        answer = await raw.answer(bodiless=True)
        assert answer.status == 200
        assert int(answer.headers["content-length"]) > 0
        # The connection is good for another: nothing of a body came.
        raw.send(request_bytes("GET", "/health", None))
        assert (await raw.answer()).json()["status"] == "healthy"


# --- what is refused ------------------------------------------------------------------------------------------------


async def test_unknown_route_is_not_found_in_our_shape(gate: JournaledGateway) -> None:
    for method, path in (("GET", "/nothing"), ("POST", "/v1/images/dreams"), ("POST", "/v1/chat/completions/")):
        answer = await http(gate.app, method, path, body=b"{}" if method == "POST" else None)
        assert answer.status == 404, path
        assert set(answer.error) == {"message", "type", "code", "param", "details"}
        assert answer.error["type"] == "not_found_error"
        assert answer.headers["x-request-id"].startswith("r-")
        assert answer.headers["x-should-retry"] == "false"
    assert (await http(gate.app, "GET", CHAT)).status == 405
