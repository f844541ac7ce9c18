"""The state of the gateway for its viewers: everything once, then what has changed, at most once a second.

Owns what each viewer has still to be told. A viewer that reads slowly is told the latest state, never a backlog. Looks
at models only while there is a viewer; looks, and renders each model, once for all viewers.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from typing import Any, Final

import msgspec

from greenroom.api.overview import Overview
from greenroom.api.reports.snapshot import Snapshot, is_failing
from greenroom.api.reports.streams import EVENTS_MAX, Feed, event_frame
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.observer import DROPPED, Event, Hub

# Models of one event. More are spread over several, so that requests are served in between.
MODELS_MAX: Final = 50
STATE: Final = "state"
# Left out of the state: models come by themselves, and these change all the time.
_LEFT_OUT: Final[dict[str, Any]] = {
    "models": True,
    "uptime_s": True,
    "connections": True,
    "counters": True,
    "probe": {"looked_s_ago"},
    "lease_store": {"since_s", "grace_left_s"},
}


class LiveState:
    def __init__(self, gateway: Overview, period_s: float) -> None:
        """Models are compared every `period_s`."""
        self._gateway = gateway
        self._period_s = period_s
        self._viewers: set[StateViewer] = set()
        self._timer: asyncio.TimerHandle | None = None
        # What each model looked like; and its JSON where a viewer was told it since, with the time that it is of.
        self._facts: dict[str, object] = {}
        self._rendered: dict[str, tuple[float, msgspec.Raw]] = {}
        self._waiting: Counter[str] = Counter()
        self._rest = b""

    @property
    def is_looking(self) -> bool:
        return self._timer is not None

    def join(self, viewer: StateViewer) -> Iterator[str]:
        """Tell this viewer about changes until it leaves. Returns the models there are."""
        self._viewers.add(viewer)
        if self._timer is None:
            self._facts = self._facts_now()
            self._rest = self._rest_now()
            self._arm()
        return iter(self._facts)

    def leave(self, viewer: StateViewer) -> None:
        self._viewers.discard(viewer)
        if not self._viewers and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._facts, self._rendered = {}, {}

    @property
    def rest(self) -> msgspec.Raw:
        """Everything but the models."""
        return msgspec.Raw(self._rest)

    def rendered(self, model: str) -> msgspec.Raw | None:
        """This model as it is now; None if there is no such model any more."""
        now = self._gateway.shell.clock()
        at, found = self._rendered.get(model, (now, None))
        # Older ones have changed in nothing but the times that pass by themselves, which are of the event all the same.
        if found is None or now - at > self._period_s:
            entry = self._gateway.shell.catalog.find(model)
            if entry is None or entry.shown_id(to_operator=True) != model:
                return None
            view = Snapshot(self._gateway).model(entry, to_operator=True, waiting=self._waiting[entry.id])
            found = msgspec.Raw(view.model_dump_json().encode())
            self._rendered[model] = now, found
        return found

    # --- looking ----------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._period_s, self._compare)

    def _compare(self) -> None:
        # First, so that one comparison that fails is not the last.
        self._arm()
        facts, rest = self._facts_now(), self._rest_now()
        before, self._facts = self._facts, facts
        changed = [model for model, facts in self._facts.items() if before.get(model) != facts]
        changed += [model for model in before if model not in self._facts]
        for model in changed:
            self._rendered.pop(model, None)
        rest_before, self._rest = self._rest, rest
        if changed or self._rest != rest_before:
            for viewer in self._viewers:
                viewer.tell(changed)

    def _facts_now(self) -> dict[str, object]:
        """What viewers are told about each model, without times that pass by themselves."""
        state, now = self._gateway.shell.loop.scheduler.view, self._gateway.shell.clock()
        self._waiting = waiting = Counter(str(caller.model) for caller in state.callers())
        shown = {entry.shown_id(to_operator=True): entry for entry in self._gateway.shell.catalog.shown}
        return {name: self._facts_of(entry, waiting[entry.id], now) for name, entry in shown.items()}

    def _facts_of(self, entry: Entry, waiting: int, now: float) -> object:
        gateway = self._gateway
        state, live = gateway.shell.loop.scheduler.view, gateway.shell.slots.live
        record = state.models.get(entry.id)
        slots = tuple(
            (
                slot.id,
                slot.tier,
                slot.move,
                slot.planned,
                slot.leaving_to,
                len(slot.in_flight),
                slot.concurrency,
                slot.last_used,
                slot.last_priority,
                tuple(state.ledger.held_by(slot.id).values()),
                slot.id in live and (live[slot.id].figures, live[slot.id].child),
            )
            for slot in state.slots_of(entry.id)
        )
        known = None if record is None else (record.need, record.failures, is_failing(record, now))
        return (entry.spec, waiting, slots, known, gateway.mover.failures.get(entry.id))

    def _rest_now(self) -> bytes:
        return Snapshot(self._gateway).status(with_models=False).model_dump_json(exclude=_LEFT_OUT).encode()


async def state_feed(hub: Hub, live: LiveState, after: int | None) -> Feed:
    """Events as they happen and, between them, events of kind `state`: models that changed, and the rest.

    The first of them tell all models there are. Each has models as they are when it is sent.
    """
    with closing(StateViewer(hub, live, after)) as viewer:
        yield b""
        while piece := await viewer.piece():
            yield piece


class StateViewer:
    """What one viewer has still to be told."""

    def __init__(self, hub: Hub, live: LiveState, after: int | None) -> None:
        self._subscription = hub.subscribe(after)
        self._hub = hub
        self._live = live
        self._unsaid: dict[str, None] = dict.fromkeys(live.join(self))
        self._is_first = True
        self._is_marked = False
        self._mark()

    def tell(self, models: list[str]) -> None:
        """These have changed, or are gone."""
        self._unsaid.update(dict.fromkeys(models))
        self._mark()

    def _mark(self) -> None:
        """Let the next state be sent after the events that were published before."""
        if not self._is_marked:
            self._is_marked = True
            self._subscription.put(Event(self._hub.last_id, STATE, {}))

    async def piece(self) -> bytes:
        """Empty at the end."""
        return b"".join([self._frame(event) for event in await self._subscription.several(EVENTS_MAX)])

    def _frame(self, event: Event) -> bytes:
        if event.kind == STATE:
            return event_frame(Event(event.id, STATE, self._state()))
        if event.kind == DROPPED:
            # The mark may be among them, and the queue is full.
            return event_frame(event) + event_frame(Event(event.id, STATE, self._state()))
        return event_frame(event)

    def _state(self) -> dict[str, object]:
        self._is_marked = False
        models = list(islice(self._unsaid, MODELS_MAX))
        found = [(model, self._live.rendered(model)) for model in models]
        for model in models:
            del self._unsaid[model]
        is_first, self._is_first = self._is_first, False
        if self._unsaid:
            self._mark()
        return {
            "first": is_first,
            "more": bool(self._unsaid),
            "at": round(time.time(), 3),
            "models": [said for _, said in found if said is not None],
            "gone": [model for model, said in found if said is None],
            "status": self._live.rest,
        }

    def close(self) -> None:
        self._live.leave(self)
        self._subscription.close()
