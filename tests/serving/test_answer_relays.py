"""Answers that are taken whole, translated or collected: none is held for long; and a model's name in them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.dialects.anthropic.answers import messages_translation
from greenroom.dialects.neutral import AnswerContext
from greenroom.dialects.ollama.answers import embed_translation
from greenroom.dialects.translation import Translation
from greenroom.errors import EngineLost, ResultTooLarge
from greenroom.http.body import Body, BodyBudget
from greenroom.http.exchange import Exchange, RawReceiver
from greenroom.http.limits import EdgeLimits, EdgeState
from greenroom.http.relays.relay import RelayOptions, RelayOutcome
from greenroom.http.request import Head
from greenroom.serving.answer_relays import LONG_BYTES, NameFilter, TranslatingRelay
from greenroom.serving.buffered import BufferedRelay

PIECE_BYTES = 256 * 1024


class SeenWire:
    """The connection of a client that sees what it is sent."""

    def __init__(self) -> None:
        self.seen = b""
        self.is_cut = False

    def write(self, data: bytes) -> None:
        self.seen += data

    def exchange_over(self, keep_alive: bool) -> None: ...
    def cut(self, *, hard: bool) -> None:
        self.is_cut = True

    def take_over(self, receiver: RawReceiver) -> asyncio.Transport:
        raise AssertionError(receiver)


def answered(body: bytes, status: int = 200) -> tuple[TranslatingRelay, bytes]:
    relay, wire = relayed(body, messages_translation(AnswerContext("m", "1", 0.0), False), status)
    return relay, wire.seen


def relayed(
    body: bytes, translation: Translation, status: int = 200, piece_bytes: int = PIECE_BYTES
) -> tuple[TranslatingRelay, SeenWire]:
    wire = SeenWire()
    head = Head(b"POST", b"/v1/messages", [], "1.1", "", keep_alive=True)
    exchange = Exchange(wire, EdgeState(EdgeLimits()), head, Body(BodyBudget(EdgeLimits())))
    relay = TranslatingRelay(exchange, translation, RelayOptions([]))
    relay.head(status, [(b"content-type", b"application/json")])
    for at in range(0, len(body), piece_bytes):
        if relay.wanted:
            relay.body(body[at : at + piece_bytes])
    if relay.wanted:
        relay.complete()
    return relay, wire


@pytest.mark.parametrize("unit", [b"{},", b'{"message":{"tool_calls":[]}},'])
def test_an_answer_of_millions_of_objects_is_not_read(unit: bytes) -> None:
    relay, seen = answered(b'{"choices":[{"message":{"content":"a"}},' + unit * 300_000 + b"{}]}")
    assert relay.outcome is RelayOutcome.ENGINE_LOST and not seen
    assert relay.error is not None and "100,000 JSON objects" in relay.error.message


def test_a_long_text_with_brackets_is_passed_on() -> None:
    text = b"{[ some code" * 40_000
    relay, seen = answered(b'{"choices":[{"message":{"content":"%b"},"finish_reason":"stop"}]}' % text)
    assert relay.outcome is RelayOutcome.COMPLETE and text in seen


@pytest.mark.parametrize(("mib", "outcome"), [(7, RelayOutcome.COMPLETE), (9, RelayOutcome.ENGINE_LOST)])
def test_a_text_that_takes_long_to_decode_is_not_read(mib: int, outcome: RelayOutcome) -> None:
    text = b"\\n" * (mib * 1024 * 1024 // 2)
    relay, seen = answered(b'{"choices":[{"message":{"content":"%b"},"finish_reason":"stop"}]}' % text)
    assert relay.outcome is outcome
    assert (text in seen) == (relay.error is None) == (mib < 8)


def test_of_a_long_error_the_beginning_is_told() -> None:
    relay, seen = answered(b'{"error":{"message":"%b"}}' % (b"no room " * 128 * 1024), status=500)
    assert relay.outcome is RelayOutcome.COMPLETE and b"no room no room" in seen and len(seen) < 8_000


EMBED = embed_translation(AnswerContext("m [0]", "1", 0.0), False)


def embeddings(places: list[int], *, spaced: bool = False) -> tuple[dict[str, Any], bytes]:
    """So many bytes of vectors that they are translated as they come."""
    numbers = LONG_BYTES // len(places) // 8
    data = [{"object": "embedding", "index": at, "embedding": [at + 0.25] * numbers * 2} for at in places]
    answer = {"object": "list", "data": data, "usage": {"prompt_tokens": 7, "total_tokens": 7}}
    return answer, json.dumps(answer, separators=None if spaced else (",", ":")).encode()


def unchunked(seen: bytes) -> bytes:
    head, _, rest = seen.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head and b"content-type: application/json" in head
    pieces = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        pieces.append(rest[:length])
        rest = rest[length + 2 :]
    return b"".join(pieces)


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("piece_bytes", [997, PIECE_BYTES, 4 * LONG_BYTES])
def test_long_vectors_are_passed_on_as_they_come(spaced: bool, piece_bytes: int) -> None:
    answer, body = embeddings(list(range(30)), spaced=spaced)
    relay, wire = relayed(body, EMBED, piece_bytes=piece_bytes)
    assert relay.outcome is RelayOutcome.COMPLETE and not wire.is_cut
    told = json.loads(unchunked(wire.seen))
    assert told["embeddings"] == [one["embedding"] for one in answer["data"]]
    assert (told["model"], told["prompt_eval_count"]) == ("m [0]", 7)
    assert told == json.loads(EMBED.whole(200, body))


@pytest.mark.parametrize(
    "spoilt",
    [
        embeddings([1, 0])[1],
        embeddings([0, 1])[1][:-1],
        embeddings([0, 1])[1][: LONG_BYTES + 100_000],
        b'{"data":[],"more":"%b"}' % (b"x" * 2 * LONG_BYTES),
        b'{"data":"%b"}' % (b"x" * 9 * LONG_BYTES),
        b'{"data":[%b]}' % b",".join([b'{"embedding":[],"object":"%b"}' % (b"x" * LONG_BYTES)] * 9),
    ],
    ids=["order", "end", "half", "none", "no list", "too much"],
)
def test_long_vectors_that_cannot_be_read_are_cut(spoilt: bytes) -> None:
    relay, wire = relayed(spoilt, EMBED)
    assert relay.outcome is RelayOutcome.ENGINE_LOST and relay.error is not None and relay.error.details
    assert not wire.seen.endswith(b"0\r\n\r\n")
    relay.fail(b"data: an event\n\n")
    assert wire.is_cut and b"an event" not in wire.seen


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


ANSWER = b"x" * 100


class NoWire:
    """The connection of a client that is sent nothing."""

    def write(self, data: bytes) -> None:
        raise AssertionError(data)

    def exchange_over(self, keep_alive: bool) -> None: ...
    def cut(self, *, hard: bool) -> None: ...
    def take_over(self, receiver: RawReceiver) -> asyncio.Transport:
        raise AssertionError(receiver)


@pytest.fixture
def budget() -> BodyBudget:
    return BodyBudget(EdgeLimits())


def collecting(budget: BodyBudget, bytes_max: int = 1_000) -> BufferedRelay:
    head = Head(b"POST", b"/", [], "1.1", "", keep_alive=True)
    exchange = Exchange(NoWire(), EdgeState(EdgeLimits()), head, Body(budget))
    relay = BufferedRelay(exchange, Body(budget), bytes_max)
    relay.head(200, [])
    relay.body(ANSWER)
    return relay


def test_a_complete_answer_is_taken_once(budget: BodyBudget) -> None:
    relay = collecting(budget)
    relay.complete()
    body = relay.take()
    assert (relay.outcome, body.read()) == (RelayOutcome.COMPLETE, ANSWER)
    body.close()
    relay.stop()
    assert budget.memory_bytes == 0


@pytest.mark.parametrize(
    "end",
    [
        lambda relay: relay.exchange.leave(),
        lambda relay: relay.stop(),
        lambda relay: relay.lost(EngineLost("gone"), False),
        lambda relay: (relay.complete(), relay.exchange.leave()),
        lambda relay: (relay.complete(), relay.stop()),
    ],
    ids=["client leaves", "stopped", "engine lost", "client leaves before it is taken", "stopped before it is taken"],
)
def test_an_answer_that_is_not_taken_is_dropped(budget: BodyBudget, end: Callable[[BufferedRelay], object]) -> None:
    relay = collecting(budget)
    assert budget.memory_bytes == len(ANSWER)
    end(relay)
    assert budget.memory_bytes == 0


def test_an_answer_that_is_too_large_holds_nothing(budget: BodyBudget) -> None:
    relay = collecting(budget, len(ANSWER) - 1)
    assert (relay.outcome, budget.memory_bytes) == (RelayOutcome.COMPLETE, 0)
    with pytest.raises(ResultTooLarge):
        relay.take()
