"""Canonical JSON: the bytes that are signed, compared with another implementation of RFC 8785."""

from __future__ import annotations

from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from greenroom.features.governance.canonical_json import DEPTH_MAX, NUMBER_MAX, NotCanonical, canonical, read

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
