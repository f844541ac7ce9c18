"""The limits that a tenant, a key or a model can have, one row each, and the amounts that they are counted with.

A further limit is a row here and its option, with its sentence, in `RateLimits` (`config/sections/keys.py`):
counting, errors, headers, `/api/v1/limits` and `greenroom key new` go by these rows. Owns the sliding window of one
limit in memory; `shared_window.py` has the one that several gateways share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import floor
from typing import Final

MINUTE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Limit:
    """An amount per period, or at the same time."""

    key: str
    """Its option, and its field in the API."""
    left: str
    """The field beside it: what is left of it; of a limit without a period, what is in use."""
    about: str | None = None
    """What is said of that field."""
    unit: str = ""
    """As errors tell it."""
    period_s: float = 0.0
    """Whole minutes; 0: at the same time."""
    of_tokens: bool = False
    """True: tokens, which are reserved when the body is known and settled at the end. Else each request counts one."""
    in_store: str = ""
    """How its keys begin in a store that gateways share."""


LIMITS: Final = (
    Limit("requests_per_minute", "requests_left", "In this minute.", "req/min", MINUTE_S, in_store="rate_limit"),
    Limit("tokens_per_minute", "tokens_left", None, "tokens/min", MINUTE_S, of_tokens=True, in_store="token_limit"),
    Limit("concurrent_max", "in_flight", "Its requests that are under way."),
)


class Budget(ABC):
    """An amount per period, which is called a minute here. `now` is seconds since 1970. A class rather than a protocol:
    calls are cheaper compiled."""

    limit: int
    period_s: float
    unit = ""
    """The limit's, as errors tell it."""
    minute: int
    """The minute in which it counted last."""

    @abstractmethod
    def left(self, now: float) -> int:
        """How much may be taken now; 0 or less if nothing."""

    @abstractmethod
    def take_one(self, now: float) -> int:
        """Count one. Returns how much is left then, as callers are told; -1, and nothing is counted, if none is."""

    @abstractmethod
    def reserve(self, asked: int, now: float) -> int:
        """Count what one request can reserve if it asks for so much, or is let in with 0. Returns how much that is. -1,
        and nothing is counted, if so much is not left. One that is shared may fetch it for the next time."""

    @abstractmethod
    def remaining(self, now: float) -> int:
        """How much is left, as callers are told."""

    @abstractmethod
    def take(self, amount: int, now: float) -> int:
        """Count this much, also beyond the limit. Returns the minute for which it is counted."""

    @abstractmethod
    def give_back(self, amount: int, minute: int, now: float) -> None:
        """Uncount what was taken in this minute and not used. Nothing happens if that minute counts no more."""

    @abstractmethod
    def wait_s(self, amount: int, now: float) -> float:
        """Seconds until so much, or the most that one request can reserve, could be taken if nothing else is."""

    @abstractmethod
    def drop(self) -> None:
        """No limit goes by it any more. Requests that were counted may still give back."""


class Window(Budget):
    """A sliding window of two buckets: of the last minute, the part that the sliding minute still covers counts. If
    callers take no more than `left`, then never more than `limit` in a minute of the clock, and in any d seconds up to
    60 at most `limit` x (1 + d / 60)."""

    def __init__(self, limit: int, period_s: float = MINUTE_S) -> None:
        self.limit = limit
        self.period_s = period_s
        self.minute = 0
        self._begins, self._ends = 0.0, period_s
        self.count = 0
        self.before = 0

    def drop(self) -> None:
        """Nothing else holds it."""

    def left(self, now: float) -> int:
        if not self._begins <= now < self._ends:
            self._roll(now)
        if self.before == 0:
            return self.limit - self.count
        return floor(self.limit - self.before * (1.0 - self._passed(now))) - self.count

    def take_one(self, now: float) -> int:
        left = self.left(now) - 1
        if left < 0:
            return -1
        self.count += 1
        return left

    def reserve(self, asked: int, now: float) -> int:
        amount = asked if asked < self.limit else self.limit
        if self.left(now) < (amount or 1):
            return -1
        self.count += amount
        return amount

    def remaining(self, now: float) -> int:
        left = self.left(now)
        return left if left > 0 else 0

    def take(self, amount: int, now: float) -> int:
        if not self._begins <= now < self._ends:
            self._roll(now)
        self.count += amount
        return self.minute

    def give_back(self, amount: int, minute: int, now: float) -> None:
        if not self._begins <= now < self._ends:
            self._roll(now)
        if minute == self.minute:
            self.count = self.count - amount if amount < self.count else 0
        elif minute == self.minute - 1:
            self.before = max(0, self.before - amount)

    def wait_s(self, amount: int, now: float) -> float:
        if not self._begins <= now < self._ends:
            self._roll(now)
        passed, amount = self._passed(now), min(amount, self.limit)
        room = self.limit - self.count - amount
        if room >= 0:
            return max(0.0, _covered_at(self.before, room) - passed) * self.period_s
        return (1.0 - passed + _covered_at(self.count, self.limit - amount)) * self.period_s

    def set_counts(self, minute: int, count: int, before: int) -> None:
        """Begin anew with these counts."""
        self.minute, self.count, self.before = minute, count, before
        self._begins, self._ends = minute * self.period_s, (minute + 1) * self.period_s

    def _roll(self, now: float) -> None:
        """Begin a new minute. If the clock was set back, all that is counted counts in the minute that it is now."""
        minute = int(now / self.period_s)
        if minute > self.minute:
            self.set_counts(minute, 0, self.count if minute == self.minute + 1 else 0)
        elif minute < self.minute:
            self.set_counts(minute, self.count + self.before, 0)

    def _passed(self, now: float) -> float:
        """Which part of the minute has passed."""
        passed = now / self.period_s - self.minute
        return 0.0 if passed < 0.0 else passed if passed < 1.0 else 1.0


def _covered_at(before: int, room: int) -> float:
    """The part of a minute after which what was counted in the minute before takes no more than `room`."""
    return 0.0 if before <= room else 1.0 - room / before
