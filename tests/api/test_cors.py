"""Pages of allowed origins can use the answers; preflights need no key; others hear nothing."""

from pathlib import Path
from typing import Any

import pytest

from greenroom.api.asgi import MANAGEMENT_BODY_MAX
from tests.harness import fake, gateway
from tests.integration.raw import Raw, http

ORIGIN = "https://chat.example.org"


def question(method: str, path: str, **headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def test_page_of_an_allowed_origin_may_read_answers_and_errors(tmp_path: Path) -> None:
    server = {"allowed_origins": [ORIGIN]}
    async with gateway(tmp_path, {"a": fake("a")}, server=server) as app, await Raw.open(app) as raw:
        for path, status in (("/health", 200), ("/nowhere", 404)):
            raw.send(question("GET", path, Origin=ORIGIN))
            answer = await raw.answer()
            assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, ORIGIN)
            assert answer.headers["vary"] == "origin"


async def test_preflight_is_answered_without_a_key(tmp_path: Path) -> None:
    server = {"allowed_origins": [ORIGIN], "api_keys": [{"name": "k", "key": "secret"}]}
    async with gateway(tmp_path, {"a": fake("a")}, server=server) as app, await Raw.open(app) as raw:
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        raw.send(question("OPTIONS", "/v1/chat/completions", Origin=ORIGIN, **asked))
        answer = await raw.answer(bodiless=True)
        assert answer.status == 204
        assert answer.headers["access-control-allow-headers"] == "authorization"
        raw.send(question("GET", "/v1/models", Origin=ORIGIN))
        assert (await raw.answer()).status == 401


async def test_other_origins_are_refused(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": fake("a")}) as app, await Raw.open(app) as raw:
        raw.send(question("GET", "/health", Origin="https://evil.example.net"))
        answer = await raw.answer()
        assert answer.status == 403
        assert "access-control-allow-origin" not in answer.headers


async def test_a_page_may_read_what_the_gateway_tells_in_headers(tmp_path: Path) -> None:
    told = {"x-request-id", "x-queue-wait-ms", "retry-after", "x-should-retry"}
    of_models = {
        "x-model",
        "x-model-version",
        "x-model-repo-id",
        "x-cache-hit",
        "x-cache-tokens-reused",
        "x-gpu-time-ms",
    }
    server = {"allowed_origins": [ORIGIN]}
    async with gateway(tmp_path, {"a": fake("a")}, server=server) as app, await Raw.open(app) as raw:
        raw.send(question("GET", "/health", Origin=ORIGIN))
        answer = await raw.answer()
        assert told | of_models <= set(answer.headers["access-control-expose-headers"].split(", "))


@pytest.mark.parametrize("status", [401, 413, 429])
async def test_page_may_read_why_its_request_was_refused_before_its_body_came(tmp_path: Path, status: int) -> None:
    server: dict[str, Any] = {"allowed_origins": [ORIGIN]}
    path, length = "/v1/chat/completions", "2"
    if status == 401:
        server["api_keys"] = [{"name": "k", "key": "secret"}]
    elif status == 413:
        path, length = "/api/v1/reload", str(MANAGEMENT_BODY_MAX + 1)
    tenants = {"lab": {"requests_per_minute": 1}}
    sent = {"Origin": ORIGIN, "X-Tenant-ID": "lab", "Content-Length": length}
    async with gateway(tmp_path, {"a": fake("a")}, server=server, tenants=tenants) as app:
        if status == 429:
            await http(app, "POST", path, body=b"{}", headers=sent)
        async with await Raw.open(app) as raw:
            raw.send(question("POST", path, **sent))
            answer = await raw.answer()
        assert (answer.status, answer.headers.get("access-control-allow-origin")) == (status, ORIGIN)
        assert answer.headers["vary"] == "origin"


async def test_preflight_without_an_origin_is_a_request_like_others(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": fake("a")}) as app, await Raw.open(app) as raw:
        raw.send(question("OPTIONS", "/v1/models", **{"Access-Control-Request-Method": "POST"}))
        assert (await raw.answer()).status == 405
