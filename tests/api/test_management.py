"""What every route of the management API has in common: errors, HEAD, the schema, and the bridge it is behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from typing import Any

import fastapi.routing
import jsonschema_rs
import pytest

from greenroom.api.asgi import AsgiBridge
from greenroom.api.openapi import DOCUMENTED
from greenroom.app import make_management
from greenroom.config.kinds import id_problem
from greenroom.http.limits import EdgeLimits
from greenroom.serving.admitted import OUR_HEADERS
from greenroom.serving.body import model_options
from greenroom.serving.body.peek import BUDGET_S, CLIENT_ID, KEEP_ALIVE, KEEP_ALIVE_S, PRIORITY
from greenroom.serving.routes import GENERATE, MODEL_ROUTES
from tests.api.management_rig import Client, FakeGateway, model
from tests.http.wires import Client as WireClient
from tests.http.wires import Server, get, post
from tests.later import Later
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
    async with behind_bridge(gateway) as client:
        await client.send(post(b"", "/api/v1/reload"))
        answer = await client.response()
    assert answer.status == 500
    assert json.loads(answer.body)["error"]["code"] == "internal_error"
    assert b"secret" not in answer.body


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


def test_the_schema_names_every_route_once_with_its_shapes(described: Client, schema: dict[str, Any]) -> None:
    declared = {route.path_format for route in described.app.routes if route.include_in_schema}
    assert set(schema["paths"]) == declared | {path.decode() for path in DOCUMENTED}
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


@asynccontextmanager
async def behind_bridge(gateway: FakeGateway) -> AsyncIterator[WireClient]:
    """A connection to an edge that answers with this gateway's management API."""
    server, bridge = Server(EdgeLimits()), AsgiBridge(make_management(gateway))
    server.handle = lambda exchange: bridge.handle(exchange, exchange.head.path, "r-77", is_admin=True)
    await server.start()
    client = await WireClient.connect(server.port)
    yield client
    await client.close()
    await server.stop()


@pytest.mark.parametrize(("target", "status"), [("/health", 200), ("/nowhere", 404), ("/v1/models/none", 404)])
async def test_every_answer_carries_its_request_id_once(target: str, status: int) -> None:
    async with behind_bridge(_gateway()) as client:
        await client.send(get(target))
        raw = (await client.reader.readuntil(b"\r\n\r\n")).lower()
    assert int(raw.split()[1]) == status
    assert raw.count(b"\r\nx-request-id: r-77\r\n") == raw.count(b"\r\nx-request-id:") == 1
    assert raw.count(b"\r\ncontent-type:") == 1


async def test_a_stream_behind_the_bridge_ends_when_its_client_leaves() -> None:
    gateway = _gateway()
    async with behind_bridge(gateway) as client:
        await client.send(get("/api/v1/events"))
        await client.reader.readuntil(b"\r\n\r\n")
        gateway.hub.publish("load", {"model": "a"})
        await client.reader.readuntil(b"event: load")
        await client.close()
        await until(lambda: gateway.hub.listeners == 0)
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()}, "no task is left")
