"""A file of llama-swap, imported and served: the same answers and the same models in memory, request by request.

The table says what llama-swap does with the same file. Its engines are programs here too, so nothing else differs.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from greenroom.app import App
from greenroom.importing.llama_swap import import_file
from tests.harness import FAKE_ENGINE, fake, gateway
from tests.integration.facts import is_ready
from tests.integration.raw import CHAT, Answer, Raw, asking, http, request_bytes
from tests.waiting import PATIENCE_S, until

FILTERS = {"stripParams": "seed", "setParamsByID": {"${MODEL_ID}:hot": {"temperature": 2}}}
SWAP = {
    "macros": {"engine": f"{shlex.quote(sys.executable)} -I -S {shlex.quote(str(FAKE_ENGINE))} --port ${{PORT}}"},
    "healthCheckTimeout": 60,
    "models": {
        "a": {"cmd": "${engine} --name a", "ttl": 300, "name": "The first", "filters": FILTERS},
        "org/b": {"cmd": "${engine} --name b", "aliases": ["gpt-4o"], "useModelName": "inner"},
        "c": {"cmd": "${engine} --name ${MODEL_ID}", "unlisted": True},
        "e": {"cmd": "${engine} --name e --talkative", "macros": {"x": 1}},
    },
    "selectors": {"any": {"strategy": "warm", "targets": ["org/b", "a"], "unlisted": True}},
    "groups": {
        "pair": {"swap": True, "exclusive": True, "members": ["a", "org/b"]},
        "always": {"swap": False, "exclusive": False, "persistent": True, "members": ["e"]},
    },
}


@dataclass(frozen=True)
class Step:
    """A request, what it is answered with, and the models that run afterwards."""

    asked: str
    status: int
    running: str
    answered_by: str | None = None
    body: dict[str, Any] | None = None
    text: str | None = None


def chatting(model: str, by: str | None, running: str, status: int = 200) -> Step:
    return Step(f"POST {CHAT}", status, running, by, asking(model))


TOGETHER = (
    Step("GET /running", 200, "", text='{"running":[]}'),
    chatting("a", "a", "a"),
    # The alias of the other of a pair: one of them runs.
    chatting("gpt-4o", "b", "org/b"),
    # A group that excludes none joins.
    Step("POST /v1/embeddings", 200, "e org/b", "e", {"model": "e", "input": "x"}),
    # In no group: it excludes the others, but not those that persist.
    chatting("c", "c", "c e"),
    chatting("a", "a", "a e"),
    # An id with parameters of its own, and a selector whose second target is warm.
    chatting("a:hot", "a", "a e"),
    chatting("any", "a", "a e"),
    chatting("nobody", None, "a e", 404),
    Step("GET /upstream/nobody/echo/x", 404, "a e"),
    Step("GET /unload", 200, "", text="OK"),
)
UNLOADED = (
    chatting("a", "a", "a"),
    chatting("e", "e", "a e"),
    Step("POST /api/models/unload/e", 200, "a", text="OK"),
    Step("POST /api/models/unload/e", 200, "a", text="OK"),
    Step("POST /api/models/unload/nobody", 404, "a"),
    Step("GET /upstream/org/b/echo/x", 200, "org/b"),
    Step("POST /api/models/unload/org%2Fb", 200, "", text="OK"),
    Step("POST /rerank", 200, "a", "a", {"model": "a", "query": "q", "documents": ["d"]}),
    Step("POST /reranking", 200, "a", "a", {"model": "a", "query": "q", "documents": ["d"]}),
    Step("POST /v1/reranking", 200, "a", "a", {"model": "a", "query": "q", "documents": ["d"]}),
    Step("POST /api/models/unload/gpt-4o", 200, "a", text="OK"),
    Step("POST /api/models/unload", 200, "", text='{"msg":"ok"}'),
    Step("GET /unload", 200, "", text="OK"),
    Step("GET /health", 200, ""),
    Step("GET /metrics", 200, ""),
    Step("GET /api/version", 200, ""),
    Step("GET /logs", 200, ""),
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    folder: Path = tmp_path_factory.mktemp("swap")
    (folder / "config.yaml").write_text(yaml.safe_dump(SWAP, sort_keys=False))
    made = import_file(folder / "config.yaml").tree
    models: Any = made.pop("models")
    made.pop("server")
    async with gateway(folder, models, **made) as app:
        yield app


async def running(app: App) -> dict[str, dict[str, Any]]:
    return {one["model"]: one for one in (await http(app, "GET", "/running")).json()["running"]}


@pytest.mark.parametrize("table", [TOGETHER, UNLOADED], ids=["together", "unloaded"])
async def test_it_answers_as_llama_swap_does(app: App, table: tuple[Step, ...]) -> None:
    for number, step in enumerate(table):
        method, path = step.asked.split()
        answer = await http(app, method, path, step.body)
        told = f"step {number}, {step.asked}: {answer.body[:300]!r}"
        assert answer.status == step.status, told
        if step.answered_by is not None:
            assert answer.json()["model"] == step.answered_by, told
        if step.text is not None:
            assert answer.body.decode() == step.text, told
        there = await running(app)
        assert " ".join(sorted(there)) == step.running, told
        assert {one["state"] for one in there.values()} <= {"ready"}, told


async def test_models_are_listed_and_told_as_there(app: App) -> None:
    assert [one["id"] for one in (await http(app, "GET", "/v1/models")).json()["data"]] == ["a", "e", "org/b"]
    await http(app, "POST", CHAT, asking("a", seed=3))
    one = (await running(app))["a"]
    assert set(one) == {"model", "state", "cmd", "proxy", "ttl", "name", "description"}
    assert (one["ttl"], one["name"]) == (300, "The first") and one["cmd"].endswith("--port ${PORT} --name a")


async def test_logs_are_text_of_all_engines_or_of_one(app: App) -> None:
    assert (await http(app, "POST", CHAT, asking("e"))).status == 200
    await until(lambda: bool(app.slots.log(app.catalog.find("e").id).tail(1)), "its engine has printed")  # type: ignore[union-attr]
    whole = await http(app, "GET", "/logs")
    assert whole.headers["content-type"].startswith("text/plain") and b"[e] " in whole.body
    for path, begin in (("/logs/stream", b"[e] "), ("/logs/stream/upstream", b"[e] "), ("/logs/stream/e", b"")):
        async with await Raw.open(app) as raw:
            raw.send(request_bytes("GET", path, None))
            status, headers = await raw.head()
            assert (status, headers["content-type"].partition(";")[0]) == (200, "text/plain")
            assert begin in await received(raw, b"--name")
    assert (await http(app, "GET", "/logs/stream/proxy")).status == 404
    assert (await http(app, "GET", "/logs/stream/nobody")).status == 404


async def test_a_line_that_is_printed_later_reaches_an_open_log_stream(app: App) -> None:
    async with await Raw.open(app) as raw:
        raw.send(request_bytes("GET", "/logs/stream?no-history", None))
        assert (await raw.head())[0] == 200
        await http(app, "POST", CHAT, asking("e", user="a-new-line"))
        assert b"[e] " in await received(raw, b"a-new-line")


async def test_events_tell_the_state_of_models_whenever_it_changes(app: App) -> None:
    await http(app, "POST", CHAT, asking("a"))
    async with await Raw.open(app) as raw:
        raw.send(request_bytes("GET", "/api/events", None))
        assert (await raw.head())[0] == 200
        assert b'\\"id\\":\\"a\\"' in await received(raw, b'\\"state\\":\\"ready\\"')
        await http(app, "POST", "/api/models/unload/a")
        text = (
            await received(
                raw, b'\\"id\\":\\"a\\",\\"name\\":\\"The first\\",\\"description\\":\\"\\",\\"state\\":\\"stopped\\"'
            )
        ).decode()
    event = next(line for line in text.splitlines() if line.startswith("data:") and "modelStatus" in line)
    told = json.loads(event.removeprefix("data:"))
    assert told["type"] == "modelStatus" and {one["id"] for one in json.loads(told["data"])} == {"a", "org/b", "c", "e"}


async def received(raw: Raw, wanted: bytes) -> bytes:
    """What came until this did."""
    found = b""
    async with asyncio.timeout(PATIENCE_S):
        while wanted not in found:
            more = await raw.reader.read(65536)
            assert more, found
            found += more
    return found


async def test_keys_unload_and_see_what_they_may(tmp_path_factory: pytest.TempPathFactory) -> None:
    keys = [
        {"name": "all", "key": "all", "admin": True},
        {"name": "some", "key": "some", "verbs": ["load"], "models": ["m*"]},
        {"name": "none", "key": "none"},
    ]
    models = {"m": fake("m"), "other": fake("other"), "shy": fake("shy", unlisted=True)}
    # It runs elsewhere: no unload concerns it.
    models["far"] = {"engine": "remote", "remote": "lan", "use_model_name": "x"}
    remotes = {"lan": {"base_url": "http://127.0.0.1:9/v1"}}
    async with gateway(tmp_path_factory.mktemp("keys"), models, server={"api_keys": keys}, remotes=remotes) as app:

        async def by(key: str, method: str, path: str, body: Any = None) -> Answer:
            return await http(app, method, path, body, headers={"Authorization": f"Bearer {key}"})

        for model in ("m", "other", "shy"):
            assert (await by("all", "POST", CHAT, asking(model))).status == 200
        seen = {key: (await by(key, "GET", "/running")).json()["running"] for key in ("all", "some", "none")}
        assert {key: [one["model"] for one in told] for key, told in seen.items()} == {
            "all": ["m", "other", "shy"],
            "some": ["m"],
            "none": ["m", "other"],
        }
        assert seen["all"][0]["cmd"] and not seen["none"][0]["cmd"]
        assert (await by("none", "GET", "/unload")).status == 403
        assert (await by("some", "POST", "/api/models/unload/other")).status == 404
        assert (await by("some", "GET", "/unload")).status == 200
        assert [one["model"] for one in (await by("all", "GET", "/running")).json()["running"]] == ["other", "shy"]
        assert (await by("all", "GET", "/unload")).status == 200
        assert (await by("all", "GET", "/running")).json() == {"running": []} and is_ready(app, "far")
