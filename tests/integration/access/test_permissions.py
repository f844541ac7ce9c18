"""Which key may use which route: every route that is declared, with every kind of key."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from greenroom.access.keys import Permission
from greenroom.app import App, make_management
from greenroom.core.model import ModelId
from greenroom.serving.routes import MODEL_ROUTES
from tests.harness import fake, gateway, write_config
from tests.integration.raw import Answer, Raw, asking, http, request_bytes
from tests.waiting import until

KEYS = [
    {"name": "plain", "key": "plain-key"},
    {"name": "lease", "key": "lease-key", "leases": True},
    {"name": "other", "key": "other-key", "leases": True},
    {"name": "admin", "key": "admin-key", "admin": True},
    {"name": "boss", "key": "boss-key", "tenant": "plain", "admin": True},
]
KINDS = (None, "wrong", "plain", "lease", "admin")
PLAIN = {"Authorization": "Bearer plain-key"}
MODELS = {
    "m": fake("m", routes=["/echo/open", "/echo/below/**", "/echo/*/one", "/ws"]),
    "shy": fake("shy", unlisted=True),
    "cold": fake("cold", unlisted=True),
    "broken": {"cmd": ["/nowhere/engine", "${PORT}"], "memory_mib": 10, "unlisted": True},
}


@dataclass(frozen=True)
class Decision:
    """The status each kind of key is answered with; without a key and with a wrong one it is 401 unless said."""

    plain: int
    lease: int
    admin: int
    nobody: int = 401
    body: Any = None


def everyone(status: int = 200, body: Any = None) -> Decision:
    return Decision(status, status, status, body=body)


def leases(status: int, body: Any = None) -> Decision:
    return Decision(403, status, status, body=body)


def admins(status: int = 200, body: Any = None) -> Decision:
    return Decision(403, 403, status, body=body)


# What the permission that a route is declared with does not tell.
BESIDES: dict[tuple[str, str], Decision] = {
    ("GET", "/health"): Decision(200, 200, 200, nobody=200),
    ("GET", "/healthz"): Decision(200, 200, 200, nobody=200),
    ("GET", "/readyz"): Decision(200, 200, 200, nobody=200),
    # A tenant may not flush the caches of all.
    ("POST", "/v1/cache/flush"): Decision(403, 403, 200, body={"scope": "all"}),
    ("POST", "/v1/jobs"): everyone(202, {"route": "/v1/chat/completions", "body": asking("m")}),
    ("POST", "/api/v1/leases"): leases(201, {"mib": 1}),
}
# What each permission opens, said a second time: a route that is declared with too little fails here. READ is all else.
OPENS = {
    Permission.ASK: """
        GET / GET /health GET /healthz GET /readyz GET /metrics GET /v1/capabilities GET /status
        GET /v1/models GET /v1/models/{model_id:path} GET /v1/models/inventory GET /v1/models/loaded
        GET /v1/models/stats GET /models GET /props GET /slots GET /running
        GET /api/tags GET /api/ps GET /api/version POST /api/show
        GET /api/v1/models GET /api/v1/models/{model_id:path} GET /api/v1/models/{model_id:path}/versions
        GET /api/v1/usage GET /api/v1/requests/{request_id} GET /v1/images/img-{picture}
        GET /v1/jobs POST /v1/jobs GET /v1/jobs/{job_id} DELETE /v1/jobs/{job_id} GET /v1/jobs/{job_id}/result
        POST /v1/cache/flush
    """,
    Permission.LEASE: """
        GET /api/v1/leases POST /api/v1/leases GET /api/v1/leases/{lease_id} DELETE /api/v1/leases/{lease_id}
        POST /api/v1/leases/{lease_id}/renew
    """,
    Permission.LOAD: """
        GET /unload POST /api/models/unload POST /api/models/unload/{model_id:path}
        POST /models/load POST /models/unload
        POST /v1/models/load GET /v1/models/load/{task_id} POST /v1/models/unload
        POST /api/v1/models/{model_id:path}/load POST /api/v1/models/{model_id:path}/prepare
        POST /api/v1/models/{model_id:path}/sleep POST /api/v1/models/{model_id:path}/unload
    """,
    Permission.DOWNLOAD: """
        POST /api/pull GET /v1/models/download POST /v1/models/download
        GET /v1/models/download/{job_id} DELETE /v1/models/download/{job_id}
    """,
    Permission.DELETE: "DELETE /api/delete DELETE /v1/models/inventory/{model_id:path}",
    Permission.RELOAD: "POST /api/v1/reload",
    Permission.MANAGE: """
        GET /api/v1/config/effective PUT /api/v1/config DELETE /api/v1/requests/{request_id}
        POST /update-model POST /api/v1/models/{model_id:path}/update
        POST /api/v1/models/{model_id:path}/rollback POST /api/v1/models/{model_id:path}/pin
    """,
}
# These read, though a body says what.
ASKED_BY_POST = {"POST /api/v1/explain", "POST /api/v1/simulate"}
SAID = asking("m", max_tokens=9, input="hi", query="hi", documents=["hi"])
PROMPTED = (b"/api/embeddings", b"/generate", b"/v1/completions", b"/v1/images/generations")
MORE = {path: {"prompt": "hi"} for path in PROMPTED}
# A form without a boundary is let in and then not understood.
ASKING = {
    ("POST", path.decode()): everyone(400 if route.form else 200, {**SAID, **MORE.get(path, {})})
    for path, route in MODEL_ROUTES.items()
}
UPSTREAM = {
    ("GET", "/upstream/m/echo/open"): everyone(),
    ("POST", "/upstream/m/echo/open"): everyone(),
    ("GET", "/upstream/m/echo/open?q=1"): everyone(),
    ("GET", "/upstream/m/echo/below/this/and/that"): everyone(),
    ("GET", "/upstream/m/echo/any/one"): everyone(),
    ("GET", "/upstream/m/echo/below"): admins(),
    ("GET", "/upstream/m/echo/any/two"): admins(),
    ("GET", "/upstream/m/echo/open/"): admins(),
    ("GET", "/upstream/m/echo/open/x"): admins(),
    ("GET", "/upstream/m/echo/closed"): admins(),
    # What an engine might read as another path is open to admins only.
    ("GET", "/upstream/m/echo/below/../closed"): admins(),
    ("GET", "/upstream/m/echo/below/%2e%2e/closed"): admins(),
    ("GET", "/upstream/m/echo/below/..%2fclosed"): admins(),
    ("GET", "/upstream/m/echo/below//closed"): admins(),
    ("GET", "/upstream/m/echo/below/;/closed"): admins(),
    ("GET", "/upstream/m/echo/below/\\closed"): admins(),
    ("GET", "/upstream/m//echo/open"): everyone(),
    ("GET", "/upstream/shy/echo/open"): admins(),
    ("GET", "/upstream/nobody/echo/open"): everyone(404),
    ("GET", "/upstream/"): everyone(404),
}
# What no route takes: only an admin is told that there is nothing.
NOTHING = {
    ("GET", "/nothing"): admins(404),
    ("GET", "/api/v1/openapi.json"): admins(),
    ("GET", "/api/v1/docs"): admins(),
    ("GET", "/api/v1/models/m/nothing"): everyone(404),
    ("POST", "/api/v1/models/m"): everyone(405),
    ("DELETE", "/v1/models"): everyone(405),
    ("PUT", "/api/v1/leases"): leases(405),
    ("GET", "/api/v1/models/m/load"): admins(405),
    # HEAD is GET without the answer's body.
    ("HEAD", "/v1/models"): everyone(),
    ("HEAD", "/api/v1/status"): admins(),
    ("HEAD", "/api/v1/leases"): leases(200),
    ("HEAD", "/unload"): admins(405),
}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    async with gateway(tmp_path_factory.mktemp("keys"), MODELS, server={"api_keys": KEYS}) as app:
        yield app


async def call(app: App, method: str, path: str, key: str | None, body: Any = None) -> Answer:
    headers = {} if key is None else {"Authorization": f"Bearer {key}-key"}
    return await http(app, method, path, body, headers=headers)


async def status(app: App, method: str, path: str, key: str | None, body: Any) -> int:
    """Of the head alone: some answers never end."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}-key"}
    async with await Raw.open(app) as raw:
        raw.send(request_bytes(method, path, None if body is None else json.dumps(body).encode(), headers))
        return (await raw.head())[0]


async def test_each_declared_route_admits_the_keys_that_have_its_permission(app: App) -> None:
    refused = {Permission.ASK: set(), Permission.LEASE: {"plain"}}
    for declared in (route.declared for route in make_management(app).routes):
        path = declared.path.replace("{model_id:path}", "m")
        told = {key: await status(app, declared.method, path, key, None) for key in KINDS}
        expected = {"plain", "lease"} if (few := refused.get(declared.needs)) is None else few
        assert {key for key, code in told.items() if code == 403} == expected, (declared, told)
        is_open = (declared.method, declared.path) in BESIDES and told[None] == 200
        assert is_open or {key for key, code in told.items() if code == 401} == {None, "wrong"}, (declared, told)
        assert max(told.values()) < 500, (declared, told)


async def test_no_permission_opens_more_than_it_should(app: App) -> None:
    opens: dict[Permission, set[str]] = {}
    for one in (route.declared for route in make_management(app).routes):
        opens.setdefault(one.needs, set()).add(f"{one.method} {one.path}")
        assert one.method != "GET" or one.needs is not Permission.ASK or one.signed is None
    reading = opens.pop(Permission.READ)
    assert {route for route in reading if not route.startswith("GET ")} == ASKED_BY_POST
    assert opens == {needs: set(re.findall(r"[A-Z]+ /\S*", routes)) for needs, routes in OPENS.items()}


@pytest.mark.parametrize(
    ("route", "decision"),
    [*BESIDES.items(), *ASKING.items(), *UPSTREAM.items(), *NOTHING.items()],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
async def test_each_route_admits_the_keys_that_it_should(app: App, route: tuple[str, str], decision: Decision) -> None:
    method, path = route
    codes = (decision.nobody, decision.nobody, decision.plain, decision.lease, decision.admin)
    told = [await status(app, method, path, key, decision.body) for key in KINDS]
    assert tuple(told) == codes


async def test_refusals_say_what_the_key_lacks(app: App) -> None:
    managing = (await call(app, "GET", "/api/v1/status", "plain")).error
    assert managing["code"] == "not_allowed" and "admin: true" in managing["message"]
    leasing = (await call(app, "GET", "/api/v1/leases", "plain")).error
    assert "leases: true" in leasing["message"]
    engine = (await call(app, "GET", "/upstream/m/slots", "plain")).error
    assert "/slots of m" in engine["message"] and "routes" in engine["message"]


@pytest.mark.parametrize(("protocol", "plain"), [("websocket", 101), ("h2c", 404), ("websocket, h2c", 404)])
async def test_an_open_path_leads_to_no_protocol_that_has_paths_of_its_own(app: App, protocol: str, plain: int) -> None:
    wanted = {"plain": plain, "admin": 101}
    for key, expected in wanted.items():
        headers = {"Authorization": f"Bearer {key}-key", "Connection": "Upgrade", "Upgrade": protocol}
        async with await Raw.open(app) as raw:
            raw.send(request_bytes("GET", "/upstream/m/ws", None, headers))
            assert (await raw.head())[0] == expected, key


async def test_a_path_that_is_not_open_loads_nothing(app: App) -> None:
    assert (await call(app, "GET", "/upstream/cold/echo/x", "plain")).status == 403
    assert not app.loop.scheduler.state.slots_of(ModelId("cold"))


async def test_listings_are_of_what_a_key_may_see(app: App) -> None:
    assert (await call(app, "GET", "/v1/models", "plain")).status == 200
    assert (await call(app, "POST", "/v1/chat/completions", "plain", asking("m"))).status == 200
    plain, admin = [(await call(app, "GET", "/api/v1/models", key)).json()["models"] for key in ("plain", "admin")]
    assert [model["id"] for model in plain] == ["m"] and {model["id"] for model in admin} == set(MODELS)
    assert plain[0]["pid"] is None and next(model["pid"] for model in admin if model["id"] == "m") > 0
    assert [slot["pid"] for slot in plain[0]["slots"]] == [None]


async def test_a_key_sees_its_own_requests_and_no_others(app: App) -> None:
    asked = await call(app, "POST", "/v1/chat/completions", "plain", asking("m"))
    path = f"/api/v1/requests/{asked.headers['x-request-id']}"
    assert (await call(app, "GET", path, "plain")).json()["tenant"] == "plain"
    assert (await call(app, "GET", path, "admin")).json()["slot"] is not None
    assert (await call(app, "GET", path, "other")).status == 404


# --- leases ---------------------------------------------------------------------------------------------------------

LEASES = "/api/v1/leases"


async def trainers(app: App, key: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = (await call(app, "GET", LEASES, key)).json()["leases"]
    return [one for one in listed if one["name"] == "train"]


async def test_leases_of_tenants_do_not_meet(app: App) -> None:
    """The same id is two leases for two tenants; neither can see, renew or end the other's, an admin can."""
    order = {"mib": 10, "id": "nightly", "name": "train"}
    mine, theirs = [await call(app, "POST", LEASES, key, order) for key in ("lease", "other")]
    assert mine.status == theirs.status == 201
    assert mine.json()["id"] == theirs.json()["id"] == "nightly"
    assert mine.json()["token"] != theirs.json()["token"]
    for key, held in (("lease", mine), ("other", theirs)):
        assert [(one["id"], one["token"]) for one in await trainers(app, key)] == [("nightly", held.json()["token"])]
    whole = await trainers(app, "admin")
    assert len(whole) == 2
    # The other's whole id is no help.
    stolen = next(one for one in whole if one["token"] == theirs.json()["token"])
    assert (await call(app, "DELETE", f"{LEASES}/{stolen['id']}", "lease")).status == 204
    renewal = {"token": stolen["token"]}
    assert (await call(app, "POST", f"{LEASES}/{stolen['id']}/renew", "lease", renewal)).status == 404
    assert (await call(app, "POST", f"{LEASES}/nightly/renew", "lease", renewal)).status == 409
    assert (await call(app, "POST", f"{LEASES}/nightly/renew", "other", renewal)).status == 200
    assert (await call(app, "GET", f"{LEASES}/nightly", "lease")).json()["token"] == mine.json()["token"]
    for one in whole:
        assert (await call(app, "DELETE", f"{LEASES}/{one['id']}", "admin")).status == 204
    assert (await call(app, "GET", f"{LEASES}/nightly", "other")).status in (404, 409)


async def test_a_tenant_cannot_name_a_models_lease_or_an_admins(app: App) -> None:
    held = await call(app, "POST", LEASES, "admin", {"mib": 10, "id": "ops", "name": "ops"})
    assert held.status == 201
    assert (await call(app, "GET", f"{LEASES}/ops", "lease")).status == 404
    assert (await call(app, "DELETE", f"{LEASES}/ops", "lease")).status == 204
    assert (await call(app, "GET", f"{LEASES}/ops", "admin")).status == 200
    assert all(one["kind"] == "program" for one in (await call(app, "GET", LEASES, "lease")).json()["leases"])
    assert (await call(app, "DELETE", f"{LEASES}/ops", "admin")).status == 204


async def test_a_tenants_leases_are_called_as_it_called_them_in_errors_too(app: App) -> None:
    assert (await call(app, "POST", LEASES, "lease", {"mib": 10, "id": "mine"})).status == 201
    taken = (await call(app, "POST", LEASES, "lease", {"mib": 20, "id": "mine"})).error
    assert taken["code"] == "lease_taken" and taken["message"].startswith("The lease mine is another one, of 10 MiB;")
    for method, path, body in (("GET", "none", None), ("POST", "none/renew", {"token": 1})):
        unknown = (await call(app, method, f"{LEASES}/{path}", "lease", body)).error
        assert unknown["message"].startswith("There is no lease none.")
    assert (await call(app, "DELETE", f"{LEASES}/mine", "lease")).status == 204


# --- what others are shown ------------------------------------------------------------------------------------------


async def test_what_an_admin_was_told_is_not_told_to_its_tenants_other_keys(app: App) -> None:
    asked = await call(app, "POST", "/v1/chat/completions", "boss", asking("broken"))
    assert asked.status == 503 and "/nowhere/engine" in asked.error["message"]
    path = f"/api/v1/requests/{asked.headers['x-request-id']}"
    assert "/nowhere/engine" in (await call(app, "GET", path, "boss")).json()["reason"]
    shown = await call(app, "GET", path, "plain")
    assert shown.status == 200 and "/nowhere" not in shown.body.decode()
    assert shown.json()["error_message"].startswith("broken could not be loaded: its engine is not installed here. ")


async def test_a_path_that_is_closed_while_the_body_comes_is_not_reached(tmp_path: Path) -> None:
    """An id that a reload takes away may leave one of which the rest of the path is another path."""
    models = {"a/b": fake("a/b", routes=["/echo/**"]), "a": fake("a")}
    async with gateway(tmp_path, models, server={"api_keys": KEYS}) as app:
        async with await Raw.open(app) as raw:
            raw.send(request_bytes("POST", "/upstream/a/b/echo/x", b"0123456789", PLAIN)[:-1])
            await until(lambda: app.edge.bodies.memory_bytes == 9, "all but the last byte is here")
            write_config(tmp_path, {"a": models["a"]}, server={"api_keys": KEYS})
            assert (await call(app, "POST", "/api/v1/reload", "admin")).status == 200
            raw.send(b"9")
            assert (await raw.answer()).error["code"] == "not_allowed"
        assert not app.loop.scheduler.state.slots_of(ModelId("a"))


async def test_a_program_with_a_key_may_name_any_page(app: App) -> None:
    """No page knows a key, so what has one is refused for no `Referer`; what has none is refused for that."""
    body = json.dumps(asking("m")).encode()
    for said in ({"Referer": "https://app.example/"}, {"Sec-Fetch-Site": "cross-site"}):
        async with await Raw.open(app) as raw:
            raw.send(request_bytes("POST", "/v1/chat/completions", body, {**PLAIN, **said}))
            assert (await raw.answer()).status == 200
        async with await Raw.open(app) as raw:
            raw.send(request_bytes("GET", "/upstream/m/echo/open", None, said))
            assert (await raw.answer()).status == 401
