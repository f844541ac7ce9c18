"""front.py"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from greenroom.api.asgi import MANAGEMENT_BODY_MAX
from greenroom.api.front import HostRule, prefers_later
from greenroom.errors import HostNotAllowed
from greenroom.http.request import Head
from tests.harness import fake, gateway
from tests.integration.raw import CHAT, Raw, http

KEY = "gr-0123456789abcdef0123456789abcdef"
SHOWN = {"Authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize(
    ("headers", "body", "code"),
    [
        ({}, b"{}", "invalid_api_key"),
        ({**SHOWN, "Host": "evil.example"}, b"{}", "host_not_allowed"),
        ({**SHOWN, "Content-Length": "99999999999"}, b"", "body_too_large"),
        (SHOWN, b"{}", "invalid_request"),
    ],
)
async def test_every_refusal_is_counted_by_its_code(
    tmp_path: Path, headers: dict[str, str], body: bytes, code: str
) -> None:
    async with gateway(tmp_path, {}, server={"api_keys": [{"name": "me", "key": KEY, "admin": True}]}) as app:
        answer = await http(app, "POST", CHAT, body=body, headers=headers)
        assert answer.error["code"] == code
        metrics = (await http(app, "GET", "/metrics", headers=SHOWN)).body.decode()
        assert f'greenroom_edge_refusals_total{{code="{code}"}} 1.0' in metrics


@pytest.mark.parametrize(
    ("lines", "later"),
    [
        ([b"respond-async"], True),
        ([b"wait=10, Respond-Async"], True),
        ([b"respond-async; wait=10"], True),
        ([b"return=minimal", b"respond-async"], True),
        ([b'a="x, y", respond-async'], True),
        ([b'a="x, respond-async, y"'], False),
        ([b"x; respond-async"], False),
        ([b"respond-asynchronously"], False),
        ([b"respond-async=no"], False),
        ([], False),
    ],
)
def test_what_a_caller_prefers_is_read_from_all_lines_as_rfc_7240_says(lines: list[bytes], later: bool) -> None:
    headers = [(b"host", b"here"), *((b"prefer", line) for line in lines)]
    assert prefers_later(Head(b"POST", b"/v1/chat/completions", headers, "1.1", "127.0.0.1", True)) is later


# --- CORS -------------------------------------------------------------------------------------------------------------

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


# --- hosts ------------------------------------------------------------------------------------------------------------

LOCAL = HostRule(["127.0.0.1"])
NAMED = HostRule(["127.0.0.1", "models.example.org", "10.1.2.3"], ["https://ui.example.org", "app://obsidian.md"])


@pytest.mark.parametrize(
    "host",
    [
        b"localhost",
        b"LocalHost:8210",
        b"localhost.",
        b"me.localhost:1",
        b"127.0.0.1",
        b"127.9.9.9:65535",
        b"[::1]",
        b"[0:0::1]:8210",
        None,
    ],
)
def test_loopback_is_always_answered(host: bytes | None) -> None:
    LOCAL.check(host, None)


@pytest.mark.parametrize(
    "host",
    [
        b"evil.example",
        b"localhost.evil.example",
        b"evil-localhost",
        b"127.0.0.1.evil.example",
        b"10.0.0.1",
        b"[::2]",
        b"0.0.0.0",
        b"",
        b"localhost:port",
        b"localhost:8210:8210",
        b"2130706433",
        b"user@localhost",
    ],
)
def test_other_names_are_refused(host: bytes) -> None:
    for _ in range(2):
        with pytest.raises(HostNotAllowed):
            LOCAL.check(host, None)


def test_configured_names_and_addresses_are_answered_at_any_port() -> None:
    for host in (b"models.example.org", b"MODELS.example.org:443", b"10.1.2.3:8210", b"localhost"):
        NAMED.check(host, None)
    with pytest.raises(HostNotAllowed, match="allowed_hosts"):
        NAMED.check(b"example.org", None)


def test_listening_everywhere_answers_any_address_but_no_unknown_name() -> None:
    for bound in ("0.0.0.0", "::"):
        rule = HostRule([bound])
        rule.check(b"192.168.1.5:8210", None)
        rule.check(b"[2001:db8::1]:8210", None)
        with pytest.raises(HostNotAllowed):
            rule.check(b"rebound.example", None)


def test_listening_everywhere_answers_programs_by_a_name_without_a_dot() -> None:
    rule = HostRule(["0.0.0.0", "model.lan"])
    for host in (b"safebox-model-llm:8080", b"model_llm", b"inference."):
        rule.check(host, None)
    for host in (b"", b"safebox-model-llm.evil.example:8080", b"a:b:8080"):
        with pytest.raises(HostNotAllowed):
            rule.check(host, None)


@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "10.1.2.3"])
def test_listening_on_one_address_answers_no_unknown_name(bound: str) -> None:
    with pytest.raises(HostNotAllowed):
        HostRule([bound]).check(b"safebox-model-llm:8080", None)


def test_a_page_by_a_name_without_a_dot_needs_that_name_to_be_listed() -> None:
    """Whoever says what names mean in a network could rebind one."""
    page = (b"safebox-model-llm:8080", b"http://safebox-model-llm:8080")
    with pytest.raises(HostNotAllowed, match="allowed_origins"):
        HostRule(["0.0.0.0"]).check(*page)
    with pytest.raises(HostNotAllowed):
        HostRule(["0.0.0.0"]).check_referer(page[0], page[1] + b"/ui/")
    HostRule(["0.0.0.0", "safebox-model-llm"]).check(*page)


def test_star_answers_every_host_but_not_every_origin() -> None:
    rule = HostRule(["*"])
    rule.check(b"anything.example", None)
    rule.check(b"anything.example", b"https://anything.example")
    with pytest.raises(HostNotAllowed):
        rule.check(b"anything.example", b"https://evil.example")
    HostRule(["*"], ["*"]).check(b"anything.example", b"https://evil.example")


@pytest.mark.parametrize(
    "origin",
    [
        b"http://models.example.org:8210",
        b"HTTPS://Models.example.org.:8210",
        b"https://ui.example.org",
        b"HTTPS://UI.example.org/",
        b"app://obsidian.md",
    ],
)
def test_own_and_listed_origins_may_call(origin: bytes) -> None:
    NAMED.check(b"models.example.org:8210", origin)


@pytest.mark.parametrize(
    "origin",
    [
        b"null",
        b"http://ui.example.org",
        b"https://evil.example",
        b"file://",
        b"",
        b"app://other",
        b"http://localhost:8210",
        b"http://localhost",
        b"http://127.0.0.1:8210",
        b"http://me.localhost:8210",
        b"http://[::1]:8210",
        b"http://models.example.org",
        b"https://models.example.org",
        b"http://models.example.org:8211",
        b"http://models.example.org:",
        b"http://x@models.example.org:8210",
        b"http://models.example.org:8210/path",
        b"ftp://localhost",
        b"\xff",
    ],
)
def test_other_origins_may_not(origin: bytes) -> None:
    with pytest.raises(HostNotAllowed, match="allowed_origins"):
        NAMED.check(b"models.example.org:8210", origin)


@pytest.mark.parametrize(
    ("host", "origin", "is_own"),
    [
        (b"localhost", b"http://localhost", True),
        (b"localhost:80", b"http://localhost:80", True),
        (b"localhost:80", b"http://localhost", True),
        (b"localhost", b"https://localhost", True),
        (b"localhost:443", b"https://localhost", True),
        (b"localhost:443", b"http://localhost", False),
        (b"localhost:80", b"https://localhost", False),
        (b"127.0.0.1:3000", b"http://127.0.0.1:3000", True),
        (b"127.0.0.1:3000", b"http://127.0.0.2:3000", False),
        (b"127.0.0.1:3000", b"http://localhost:3000", False),
        (b"[::1]:8210", b"http://[::1]:8210", True),
        (b"[0:0::1]:8210", b"http://[::1]:8210", True),
        (b"[::1]", b"http://[::1]:8210", False),
        (b"[::1]:8210", b"http://127.0.0.1:8210", False),
        (None, b"http://localhost:8210", False),
        (None, b"http://", False),
    ],
)
def test_a_page_is_our_own_by_name_and_port(host: bytes | None, origin: bytes, is_own: bool) -> None:
    with nullcontext() if is_own else pytest.raises(HostNotAllowed):
        LOCAL.check(host, origin)


def test_public_url_allows_its_own_host_and_pages() -> None:
    rule = HostRule(["127.0.0.1"], public_url="https://models.example.org/ai/")
    # A proxy that passes Host on, and one that does not.
    rule.check(b"models.example.org", b"https://models.example.org")
    rule.check(b"127.0.0.1:8210", b"https://models.example.org")
    for origin in (b"http://models.example.org", b"https://models.example.org:8443", b"https://example.org"):
        with pytest.raises(HostNotAllowed):
            rule.check(b"127.0.0.1:8210", origin)
    with pytest.raises(HostNotAllowed):
        rule.check(b"example.org", None)
    HostRule(public_url="http://[fd00::2]:8443").check(b"[fd00:0::2]", b"http://[fd00::2]:8443")


def test_the_port_that_a_scheme_has_anyway_may_be_named() -> None:
    rule = HostRule([], ["https://chat.example.org:443", "http://a:80/", "https://b:80"], public_url="https://c:443")
    for origin in (b"https://chat.example.org", b"http://a", b"http://a:80", b"https://b:80", b"https://c"):
        rule.check(b"localhost", origin)
    for origin in (b"http://chat.example.org", b"https://b", b"https://a:80", b"https://a"):
        with pytest.raises(HostNotAllowed):
            rule.check(b"localhost", origin)


def test_memory_of_allowed_pairs_is_bounded() -> None:
    rule = HostRule(["*"])
    for number in range(1000):
        rule.check(b"h%d.example" % number, None)
    # Seen nowhere else: it makes nothing but speed.
    assert len(rule._remembered) <= 256
