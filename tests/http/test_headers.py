"""What passes between clients and engines."""

from __future__ import annotations

import tracemalloc

import pytest

from greenroom.errors import GatewayBug
from greenroom.http.headers import NEVER_FORWARDED, SOUND_MAX, Pattern, build_request, chunk, response_headers

CLIENT = [
    (b"host", b"gateway"),
    (b"content-type", b"application/json"),
    (b"accept", b"text/event-stream"),
    (b"accept-encoding", b"gzip"),
    (b"authorization", b"Bearer secret"),
    (b"cookie", b"secret"),
    (b"connection", b"keep-alive"),
    (b"transfer-encoding", b"chunked"),
    (b"content-length", b"99"),
    (b"x-forwarded-for", b"1.2.3.4"),
    (b"x-request-id", b"theirs"),
    (b"x-special", b"yes"),
    (b"sec-websocket-key", b"k"),
]


def build(**changes: object) -> bytes:
    options: dict[str, object] = {"host": b"engine:1", "length": 3, "request_id": b"r-1", **changes}
    method = options.pop("method", b"POST")
    target = options.pop("target", b"/v1/x?y=%2F")
    return build_request(method, target, CLIENT, **options)  # type: ignore[arg-type]


def test_engine_sees_only_allowed_headers_and_ours() -> None:
    assert build().split(b"\r\n") == [
        b"POST /v1/x?y=%2F HTTP/1.1",
        b"host: engine:1",
        b"x-request-id: r-1",
        b"content-length: 3",
        b"content-type: application/json",
        b"accept: text/event-stream",
        b"",
        b"",
    ]


def test_configured_names_pass_but_never_those_of_the_hop() -> None:
    everything = frozenset(name for name, _ in CLIENT)
    sent = build(allowed=everything)
    assert b"\r\nx-special: yes\r\n" in sent
    assert b"secret" not in sent
    assert b"forwarded" not in sent
    names = [line.split(b":")[0] for line in sent.split(b"\r\n")[1:-2]]
    assert sorted(set(names) & NEVER_FORWARDED) == [b"content-length", b"host", b"x-request-id"]
    assert len(names) == len(set(names))


def test_length_is_sent_where_a_body_is_expected() -> None:
    assert b"content-length: 0" in build(length=0)
    assert b"content-length" not in build(method=b"GET", length=0)
    assert b"content-length: 5" in build(method=b"GET", length=5)


def test_upgrade_carries_its_handshake() -> None:
    sent = build(method=b"GET", length=0, upgrade=b"websocket")
    assert b"connection: upgrade\r\nupgrade: websocket\r\n" in sent
    assert b"sec-websocket-key: k\r\n" in sent


@pytest.mark.parametrize("target", [b"v1", b"", b"/a b", b"/a\r\nX: y", b"/a\0", b"/\xc3\xa9", b"/a\n"])
def test_target_must_be_a_printable_path(target: bytes) -> None:
    with pytest.raises(GatewayBug):
        build(target=target)


@pytest.mark.parametrize("value", [b"r\r\nX: y", b"r\n", b"r\0"])
def test_our_own_values_cannot_break_the_head(value: bytes) -> None:
    with pytest.raises(GatewayBug):
        build(request_id=value)
    with pytest.raises(GatewayBug):
        build(host=value)
    with pytest.raises(GatewayBug):
        build(ours=[(b"x-tenant-id", value)])


def test_what_we_say_takes_the_place_of_what_the_client_said_under_the_same_name() -> None:
    sent = build(allowed=frozenset((b"x-special", b"accept")), ours=[(b"x-special", b"ours"), (b"x-more", b"1")])
    assert sent.count(b"x-special") == 1
    assert b"\r\nx-special: ours\r\nx-more: 1\r\n" in sent and b"accept: text/event-stream" in sent


def test_default_headers_are_added_only_where_none_was_set() -> None:
    defaults = [(b"x-cache-hit", b"false"), (b"x-cache-tokens-reused", b"0")]
    engine, ours = [(b"x-cache-hit", b"true")], [(b"x-request-id", b"r")]
    assert response_headers(engine, ours, defaults) == [*engine, *ours, defaults[1]]
    assert response_headers([], [], defaults) == defaults


def test_client_sees_only_allowed_headers_of_an_engine_and_ours() -> None:
    engine = [
        (b"server", b"llama.cpp"),
        (b"date", b"today"),
        (b"content-type", b"application/json"),
        (b"content-length", b"3"),
        (b"x-private", b"1"),
        (b"connection", b"keep-alive, X-Private, x-later"),
        (b"keep-alive", b"timeout=5"),
        (b"x-later", b"1"),
        (b"access-control-allow-origin", b"*"),
        (b"x-request-id", b"theirs"),
        (b"set-cookie", b"session=1"),
        (b"clear-site-data", b'"*"'),
        (b"www-authenticate", b"Basic"),
        (b"x-model", b"theirs"),
        (b"x-model-version", b"9"),
        (b"x-ratelimit-remaining", b"0"),
        (b"vary", b"accept"),
        (b"vary", b"origin"),
        (b"retry-after", b"3"),
    ]
    assert response_headers(engine, [(b"x-request-id", b"ours")]) == [
        (b"content-type", b"application/json"),
        (b"vary", b"accept"),
        (b"vary", b"origin"),
        (b"retry-after", b"3"),
        (b"x-request-id", b"ours"),
    ]
    assert response_headers([], []) == []


def test_value_that_was_sound_is_sound_again_and_others_are_still_refused() -> None:
    pattern = Pattern(rb"[a-z]+")
    assert [pattern.fits(value) for value in (b"abc", b"ABC", b"abc", b"ABC", b"abc\n")] == [True, False] * 2 + [False]


def test_sound_values_are_remembered_up_to_a_bound() -> None:
    pattern = Pattern(rb"[a-z0-9]+")
    tracemalloc.start()
    try:
        for number in range(SOUND_MAX * 20):
            assert pattern.fits(b"%0100d" % number) and pattern.fits(b"%01000d" % number)
        held_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held_bytes < SOUND_MAX * 400, "of 10,240 short values and as many long ones"


@pytest.mark.parametrize("length", [1, 15, 16, 1023, 1024, 70_000])
def test_chunk_begins_with_its_size_in_hex(length: int) -> None:
    assert chunk(b"x" * length) == b"%x\r\n%b\r\n" % (length, b"x" * length)
