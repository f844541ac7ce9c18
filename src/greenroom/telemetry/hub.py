"""Publishes events to listeners, such as dashboards.

Owns the numbering of events, the last few of them, and a bounded queue for each listener. Never waits for a listener:
one that is too slow loses the oldest events and is told how many. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

from greenroom.errors import Overload

# Enough for a browser that reconnects after a few seconds.
PAST_MAX = 200
# A listener that is this far behind will not catch up by itself.
QUEUE_MAX = 1_000
# Dashboards and shells; each costs a queue.
SUBSCRIBERS_MAX = 1_000

DROPPED = "dropped"


class Event(NamedTuple):
    """One thing that happened. Ids count up."""

    id: int
    kind: str
    data: Mapping[str, Any]


class Hub:
    def __init__(
        self,
        *,
        begins_after: int = 0,
        past_max: int = PAST_MAX,
        queue_max: int = QUEUE_MAX,
        subscribers_max: int = SUBSCRIBERS_MAX,
    ):
        """`begins_after` is the id before the first event's: above all of an earlier run, ids are never used twice."""
        self._past: deque[Event] = deque(maxlen=past_max)
        self._queue_max = queue_max
        self._subscribers_max = subscribers_max
        self._subscriptions: set[EventSubscription] = set()
        self._begins_after = self._last_id = begins_after
        self._closed = False

    @property
    def listeners(self) -> int:
        return len(self._subscriptions)

    @property
    def last_id(self) -> int:
        """The id of the last event; before the first, the id before it."""
        return self._last_id

    def publish(self, kind: str, data: Mapping[str, Any]) -> None:
        """Send to every listener. `data` is kept, not copied: do not change it afterwards."""
        self._last_id += 1
        event = Event(self._last_id, kind, data)
        self._past.append(event)
        for subscription in self._subscriptions:
            subscription.put(event)

    def subscribe(self, after: int | None = None) -> EventSubscription:
        """Listen from now on, or from the event after this id as far as it is still kept. Raises Overload when full."""
        if len(self._subscriptions) >= self._subscribers_max:
            raise Overload(f"{self._subscribers_max:,} listeners are connected already.", retry_after_s=10.0)
        subscription = EventSubscription(self, self._queue_max)
        if after is not None:
            self._replay(subscription, after)
        if self._closed:
            subscription.finish()
        else:
            self._subscriptions.add(subscription)
        return subscription

    def close(self) -> None:
        """End every subscription once it has read its queue. Later ones end at once."""
        self._closed = True
        for subscription in self._subscriptions:
            subscription.finish()
        self._subscriptions.clear()

    def forget(self, subscription: EventSubscription) -> None:
        """Send nothing more to this subscription. `EventSubscription.close` calls it."""
        self._subscriptions.discard(subscription)

    def _replay(self, subscription: EventSubscription, after: int) -> None:
        # Another id was given before a restart: every event is new to that listener.
        seen = after if self._begins_after <= after <= self._last_id else self._begins_after
        oldest = self._past[0].id if self._past else self._last_id + 1
        subscription.miss(oldest - 1 - seen, oldest - 1)
        for event in self._past:
            if event.id > seen:
                subscription.put(event)


class EventSubscription(AsyncIterator[Event]):
    """One listener's queue, for one reader. Events that did not fit are replaced by one of kind "dropped"."""

    def __init__(self, hub: Hub, queue_max: int) -> None:
        self._hub = hub
        self._queue: deque[Event] = deque()
        self._queue_max = queue_max
        self._missed = 0
        self._last_missed_id = 0
        self._finished = False
        self._waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __anext__(self) -> Event:
        for event in await self.several(1):
            return event
        raise StopAsyncIteration

    async def several(self, at_most: int) -> list[Event]:
        """The next event and those that already follow it; none at the end."""
        while not (self._missed or self._queue or self._finished):
            await self._something()
        events = [self._take_missed()] if self._missed else []
        while self._queue and len(events) < at_most:
            events.append(self._queue.popleft())
        return events

    def close(self) -> None:
        """Stop listening and drop what was not read. May be called again."""
        self._hub.forget(self)
        self._queue.clear()
        self._missed = 0
        self.finish()

    def put(self, event: Event) -> None:
        """For the hub: one more event."""
        if len(self._queue) >= self._queue_max:
            self.miss(1, self._queue.popleft().id)
        self._queue.append(event)
        self._wake()

    def miss(self, count: int, last_id: int) -> None:
        """For the hub: this many events before those in the queue are lost."""
        if count > 0:
            self._missed += count
            self._last_missed_id = last_id
            self._wake()

    def finish(self) -> None:
        """For the hub: nothing more will come."""
        self._finished = True
        self._wake()

    def _take_missed(self) -> Event:
        # It carries the id of the last event lost, so that resuming after it does not lose or repeat any.
        event = Event(self._last_missed_id, DROPPED, {"count": self._missed})
        self._missed = 0
        return event

    async def _something(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
