"""Counting and filtering events gives the same however the bytes are split."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from greenroom.http.sse import HELD_BYTES_MAX, EventCounter, UsageFilter

LINES = st.sampled_from(
    [
        b"data: x",
        b"data:",
        b": ping",
        b"event: e",
        b"da",
        b"ta: 1",
        b"\n",
        b"\r\n",
        b"\n\n",
        b"\r\n\r\n",
        b"\r",
        b"\n\n\n",
        b"z",
    ]
)
STREAMS = st.lists(LINES, max_size=30).map(b"".join)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    points = sorted({cut % (len(data) + 1) for cut in cuts})
    pieces = [data[start:end] for start, end in zip([0, *points], [*points, len(data)], strict=True)]
    return [piece for piece in pieces if piece]


@given(STREAMS, st.lists(st.integers(0, 400), max_size=12))
@example(b"data: a\n\ndata: b\r\n\r\n", list(range(30)))
@example(b"\n\n\ndata: a\n", [1, 2])
def test_counts_do_not_depend_on_the_reads(data: bytes, cuts: list[int]) -> None:
    counter = EventCounter()
    for piece in split(data, cuts):
        counter.feed(piece)
    # The same, said of the whole stream: runs of line ends with a blank line in them, after something.
    runs = [run for run in re.findall(rb"(?<=[^\r\n])[\r\n]+", data) if run.count(b"\n") >= 2]
    last = re.search(rb"[\r\n]*\Z", data)
    assert last is not None
    starts_there = last.start() == 0
    assert counter.events == len(runs)
    assert counter.at_boundary == (starts_there or last.group().count(b"\n") >= 2)
    assert counter.has_data == (b"\ndata:" in b"\n" + data)


def chunk(content: str | None, usage: dict[str, int] | None = None) -> bytes:
    choices = [] if content is None else [{"index": 0, "delta": {"content": content}}]
    value: dict[str, object] = {"id": "c", "choices": choices}
    if usage is not None:
        value["usage"] = usage
    return b"data: %b\n\n" % json.dumps(value).encode()


TRICKY = 'the text "choices":[] and "usage":{} \n\ndata: x'
PARTS = [chunk("a"), chunk(TRICKY), b": comment\n\n", chunk(None), chunk("b")]
USAGE = chunk(None, {"total_tokens": 3})
STREAM = b"".join(PARTS) + USAGE + b"data: [DONE]\n\n"
WITHOUT = b"".join(PARTS) + b"data: [DONE]\n\n"


@given(st.lists(st.integers(0, 2000), max_size=40))
def test_usage_event_is_dropped_and_nothing_else(cuts: list[int]) -> None:
    for stream, expected in (
        (STREAM, WITHOUT),
        (STREAM.replace(b"\n\n", b"\r\n\r\n"), WITHOUT.replace(b"\n\n", b"\r\n\r\n")),
        (STREAM.replace(b": []", b":[ ]"), WITHOUT.replace(b": []", b":[ ]")),
        (WITHOUT, WITHOUT),
    ):
        held = UsageFilter()
        passed = b"".join(held.feed(piece) for piece in split(stream, cuts))
        assert passed + held.flush() == expected


def test_only_whole_events_pass() -> None:
    held = UsageFilter()
    assert held.feed(b"data: {") == b""
    assert held.feed(b"}\n") == b""
    assert held.feed(b"\ndata: 2") == b"data: {}\n\n"
    assert held.at_boundary
    assert held.flush() == b"data: 2"
    assert not held.at_boundary


def test_event_that_only_looks_like_usage_passes() -> None:
    for event in (b'data: {"choices":[], "usage": broken\n\n', b'data: [{"choices":[]}]\n\n', b'"choices":[]\n\n'):
        assert UsageFilter().feed(event) == event


def test_usage_event_cut_off_before_its_blank_line_is_dropped_too() -> None:
    held = UsageFilter()
    assert held.feed(chunk("a") + USAGE.rstrip()) == chunk("a")
    assert held.flush() == b""


@pytest.mark.parametrize("step", [997, 65536])
def test_endless_line_is_passed_on_in_bounded_memory(step: int) -> None:
    held = UsageFilter()
    sent = passed = 0
    while sent < 3 * HELD_BYTES_MAX:
        sent += step
        passed += len(held.feed(b"x" * step))
        assert sent - passed <= HELD_BYTES_MAX + step
    assert passed > HELD_BYTES_MAX
    assert not held.at_boundary
