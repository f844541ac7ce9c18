"""Profiles through a running gateway: what callers get without asking, and what they may ask at most."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from greenroom.core.model import ModelId
from greenroom.features.jobs.job import AnswerFile
from greenroom.http.body import Body
from greenroom.http.exchange import Exchange
from greenroom.http.request import Head
from greenroom.serving.admitted import OUR_HEADERS
from greenroom.serving.routes import MODEL_ROUTES
from tests.harness import fake, gateway
from tests.integration.facts import Journal, over
from tests.integration.raw import CHAT, Answer, http
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SWITCHES = "chat_template_kwargs"
PROFILES: dict[str, Any] = {
    "teams": {
        "keys": ["team-*"],
        "default_model": "large",
        "models": ["large", "small", "edited"],
        "priority": "normal",
        "keep_alive_s": 600,
        "set_params": {"temperature": 0.2, "seed": 7},
        "thinking": False,
        "clients": {
            "bot-*": {
                "default_model": "small",
                "models": ["small", "secret"],
                "priority": "low",
                "keep_alive_s": 60,
                "set_params": {"temperature": 2, "top_k": 5},
                "thinking": True,
                SWITCHES: {"style": "short"},
            }
        },
    },
    "labs": {"tenants": ["lab"], "default_model": "small"},
    "writers": {"keys": ["writer"], "default_model": "writing", "models": ["small"]},
}
KEYS: list[dict[str, Any]] = [
    *({"name": name} for name in ("team-a", "solo", "writer")),
    {"name": "chemist", "tenant": "lab"},
    {"name": "boss", "admin": True},
]
TASKS = {"writing": {"candidates": ["secret", "small"], "pin_primary": True}}


@dataclass
class Gate:
    app: App
    journal: Journal

    async def post(self, key: str, body: Any, path: str = CHAT, **headers: str) -> Answer:
        said = {
            "Authorization": f"Bearer {key}-key",
            **{name.replace("_", "-"): text for name, text in headers.items()},
        }
        return await http(self.app, "POST", path, body, headers=said)

    async def get(self, key: str, path: str, **headers: str) -> Answer:
        said = {
            "Authorization": f"Bearer {key}-key",
            **{name.replace("_", "-"): text for name, text in headers.items()},
        }
        return await http(self.app, "GET", path, headers=said)

    def sent(self, answer: Answer) -> dict[str, Any]:
        """What the engine got."""
        assert answer.status == 200, answer.body
        (line,) = self.journal.lines("request", id=answer.headers["x-request-id"])
        found: dict[str, Any] = json.loads(line["body"])
        return found

    def record(self, answer: Answer) -> Any:
        return self.app.activity.get(answer.headers["x-request-id"])


def asking(model: str | None = None, **more: Any) -> dict[str, Any]:
    named = {} if model is None else {"model": model}
    return {**named, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **more}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gate(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gate]:
    folder = tmp_path_factory.mktemp("profiles")
    journal = Journal(folder)
    record = (*journal.switches, "--record")
    own = {"temperature": 0.9, SWITCHES: {"enable_thinking": True}}
    models = {
        "large": fake("large", *record),
        "small": fake("small", *record, aliases=["tiny"]),
        "edited": fake("edited", *record, set_params=own, strip_params=["seed"]),
        "secret": fake("secret", *record, routes=["/echo/**"]),
    }
    server = {"api_keys": [{**key, "key": f"{key['name']}-key"} for key in KEYS]}
    async with gateway(folder, models, server=server, profiles=PROFILES, tasks=TASKS) as app:
        yield Gate(app, journal)


async def test_a_request_without_a_model_gets_that_of_its_profile(gate: Gate) -> None:
    assert gate.sent(await gate.post("team-a", asking()))["model"] == "large"
    assert gate.sent(await gate.post("chemist", asking()))["model"] == "small"
    assert gate.sent(await gate.post("team-a", asking(), X_Client_ID="bot-1"))["model"] == "small"
    # The id in the body wins.
    both = await gate.post("team-a", asking(x_client_id="bot-1"), X_Client_ID="editor")
    assert gate.sent(both)["model"] == "small"
    nothing = await gate.post("solo", asking())
    assert (nothing.status, nothing.error["param"]) == (400, "model")


async def test_the_default_may_be_a_task_of_which_the_profile_allows_a_part(gate: Gate) -> None:
    answer = await gate.post("writer", asking())
    assert gate.record(answer).model == "small" and gate.sent(answer)["model"] == "small"
    assert gate.record(await gate.post("solo", asking("writing"))).model == "secret"


async def test_every_dialect_has_the_default(gate: Gate) -> None:
    said = asking()
    for path in ("/v1/messages", "/api/chat", "/v1/completions"):
        body = {**said, "prompt": "hi", "stream": False} if path == "/v1/completions" else {**said, "stream": False}
        assert gate.sent(await gate.post("team-a", body, path))["model"] == "large", path


async def test_models_beyond_the_profile_look_as_if_they_did_not_exist(gate: Gate) -> None:
    for model, client, status in (
        ("large", "", 200),
        ("tiny", "", 200),
        ("secret", "", 404),
        ("nothing", "", 404),
        ("small", "bot-1", 200),
        ("large", "bot-1", 404),
        ("secret", "bot-1", 404),
        ("large", "editor", 200),
    ):
        answer = await gate.post("team-a", asking(model), X_Client_ID=client)
        assert answer.status == status, (model, client)
        in_body = await gate.post("team-a", asking(model, x_client_id=client))
        assert in_body.status == status, (model, client)
    hidden, missing = [await gate.post("team-a", {}, f"/upstream/{one}/echo/x") for one in ("secret", "nothing")]
    assert (hidden.status, hidden.error["message"]) == (
        missing.status,
        missing.error["message"],
    ) and hidden.status == 404
    assert (await gate.post("solo", asking("secret"))).status == 200


async def test_lists_show_what_the_profile_allows_and_operators_all(gate: Gate) -> None:
    async def listed(key: str, **headers: str) -> list[str]:
        return [one["id"] for one in (await gate.get(key, "/v1/models", **headers)).json()["data"]]

    assert sorted(await listed("team-a")) == ["edited", "large", "small", "writing"]
    assert sorted(await listed("team-a", X_Client_ID="bot-1")) == ["small", "writing"]
    assert len(await listed("solo")) == len(await listed("boss")) == 5
    assert (await gate.get("team-a", "/v1/models/secret")).status == 404


async def test_priority_is_that_of_the_profile_at_best(gate: Gate) -> None:
    for client, said, wanted in (("", {}, 1), ("", {"x_priority": "high"}, 1), ("", {"x_priority": "low"}, 2)):
        assert gate.record(await gate.post("team-a", asking("small", **said), X_Client_ID=client)).priority == wanted
    low = await gate.post("team-a", asking("small", x_priority="high"), X_Client_ID="bot-1")
    assert gate.record(low).priority == 2
    assert gate.record(await gate.post("solo", asking("small", x_priority="high"))).priority == 0


@pytest.mark.parametrize(
    ("client", "said", "stays_s"),
    [("", {}, 600), ("", {"keep_alive": 30}, 30), ("", {"keep_alive": -1}, 600), ("bot-1", {"keep_alive": "1h"}, 60)],
)
async def test_a_model_stays_as_the_profile_says(gate: Gate, client: str, said: dict[str, Any], stays_s: float) -> None:
    await gate.post("team-a", asking("small", **said), X_Client_ID=client)

    def stays() -> float | None:
        (slot,) = gate.app.loop.scheduler.state.slots_of(ModelId("small"))
        return slot.keep_alive_s

    await until(lambda: stays() == stays_s, "the slot was told")


async def test_fields_and_switches_are_set(gate: Gate) -> None:
    sent = gate.sent(await gate.post("team-a", asking("large", temperature=1, top_p=0.5)))
    assert (sent["temperature"], sent["seed"], sent["top_p"]) == (0.2, 7, 0.5)
    assert sent[SWITCHES] == {"enable_thinking": False}
    of_client = gate.sent(await gate.post("team-a", asking("small", **{SWITCHES: {"mine": 1}}), X_Client_ID="bot-1"))
    assert (of_client["temperature"], of_client["top_k"]) == (0.2, 5)
    assert of_client[SWITCHES] == {"mine": 1, "enable_thinking": False, "style": "short"}
    # What the model sets or strips itself goes first.
    edited = gate.sent(await gate.post("team-a", asking("edited")))
    assert (edited["temperature"], edited[SWITCHES]) == (0.9, {"enable_thinking": True}) and "seed" not in edited


async def test_only_requests_for_text_are_changed_and_switches_are_for_chats(gate: Gate) -> None:
    words = gate.sent(await gate.post("team-a", {"model": "large", "input": "hi"}, "/v1/embeddings"))
    assert words == {"model": "large", "input": "hi"}
    text = gate.sent(await gate.post("team-a", {"model": "large", "prompt": "hi"}, "/v1/completions"))
    assert text["seed"] == 7 and SWITCHES not in text
    translated = gate.sent(await gate.post("team-a", {**asking("large"), "think": True, "stream": False}, "/api/chat"))
    assert (translated["temperature"], translated[SWITCHES]) == (0.2, {"enable_thinking": False})


async def test_a_job_goes_by_the_profile(gate: Gate) -> None:
    accepted = await gate.post("team-a", asking(), Prefer="respond-async", X_Client_ID="bot-1")
    assert accepted.status == 202, accepted.body
    path = f"/v1/jobs/{accepted.json()['id']}"
    await over(gate.app, path, {"Authorization": "Bearer team-a-key"})
    assert (await gate.get("team-a", f"{path}/result")).json()["model"] == "small"
    refused = await gate.post("team-a", asking("secret"), Prefer="respond-async")
    assert refused.status == 404


async def test_requests_without_a_profile_are_as_ever(gate: Gate) -> None:
    body = asking("large", temperature=1, **{SWITCHES: {"mine": 1}})
    answer = await gate.post("solo", body, X_Client_ID="bot-1")
    assert gate.sent(answer) == body
    assert gate.record(answer).client == "bot-1"


async def test_what_is_read_again_after_a_reload_goes_by_the_profiles_of_then(gate: Gate) -> None:
    app, body = gate.app, Body(gate.app.bodies)
    body.append(json.dumps(asking("large")).encode())
    head = Head(b"POST", CHAT.encode(), [], "1.1", "127.0.0.1", keep_alive=True)
    caller, route = app.keys.keys.named("team-a"), MODEL_ROUTES[head.path]
    assert caller is not None
    exchange = Exchange(AnswerFile(), app.edge.state, head, body)
    admitted = app.inference.admitted(head.get_all(OUR_HEADERS), route, caller)
    # A long body is read in several tries.
    reading = app.inference.reading(exchange, admitted, route)
    assert reading.read().keep_alive_s == 600
    app.inference.configure(app.config.model_copy(update={"profiles": {}}))
    try:
        assert reading.read().keep_alive_s is None
    finally:
        app.inference.configure(app.config)
        body.close()
