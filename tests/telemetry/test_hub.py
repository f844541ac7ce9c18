"""Events reach every listener in order; a slow one is told how many it lost, and delays no other."""

from __future__ import annotations

import asyncio

import pytest

from greenroom.errors import Overload
from greenroom.runtime.observer import Event, EventSubscription, Hub
from tests.waiting import PATIENCE_S


async def next_of(subscription: EventSubscription) -> Event:
    return await asyncio.wait_for(anext(subscription), 10)


async def all_of(subscription: EventSubscription) -> list[tuple[int, str]]:
    """What a subscription still gives; it must have been ended."""
    return [(event.id, event.kind) async for event in subscription]


async def test_listeners_hear_what_is_published_after_they_came() -> None:
    hub = Hub()
    hub.publish("before", {})
    one, other = hub.subscribe(), hub.subscribe()
    hub.publish("load", {"model": "qwen"})
    assert await next_of(one) == await next_of(other) == Event(2, "load", {"model": "qwen"})


async def test_listener_that_waits_is_woken() -> None:
    hub = Hub()
    waiting = asyncio.create_task(next_of(hub.subscribe()))
    await asyncio.sleep(0)
    hub.publish("load", {})
    assert (await waiting).kind == "load"


async def test_listener_cancelled_while_waiting_loses_nothing() -> None:
    hub = Hub()
    subscription = hub.subscribe()
    waiting = asyncio.create_task(next_of(subscription))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    hub.publish("load", {})
    assert (await next_of(subscription)).kind == "load"


async def test_slow_listener_loses_the_oldest_and_hears_how_many() -> None:
    hub = Hub(queue_max=3)
    slow = hub.subscribe()
    for _ in range(10):
        hub.publish("tick", {})
    hub.close()
    assert await next_of(slow) == Event(7, "dropped", {"count": 7})
    assert await all_of(slow) == [(8, "tick"), (9, "tick"), (10, "tick")]


async def test_losses_in_the_middle_are_told_where_they_happened() -> None:
    hub = Hub(queue_max=2)
    slow = hub.subscribe()
    hub.publish("a", {})
    assert (await next_of(slow)).id == 1
    for _ in range(3):
        hub.publish("b", {})
    assert await next_of(slow) == Event(2, "dropped", {"count": 1})
    assert (await next_of(slow)).id == 3


@pytest.mark.parametrize(
    ("before", "after", "heard"),
    [
        pytest.param(3, 1, [(2, "tick"), (3, "tick"), (4, "new")], id="what was missed"),
        pytest.param(1, 1, [(2, "new")], id="after the last, only what is new"),
        pytest.param(0, 0, [(1, "new")], id="when nothing ever happened"),
        pytest.param(10, 4, [(7, "dropped 3"), (8, "tick"), (9, "tick"), (10, "tick"), (11, "new")], id="too far back"),
        pytest.param(2, 10_000, [(1, "tick"), (2, "tick"), (3, "new")], id="from an id that never was"),
        pytest.param(2, -1, [(1, "tick"), (2, "tick"), (3, "new")], id="from before the first"),
    ],
)
async def test_resuming_gives_what_was_missed_and_is_remembered(
    before: int, after: int, heard: list[tuple[int, str]]
) -> None:
    hub = Hub(past_max=3)
    for _ in range(before):
        hub.publish("tick", {})
    subscription = hub.subscribe(after=after)
    hub.publish("new", {})
    hub.close()
    told = [(event.id, f"{event.kind} {event.data.get('count', '')}".strip()) async for event in subscription]
    assert told == heard


async def test_ids_of_an_earlier_run_are_told_from_those_of_this_one() -> None:
    hub = Hub(begins_after=1_000, past_max=2)
    for _ in range(3):
        hub.publish("tick", {})
    subscription = hub.subscribe(after=500)
    assert await next_of(subscription) == Event(1_001, "dropped", {"count": 1})
    assert await subscription.several(10) == [Event(1_002, "tick", {}), Event(1_003, "tick", {})]


async def test_closed_hub_ends_its_listeners_after_what_they_have_not_read() -> None:
    hub = Hub()
    behind, idle = hub.subscribe(), hub.subscribe()
    hub.publish("last", {})
    assert (await next_of(idle)).kind == "last"
    waiting = asyncio.create_task(all_of(idle))
    await asyncio.sleep(0)
    hub.close()
    assert await asyncio.wait_for(waiting, PATIENCE_S) == []
    assert await all_of(behind) == [(1, "last")]
    assert await all_of(hub.subscribe()) == []


async def test_closed_subscription_hears_nothing_more() -> None:
    hub = Hub()
    with hub.subscribe() as subscription:
        hub.publish("a", {})
    hub.publish("b", {})
    subscription.close()
    assert await all_of(subscription) == []


async def test_too_many_listeners_are_refused_until_one_leaves() -> None:
    hub = Hub(subscribers_max=2)
    first, _second = hub.subscribe(), hub.subscribe()
    with pytest.raises(Overload):
        hub.subscribe()
    first.close()
    hub.subscribe()


def test_publishing_without_subscribers_needs_no_loop_and_keeps_a_bounded_past() -> None:
    hub = Hub()
    for _ in range(100_000):
        hub.publish("tick", {})
    hub.close()

    async def past() -> list[Event]:
        return [event async for event in hub.subscribe(after=0)]

    missed, *kept = asyncio.run(past())
    assert (missed.kind, missed.data) == ("dropped", {"count": 99_800}) and len(kept) == 200
