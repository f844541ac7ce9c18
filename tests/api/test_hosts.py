"""Which Host and Origin headers are answered."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from greenroom.api.front import HostRule
from greenroom.errors import HostNotAllowed

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
