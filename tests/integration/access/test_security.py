"""Who may do what, however it is spelled; and what is never written down."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from greenroom.errors import ConfigError
from greenroom.features.governance.tokens import as_text
from greenroom.telemetry import logs
from tests.features.governance.token_rig import shared_token
from tests.harness import fake, gateway, write_config
from tests.integration.facts import over
from tests.integration.governance.test_governance import with_key
from tests.integration.raw import CHAT, Answer, Raw, asking, chat, http, request_bytes

ADMIN, USER, WRONG = "gr-admin-secret-0001", "gr-user-secret-0002", "gr-wrong-secret-0003"
API_KEYS: list[dict[str, Any]] = [
    {"name": "admin", "key": ADMIN, "admin": True},
    # Only its hash is in the file.
    {
        "name": "user",
        "sha256": hashlib.sha256(USER.encode()).hexdigest(),
        "tenant": "team",
        "priority_max": "low",
    },
]

# Holds what each of the routes of models needs.
ASKED = asking("plain", prompt="a", input="a", query="a", documents=["b"])
ODD_SPELLINGS = [
    "/%61pi/v1/status",
    "/api%2Fv1%2Fstatus",
    "//api/v1/status",
    "/./api/v1/status",
    "/api/v1/../v1/status",
    "/api/v1/status/",
    "/api/v1/status%00",
    "/api/v1/status%0a",
    "/API/v1/status",
    "/health/../api/v1/status",
    "/health%2f..%2fapi/v1/status",
    "/v1/models/..%2f..%2fapi",
    "/v1/models/..%2f..%2fapi%2fv1%2fstatus",
    "/v1/models/../../api/v1/status",
    "/v1/models/%2e%2e/%2e%2e/api/v1/status",
    "/v1/chat/completions/../../../api/v1/status",
    "/%2575pstream/plain/echo/x",
    "/%75pstream/plain/echo/x",
    "/;/api/v1/status",
    "/api/v1/status;a=b",
    "http://localhost/api/v1/status",
]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def guarded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    """A gateway that wants keys."""
    async with gateway(
        tmp_path_factory.mktemp("guarded"), {"plain": fake("plain")}, server={"api_keys": API_KEYS}
    ) as app:
        yield app


async def call(app: App, method: str, path: str, key: str | None, **headers: str) -> Answer:
    named = headers if key is None else {"Authorization": f"Bearer {key}", **headers}
    body = ASKED if method == "POST" and not path.startswith("/api/") else None
    return await http(app, method, path, body, headers=named)


# --- keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ODD_SPELLINGS)
async def test_no_spelling_of_a_path_reaches_what_its_key_may_not(guarded: App, path: str) -> None:
    assert (await call(guarded, "GET", path, None)).status == 401
    answer = await call(guarded, "GET", path, USER)
    assert answer.status in (400, 403, 404)
    assert b"uptime" not in answer.body
    # An admin is not refused, but only right spellings are found.
    assert (await call(guarded, "GET", path, ADMIN)).status in (200, 400, 404)


async def test_health_is_open_to_everyone_and_only_under_its_own_name(guarded: App) -> None:
    assert (await call(guarded, "GET", "/health", None)).status == 200
    assert (await call(guarded, "HEAD", "/health?from=balancer", None)).status == 200
    for path in ("/%68ealth", "//health", "/health/", "/health/x", "/HEALTH"):
        assert (await call(guarded, "GET", path, None)).status == 401, path


async def test_a_body_is_not_read_from_someone_without_a_key(guarded: App) -> None:
    """The refusal comes at the end of the headers, before a gigabyte is uploaded."""
    async with await Raw.open(guarded) as raw:
        raw.send(request_bytes("POST", CHAT, None, {"Content-Length": "50000000", "Expect": "100-continue"}))
        assert (await raw.head())[0] == 401
    assert guarded.edge.bodies.memory_bytes == 0


async def test_tenant_and_best_priority_are_the_keys(guarded: App) -> None:
    claimed = {"X-Tenant-ID": "somebody-else", "X-Priority": "high"}
    answer = await chat(guarded, "plain", x_priority=-5, headers={"Authorization": f"Bearer {USER}", **claimed})
    record = guarded.activity.get(answer.headers["x-request-id"])
    assert record is not None
    assert (record.tenant, record.priority) == ("team", 2)
    # A worse one than allowed may be asked for; without a cap of its own a key may ask for high.
    for key, tenant, asked, got in ((USER, "team", 7, 7), (ADMIN, "admin", -5, 0)):
        answer = await chat(guarded, "plain", x_priority=asked, headers={"Authorization": f"Bearer {key}", **claimed})
        record = guarded.activity.get(answer.headers["x-request-id"])
        assert record is not None
        assert (record.tenant, record.priority) == (tenant, got)


# --- names ----------------------------------------------------------------------------------------------------------


# --- the door -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["keys", "tokens"])
async def test_reload_cannot_take_the_guard_from_an_open_door(tmp_path: Path, by: str) -> None:
    server = {"host": "0.0.0.0", "port": 0}
    guard = {"governance": with_key(tmp_path)} if by == "tokens" else {}
    async with gateway(tmp_path, {}, server=server | ({} if guard else {"api_keys": API_KEYS}), **guard) as app:
        write_config(tmp_path, {}, server=server)
        with pytest.raises(ConfigError, match="can be reached by others"):
            await app.reload()
        assert guard or (app.door.keys.enabled and app.config.server.api_keys)


BY_NAME = {"Host": "safebox-model-llm:8080"}


async def test_signed_operations_open_an_address_to_models_alone(tmp_path: Path) -> None:
    """Reading what callers do, taking memory and reaching into engines need a key, so nobody can."""
    server = {"host": "0.0.0.0", "port": 0}
    async with gateway(tmp_path, {"plain": fake("plain")}, server=server, governance=with_key(tmp_path)) as app:
        for path in ("/health", "/v1/models", "/v1/capabilities", "/metrics"):
            assert (await http(app, "GET", path, headers=BY_NAME)).status == 200
        assert (await http(app, "POST", CHAT, ASKED, headers=BY_NAME)).status == 200
        for path in ("/v1/models/load", "/v1/models/unload"):
            unsigned = await http(app, "POST", path, {"modelId": "plain"}, headers=BY_NAME)
            assert (unsigned.status, unsigned.json()["error"]["code"]) == (401, "token_missing")
        for method, path in (
            *(("GET", path) for path in ("/api/v1/status", "/api/v1/models/plain/logs", "/upstream/plain/echo/x")),
            *(("POST", path) for path in ("/api/v1/leases", "/upstream/plain/echo/x", "/api/v1/models/plain/pin")),
        ):
            assert (await http(app, method, path, {} if method == "POST" else None, headers=BY_NAME)).status == 403, (
                path
            )
        page = {**BY_NAME, "Origin": "http://safebox-model-llm:8080"}
        assert (await http(app, "POST", CHAT, ASKED, headers=page)).status == 403


async def test_callers_without_a_key_beside_signed_operations_are_no_admins(tmp_path: Path) -> None:
    """They see what a key without `admin` sees, and of jobs those whose id they have."""
    models = {"plain": fake("plain"), "hidden": fake("hidden", unlisted=True)}
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    extra = {"governance": with_key(tmp_path), "library": {"roots": [str(tmp_path / "models")]}}
    async with gateway(tmp_path, models, server={"host": "0.0.0.0", "port": 0}, **extra) as app:
        later = {**BY_NAME, "Prefer": "respond-async"}
        request_id = (await http(app, "POST", CHAT, ASKED, headers=BY_NAME)).headers["x-request-id"]
        job = (await http(app, "POST", CHAT, ASKED, headers=later)).headers["location"]
        token = shared_token(operation="model-download", modelId="org/x", issuedAt=int(time.time()))
        signed = {**BY_NAME, "X-Verified-Op-Token": as_text(token)}
        fetch = (await http(app, "POST", "/v1/models/download", {"model": "org/x"}, headers=signed)).headers["location"]
        told = {
            path: await http(app, "GET", path, headers=BY_NAME)
            for path in (
                "/v1/models/download",
                "/running",
                "/v1/models/inventory",
                "/api/v1/models",
                "/v1/jobs",
                "/api/v1/usage",
            )
        }
        for path, answer in told.items():
            assert answer.status == 200
            for word in ("fake_engine", "bad.gguf", "hidden"):
                assert word not in answer.body.decode(), path
        assert told["/v1/models/download"].json()["data"] == []
        assert (await http(app, "GET", fetch, headers=BY_NAME)).status == 200
        assert told["/v1/jobs"].json()["data"] == told["/api/v1/usage"].json()["rows"] == []
        assert (await http(app, "GET", f"/api/v1/requests/{request_id}", headers=BY_NAME)).status == 404
        assert (await over(app, job, BY_NAME))["status"] == "done"


# --- what is written down -------------------------------------------------------------------------------------------


@pytest.fixture
def every_line() -> Iterator[None]:
    logs.setup("debug", "text")
    yield
    logs.setup("info", "text")


async def test_neither_keys_nor_words_of_callers_are_logged(
    guarded: App, every_line: None, capsys: pytest.CaptureFixture[str]
) -> None:
    body = asking("plain", user="SECRET-USER", stop="SECRET-STOP", stream=True)
    body["messages"][0]["content"] = "SECRET-PROMPT"
    secrets = {"Cookie": "SECRET-COOKIE", "X-Anything": "SECRET-HEADER"}
    for key in (ADMIN, USER, WRONG):
        await http(guarded, "POST", CHAT, body, headers={"Authorization": f"Bearer {key}", **secrets})
    await http(guarded, "POST", CHAT, body=b'{"model": "plain", "SECRET-BROKEN', headers={"x-api-key": ADMIN})
    await call(guarded, "POST", "/api/v1/models/plain/unload", ADMIN)
    shown = await call(guarded, "GET", "/api/v1/status", ADMIN)
    written = capsys.readouterr().err
    assert "unload started" in written, "the log was looked at"
    for text in (written, shown.body.decode(), (await call(guarded, "GET", "/metrics", ADMIN)).body.decode()):
        assert "SECRET" not in text
        for key in (ADMIN, USER, WRONG):
            assert key not in text
