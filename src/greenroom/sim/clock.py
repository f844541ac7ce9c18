"""Virtual time: nobody waits, the next thing that was arranged simply happens.

Owns the agenda and both readings of the clock: the time that really passes, and the time the scheduler is told, which a
fault may step. Things arranged for the same moment happen in the order in which they were arranged.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, TypeVar

Subject = TypeVar("Subject")

# Once the clock was stepped, what is told is a sum with rounding; a timer must not fire that little bit early.
ROUNDING_S = 1e-6


class Clock:
    __slots__ = ("_agenda", "_number", "_offset_s", "now", "told")

    def __init__(self) -> None:
        self.now = 0.0
        self.told = 0.0
        self._offset_s = 0.0
        self._number = 0
        self._agenda: list[tuple[float, int, Callable[[Any], object], Any]] = []

    def arrange(self, after_s: float, action: Callable[[Subject], object], subject: Subject) -> None:
        """Let this happen to that subject after so many seconds."""
        self._number += 1
        heappush(self._agenda, (self.now + max(0.0, after_s), self._number, action, subject))

    def arrange_at(self, at: float, action: Callable[[Subject], object], subject: Subject) -> None:
        """The same at a moment; at once if that has passed."""
        self._number += 1
        heappush(self._agenda, (max(at, self.now), self._number, action, subject))

    def arrange_when_told(self, at: float, action: Callable[[Subject], object], subject: Subject) -> None:
        """The same when the scheduler's clock shows that moment."""
        self.arrange_at(at - self._offset_s + ROUNDING_S if self._offset_s else at, action, subject)

    def advance(self, until: float) -> bool:
        """Let the next thing happen, unless it is later than that or there is none."""
        if not self._agenda or self._agenda[0][0] > until:
            return False
        at, _, action, subject = heappop(self._agenda)
        self.now = at
        self.told = at + self._offset_s
        action(subject)
        return True

    def pass_to(self, now: float) -> None:
        """Let time pass in which nothing happens."""
        self.now = now
        self.told = now + self._offset_s

    def step(self, by_s: float) -> None:
        """The scheduler's clock jumps; what really happens goes on as before."""
        self._offset_s += by_s
        self.told = self.now + self._offset_s

    @property
    def is_empty(self) -> bool:
        return not self._agenda
