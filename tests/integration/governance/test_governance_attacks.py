"""Ways around signed operations that were tried: other spellings, upgrades, doubled fields, jobs, odd names."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from greenroom.core.model import ModelId
from greenroom.features.governance.audit import verify
from greenroom.features.governance.tokens import as_text
from tests.features.governance.token_rig import shared_token
from tests.full_disk import full_disk
from tests.harness import fake, gateway
from tests.integration.facts import over
from tests.integration.governance.test_governance import KEYS, ask, audited, now, with_key
from tests.integration.raw import Answer, Raw, asking, http
from tests.waiting import until

COMPOSED = unicodedata.normalize("NFC", "café")


@pytest_asyncio.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    models = {"m": fake("m", routes=["/echo/open", "/ws"]), COMPOSED: fake("accent")}
    async with gateway(tmp_path, models, server={"api_keys": KEYS}, governance=with_key(tmp_path)) as app:
        yield app


def is_untouched(app: App) -> bool:
    return not any(app.loop.scheduler.state.slots_of(ModelId(model)) for model in ("m", COMPOSED))


async def raw(app: App, *lines: str, body: bytes = b"") -> Answer:
    """A request as written, with a key."""
    head = [*lines, "Host: localhost", "Authorization: Bearer ops-key", f"Content-Length: {len(body)}"]
    async with await Raw.open(app) as connection:
        connection.send("\r\n".join([*head, "Content-Type: application/json", "", ""]).encode() + body)
        return await connection.answer()


# --- the way there ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/models/load/", "//v1/models/load", "/v1//models/load", "/v1/models//load", "/v1/models/%6Coad"),
        *("/v1/models/./load", "/v1/models/%2e/load", "/v1/models/x/../load", "/v1/models/x/%2e%2e/load"),
        *("/V1/models/load", "/v1/models/LOAD", "/v1/models/load%2f", "/v1/models/load;x=1", "/v1/models/load%20"),
        *("/v1/models/load%00", "/v1/models/load%0a", "/v1%2fmodels%2fload", "/v1\\models\\load", "/v1/models/load?"),
        *("/api/v1/models/m/load/", "/api/v1/models//m/load", "/api/v1/models/m%2fload", "/%61pi/v1/models/m/load"),
        *("/api/v1/models/m/%6coad", "/api/v1/models/m/./load", "/api/v1/models/m/x/../load", "/api/v1/models/M/load"),
        *("/upstream/m/../../v1/models/load", "/upstream/m/%2e%2e/%2e%2e/api/v1/models/m/load"),
        *("http://localhost/v1/models/load", "/api/v1/./reload", "/api/v1/reload/", "/api/v1/%72eload"),
    ],
)
async def test_no_spelling_of_a_path_needs_no_token(app: App, path: str) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        answer = await raw(app, f"{method} {path} HTTP/1.1", body=b'{"modelId":"m"}')
        assert answer.status in (400, 401, 403, 404, 405), (method, answer.status, answer.body)
    assert is_untouched(app)


@pytest.mark.parametrize(
    "lines",
    [
        ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAA"),
        ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"),
        ("X-HTTP-Method-Override: GET",),
        ("X-Original-URL: /health", "X-Rewrite-URL: /health"),
        ("Prefer: respond-async",),
        ("Expect: 100-continue-not",),
    ],
)
async def test_no_header_changes_what_a_call_is(app: App, lines: tuple[str, ...]) -> None:
    answer = await raw(app, "POST /v1/models/load HTTP/1.1", *lines, body=b'{"modelId":"m"}')
    assert answer.status in (400, 401, 417, 426), answer.body
    answer = await raw(app, "GET /api/v1/models/m/load HTTP/1.1", *lines)
    assert answer.status in (400, 404, 405, 417), answer.body
    assert is_untouched(app)


async def test_a_websocket_controls_no_engine(app: App) -> None:
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAA")
    closed = await raw(app, "GET /upstream/m/echo/closed HTTP/1.1", *upgrade)
    assert (closed.status, closed.error["code"]) == (403, "not_allowed")
    other = ("Connection: Upgrade", "Upgrade: anything")
    unknown = await raw(app, "GET /upstream/m/ws HTTP/1.1", *other)
    assert (unknown.status, unknown.error["code"]) == (403, "not_allowed"), "another protocol may carry other paths"
    assert is_untouched(app)


@pytest.mark.parametrize("route", ["/v1/models/load", "/api/v1/models/m/load", "/api/v1/reload", "/v1/cache/flush"])
async def test_a_job_does_nothing_that_needs_a_token(app: App, route: str) -> None:
    order = {"route": route, "body": {"modelId": "m", "model": "m", "scope": "all"}}
    answer = await ask(app, "POST", "/v1/jobs", order)
    assert answer.status in (400, 404, 422), answer.body
    assert is_untouched(app)


# --- the token --------------------------------------------------------------------------------------------------------


async def test_a_token_that_could_be_read_in_two_ways_is_refused(app: App) -> None:
    token = shared_token(modelId="m", issuedAt=now())
    text = json.dumps(token)
    doubled = [
        text.replace('"modelId": "m"', '"modelId": "other", "modelId": "m"'),
        text.replace('"signature"', '"signature": "00", "signature"'),
        text.replace('{"opToken"', '{"opToken": {}, "opToken"'),
        text.replace(f'"issuedAt": {token["opToken"]["issuedAt"]}', '"issuedAt": 1e9'),
        text.replace(f'"issuedAt": {token["opToken"]["issuedAt"]}', '"issuedAt": ' + "9" * 5_000),
        text.replace(f'"issuedAt": {token["opToken"]["issuedAt"]}', '"issuedAt": 9007199254740993'),
        text.replace('"modelId": "m"', '"modelId": "m\\ud800"'),
        "[" * 100_000,
    ]
    for one in doubled:
        body = b'{"modelId":"m","verifiedOpToken":' + one.encode() + b"}"
        answer = await raw(app, "POST /v1/models/load HTTP/1.1", body=body)
        assert answer.status in (400, 401), (one[:100], answer.body)
    written = json.dumps({"modelId": "m", "verifiedOpToken": token}).encode()
    for encoded in (
        b"\xef\xbb\xbf" + written,
        written.decode().encode("utf-16"),
        written + b"{}",
        b"[" + written + b"]",
    ):
        assert (await raw(app, "POST /v1/models/load HTTP/1.1", body=encoded)).status == 400
    assert is_untouched(app)
    assert (await raw(app, "POST /v1/models/load HTTP/1.1", body=written)).status == 202, "it is unspent"


async def test_two_headers_are_not_one(app: App) -> None:
    tokens = [as_text(shared_token(modelId="m", issuedAt=now())) for _ in range(2)]
    for second in (*tokens, "", "x"):
        lines = (f"X-Verified-Op-Token: {tokens[0]}", f"x-verified-op-token: {second}")
        answer = await raw(app, "POST /v1/models/load HTTP/1.1", *lines, body=b'{"modelId":"m"}')
        assert (answer.status, answer.error["code"]) == (401, "token_malformed")
    joined = f"X-Verified-Op-Token: {', '.join(tokens)}"
    answer = await raw(app, "POST /v1/models/load HTTP/1.1", joined, body=b'{"modelId":"m"}')
    assert (answer.status, answer.error["code"]) == (401, "token_malformed")
    assert is_untouched(app)


async def test_another_normal_form_of_a_name_is_another_name(app: App) -> None:
    """What looks the same and has other bytes is neither the model of the token nor the model of a rule."""
    decomposed = unicodedata.normalize("NFD", COMPOSED)
    token = shared_token(modelId=COMPOSED, issuedAt=now())
    answer = await ask(app, "POST", "/v1/models/load", {"modelId": decomposed}, token)
    assert answer.error["code"] == "token_wrong_model"
    other = shared_token(modelId=decomposed, issuedAt=now())
    answer = await ask(app, "POST", "/v1/models/load", {"modelId": decomposed}, other)
    assert answer.status in (202, 404) and is_untouched(app)
    assert (await ask(app, "POST", "/v1/models/load", {"modelId": COMPOSED}, token)).status == 202


@pytest.mark.parametrize("mib", [10**30, 2**53 + 1, 1.5, -1, "1"])
async def test_odd_numbers_in_a_signed_body_permit_nothing_else(app: App, mib: Any) -> None:
    token = shared_token(operation="model-unload", modelId=None, issuedAt=now(), bodySha256="0" * 64)
    answer = await ask(app, "POST", "/api/v1/leases", {"mib": mib, "wait_s": 5}, token)
    assert answer.error["code"] == "token_body_changed"


# --- time -------------------------------------------------------------------------------------------------------------


async def test_a_load_goes_on_when_its_token_is_over(tmp_path: Path) -> None:
    """The window is for the call; what was permitted is done."""
    governance = with_key(tmp_path, window_s=1, clock_skew_s=1)
    async with gateway(tmp_path, {"m": fake("m", "--load-s", "4")}, governance=governance) as app:
        token = shared_token(modelId="m", issuedAt=now())
        taken = await http(app, "POST", "/v1/models/load", {"modelId": "m", "verifiedOpToken": token})
        assert taken.status == 202
        assert (await over(app, f"/v1/models/load/{taken.json()['taskId']}"))["status"] == "completed"
        late = await http(app, "POST", "/v1/models/load", {"modelId": "m", "verifiedOpToken": token})
        assert late.error["code"] in ("token_expired", "token_replayed")


# Waits for ten seconds: until the key is over, and longer for the model.
@pytest.mark.slow
async def test_a_key_that_is_over_starts_no_job_and_what_waits_does_not_run(tmp_path: Path) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=8)
    keys = [*KEYS, {"name": "short", "key": "short-key", "expires": soon.isoformat()}]
    models = {"m": fake("m", "--load-s", "10")}
    async with gateway(tmp_path, models, server={"api_keys": keys}, governance=with_key(tmp_path)) as app:
        order = {"route": "/v1/chat/completions", "body": asking("m")}
        taken = await ask(app, "POST", "/v1/jobs", order, key="short")
        assert taken.status == 202, taken.body
        path = f"/v1/jobs/{taken.json()['id']}"
        await until(lambda: datetime.now(UTC) > soon, "the key is over")
        refused = await ask(app, "POST", "/v1/jobs", order, key="short")
        assert (refused.status, refused.error["code"]) == (401, "api_key_expired")
        seen = await over(app, path, {"Authorization": "Bearer ops-key"})
        # It waited for its model when the key ended, so it is not answered.
        assert (seen["status"], seen["error"]["code"]) == ("failed", "api_key_expired"), seen
        assert (await ask(app, "GET", path, key="short")).status == 401


async def test_a_full_disk_permits_nothing_and_room_permits_again(app: App, tmp_path: Path) -> None:
    """Neither what cannot be remembered as used nor what cannot be written down is done."""
    log = tmp_path / "state" / "governance" / "audit.jsonl"

    async def load() -> Answer:
        return await ask(app, "POST", "/v1/models/load", {"modelId": "m"}, shared_token(modelId="m", issuedAt=now()))

    for room, code in ((0, "nonce_store_unavailable"), (log.stat().st_size + 10, "audit_unavailable")):
        with full_disk(room):
            refused = await load()
        assert (refused.status, refused.error["code"]) == (503, code)
        assert int(refused.headers["retry-after"]) > 0 and is_untouched(app)
    assert (await load()).status == 202
    assert verify(log).problem is None


async def test_refusals_of_all_of_these_are_in_the_log_and_it_stays_small(app: App, tmp_path: Path) -> None:
    for number in range(200):
        await raw(app, "POST /v1/models/load HTTP/1.1", body=b'{"modelId":"m%d"}' % number)
    assert (tmp_path / "state" / "governance" / "audit.jsonl").stat().st_size < 4_000
    assert audited(tmp_path)[-1]["code"] == "token_missing"
