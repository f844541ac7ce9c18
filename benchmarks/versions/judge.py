"""Whether versions changed as promised: judged from the answers of all callers and from the scheduler's events."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Protocol, cast

from greenroom.core.effects import Effects
from greenroom.core.events import Event, ShutdownAsked
from greenroom.core.model import ModelId
from greenroom.core.scheduler import DefaultScheduler


class Answer(Protocol):
    """An answer: when it was asked for and begun, by one clock, and the version that its header names."""

    asked: float
    begun: float
    version: int


def went_back(answers: Sequence[Answer]) -> int:
    """Answers of an older version than one that had begun before they were asked for."""
    ordered = sorted(answers, key=lambda one: one.begun)
    begun = [one.begun for one in ordered]
    newest = list(itertools.accumulate((one.version for one in ordered), max))
    seen = ((one, bisect_left(begun, one.asked)) for one in answers)
    return sum(before > 0 and one.version < newest[before - 1] for one, before in seen)


class NoEffects:
    """Stands for the gateway's side of the scheduler where a recording is played."""

    def __getattr__(self, name: str) -> object:
        return lambda *args, **options: None


def grant_gap_ms(events: Iterable[Event], name: str) -> float:
    """The longest time in which a request waited though a place was free, or, after the first, no version served."""
    scheduler, longest_s, has_served = DefaultScheduler(cast(Effects, NoEffects())), 0.0, False
    since: float | None = None
    for event in itertools.takewhile(lambda one: not isinstance(one, ShutdownAsked), events):
        longest_s = max(longest_s, 0.0 if since is None else event.now - since)
        scheduler.handle(event)
        serving = [slot for slot in scheduler.view.slots_of(ModelId(name)) if slot.is_serving]
        has_served = has_served or bool(serving)
        has_place = any(len(slot.in_flight) < slot.concurrency for slot in serving)
        is_gap = has_served and (not serving or (has_place and scheduler.view.waitlist.count(ModelId(name)) > 0))
        since = (event.now if since is None else since) if is_gap else None
    return round(1_000 * longest_s, 3)
