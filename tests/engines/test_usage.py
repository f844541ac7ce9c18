"""Tokens are read from the last bytes of an answer, wherever those begin."""

import json

import pytest

from greenroom.engines.usage import Usage, estimated, from_timings, from_usage

USAGE = {
    "completion_tokens": 4,
    "prompt_tokens": 22,
    "total_tokens": 26,
    "prompt_tokens_details": {"cached_tokens": 21},
}
TIMINGS = {"cache_n": 21, "prompt_n": 1, "prompt_ms": 3.5, "predicted_n": 4, "predicted_ms": 9.1}


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def test_whole_answer_is_read_in_one_go() -> None:
    answer = json.dumps(
        {"choices": [{"message": {"content": '"usage": {"prompt_tokens": 9}'}}], "usage": USAGE}
    ).encode()
    assert from_usage(answer) == Usage(22, 4, 21)


@pytest.mark.parametrize("cut", [0, 1, 7, 30, 60])
def test_tail_may_begin_anywhere(cut: int) -> None:
    answer = json.dumps({"choices": [{"message": {"content": "x" * 50}}], "usage": USAGE, "timings": TIMINGS}).encode()
    assert from_usage(answer[cut:]) == Usage(22, 4, 21)
    assert from_timings(answer[cut:]) == Usage(22, 4, 21, 12.6)


def test_last_event_of_a_stream_counts() -> None:
    stream = event(choices=[{"delta": {"content": '"usage": {'}}], usage={"prompt_tokens": 1, "completion_tokens": 1})
    stream += event(choices=[], usage=USAGE) + b"data: [DONE]\n\n"
    assert from_usage(stream) == Usage(22, 4, 21)


def test_usage_without_details_does_not_tell_what_was_cached() -> None:
    assert from_usage(event(usage={"prompt_tokens": 3, "completion_tokens": 5})) == Usage(3, 5)


@pytest.mark.parametrize(
    ("said", "usage"),
    [
        ({"input_tokens": 3, "output_tokens": 5, "total_tokens": 8}, Usage(3, 5)),
        ({"input_tokens": 3, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 2}}, Usage(3, 5, 2)),
        ({"input_tokens": 3, "output_tokens": 5, "input_tokens_details": {"image_tokens": 2}}, Usage(3, 5)),
        ({"prompt_tokens": 3, "total_tokens": 3}, Usage(3, 0)),
        ({"completion_tokens": 5, "total_tokens": 8}, Usage(3, 5)),
        ({"output_tokens": 5}, Usage(0, 5, estimated=True)),
        ({"prompt_tokens": -3, "completion_tokens": 5}, Usage(0, 5, estimated=True)),
    ],
)
def test_both_names_are_read_and_what_is_missing_is_not_0(said: dict[str, object], usage: Usage) -> None:
    assert from_usage(event(usage=said)) == usage
    assert from_usage(json.dumps({"usage": said}).encode()) == usage


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"total_tokens": 9},
        {"prompt_tokens": 3},
        {"input_tokens": 3, "output_tokens": -1},
        {"prompt_tokens": 9, "total_tokens": 3},
        {"type": "duration", "seconds": 3},
    ],
)
def test_usage_that_does_not_tell_the_length_of_the_answer_is_none(said: dict[str, object]) -> None:
    assert from_usage(event(usage=said)) is None


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        b"{}",
        b'"usage"',
        b'"usage":',
        b'"usage": {"prompt_tokens": 3',
        b'"usage": null}',
        b'"usage": {"prompt_tokens": "three"}',
        b'"usage": ' + b"{" * 50,
        b"data: [DONE]\n\n",
        b'{"usage": []}',
    ],
)
def test_tail_that_does_not_say_gives_nothing(tail: bytes) -> None:
    assert from_usage(tail) is None
    assert from_timings(tail) is None


def test_counted_events_are_marked_as_an_estimate() -> None:
    assert estimated(7) == Usage(0, 7, estimated=True)
