"""Canonical JSON: the bytes that are signed, compared with another implementation of RFC 8785 and with the guide."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from greenroom.features.governance import signing
from greenroom.features.governance.canonical_json import DEPTH_MAX, NUMBER_MAX, NotCanonical, canonical, read, sha256_of
from greenroom.features.governance.tokens import as_text
from tests.features.governance.token_rig import PRIVATE, PUBLIC, SHARED

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-NUMBER_MAX, NUMBER_MAX)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_the_form_is_that_of_the_standard(value: Any) -> None:
    assert canonical(value) == rfc8785.dumps(value)
    assert read(canonical(value)) == value


def test_keys_are_sorted_by_utf_16_and_texts_escaped_as_in_ecmascript() -> None:
    value = {"\U0001f600": 1, "\ufb33": 2, "é": 3, "\n": '"\\\x07\x7f/'}
    assert canonical(value) == '{"\\n":"\\"\\\\\\u0007\x7f/","é":3,"\U0001f600":1,"\ufb33":2}'.encode()


@pytest.mark.parametrize("value", [1.0, 0.5, 2**53, -(2**53), float("nan"), "\ud800", {"\udfff": 1}, {1: 2}, object()])
def test_values_without_one_form_are_refused(value: Any) -> None:
    with pytest.raises(NotCanonical):
        canonical(value)


def test_deep_values_are_refused() -> None:
    value: Any = 1
    for _ in range(DEPTH_MAX):
        value = [value]
    with pytest.raises(NotCanonical):
        canonical(value)


@pytest.mark.parametrize(
    "text", [b'{"a":1,"a":1}', b"NaN", b"Infinity", b"\xff", b"", b"{", b"\xef\xbb\xbf{}", b"[" * 100_000, b"1" * 5_000]
)
def test_texts_that_could_be_read_in_two_ways_are_refused(text: bytes) -> None:
    with pytest.raises(NotCanonical):
        read(text)


GUIDE = Path(__file__).parents[3] / "docs" / "governance.md"
BODY = {"modelId": "org/model", "evictModel": "old", "maxContextLength": 32768}
FIELDS = {"operation": "model-load", "modelId": "org/model", "issuedAt": 1745880000, "nonce": "abc123"}


def vectors() -> str:
    """The lines of the guide."""
    plain = FIELDS | {"signers": ["admin1", "admin2"]}
    bound = FIELDS | {"signers": ["alice", "bob"], "bodySha256": sha256_of(BODY)}
    shared = signing.by_shared_key(plain, SHARED)
    signed = signing.cosigned(signing.by_signer(bound, "alice", PRIVATE["alice"]), "bob", PRIVATE["bob"])
    rows = [
        ("an empty body's bodySha256", sha256_of({})),
        (f"bodySha256 of {json.dumps(BODY)}", sha256_of(BODY)),
        ("opToken of the shared key, canonical", canonical(plain).decode()),
        ("its signature", shared["signature"]),
        ("the token as text", as_text(shared)),
        ("opToken of the signers, canonical", canonical(bound).decode()),
        ("alice's sig", signed["signatures"][0]["sig"]),
        ("bob's sig", signed["signatures"][1]["sig"]),
    ]
    return "\n".join(f"- {name}:\n  `{value}`" for name, value in rows)


def test_the_vectors_of_the_guide_are_true() -> None:
    assert vectors() in GUIDE.read_text(encoding="utf-8")
    assert re.findall(r"^    (alice|bob): ([0-9a-f]{64})$", GUIDE.read_text(), re.MULTILINE) == [
        (name, PUBLIC[name]) for name in ("alice", "bob")
    ]
