"""Reports what the scheduler does: in the log, to listeners of events, and in the metrics.

Owns the wording. Keeps the last decisions with their reasons for `/api/v1/decisions`, numbered from 1 in each run, and
which model was where during the last hour (`Residency`). Times are wall-clock, for people.

`Hub` owns the numbering of events, the last few of them, and a bounded queue for each listener, such as a dashboard. It
never waits for a listener: one that is too slow loses the oldest events and is told how many.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeVar, cast

from greenroom.base.names import public_name
from greenroom.core.effects import Reason, Rejection
from greenroom.core.model import LeaseId, Move, MoveId, MoveKind, Outcome, Tier
from greenroom.core.view import LEASE_MARK
from greenroom.errors import Overload
from greenroom.telemetry.logs import get_logger
from greenroom.telemetry.metrics import Metrics

_log = get_logger("scheduler")

# Decisions kept for `/api/v1/decisions`: so many about models, and so many about single requests. A burst of rejected
# requests must not push out why a model was evicted.
DECISIONS_MAX = 500


Decision = Mapping[str, Any]
_Said = TypeVar("_Said")


class Observer:
    def __init__(
        self,
        hub: Hub,
        metrics: Metrics,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.hub = hub
        self.metrics = metrics
        self._wall = wall
        self._numbers = itertools.count(1)
        self.residency = Residency(wall, time.monotonic)
        # Moves under way, to name the model of an abort.
        self._moving: dict[MoveId, Move] = {}
        self._of_models: deque[Decision] = deque(maxlen=DECISIONS_MAX)
        self._of_requests: deque[Decision] = deque(maxlen=DECISIONS_MAX)

    @property
    def decisions(self) -> list[Decision]:
        """The last decisions with their reasons, newest last."""
        return sorted((*self._of_models, *self._of_requests), key=itemgetter("seq"))

    def moving(self, move: Move, reason: Reason) -> None:
        self._moving[move.id] = move
        facts = {"model": move.model, "slot": move.slot, "move": move.id}
        _log.info(f"{move.kind.value} started", **facts, why=_plain(str(reason)))
        self.residency.moving(move, _plain(move.model), self._tell(move.kind.value, facts, reason))
        if move.kind in (MoveKind.UNLOAD, MoveKind.SLEEP):
            self.metrics.evicted(move.model, _cause(reason))

    def moved(self, move: Move, outcome: Outcome, took_s: float) -> None:
        self._moving.pop(move.id, None)
        self.residency.moved(move, _plain(move.model), outcome)
        self.metrics.move_done(move.model, move.kind.value, outcome.value, took_s)
        facts = {"model": move.model, "slot": move.slot, "move": move.id}
        said = {**facts, "outcome": outcome.value, "took_s": took_s}
        _log.info(f"{move.kind.value} {outcome.value}", **said)
        self.hub.publish(f"{move.kind.value}_done", said)

    def rejected(self, request: str, rejection: Rejection, reason: Reason) -> None:
        self.metrics.rejected(rejection.model, rejection.code.value)
        facts = {"request": request, "model": _plain(rejection.model), "code": rejection.code.value}
        _log.info("rejected", **facts)
        self._tell("reject", facts, reason)

    def cut(self, request: str, model: str | None, reason: Reason) -> None:
        _log.info("cut", request=request, model=model, why=_plain(str(reason)))
        self._tell("cut", {"request": request, "model": model}, reason)

    def aborting(self, move: MoveId, reason: Reason) -> None:
        moving = self._moving.get(move)
        self._tell("abort", {"move": move, "model": None if moving is None else moving.model}, reason)

    def recalled(self, lease: LeaseId, grace_s: float, reason: Reason) -> None:
        self._tell("recall", {"lease": lease, "deadline": round(self._wall() + grace_s, 3)}, reason)

    def lost(self, model: str, slot: str, cause: str) -> None:
        self.residency.lost(slot)
        _log.warning("engine lost", model=model, slot=slot, cause=cause)
        self.hub.publish("lost", {"model": model, "slot": slot, "cause": cause})

    # --- the green room ---------------------------------------------------------------------------------------------

    def woke(self, model: str, size_bytes: int, seconds: float) -> None:
        """Weights of this size were copied to a device in this time."""
        self.metrics.woke(model, size_bytes, seconds)
        self._copied("woke", model, size_bytes, seconds)

    def prepared(self, model: str, size_bytes: int, seconds: float) -> None:
        """Weights of this size were read from disk into host memory in this time."""
        self.metrics.prepared(model, size_bytes, seconds)
        self._copied("prepared", model, size_bytes, seconds)

    def _copied(self, what: str, model: str, size_bytes: int, seconds: float) -> None:
        rate = round(size_bytes / seconds / 1e9, 2) if seconds > 0 else None
        said = {"model": model, "bytes": size_bytes, "took_s": round(seconds, 3), "gb_per_s": rate}
        _log.info(what, **said)
        self.hub.publish(what, said)

    def worker_started(self, worker: str, *, spare: bool) -> None:
        """A worker is up. A spare one hosts no model yet."""
        self.metrics.worker_started(spare=spare)
        _log.info("worker started", worker=worker, spare=spare)
        self.hub.publish("worker_started", {"worker": worker, "spare": spare})

    def worker_lost(self, worker: str, slots: int, cause: str) -> None:
        """A worker with this many slots ended without being asked to. Each slot is reported by `lost` too."""
        self.metrics.worker_lost()
        _log.warning("worker lost", worker=worker, slots=slots, cause=cause)
        self.hub.publish("worker_lost", {"worker": worker, "slots": slots, "cause": cause})

    def prefetched(self, model: str, size_bytes: int, seconds: float) -> None:
        """This much of its files was read ahead while requests waited for it."""
        self.metrics.prefetched(model, size_bytes)
        _log.info("prefetched", model=model, bytes=size_bytes, took_s=round(seconds, 3))

    def _tell(self, what: str, facts: Mapping[str, Any], reason: Reason) -> Decision:
        """Keep this decision and publish it. Returns it as it is kept."""
        more = {name: value for name, value in reason.facts if name not in facts}
        told = {**facts, "why": reason.why, **more}
        kept = self._of_requests if what in ("reject", "cut") else self._of_models
        told = {name: _plain(value) for name, value in told.items()}
        decision = {"seq": next(self._numbers), "at": round(self._wall(), 3), "what": what, **told}
        kept.append(decision)
        self.hub.publish(what, told)
        return decision


def _cause(reason: Reason) -> str:
    """Why a slot was told to leave, also if it first had to end what it did (`leaving`)."""
    return next((str(fact) for name, fact in reason.facts if name == "cause"), reason.why)


def _plain(said: _Said) -> _Said:
    """The same text, with leases and models called by their own names."""
    return cast(_Said, public_name(said.replace(LEASE_MARK, ""))) if isinstance(said, str) else said


# --- which model was where ------------------------------------------------------------------------------------------

# A swap is about four of them.
SPANS_MAX: Final = 4_000
# Where a move leads if it succeeds, and if it does not. None: the slot is no more.
_AFTER: Final[Mapping[MoveKind, tuple[Tier | None, Tier | None]]] = {
    MoveKind.LOAD: (Tier.READY, None),
    MoveKind.WAKE: (Tier.READY, Tier.ASLEEP),
    MoveKind.PREPARE: (Tier.ASLEEP, None),
    MoveKind.SLEEP: (Tier.ASLEEP, None),
    MoveKind.UNLOAD: (None, None),
}


@dataclass(slots=True)
class SlotSpan:
    """`phase` is the move that was under way, or the tier in between."""

    slot: str
    model: str
    phase: str
    devices: Mapping[str, int]
    began: float
    began_clock: float
    ended: float | None = None
    outcome: str | None = None
    why: Mapping[str, Any] = field(default_factory=dict)


class Residency:
    """A bounded list of spans: one for each time that a slot loads, is ready, is asleep or leaves."""

    def __init__(self, wall: Callable[[], float], clock: Callable[[], float], spans_max: int = SPANS_MAX) -> None:
        self._wall = wall
        self._clock = clock
        self._ended: deque[SlotSpan] = deque(maxlen=spans_max)
        # By slot: the memory it holds, and the span that goes on.
        self._open: dict[str, SlotSpan] = {}

    def moving(self, move: Move, model: str, why: Mapping[str, Any]) -> None:
        """This move has begun, for these reasons."""
        held = self._open.get(move.slot)
        self._end(move.slot)
        # What leaves is shown where it was.
        is_leaving = move.kind in (MoveKind.SLEEP, MoveKind.UNLOAD) and held is not None
        devices = held.devices if is_leaving and held is not None else dict(move.claim)
        self._begin(move.slot, model, move.kind.value, devices, why)

    def moved(self, move: Move, model: str, outcome: Outcome) -> None:
        was_lost = move.slot not in self._open
        self._end(move.slot, outcome.value)
        tier = _AFTER[move.kind][outcome is not Outcome.DONE]
        if tier is not None and not was_lost:
            self._begin(move.slot, model, tier.value, dict(move.claim), {})

    def lost(self, slot: str) -> None:
        """Its engine ended without being asked to."""
        self._end(slot, "lost")

    def spans(self, since: float, slots: Container[str]) -> Iterator[SlotSpan]:
        """Spans that went on after this time, the oldest first. `slots` are those that there are."""
        for slot in [slot for slot in self._open if slot not in slots]:
            self._end(slot)
        yield from (span for span in self._ended if span.ended is not None and span.ended >= since)
        yield from self._open.values()

    def _begin(self, slot: str, model: str, phase: str, devices: Mapping[Any, int], why: Mapping[str, Any]) -> None:
        held = {str(device): mib for device, mib in devices.items()}
        self._open[slot] = SlotSpan(slot, model, phase, held, self._wall(), self._clock(), why=why)

    def _end(self, slot: str, outcome: str | None = None) -> None:
        span = self._open.pop(slot, None)
        if span is not None:
            # So that it is as long as it was: the wall clock may have been set meanwhile.
            span.ended, span.outcome = span.began + self._clock() - span.began_clock, outcome
            self._ended.append(span)


# --- listeners ------------------------------------------------------------------------------------------------------

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
        """Send to every listener. `data` is copied."""
        self._last_id += 1
        event = Event(self._last_id, kind, {name: _plain(value) for name, value in data.items()})
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
        self._news = asyncio.Event()

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
            self._news.clear()
            await self._news.wait()
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
        self._news.set()

    def miss(self, count: int, last_id: int) -> None:
        """For the hub: this many events before those in the queue are lost."""
        if count > 0:
            self._missed += count
            self._last_missed_id = last_id
            self._news.set()

    def finish(self) -> None:
        """For the hub: nothing more will come."""
        self._finished = True
        self._news.set()

    def _take_missed(self) -> Event:
        # It carries the id of the last event lost, so that resuming after it does not lose or repeat any.
        event = Event(self._last_missed_id, DROPPED, {"count": self._missed})
        self._missed = 0
        return event
