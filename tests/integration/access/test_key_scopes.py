"""Keys that may ask for some models, by some routes, with some verbs, until some day."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from tests.harness import fake, gateway
from tests.integration.raw import CHAT, Answer, Raw, asking, http, request_bytes
from tests.models import tiny as tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEYS: list[dict[str, Any]] = [
    {"name": "some", "tenant": "lab", "models": ["llama-*", "seen*"], "verbs": ["load"]},
    {"name": "all", "tenant": "lab"},
    {"name": "chat", "routes": ["/v1/chat/completions", "/v1/models/**", "/v1/jobs"]},
    {"name": "ops", "verbs": ["read", "reload"]},
    {"name": "old", "expires": "2020-01-01"},
    {"name": "boss", "admin": True},
]
HIDDEN = ("qwen", "other-name", "hidden", "nothing")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    folder = tmp_path_factory.mktemp("scopes")
    (folder / "models").mkdir()
    for name in ("seen", "hidden"):
        shutil.copy(tiny_model("alpha" if name == "seen" else "beta"), folder / "models" / f"{name}.gguf")
    models = {
        "llama-1": fake("llama-1", aliases=["first"], routes=["/echo/**", "/ws"]),
        "qwen": fake("qwen", aliases=["other-name", "llama-alias"], routes=["/echo/**", "/ws"]),
    }
    server = {"api_keys": [{**key, "key": f"{key['name']}-key"} for key in KEYS]}
    library = {"roots": [str(folder / "models")], "adhoc_models_max": 4}
    async with gateway(folder, models, server=server, library=library) as app:
        yield app


async def call(app: App, key: str, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    return await http(app, method, path, body, headers={"Authorization": f"Bearer {key}-key", **headers})


async def say(app: App, key: str, model: str, **more: Any) -> Answer:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **more}
    return await call(app, key, "POST", CHAT, body)


def alike(answer: Answer, model: str) -> tuple[int, dict[str, Any]]:
    """An error without what differs between any two requests."""
    kept = {name: value for name, value in answer.error.items() if name != "request_id"}
    return answer.status, json.loads(json.dumps(kept).replace(model, "MODEL"))


async def test_a_model_is_asked_by_id_or_alias_or_from_disk_if_its_id_fits(app: App) -> None:
    assert [(await say(app, "some", model)).status for model in ("llama-1", "first", "seen.gguf")] == [200, 200, 200]
    assert (await say(app, "all", "qwen")).status == 200
    # With options it is another model of the same id.
    assert (await say(app, "some", "seen.gguf", n_gpu_layers=0)).status == 200


@pytest.mark.parametrize("model", ["qwen", "other-name", "llama-alias", "hidden.gguf", "hidden"])
async def test_another_model_is_answered_like_one_that_does_not_exist(app: App, model: str) -> None:
    unknown = "n" * len(model)
    assert alike(await say(app, "some", model), model) == alike(await say(app, "some", unknown), unknown)
    for path in (f"/v1/models/{model}", f"/api/v1/models/{model}", f"/upstream/{model}/echo/x"):
        known, missing = [await call(app, "some", "GET", path.replace(model, one)) for one in (model, unknown)]
        assert alike(known, model) == alike(missing, unknown) and known.status == 404, path
    for order in ("load", "unload", "sleep"):
        path = f"/api/v1/models/{model}/{order}"
        known, missing = [await call(app, "some", "POST", path.replace(model, one), {}) for one in (model, unknown)]
        assert alike(known, model) == alike(missing, unknown) and known.status == 404, order
    for path, body in (
        ("/v1/models/load", {"modelId": model}),
        ("/v1/models/load", {"modelId": "llama-1", "evictModel": model}),
        ("/v1/models/unload", {"modelId": model}),
        ("/api/v1/models/llama-1/load", {"evict": [model]}),
        ("/v1/jobs", {"route": CHAT, "body": asking(model)}),
    ):
        other = json.loads(json.dumps(body).replace(model, unknown))
        known, missing = [await call(app, "some", "POST", path, one) for one in (body, other)]
        assert alike(known, model) == alike(missing, unknown) and known.status == 404, path


async def test_a_path_on_disk_that_is_not_the_keys_is_no_path(app: App) -> None:
    root, before = app.config.roots[0], [entry.id for entry in app.catalog if entry.is_adhoc]
    denied, missing = [await say(app, "some", f"{root}/{name}.gguf") for name in ("hidden", "absent")]
    assert alike(denied, "hidden") == alike(missing, "absent") and denied.status == 404
    # What is broken or of an unknown kind is not told either.
    (Path(root) / "broken.gguf").write_bytes(b"GGUF")
    broken = await say(app, "some", f"{root}/broken.gguf")
    assert alike(broken, "broken") == alike(missing, "absent")
    assert [entry.id for entry in app.catalog if entry.is_adhoc] == before


async def test_a_websocket_to_another_model_is_not_opened(app: App) -> None:
    statuses = []
    for model in ("llama-1", "qwen"):
        headers = {"Authorization": "Bearer some-key", "Connection": "Upgrade", "Upgrade": "websocket"}
        async with await Raw.open(app) as raw:
            raw.send(request_bytes("GET", f"/upstream/{model}/ws", None, headers))
            statuses.append((await raw.head())[0])
    assert statuses == [101, 404]


async def test_no_list_names_another_model(app: App) -> None:
    for model in ("qwen", "hidden.gguf", "seen.gguf"):
        await say(app, "all", model)
    paths = (
        "/v1/models",
        "/models",
        "/v1/models/inventory",
        "/v1/models/loaded",
        "/v1/models/stats",
        "/v1/capabilities",
    )
    for path in (*paths, "/api/v1/models", "/metrics", "/health", "/v1/jobs"):
        text = (await call(app, "some", "GET", path)).body.decode()
        assert not any(name in text for name in HIDDEN), path
    listed = (await call(app, "some", "GET", "/v1/models")).json()["data"]
    assert {model["id"] for model in listed} >= {"llama-1", "seen.gguf"}


async def test_requests_and_jobs_of_the_tenants_other_keys_are_seen_if_their_model_is(app: App) -> None:
    shown = []
    for model in ("llama-1", "qwen"):
        answer = await say(app, "all", model)
        path = f"/api/v1/requests/{answer.headers['x-request-id']}"
        job = (await call(app, "all", "POST", "/v1/jobs", {"route": CHAT, "body": asking(model)})).json()["id"]
        paths = (path, f"/v1/jobs/{job}")
        shown.append([(await call(app, "some", "GET", one)).status for one in paths])
        assert [(await call(app, "all", "GET", one)).status for one in paths] == [200, 200]
    assert shown == [[200, 200], [404, 404]]


async def test_a_load_is_shown_to_the_key_that_ordered_it(app: App) -> None:
    taken = (await call(app, "boss", "POST", "/v1/models/load", {"modelId": "qwen"})).json()["taskId"]
    own = (await call(app, "some", "POST", "/v1/models/load", {"modelId": "llama-1"})).json()["taskId"]
    paths = [f"/v1/models/load/{task}" for task in (taken, own)]
    assert [(await call(app, "some", "GET", path)).status for path in paths] == [404, 200]


async def test_verbs_allow_their_routes_and_no_others(app: App) -> None:
    assert (await call(app, "some", "POST", "/api/v1/models/llama-1/unload", {})).status == 200
    for path in ("/api/v1/status", "/api/v1/events", "/api/v1/models/llama-1/logs"):
        refused = await call(app, "some", "GET", path)
        assert refused.status == 403 and "verbs: [read]" in refused.error["message"]
    assert (await call(app, "ops", "GET", "/api/v1/status")).status == 200
    assert (await call(app, "ops", "POST", "/api/v1/explain", {"model": "qwen"})).status == 200
    assert (await call(app, "ops", "POST", "/api/v1/reload")).status == 200
    for path in ("/api/v1/models/qwen/load", "/v1/models/load", "/v1/models/download"):
        assert (await call(app, "ops", "POST", path, {})).status == 403
    assert (await call(app, "ops", "DELETE", "/v1/models/inventory/seen.gguf")).status == 403
    assert (await call(app, "ops", "POST", "/v1/cache/flush", {"scope": "all"})).status == 403
    # A path of an engine may do anything: for admins, whatever the verbs.
    assert (await call(app, "ops", "GET", "/upstream/qwen/closed")).status == 403


async def test_a_flush_names_no_model_that_its_key_does_not_see(app: App) -> None:
    assert (await say(app, "all", "qwen")).status == 200
    answers = [(await call(app, key, "POST", "/v1/cache/flush", {"scope": "tenant"})).json() for key in ("all", "some")]
    assert [answer["flushed"] for answer in answers] == [False, False]
    assert ["qwen" in answer["reason"] for answer in answers] == [True, False]


async def test_routes_are_all_that_a_key_may_call(app: App) -> None:
    assert (await say(app, "chat", "qwen")).status == 200
    assert (await call(app, "chat", "GET", "/v1/models/qwen")).status == 200
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/upstream/qwen/echo/x")):
        refused = await call(app, "chat", method, path, asking("qwen") if method == "POST" else None)
        assert refused.status == 403 and f"may not call {path}" in refused.error["message"]
    for spelled in ("/v1/models/../completions", "/v1/models/%2e%2e/completions", "/v1/models//qwen"):
        assert (await call(app, "chat", "GET", spelled)).status == 403, spelled
    # A job's route is as good as a request's.
    wanted = {CHAT: 202, "/v1/completions": 403, "/upstream/qwen/echo/x": 403}
    jobs = {
        route: await call(app, "chat", "POST", "/v1/jobs", {"route": route, "body": asking("qwen")}) for route in wanted
    }
    assert {route: answer.status for route, answer in jobs.items()} == wanted
    assert (await call(app, "chat", "POST", "/v1/embeddings", {"model": "qwen"}, Prefer="respond-async")).status == 403


async def test_an_expired_key_is_told_so(app: App) -> None:
    answer = await say(app, "old", "llama-1")
    assert (answer.status, answer.error["code"], answer.error["type"]) == (
        401,
        "api_key_expired",
        "authentication_error",
    )
    assert "2020-01-01" in answer.error["message"] and "old-key" not in answer.body.decode()


# --- how a key is sent ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
async def test_two_keys_in_one_request_are_refused(app: App, name: str) -> None:
    sent = {"authorization": "Bearer all-key", "x-api-key": "all-key"}[name]
    for second in (sent, sent.replace("all", "boss")):
        async with await Raw.open(app) as raw:
            lines = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{name}: {sent}\r\n{name.upper()}: {second}\r\n\r\n"
            raw.send(lines.encode())
            assert (await raw.head())[0] == 400


@pytest.mark.parametrize(
    "sent",
    [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer all-ke"},
        {"Authorization": "Bearer all-key0"},
        {"Authorization": "Basic all-key"},
        {"Authorization": "all-key"},
        {"Authorization": "Bearer all-key, Bearer boss-key"},
        {"Authorization": "Bearer\tall-key"},
        {"Proxy-Authorization": "Bearer all-key"},
        {"X_Api_Key": "all-key"},
        {"Cookie": "api_key=all-key"},
        {"api-key": "all-key"},
    ],
)
async def test_a_key_is_taken_from_nowhere_else(app: App, sent: dict[str, str]) -> None:
    answer = await http(app, "GET", "/v1/models", headers=sent)
    assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("name", ["key", "api_key", "api-key", "token", "access_token", "authorization", "x-api-key"])
async def test_a_key_in_the_address_is_not_accepted(app: App, name: str) -> None:
    assert (await http(app, "GET", f"/v1/models?{name}=all-key")).status == 401


async def test_a_tenant_that_a_keys_holder_names_is_ignored(app: App) -> None:
    for named in ({"X-Tenant-ID": "boss"}, {"x-tenant-id": "t" * 999}):
        answer = await call(app, "all", "POST", CHAT, asking("qwen", tenant="boss", user="boss"), **named)
        shown = await call(app, "boss", "GET", f"/api/v1/requests/{answer.headers['x-request-id']}")
        assert shown.json()["tenant"] == "lab"


# --- models of requests, in turns of tenants ------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_tenant_that_asks_with_many_options_pushes_out_its_own(app: App) -> None:
    for layers in (0, 1):
        assert (await say(app, "chat", "seen.gguf", n_gpu_layers=layers)).status == 200
    for layers in range(10, 22):
        assert (await say(app, "all", "hidden.gguf", n_gpu_layers=layers)).status == 200
    known = {(entry.public_id, entry.config.n_gpu_layers) for entry in app.catalog if entry.is_adhoc}
    assert {("seen.gguf", 0), ("seen.gguf", 1), ("hidden.gguf", 21)} < known and len(known) == 4
