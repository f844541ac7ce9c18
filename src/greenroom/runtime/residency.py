"""Which model was where during the last hour: one span for each time that a slot loads, is ready, is asleep or leaves.

Owns a bounded list of spans, written once for each move. Times are wall-clock, for people.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from greenroom.core.model import Move, MoveKind, Outcome, Tier

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
class Span:
    """`phase` is the move that was under way, or the tier in between."""

    slot: str
    model: str
    phase: str
    devices: Mapping[str, int]
    began: float
    ended: float | None = None
    outcome: str | None = None
    why: Mapping[str, Any] = field(default_factory=dict)


class Residency:
    def __init__(self, wall: Callable[[], float], spans_max: int = SPANS_MAX) -> None:
        self._wall = wall
        self._ended: deque[Span] = deque(maxlen=spans_max)
        # By slot: the memory it holds, and the span that goes on.
        self._open: dict[str, Span] = {}

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

    def spans(self, since: float, slots: Container[str]) -> Iterator[Span]:
        """Spans that went on after this time, the oldest first. `slots` are those that there are."""
        for slot in [slot for slot in self._open if slot not in slots]:
            self._end(slot)
        yield from (span for span in self._ended if span.ended is not None and span.ended >= since)
        yield from self._open.values()

    def _begin(self, slot: str, model: str, phase: str, devices: Mapping[Any, int], why: Mapping[str, Any]) -> None:
        held = {str(device): mib for device, mib in devices.items()}
        self._open[slot] = Span(slot, model, phase, held, self._wall(), why=why)

    def _end(self, slot: str, outcome: str | None = None) -> None:
        span = self._open.pop(slot, None)
        if span is not None:
            span.ended, span.outcome = self._wall(), outcome
            self._ended.append(span)
