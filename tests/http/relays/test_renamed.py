"""The name of a model in an answer: replaced wherever it is a field's value, in whatever pieces it comes."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from greenroom.http.relays.translated import NameFilter

OLD, NEW = "alpha.gguf", '/models/a "b".gguf'


def passed(data: bytes, cuts: list[int]) -> bytes:
    names, out, begin = NameFilter(OLD, NEW), b"", 0
    for cut in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
        out += names.feed(data[begin:cut])
        begin = cut
    return out + names.flush()


def event(text: str, model: str = OLD) -> dict[str, object]:
    return {"id": "1", "model": model, "choices": [{"delta": {"content": text}}]}


@given(st.text(max_size=20), st.lists(st.integers(0, 400), max_size=8), st.booleans())
def test_only_the_name_changes(text: str, cuts: list[int], is_compact: bool) -> None:
    said = event(f'{text} "model":"{OLD}" {text}')
    data = json.dumps(said, separators=(",", ":") if is_compact else None).encode()
    assert json.loads(passed(data, cuts)) == {**said, "model": NEW}


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=8))
def test_other_bytes_pass_as_they_are(data: bytes, cuts: list[int]) -> None:
    assert passed(data, cuts) == data


def test_whole_events_are_not_held_back() -> None:
    names = NameFilter(OLD, NEW)
    data = b"data: " + json.dumps(event("x")).encode() + b"\n\n"
    assert names.feed(data).endswith(b"\n\n") and names.flush() == b""


def test_a_longer_name_that_begins_alike_is_another() -> None:
    data = json.dumps(event("x", OLD + "2")).encode()
    assert passed(data, []) == data
