"""An engine's answer that is collected: what it holds is given back, whatever becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from greenroom.errors import EngineLost, ResultTooLarge
from greenroom.http.body import Body, BodyBudget
from greenroom.http.exchange import Exchange, RawReceiver
from greenroom.http.limits import EdgeLimits, EdgeState
from greenroom.http.relays.collected import Collected
from greenroom.http.relays.relay import RelayOutcome
from greenroom.http.request import Head

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


def collecting(budget: BodyBudget, bytes_max: int = 1_000) -> Collected:
    head = Head(b"POST", b"/", [], "1.1", "", keep_alive=True)
    exchange = Exchange(NoWire(), EdgeState(EdgeLimits()), head, Body(budget))
    relay = Collected(exchange, Body(budget), bytes_max)
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
def test_an_answer_that_is_not_taken_is_dropped(budget: BodyBudget, end: Callable[[Collected], object]) -> None:
    relay = collecting(budget)
    assert budget.memory_bytes == len(ANSWER)
    end(relay)
    assert budget.memory_bytes == 0


def test_an_answer_that_is_too_large_holds_nothing(budget: BodyBudget) -> None:
    relay = collecting(budget, len(ANSWER) - 1)
    assert (relay.outcome, budget.memory_bytes) == (RelayOutcome.COMPLETE, 0)
    with pytest.raises(ResultTooLarge):
        relay.take()
