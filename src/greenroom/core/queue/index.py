"""An index of what waits, in order of turn: the heads of a queue's flows, and the queues of the waitlist.

Owns when turns are computed and how they are kept. Few items are compared anew at each question. With many, their turns
are kept in order and refreshed bit by bit, so that no question goes through all items. Callers cannot tell which.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import islice
from math import inf
from typing import Final, Generic, TypeVar

from greenroom.core.model import TenantId
from greenroom.core.queue.waiter import Waiter, WaiterKind

Key = TypeVar("Key")
Item = TypeVar("Item")
Turn = tuple[float, ...]
# A flow is the waiters of one kind, priority and tenant. The kind's value: flows are compared where turns are equal.
Flow = tuple[str, int, TenantId]

# How long kept turns are good enough for `first`: age lifts by the minute.
TURNS_FRESH_S: Final = 1.0
# After that all turns are refreshed; with more items than this, only a few at each question until all have been.
REFRESHED_AT_ONCE_MAX: Final = 64
REFRESHED_BY_FIRST: Final = 8
# `leading` refreshes this many items that have changed, and this many that were not refreshed for longest.
REFRESHED_BY_LEADING: Final = 16
# How many of many items `leading` returns at least.
LEADING_MIN: Final = 4
# With more flows than this their heads are kept in order; with fewer, checking each is as fast.
FLOWS_FEW: Final = 8
# Rebuild the heaps of head times when they hold this many entries per flow, most of them outdated.
TIMES_PER_FLOW: Final = 4
# The kept turn of an item that does not count.
_LAST: Final = (inf,)


class TurnIndex(Generic[Key, Item]):
    """Items by key. `first` and `leading` return them in order of a turn that depends on time and other facts."""

    def __init__(self, few: int) -> None:
        self.items: dict[Key, Item] = {}
        self._few = few
        # The turns as last computed, when all of them began to be refreshed, and how many are still to be.
        self._order: KeptOrder[Key] = KeptOrder()
        self._refreshed_at = 0.0
        self._refresh_left = 0
        # Items that are new or changed since their turn was computed.
        self._changed: dict[Key, None] = {}

    def put(self, key: Key, item: Item) -> None:
        """Add this item, or note that its turn has changed for another reason than time."""
        self.items[key] = item
        self._changed[key] = None

    def drop(self, key: Key) -> None:
        # Its kept turn is dropped when it is found.
        del self.items[key]
        self._changed.pop(key, None)

    def first(self, turn: Callable[[Item], Turn], now: float) -> Item | None:
        """The item with the smallest turn; None if there is none. With many items a turn may be a little old."""
        items, order = self.items, self._order
        if len(items) <= self._few:
            if order.entries:
                self._forget_order()
            return min(items.values(), key=turn) if len(items) > 1 else next(iter(items.values()), None)
        self._refresh(turn, now)
        while True:
            known, key = order.entries[0]
            item = items.get(key)
            if item is None:
                order.drop(key)
            elif (current := turn(item)) > known:
                order.put(key, current)
            else:
                return item

    def _refresh(self, turn: Callable[[Item], Turn], now: float) -> None:
        """Compute the turns of changed items. After a while compute all, a few at a time, because they age."""
        order = self._order
        if not order.entries:
            # All items are new.
            self._refreshed_at, self._refresh_left = now, 0
            order.renew([(key, turn(self.items[key])) for key in self._changed])
            self._changed.clear()
        elif self._changed:
            self._compute(self._changed, turn)
            self._changed.clear()
        if not self._refresh_left and not 0.0 <= now - self._refreshed_at < TURNS_FRESH_S:
            self._refreshed_at, self._refresh_left = now, len(order)
        if not self._refresh_left:
            return
        if len(order) <= REFRESHED_AT_ONCE_MAX:
            items, self._refresh_left = self.items, 0
            order.renew([(key, turn(items[key])) for key in order.longest_unseen(len(order)) if key in items])
        else:
            count = min(self._refresh_left, REFRESHED_BY_FIRST)
            self._refresh_left -= count
            self._compute(order.longest_unseen(count), turn)

    def leading(
        self, turn: Callable[[Item, float], Turn], counts: Callable[[Item, float], bool], now: float
    ) -> list[Item]:
        """Items that count, in order of turn: all if they are few; else the first ones, then some whose turn is old.

        So each item is returned now and then, however many there are. The caller checks again whether an item counts.
        """
        order, items = self._order, self.items
        if len(items) <= self._few:
            if order.entries:
                self._forget_order()
            return sorted((item for item in items.values() if counts(item, now)), key=lambda item: turn(item, now))
        changed = list(islice(self._changed, REFRESHED_BY_LEADING))
        for key in changed:
            del self._changed[key]
        self._rank(changed, turn, counts, now)
        oldest = order.longest_unseen(REFRESHED_BY_LEADING)
        self._rank(oldest, turn, counts, now)
        firsts: list[Key] = []
        # A loop: a compiled generator expression would go through all keys first.
        for _, key in order.entries:
            if key in items and counts(items[key], now):
                firsts.append(key)
                if len(firsts) == LEADING_MIN:
                    break
        others = sorted([key for key in oldest if key in order.seen and key not in firsts], key=order.seen.__getitem__)
        return [items[key] for key in (*firsts, *others)]

    def _rank(
        self,
        keys: Iterable[Key],
        turn: Callable[[Item, float], Turn],
        counts: Callable[[Item, float], bool],
        now: float,
    ) -> None:
        items, order = self.items, self._order
        for key in keys:
            item = items.get(key)
            if item is None:
                order.drop(key)
            else:
                order.put(key, turn(item, now) if counts(item, now) else _LAST)

    def _compute(self, keys: Iterable[Key], turn: Callable[[Item], Turn]) -> None:
        items, order = self.items, self._order
        for key in keys:
            item = items.get(key)
            if item is None:
                order.drop(key)
            else:
                order.put(key, turn(item))

    def _forget_order(self) -> None:
        """Items have become few. If there are many again, all turns are computed from scratch."""
        self._order.clear()
        self._changed.update(dict.fromkeys(self.items))


class FlowHeads(TurnIndex[Flow, Waiter]):
    """The first waiter of each flow of a queue."""

    def __init__(self) -> None:
        super().__init__(FLOWS_FEW)
        # With many flows: arrivals and ages of their heads by priority, and the flows not included yet.
        self._arrivals: Least[Flow] | None = None
        self._ages_from: Least[Flow] | None = None
        self._untimed: dict[Flow, None] = {}

    # Without super(), which would cost more than the rest: every request calls these.
    def put(self, key: Flow, item: Waiter) -> None:
        self.items[key] = item
        self._changed[key] = self._untimed[key] = None

    def drop(self, key: Flow) -> None:
        del self.items[key]
        self._changed.pop(key, None)
        self._untimed.pop(key, None)

    def earliest(self) -> list[tuple[int, float, float]]:
        """Priority, arrival and `aged_from` of every head; with many flows the earliest times of each priority.

        Preloads are left out.
        """
        items = self.items
        if len(items) <= FLOWS_FEW:
            self._arrivals = self._ages_from = None
            preload = WaiterKind.PRELOAD
            return [(one.priority, one.arrived, one.aged_from) for one in items.values() if one.kind is not preload]
        arrivals, ages_from = self._timed()
        arrived = arrivals.of_groups(lambda at, key: key in items and items[key].arrived == at)
        ages = dict(ages_from.of_groups(lambda at, key: key in items and items[key].aged_from == at))
        return [(priority, at, ages[priority]) for priority, at in arrived]

    def _timed(self) -> tuple[Least[Flow], Least[Flow]]:
        arrivals, ages_from, changed = self._arrivals, self._ages_from, self._untimed
        if arrivals is None or ages_from is None or len(arrivals) > TIMES_PER_FLOW * len(self.items):
            arrivals, ages_from, changed = Least(), Least(), dict.fromkeys(self.items)
            self._arrivals, self._ages_from = arrivals, ages_from
        for key in changed:
            head = self.items[key]
            if head.kind is not WaiterKind.PRELOAD:
                arrivals.put(head.priority, head.arrived, key)
                ages_from.put(head.priority, head.aged_from, key)
        self._untimed.clear()
        return arrivals, ages_from


class KeptOrder(Generic[Key]):
    """Keys ordered by their last seen turn. Updating or dropping a key takes O(log n) comparisons."""

    def __init__(self) -> None:
        # The keys that were not seen for longest come first.
        self.seen: OrderedDict[Key, Turn] = OrderedDict()
        # In order. Both are for reading only.
        self.entries: list[tuple[Turn, Key]] = []

    def __len__(self) -> int:
        return len(self.entries)

    def put(self, key: Key, turn: Turn) -> None:
        """Record the current turn of this key."""
        seen = self.seen.get(key)
        if seen != turn:
            if seen is not None:
                self._take_out(seen, key)
            insort(self.entries, (turn, key))
            self.seen[key] = turn
        self.seen.move_to_end(key)

    def renew(self, turns: list[tuple[Key, Turn]]) -> None:
        """Keep these keys and no others. Cheaper than to put each of many."""
        self.seen = OrderedDict(turns)
        self.entries = sorted([(turn, key) for key, turn in turns])

    def drop(self, key: Key) -> None:
        """Remove this key, if it is there."""
        seen = self.seen.pop(key, None)
        if seen is not None:
            self._take_out(seen, key)

    def longest_unseen(self, count: int) -> list[Key]:
        """Up to `count` keys that were not seen for longest."""
        return list(islice(self.seen, count))

    def clear(self) -> None:
        self.seen.clear()
        self.entries.clear()

    def _take_out(self, seen: Turn, key: Key) -> None:
        del self.entries[bisect_left(self.entries, (seen, key))]


class Least(Generic[Key]):
    """The smallest number in each group. Outdated entries are skipped when they come to the top."""

    def __init__(self) -> None:
        self._groups: dict[int, list[tuple[float, Key]]] = {}
        self._size = 0

    def __len__(self) -> int:
        """Number of entries, outdated ones included."""
        return self._size

    def put(self, group: int, number: float, key: Key) -> None:
        heappush(self._groups.setdefault(group, []), (number, key))
        self._size += 1

    def of_groups(self, holds: Callable[[float, Key], bool]) -> list[tuple[int, float]]:
        """The smallest number that still holds, for each group that has one."""
        found = []
        for group, heap in list(self._groups.items()):
            while heap and not holds(*heap[0]):
                heappop(heap)
                self._size -= 1
            if heap:
                found.append((group, heap[0][0]))
            else:
                del self._groups[group]
        return found
