"""Answers that are translated as a whole: what an engine cannot have gateways do."""

from __future__ import annotations

import asyncio

import pytest

from greenroom.dialects.anthropic_answer import messages_translation
from greenroom.dialects.neutral import Frame
from greenroom.http.body import Body, BodyBudget
from greenroom.http.exchange import Exchange, RawReceiver
from greenroom.http.limits import EdgeLimits, EdgeState
from greenroom.http.relays.relay import RelayOptions, RelayOutcome
from greenroom.http.relays.translated import Translated
from greenroom.http.request import Head

PIECE_BYTES = 256 * 1024


class SeenWire:
    """The connection of a client that sees what it is sent."""

    def __init__(self) -> None:
        self.seen = b""

    def write(self, data: bytes) -> None:
        self.seen += data

    def exchange_over(self, keep_alive: bool) -> None: ...
    def cut(self, *, hard: bool) -> None: ...
    def take_over(self, receiver: RawReceiver) -> asyncio.Transport:
        raise AssertionError(receiver)


def answered(body: bytes, status: int = 200) -> tuple[Translated, bytes]:
    wire = SeenWire()
    head = Head(b"POST", b"/v1/messages", [], "1.1", "", keep_alive=True)
    exchange = Exchange(wire, EdgeState(EdgeLimits()), head, Body(BodyBudget(EdgeLimits())))
    translation = messages_translation(Frame("m", "1", 0.0), False)
    relay = Translated(exchange, translation, RelayOptions([]))
    relay.head(status, [(b"content-type", b"application/json")])
    for at in range(0, len(body), PIECE_BYTES):
        if relay.wanted:
            relay.body(body[at : at + PIECE_BYTES])
    if relay.wanted:
        relay.complete()
    return relay, wire.seen


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
