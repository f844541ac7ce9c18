"""Which model a path names, with slashes and escapes in ids."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greenroom.config.kinds import id_problem
from greenroom.serving.routes import is_open, split_model

# Another process may hold the machine for a while: that says nothing about the code.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

KNOWN = frozenset(
    ("qwen", "org/qwen", "org/qwen/v2", "org", "qwen:7b", "qwen:7b/x", "naïve model", "50%", "a%2Fb", "a/b")
)


def split(raw: bytes) -> tuple[str, bytes] | None:
    return split_model(raw, KNOWN.__contains__)


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        # Plain ids, with and without something after them.
        (b"qwen", ("qwen", b"")),
        (b"qwen/", ("qwen", b"/")),
        (b"qwen/v1/chat", ("qwen", b"/v1/chat")),
        (b"qwen//v1", ("qwen", b"//v1")),
        # The longest known id wins.
        (b"org/qwen/v1/chat", ("org/qwen", b"/v1/chat")),
        (b"org/qwen/v2", ("org/qwen/v2", b"")),
        (b"org/qwen/v2/v1", ("org/qwen/v2", b"/v1")),
        (b"org/other", ("org", b"/other")),
        # An id encoded as one segment is exactly that id, even where a longer one would match.
        (b"org%2Fqwen/v2/x", ("org/qwen", b"/v2/x")),
        (b"org%2fqwen", ("org/qwen", b"")),
        (b"qwen%3A7b/x", ("qwen:7b", b"/x")),
        (b"qwen:7b/x", ("qwen:7b/x", b"")),
        # Encoded in part: not an id by itself, so the longest again.
        (b"org%2Fqwen%2Fv2/x", ("org/qwen/v2", b"/x")),
        (b"o%72g/qwen/x", ("org", b"/qwen/x")),
        (b"a/%62/c", ("a/b", b"/c")),
        (b"na%C3%AFve%20model/x", ("naïve model", b"/x")),
        # What follows is never decoded, whatever it holds.
        (b"qwen/a%2Fb%00%zz/../c", ("qwen", b"/a%2Fb%00%zz/../c")),
        # Decoded once.
        (b"50%25/x", ("50%", b"/x")),
        (b"a%252Fb", ("a%2Fb", b"")),
        (b"org%252Fqwen", None),
        # Nothing known, nothing at all, nothing sensible.
        (b"", None),
        (b"/qwen", None),
        (b"other/qwen", None),
        (b"Qwen", None),
        (b"qwe", None),
        (b"50%", None),
        (b"50%2", None),
        (b"%71wen%zz", None),
        (b"qwen%00", None),
        (b"qwen%0d%0aX", None),
        (b"qwen%FF", None),
        (b"qwen\r\n/x", None),
        (b"qwen/x y", None),
        (b"qwen\x00", None),
        (b"qwen/\x7f", None),
        (b"na\xc3\xafve%20model", ("naïve model", b"")),
    ],
)
def test_path_is_split(raw: bytes, found: tuple[str, bytes] | None) -> None:
    assert split(raw) == found


def test_endless_path_is_looked_at_only_as_far_as_an_id_can_reach() -> None:
    asked: list[str] = []

    def is_known(name: str) -> bool:
        asked.append(name)
        return False

    assert split_model(b"a/" * 100_000, is_known) is None
    assert len(asked) <= 256


ids = st.text(min_size=1, max_size=30).filter(lambda name: id_problem(name) is None)
after = st.text(alphabet="abc/%2F.", max_size=20).map(lambda rest: f"/{rest}".encode() if rest else b"")


@patient
@given(ids, after)
def test_encoded_id_is_always_found_with_what_follows_untouched(name: str, rest: bytes) -> None:
    segment = quote(name, safe="")
    known = {name}
    assert split_model(segment.encode() + rest, known.__contains__) == (name, rest)


@patient
@given(st.sets(ids, min_size=1, max_size=5), ids, after)
def test_unencoded_id_gives_itself_or_a_longer_known_one(others: set[str], name: str, rest: bytes) -> None:
    raw = quote(name, safe="/").encode() + rest
    found = split_model(raw, (others | {name}).__contains__)
    assert found is not None
    assert found[0] in others | {name}
    assert raw.endswith(found[1])
    if b"%" not in raw:
        assert len(found[0]) >= len(name)


@patient
@given(st.binary(max_size=40))
def test_any_bytes_are_split_or_refused(raw: bytes) -> None:
    found = split_model(raw, lambda _: True)
    if found is not None:
        name, rest = found
        assert name.isprintable()
        assert raw.endswith(rest)
        assert not rest or rest.startswith(b"/")


@pytest.mark.parametrize(
    ("pattern", "fits", "fits_not"),
    [
        ("/tokenize", ["/tokenize"], ["/tokenize/", "/tokenize/x", "/Tokenize", "/", "//tokenize", "/tokeniz%65"]),
        ("/", ["/"], ["/x", "//"]),
        ("/v1/*/x", ["/v1/a/x"], ["/v1//x", "/v1/x", "/v1/a/b/x", "/v1/../x", "/v1/./x"]),
        (
            "/a/**",
            ["/a/b", "/a/b/c"],
            ["/a", "/b/c", "/a/../b", "/a/%2e%2e/b", "/a/b/..", "/a//b", "/a/b;c", "/a/b\\c"],
        ),
        ("/**", ["/a", "/a/b.c"], ["/a/..", "/.", "/a%00"]),
    ],
)
def test_open_paths_are_those_whose_bytes_fit(pattern: str, fits: list[str], fits_not: list[str]) -> None:
    assert all(is_open(path.encode(), ["/other", pattern]) for path in fits)
    assert not [path for path in fits_not if is_open(path.encode(), [pattern])]
    assert not is_open(b"/tokenize", [])
