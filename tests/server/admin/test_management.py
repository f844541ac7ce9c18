"""What every route of the management API has in common: errors, HEAD, the schema, and the bridge it is behind."""

from __future__ import annotations

import asyncio
import json
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any, cast

import fastapi.routing
import jsonschema_rs
import pytest

from greenroom.config.kinds import id_problem
from greenroom.http.body import Body, BodyBudget
from greenroom.http.exchange import Exchange
from greenroom.http.limits import EdgeLimits
from greenroom.server.admin.management import make_management
from greenroom.server.admin.models.model_openapi import DOCUMENTED
from greenroom.server.asgi import AsgiBridge
from greenroom.server.inference.ask import OUR_HEADERS
from greenroom.server.inference.body import model_options
from greenroom.server.inference.body.peek import BUDGET_S, CLIENT_ID, KEEP_ALIVE, KEEP_ALIVE_S, PRIORITY
from greenroom.server.inference.routes import GENERATE, MODEL_ROUTES
from tests.later import Later
from tests.server.admin.management_rig import SOON_S, Client, FakeGateway, model
from tests.waiting import until

schemathesis = Later("schemathesis")


HOLDER = {"host": "h", "pid": 1, "start_ticks": 1, "pid_ns": 1}


def _gateway(**server: Any) -> FakeGateway:
    return FakeGateway({"a": model()}, **server)


@pytest.fixture(scope="module")
def described() -> Client:
    """Of a gateway that has described its routes already, which takes most of a second. Only to be read from."""
    client = Client(_gateway())
    asyncio.run(client.get("/api/v1/openapi.json"))
    return client


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    ["/nowhere", "/api/v1", "/api/v1/", "/health/", "/v1", "//health", "/api/v1/explained", "/api/v1/status/"],
)
async def test_there_is_nothing_at_an_unknown_path(target: str) -> None:
    answer = await Client(_gateway()).get(target)
    assert (answer.status, answer.error["code"], answer.error["type"]) == (404, "not_found", "not_found_error")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    "target",
    ["/health%0A", "/api/v1/status%0a", "/metrics%0D", "/health%00", "/api/v1/docs%0A", "/\N{ZERO WIDTH SPACE}"],
)
async def test_a_path_with_invisible_characters_leads_nowhere(target: str) -> None:
    answer = await Client(_gateway()).get(target)
    assert (answer.status, answer.error["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "target", "allowed"),
    [
        ("POST", "/health", "GET"),
        ("DELETE", "/v1/models", "GET"),
        ("PUT", "/v1/models/a", "GET"),
        ("GET", "/api/v1/models/a/load", "POST"),
        ("GET", "/api/v1/models/a/pin", "POST"),
        ("GET", "/v1/models/unload", "POST"),
        ("GET", "/v1/models/inventory/a", "DELETE"),
        ("PUT", "/api/v1/leases", "GET, POST"),
        ("POST", "/api/v1/requests/r-1", "DELETE, GET"),
        ("GET", "/api/v1/reload", "POST"),
        ("OPTIONS", "/api/v1/status", "GET"),
        ("BREW", "/health", "GET"),
    ],
)
async def test_a_method_that_a_path_does_not_take_is_refused(method: str, target: str, allowed: str) -> None:
    answer = await Client(_gateway()).ask(method, target)
    assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == allowed
    assert allowed in answer.error["message"]


async def test_an_order_without_api_before_it_is_told_its_path() -> None:
    answer = await Client(_gateway()).ask("POST", "/v1/models/a/load")
    assert answer.status == 405
    said = "POST /v1/models/a/load is not possible; it takes GET. Perhaps POST /api/v1/models/a/load is meant."
    assert answer.error["message"] == said


@pytest.mark.parametrize(("name", "said"), [("", "''"), ("%20", "' '"), ("a%20b", "'a b'"), ("a.b", "a.b")])
async def test_a_name_that_is_no_plain_word_is_quoted(name: str, said: str) -> None:
    answer = await Client(_gateway()).get(f"/v1/models/{name}")
    assert answer.error["message"].startswith(f"There is no model {said}. ")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[]", "body: a JSON object is wanted, {…}"),
        (b'"a"', "body: a JSON object is wanted, {…}"),
        (rb'{"modelId": "\ud800"}', "modelId: holds half of a surrogate pair, which is no character"),
    ],
)
async def test_a_body_that_is_no_object_or_no_text_is_told_in_our_words(body: bytes, said: str) -> None:
    answer = await Client(_gateway()).ask("POST", "/v1/models/load", body, {"content_type": "application/json"})
    assert (answer.status, answer.error["message"]) == (400, said)


@pytest.mark.parametrize("name", ["", "a/", "org/update", "a/load", "loaded/x"])
async def test_a_path_below_models_is_a_name_that_is_not_known(name: str) -> None:
    answer = await Client(_gateway()).get(f"/v1/models/{name}")
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("target", "body", "param"),
    [
        *(("/api/v1/models/a/pin", {"pinned": said}, "pinned") for said in ("yes", "off", 1, 0, "true", None)),
        ("/api/v1/models/a/unload", {"grace_s": "5"}, "grace_s"),
        ("/api/v1/models/a/sleep", {"grace_s": True}, "grace_s"),
        ("/v1/models/load", {"modelId": "a", "maxContextLength": "4096"}, "maxContextLength"),
        ("/api/v1/leases", {"mib": "10"}, "mib"),
        ("/api/v1/leases", {"mib": 10, "preemptible": "yes"}, "preemptible"),
        ("/api/v1/leases", {"mib": 10, "holder": {**HOLDER, "pid": "1"}}, "holder.pid"),
        ("/api/v1/explain", {"model": "a", "stream": "on"}, "stream"),
        ("/api/v1/simulate", {"gpus": ["2"]}, "gpus.0"),
        ("/update-model", {"model_repo_id": "org/name", "allow_gap": 1}, "allow_gap"),
    ],
)
async def test_a_body_has_json_booleans_and_numbers_and_no_texts_of_them(
    target: str, body: dict[str, Any], param: str
) -> None:
    answer = await Client(_gateway()).post(target, body)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_request", param)


async def test_a_bug_is_told_without_its_words_and_raised_to_be_logged() -> None:
    gateway = _gateway()
    gateway.reload_error = RuntimeError("a secret")
    exchange = FakeExchange("POST", b"/api/v1/reload")
    await exchange.through(gateway)
    assert exchange.status == 500
    assert json.loads(exchange.body)["error"]["code"] == "internal_error"
    assert b"secret" not in exchange.body


# --- when routes are analysed ----------------------------------------------------------------------------------------


async def test_a_route_is_analysed_once_and_not_before_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """To analyse all of them would double what a gateway's start takes."""
    analysed: list[str] = []
    analyse = fastapi.routing.get_dependant

    def watched(*, path: str, **rest: Any) -> Any:
        analysed.append(path)
        return analyse(path=path, **rest)

    monkeypatch.setattr(fastapi.routing, "get_dependant", watched)
    client = Client(_gateway())
    assert (await client.ask("POST", "/health")).status == 405
    assert analysed == []
    assert [(await client.get("/health")).status for _ in range(2)] == [200, 200]
    assert analysed == ["/health"]


# --- HEAD -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target", ["/v1/models", "/v1/models/a", "/health", "/metrics", "/api/v1/status", "/api/v1/docs"]
)
async def test_head_is_asked_like_get(described: Client, target: str) -> None:
    head, get = await described.ask("HEAD", target), await described.get(target)
    assert (head.status, head.headers.keys()) == (200, get.headers.keys())


@pytest.mark.parametrize("target", ["/api/v1/events", "/api/v1/models/a/logs/stream"])
async def test_a_stream_has_no_head(target: str) -> None:
    answer = await Client(_gateway()).ask("HEAD", target)
    assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")


# --- the schema and its page ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def schema(described: Client) -> dict[str, Any]:
    """Read only, and the same for every gateway."""
    return asyncio.run(described.get("/api/v1/openapi.json")).json


def test_no_id_ends_in_a_word_that_follows_an_id_in_a_path(schema: dict[str, Any]) -> None:
    orders = [path.partition("/{model_id}/")[2] for path in schema["paths"]]
    assert "pin" in orders
    assert all(id_problem(f"a/{order}") is not None for order in orders if order)


def test_the_schema_names_every_route_once_with_its_shapes(schema: dict[str, Any]) -> None:
    assert set(schema["paths"]) == {
        "/v1/models",
        "/v1/models/{model_id}",
        "/v1/models/inventory",
        "/v1/models/inventory/{model_id}",
        "/v1/models/loaded",
        "/v1/models/stats",
        "/health",
        "/healthz",
        "/readyz",
        "/metrics",
        "/v1/capabilities",
        "/api/v1/status",
        "/api/v1/events",
        "/api/v1/requests",
        "/api/v1/requests/{request_id}",
        "/api/v1/decisions",
        "/api/v1/explain",
        "/api/v1/leases",
        "/api/v1/leases/{lease_id}",
        "/api/v1/leases/{lease_id}/renew",
        "/api/v1/gpus",
        "/api/v1/models",
        "/api/v1/models/{model_id}",
        "/api/v1/models/{model_id}/load",
        "/api/v1/models/{model_id}/unload",
        "/api/v1/models/{model_id}/sleep",
        "/api/v1/models/{model_id}/prepare",
        "/api/v1/models/{model_id}/pin",
        "/v1/cache/flush",
        "/v1/jobs",
        "/v1/jobs/{job_id}",
        "/v1/jobs/{job_id}/result",
        "/v1/models/load",
        "/v1/models/load/{task_id}",
        "/v1/models/unload",
        "/api/v1/operations",
        "/api/v1/usage",
        "/api/v1/clients",
        "/api/v1/config",
        "/api/v1/config/effective",
        "/api/v1/history",
        "/api/v1/limits",
        "/api/v1/queue",
        "/api/v1/timeline",
        "/api/v1/simulate",
        "/api/v1/remotes",
        "/v1/models/download",
        "/v1/models/download/{job_id}",
        "/v1/images/img-{picture}",
        "/api/v1/models/{model_id}/logs",
        "/api/v1/models/{model_id}/logs/stream",
        "/api/v1/reload",
        "/status",
        "/update-model",
        "/update-model/{task_id}",
        "/api/v1/models/{model_id}/update",
        "/api/v1/models/{model_id}/rollback",
        "/api/v1/models/{model_id}/versions",
        *(path.decode() for path in DOCUMENTED),
    }
    operations = [operation for methods in schema["paths"].values() for operation in methods.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(names) == len(set(names))
    assert all(operation["description"] for operation in operations)
    # Mistakes are answered in our shape, never in the framework's.
    assert all("422" not in operation["responses"] for operation in operations)
    assert "HTTPValidationError" not in schema["components"]["schemas"]
    assert schema["components"]["schemas"]["StatusView"]["properties"]["models"]["items"]["$ref"].endswith("/ModelView")


def test_the_schema_is_valid_openapi(schema: dict[str, Any]) -> None:
    schemathesis.openapi.from_dict(schema).validate()
    for shape in schema["components"]["schemas"].values():
        jsonschema_rs.meta.validate(shape)


def test_the_schema_has_the_answer_to_a_load_that_is_not_waited_for(schema: dict[str, Any]) -> None:
    answers = schema["paths"]["/api/v1/models/{model_id}/load"]["post"]["responses"]
    assert answers["202"]["content"]["application/json"]["schema"]["$ref"].endswith("/LoadTaken")


@pytest.mark.parametrize("path", DOCUMENTED)
def test_the_schema_says_how_models_are_asked(path: bytes, schema: dict[str, Any]) -> None:
    operation, route = schema["paths"][path.decode()]["post"], MODEL_ROUTES[path]
    [(kind, content)] = operation["requestBody"]["content"].items()
    assert kind == ("multipart/form-data" if route.form else "application/json")
    body = schema["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
    ours = {PRIORITY, CLIENT_ID, BUDGET_S, KEEP_ALIVE, KEEP_ALIVE_S} | model_options.FIELDS
    named = set() if route is GENERATE else {"model"}
    assert {*named, *route.form} <= set(body["required"]) <= set(body["properties"]) and ours <= set(body["properties"])
    assert body["additionalProperties"] is True, "engines take more"
    headers = {parameter["name"].lower().encode() for parameter in operation["parameters"]}
    assert {name for name in OUR_HEADERS if b"cache" not in name or route.is_text} <= headers
    assert "text/event-stream" in operation["responses"]["200"]["content"] or not route.is_text
    for status in ("401", "404", "413", "503", "504", "507"):
        assert operation["responses"][status]["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorBody")


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]


async def test_the_page_lists_the_api_and_loads_nothing_from_elsewhere(described: Client) -> None:
    answer = await described.get("/api/v1/docs")
    page = _Links()
    page.feed(answer.body.decode())
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert page.tags.isdisjoint({"script", "link", "iframe", "img"})
    assert page.links == ["/api/v1/openapi.json"]
    for text in (b"POST /api/v1/models/{model_id}/load", b"evict", b"grace_s", b"Last-Event-ID"):
        assert text in answer.body


@pytest.mark.parametrize("path", ["/api/v1/openapi.json", "/api/v1/docs"])
async def test_the_loop_goes_on_while_the_routes_are_described(path: str) -> None:
    client, turns = Client(_gateway()), 0
    asked = [asyncio.ensure_future(client.get(path)) for _ in range(2)]
    while not all(one.done() for one in asked):
        await asyncio.sleep(0)
        turns += 1
    assert [one.result().status for one in asked] == [200, 200]
    # At least one turn after each route, of which there are more.
    assert turns > 50


async def test_the_page_can_be_switched_off_while_running() -> None:
    gateway = _gateway(docs=False)
    client = Client(gateway)
    assert (await client.get("/api/v1/docs")).status == 404
    assert (await client.get("/api/v1/openapi.json")).status == 200
    gateway.config = _gateway(docs=True).config
    assert (await client.get("/api/v1/docs")).status == 200


# --- behind the bridge ----------------------------------------------------------------------------------------------


class FakeExchange:
    """The edge's half: takes the answer, and can leave."""

    def __init__(self, method: str, target: bytes) -> None:
        path, _, query = target.partition(b"?")
        self.head = SimpleNamespace(
            method=method.encode(), path=path, query=query, headers=[], http_version="1.1", peer_ip="127.0.0.1"
        )
        self.body_sent = Body(BodyBudget(EdgeLimits()))
        self.started = self.finished = self.gone = False
        self.on_gone: Any = None
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.pieces = bytearray()
        self.over = asyncio.Event()

    @property
    def body(self) -> Any:
        return bytes(self.pieces) if self.finished else self.body_sent

    def start(self, status: int, headers: list[tuple[bytes, bytes]], length: int | None) -> None:
        assert not self.started, "an answer was started twice"
        self.status, self.headers, self.started = status, headers, True

    def respond(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self.start(status, headers, len(body))
        self.write(body)
        self.finish()

    def write(self, data: bytes) -> None:
        self.pieces += data

    def finish(self) -> None:
        self.finished = True
        self.over.set()

    def cut(self) -> None:
        self.finish()

    def leave(self) -> None:
        self.gone = True
        self.on_gone()

    async def through(self, gateway: FakeGateway) -> None:
        bridge = AsgiBridge(make_management(gateway))
        bridge.handle(cast(Exchange, self), self.head.path, "r-77", is_admin=True)
        async with asyncio.timeout(SOON_S):
            await self.over.wait()


@pytest.mark.parametrize(("target", "status"), [(b"/health", 200), (b"/nowhere", 404), (b"/v1/models/none", 404)])
async def test_every_answer_carries_its_request_id_once(target: bytes, status: int) -> None:
    exchange = FakeExchange("GET", target)
    await exchange.through(_gateway())
    assert exchange.status == status
    assert [value for name, value in exchange.headers if name == b"x-request-id"] == [b"r-77"]
    assert [name for name, _ in exchange.headers].count(b"content-type") == 1


async def test_a_stream_behind_the_bridge_ends_when_its_client_leaves() -> None:
    gateway = _gateway()
    exchange = FakeExchange("GET", b"/api/v1/events")
    bridge = AsgiBridge(make_management(gateway))
    bridge.handle(cast(Exchange, exchange), exchange.head.path, "r-77", is_admin=True)
    await until(lambda: exchange.started)
    gateway.hub.publish("load", {"model": "a"})
    await until(lambda: b"event: load" in exchange.pieces)
    exchange.leave()
    await until(lambda: exchange.finished and gateway.hub.listeners == 0)
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()}, "no task is left")
