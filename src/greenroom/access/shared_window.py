"""One limit that several gateways share, as one of them sees it: the permits in hand, and what to ask the store for.

Never waits and never asks itself: `shared_limits.py` does, in a task. A request that needs more than a block is refused
the first time, and what it needs is fetched. For a while the gateway then holds as much as such requests need, as long
as the store has it; after that it gives the surplus back.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple, Protocol

from greenroom.access.budgets import Budget, Window

# A gateway takes its permits in blocks of this part of the limit.
BLOCK_PARTS: Final = 8
# Of a minute: how long before the end of a period permits for the next are taken, and for how long a gateway is ready
# for the next request as large as the last large one.
AHEAD: Final = 1 / 12
LARGE: Final = 1 / 6


class PermitStore(Protocol):
    """What a window asks of the store. Times are those of this machine."""

    period_s: float
    tick_s: float

    @property
    def others(self) -> int: ...
    def by_its_clock(self, now: float) -> float: ...
    def minute(self, now: float) -> int: ...
    def passed(self, now: float, minutes: int) -> float: ...
    def holds_share(self, now: float, minutes: int) -> bool: ...
    def share(self, window: SharedWindow) -> int: ...
    def wake(self, window: SharedWindow) -> None: ...
    def forget(self, window: SharedWindow) -> None: ...


class Asked(NamedTuple):
    """What a gateway asks the store for, and tells it, about one limit."""

    name: str
    limit: int
    period_s: float
    wanted: int
    """Permits for this minute: as many as there are if there are `least`, else up to `plain`."""
    least: int
    plain: int
    ahead: int
    """Permits for the next minute."""
    used: int
    """Used in this minute without being counted; below 0: counted and not needed."""
    unused: int
    """Counted in the minute before and never used."""
    minute: int
    """This minute of the store, as the gateway estimates it."""


class SharedWindow(Budget):
    """The permits of one limit that this gateway has in hand. A `Budget`."""

    def __init__(self, store: PermitStore, name: str, limit: int, minutes: int) -> None:
        """Its period has so many minutes of the store. It is called a minute here."""
        self.name = name
        self.limit = limit
        self.period_s = store.period_s * minutes
        self._minutes = minutes
        self.in_hand = 0
        self.minute = 0
        # Permits of this minute, in hand or used; those of the last one that were used; permits of the next one.
        self.taken = 0
        self.taken_before = 0
        self.ahead = 0
        # Used in this minute without being counted in the store; below 0: counted there and not needed.
        self.uncounted = 0
        # Counted in the minute before and not used.
        self.unused_before = 0
        # The largest of the requests above a block, what all that were refused need, and until when both count.
        self._large = 0
        self._refused = 0
        self._large_until = 0.0
        # The counts of all gateways as the store told them last; and True if they were needed since.
        self._seen = Window(limit, self.period_s)
        self._is_used = False
        self._ask_from = 0.0
        self._store = store

    def drop(self) -> None:
        self._store.forget(self)

    @property
    def block(self) -> int:
        return max(1, self.limit // BLOCK_PARTS)

    def left(self, now: float) -> int:
        self._roll(now)
        self._is_used = True
        if self.in_hand < 1 and self._store.holds_share(now, self._minutes):
            self._use_share(now)
        self._wake_if_low(now)
        return self.in_hand

    def take_one(self, now: float) -> int:
        if self.left(now) < 1:
            return -1
        self.take(1, now)
        return self.remaining(now)

    def reserve(self, asked: int, now: float) -> int:
        amount = min(asked, self.reservable(now))
        if not self.has(amount or 1, now):
            return -1
        self.take(amount, now)
        return amount

    def has(self, amount: int, now: float) -> bool:
        """True if so much is in hand. What is above a block is fetched for the next time."""
        if self.left(now) < amount and self._store.holds_share(now, self._minutes):
            self._use_share(now)
        is_in_hand = self.in_hand >= amount
        if amount > self.block:
            self._note_large(amount, is_in_hand, now)
        return is_in_hand

    def _note_large(self, amount: int, is_in_hand: bool, now: float) -> None:
        """Be ready for it when it comes again, and for the next one like it."""
        self._forget_large(now)
        self._large = max(self._large, amount)
        self._large_until = now + self._store.period_s * LARGE
        self._refused = max(0, self._refused - amount) if is_in_hand else self._refused + amount
        if not is_in_hand and now >= self._ask_from:
            self._store.wake(self)

    def _forget_large(self, now: float) -> None:
        # Also if the clock was set back since: it would last for as long as that.
        if not 0.0 < self._large_until - now <= 2 * self._store.period_s * LARGE:
            self._large = self._refused = 0

    def reservable(self, now: float) -> int:
        """The most that one request can reserve: the other gateways may each keep one block to themselves."""
        if self._store.holds_share(now, self._minutes):
            return self._store.share(self)
        return max(self.block, self.limit - self._store.others * self.block)

    def remaining(self, now: float) -> int:
        self._is_used = True
        self._seen.limit = self.limit
        is_share = self._store.holds_share(now, self._minutes)
        more = self._more_of_share(now) if is_share else self._seen.left(self._store.by_its_clock(now))
        return min(self.limit, max(0, self.in_hand) + max(0, more))

    def take(self, amount: int, now: float) -> int:
        self._roll(now)
        self.in_hand -= amount
        self._wake_if_low(now)
        return self.minute

    def give_back(self, amount: int, minute: int, now: float) -> None:
        self._roll(now)
        if minute == self.minute:
            self.in_hand += amount
        elif minute == self.minute - 1:
            self.unused_before += amount
            self.taken_before = max(0, self.taken_before - amount)

    def wait_s(self, amount: int, now: float) -> float:
        self._seen.limit, amount = self.limit, min(amount, self.reservable(now))
        store, left_s = self._store, self._left(now) * self.period_s
        sure = max(self.block, self.limit - (2 * store.others + 1) * self.block)
        if left_s < AHEAD * store.period_s and amount > sure:
            # What gateways took ahead counts in this minute, too. In the next one it is fetched first.
            return left_s + 2 * store.tick_s
        missing = max(1, amount - max(0, self.in_hand))
        return max(store.tick_s, self._seen.wait_s(missing, store.by_its_clock(now)))

    def lend(self, amount: int) -> None:
        """Have so much in hand that the store is told of later."""
        self.in_hand += amount
        self.taken += amount
        self.uncounted += amount

    def needs(self, now: float) -> Asked | None:
        """What to ask the store for; None if nothing."""
        self._roll(now)
        self._forget_large(now)
        goal = max(self.block, self._large, min(self._refused, self.reservable(now)))
        if self.in_hand < 0 or self.in_hand > goal:
            # More was used than was in hand, or much of it came back.
            surplus = self.in_hand - (0 if self.in_hand < 0 else goal)
            self.in_hand, self.taken = self.in_hand - surplus, self.taken - surplus
            self.uncounted -= surplus
        wanted = plain = ahead = 0
        if not self._store.holds_share(now, self._minutes):
            plain = self.block - self.in_hand if self._is_low() else 0
            wanted = goal - self.in_hand if goal > self.block else plain
        if self._left(now) * self.period_s < AHEAD * self._store.period_s:
            ahead = max(0, self.block - self.ahead)
        if not (wanted or ahead or self.uncounted or self.unused_before or self._is_used):
            return None
        least = max(0, self._large - self.in_hand) if wanted > plain else 0
        asked = Asked(
            *(self.name, self.limit, self.period_s, wanted, least, plain, ahead),
            *(self.uncounted, self.unused_before, self.minute),
        )
        self.uncounted = self.unused_before = 0
        self._is_used = False
        return asked

    def given(self, asked: Asked, minute: int, given: int, ahead: int, current: int, before: int, now: float) -> None:
        """The store's answer, as of this minute. Permits of a minute that is over are given back to it."""
        self._roll(now)
        for of, amount in ((minute, given), (minute + 1, ahead)):
            if of == self.minute:
                self.in_hand += amount
                self.taken += amount
            elif of == self.minute + 1:
                self.ahead += amount
            elif of == self.minute - 1:
                self.unused_before += amount
        self._seen.set_counts(minute, current, before)
        self._ask_from = now + self._store.tick_s if given < asked.wanted else 0.0

    def lost(self, asked: Asked) -> None:
        """The store may or may not have heard this: what was used may be counted twice, never not at all."""
        self.uncounted += max(0, asked.used)

    def forgotten(self, now: float) -> None:
        """The store has lost its counts: it is told again what was taken of this minute."""
        self.left(now)
        self.uncounted, self.ahead, self.unused_before = self.taken, 0, 0

    def _is_low(self) -> bool:
        return self.in_hand * 2 <= self.block

    def _wake_if_low(self, now: float) -> None:
        if self._is_low() and now >= self._ask_from:
            self._store.wake(self)

    def _use_share(self, now: float) -> None:
        if (more := self._more_of_share(now)) > 0:
            self.lend(more)

    def _more_of_share(self, now: float) -> int:
        """What is left of the share of this gateway, by the same window, besides what it has taken."""
        share = self._store.share(self)
        return math.floor(share - min(self.taken_before, share) * self._left(now)) - self.taken

    def _left(self, now: float) -> float:
        """Which part of this period is left."""
        return 1 - self._store.passed(now, self._minutes)

    def _roll(self, now: float) -> None:
        minute = self._store.minute(now) // self._minutes
        # The two clocks differ by a moment each time they are compared. Further back is a clock that was set.
        if self.minute - 1 <= minute <= self.minute:
            return
        is_next = minute == self.minute + 1
        # What lapses with the minute that is over: first what the store was not told of.
        lapsed = max(0, self.in_hand) + max(0, -self.uncounted)
        untold = max(0, self.uncounted) + max(0, -self.in_hand)
        self.taken_before = max(0, self.taken - self.in_hand) if is_next else 0
        self.uncounted = max(0, untold - lapsed)
        self.unused_before = max(0, lapsed - untold) if is_next else 0
        self.in_hand = self.taken = self.ahead if is_next else 0
        self.ahead = 0
        self.minute = minute
