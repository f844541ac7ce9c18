"""Events are handled one at a time and before `post` returns; a ticket is closed exactly once."""

import asyncio
import time
from collections.abc import Callable
from math import inf
from types import SimpleNamespace
from typing import cast

import pytest

from greenroom.config.schema import Config
from greenroom.core.contract import Scheduler
from greenroom.core.effects import Effects, OpOutcome, Reason
from greenroom.core.events import ConfigChanged, Event, Limits, MoveAsked, RequestArrived, RequestGone, ServeDone
from greenroom.core.model import (
    Device,
    DeviceId,
    DeviceKind,
    ModelId,
    ModelSpec,
    MoveKind,
    Need,
    OpId,
    RequestId,
    SlotId,
)
from greenroom.core.policy import BUILT_IN, PolicyFactory, PriorityClass, Swapper
from greenroom.core.scheduler import DefaultScheduler
from greenroom.errors import QueueFull
from greenroom.http.upstream import EngineAddress, Pool
from greenroom.process.spawn import Child
from greenroom.runtime.catalogue import Catalog
from greenroom.runtime.loop import Ticket, Tickets
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.runtime.slots import LiveSlot
from tests.waiting import PATIENCE_S


class Scripted:
    """Effects that do what they are told at each answer: a scheduler answers an order for an unknown model at once."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.reactions: list[Callable[[], object]] = []

    def answer(self, op: OpId, outcome: OpOutcome, reason: Reason) -> None:
        self.seen.append(op)
        if self.reactions:
            self.reactions.pop(0)()


def scripted() -> tuple[Scripted, SchedulerLoop]:
    effects = Scripted()
    return effects, SchedulerLoop(DefaultScheduler(cast(Effects, effects)), time.monotonic)


def some_slot() -> LiveSlot:
    """One of which nothing is asked; a real one, because compiled code takes no other."""
    catalog = Catalog()
    catalog.fill(Config.model_validate({"models": {"m": {"cmd": ["true", "${PORT}"], "memory_mib": 1}}}))
    clock = cast(asyncio.AbstractEventLoop, SimpleNamespace(time=time.monotonic))
    pool = Pool(EngineAddress("127.0.0.1", 1), loop=clock)
    return LiveSlot(SlotId("s1"), next(iter(catalog)), cast(Child, None), pool, None, 0.0)


def order(name: str) -> MoveAsked:
    return MoveAsked(0.0, OpId(name), MoveKind.LOAD, ModelId("unknown"))


def test_events_posted_meanwhile_are_handled_before_the_outermost_post_returns() -> None:
    effects, loop = scripted()
    told: list[str] = []

    def post_two() -> None:
        loop.post(order("b"))
        loop.post(order("c"))
        told.append("first handler ends")

    effects.reactions = [post_two, lambda: told.append("second"), lambda: told.append("third")]
    loop.post(order("a"))
    assert told == ["first handler ends", "second", "third"]


def test_an_event_that_fails_raises_at_its_poster_and_stops_no_other() -> None:
    effects, loop = scripted()

    def fail() -> None:
        loop.post(order("b"))
        raise ValueError("broken")

    effects.reactions = [fail, lambda: None]
    with pytest.raises(ValueError, match="broken"):
        loop.post(order("a"))
    loop.post(order("c"))
    assert effects.seen == ["a", "b", "c"]


class Failing:
    """A policy that raises as soon as a request waits."""

    def __init__(self, limits: Limits, swapper: Swapper) -> None:
        self.swapper = swapper

    def priority_class(self, priority: int) -> PriorityClass:
        raise ZeroDivisionError("nothing to divide by")


def test_a_policy_that_raises_is_named_with_the_model_it_decided_on() -> None:
    policies = {**BUILT_IN, "mine": cast(PolicyFactory, Failing)}
    loop = SchedulerLoop(DefaultScheduler(cast(Effects, Scripted()), policies), time.monotonic)
    gpu = Device(DeviceId("gpu0"), DeviceKind.GPU, 100)
    model = ModelSpec(ModelId("m"), need=Need(10))
    loop.post(ConfigChanged(0.0, models=(model,), devices=(gpu,), limits=Limits(policy="mine")))
    assert loop.failed_at == -inf
    with pytest.raises(ZeroDivisionError) as raised:
        loop.post(arrival())
    assert raised.value.__notes__ == [
        "The scheduler failed at RequestArrived of m; its policy is 'mine', its swapper 'memory'."
    ]
    assert loop.failed_at == 1.0


async def test_until_waits_for_a_fact_after_an_event() -> None:
    effects, loop = scripted()
    waiting = asyncio.ensure_future(loop.until(lambda: len(effects.seen) == 2))
    await asyncio.sleep(0)
    loop.post(order("a"))
    await asyncio.sleep(0)
    assert not waiting.done()
    loop.post(order("b"))
    await asyncio.wait_for(waiting, PATIENCE_S)


def arrival(name: str = "r") -> RequestArrived:
    return RequestArrived(1.0, RequestId(name), (ModelId("m"),))


class Posts:
    """A scheduler that writes down what is posted, and decides nothing."""

    def __init__(self, error: Exception | None = None) -> None:
        self.events: list[Event] = []
        self._error = error
        self.view = SimpleNamespace(limits=Limits())

    def handle(self, event: Event) -> None:
        self.events.append(event)
        if self._error is not None:
            raise self._error


def tickets_of(posts: Posts, clock: Callable[[], float] = lambda: 2.0) -> Tickets:
    return Tickets(SchedulerLoop(cast(Scheduler, posts), clock))


def arrived() -> tuple[Posts, Tickets, Ticket]:
    posts = Posts()
    tickets = tickets_of(posts)
    return posts, tickets, tickets.arrive(arrival())


def test_ticket_that_waits_is_gone_when_closed_and_only_once() -> None:
    posts, tickets, ticket = arrived()
    tickets.close(ticket)
    tickets.close(ticket)
    assert posts.events[1:] == [RequestGone(2.0, RequestId("r"))]
    assert not tickets.open


def test_rejected_ticket_posts_nothing_when_closed() -> None:
    posts, tickets, ticket = arrived()
    ticket.reject(QueueFull("full"))
    tickets.close(ticket)
    assert len(posts.events) == 1


def test_granted_ticket_is_done_when_closed() -> None:
    posts, tickets, ticket = arrived()
    ticket.grant(some_slot(), 1.5)
    tickets.close(ticket)
    assert posts.events[1:] == [ServeDone(2.0, RequestId("r"))]


@pytest.mark.parametrize(("ready_since", "not_there_s"), [(0.5, 0.0), (1.0, 0.0), (3.0, 2.0)])
def test_a_ticket_tells_how_long_its_slot_was_not_there(ready_since: float, not_there_s: float) -> None:
    """It arrives at 1 and is granted at 4."""
    ticket, slot = tickets_of(Posts()).arrive(arrival()), some_slot()
    slot.ready_since = ready_since
    ticket.grant(slot, 4.0)
    assert ticket.not_there_s == not_there_s


def test_lost_ticket_waits_again() -> None:
    posts, tickets, ticket = arrived()
    ticket.grant(some_slot(), 1.5)
    tickets.lost(ticket)
    assert posts.events[1:] == [ServeDone(2.0, RequestId("r"), lost_before_first_byte=True)]
    assert not ticket.is_settled
    tickets.close(ticket)
    assert posts.events[2:] == [RequestGone(2.0, RequestId("r"))]


def test_lost_ticket_that_was_cut_meanwhile_does_not_wait_again() -> None:
    posts, tickets, ticket = arrived()
    ticket.grant(some_slot(), 1.0)
    tickets.cancel("r", error := QueueFull("cancelled"))
    tickets.lost(ticket)
    assert posts.events[1:] == [ServeDone(2.0, RequestId("r"))]
    assert ticket.rejection is error
    tickets.close(ticket)
    assert len(posts.events) == 2


def test_arrival_that_cannot_be_handled_leaves_no_ticket() -> None:
    tickets = tickets_of(Posts(ValueError("broken")))
    with pytest.raises(ValueError, match="broken"):
        tickets.arrive(arrival())
    assert not tickets.open


async def test_wait_ends_with_the_decision_or_the_time() -> None:
    ticket = Ticket(RequestId("r"), 0.0)
    assert await ticket.wait(0.01) is False
    asyncio.get_running_loop().call_soon(ticket.reject, QueueFull("full"))
    with pytest.raises(QueueFull):
        await ticket.wait(PATIENCE_S)


def test_cut_reaches_a_listener_that_is_added_later() -> None:
    ticket, heard = Ticket(RequestId("r"), 0.0), []
    ticket.cut(QueueFull("over"))
    ticket.on_cut(lambda: heard.append(1))
    assert heard == [1]


def test_an_engine_that_has_answered_nothing_but_503_for_a_minute_is_not_only_busy() -> None:
    slot = some_slot()
    for second in (100.0, 150.0):
        slot.answered(503, second, is_at_work=False)
    assert not slot.is_unavailable(160.0) and slot.is_unavailable(161.0)
    slot.answered(400, 161.0, is_at_work=False)
    assert not slot.is_unavailable(162.0)
    slot.answered(503, 1_000.0, is_at_work=False)
    slot.answered(503, 1_059.0, is_at_work=True)
    assert not slot.is_unavailable(1_061.0)


def test_an_engine_that_was_not_asked_for_a_minute_may_be_only_busy_again() -> None:
    """Two answers far apart say nothing about the time between them, in which it may have slept and woken."""
    slot = some_slot()
    slot.answered(503, 100.0, is_at_work=False)
    assert not slot.is_unavailable(200.0)
    for second in (200.0, 250.0):
        slot.answered(503, second, is_at_work=False)
    assert slot.is_unavailable(261.0) and not slot.is_unavailable(311.0)
    slot.answered(503, 311.0, is_at_work=False)
    assert not slot.is_unavailable(312.0)


def test_an_engine_works_on_a_request_that_it_has_had_for_a_while() -> None:
    now = 10.0
    tickets = tickets_of(Posts(), lambda: now)
    arrivals = [RequestArrived(now, RequestId(name), (ModelId("m"),)) for name in ("mine", "old", "elsewhere")]
    mine, old, elsewhere = (tickets.arrive(arrival) for arrival in arrivals)
    mine.slot = old.slot = some_slot()
    elsewhere.slot = some_slot()
    mine.granted_at = old.granted_at = elsewhere.granted_at = now
    now = 10.5
    assert not tickets.works_on_another(mine)
    now = 15.0
    old.granted_at = 14.5
    assert not tickets.works_on_another(mine)
    old.granted_at = 10.0
    assert tickets.works_on_another(mine) and not tickets.works_on_another(elsewhere)
