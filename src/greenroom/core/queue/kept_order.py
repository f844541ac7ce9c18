"""Orders of keys that are updated bit by bit, so that no caller has to go through all keys at once.

Owns the last seen turn of each key, and their order. Does not know what the keys are. Updating or dropping a key takes
O(log n) comparisons.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Generic, TypeVar

Key = TypeVar("Key")
Turn = tuple[float, ...]


class KeptOrder(Generic[Key]):
    """Keys ordered by turn. Callers refresh a few at a time, those first that were not seen for longest."""

    def __init__(self) -> None:
        # The keys that were not seen for longest come first.
        self._seen: OrderedDict[Key, Turn] = OrderedDict()
        self._order: list[tuple[Turn, Key]] = []

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: Key) -> bool:
        return key in self._seen

    def __iter__(self) -> Iterator[Key]:
        """Keys in order of turn. Valid only until something changes."""
        return (key for _, key in self._order)

    @property
    def first(self) -> tuple[Turn, Key]:
        """The first key, and its turn as last seen."""
        return self._order[0]

    def turn(self, key: Key) -> Turn:
        """The turn of this key as last seen."""
        return self._seen[key]

    def put(self, key: Key, turn: Turn) -> None:
        """Record the current turn of this key."""
        seen = self._seen.get(key)
        if seen != turn:
            if seen is not None:
                self._take_out(seen, key)
            insort(self._order, (turn, key))
            self._seen[key] = turn
        self._seen.move_to_end(key)

    def drop(self, key: Key) -> None:
        """Remove this key, if it is there."""
        seen = self._seen.pop(key, None)
        if seen is not None:
            self._take_out(seen, key)

    def longest_unseen(self, count: int) -> list[Key]:
        """Up to `count` keys that were not seen for longest."""
        return [key for key, _ in zip(self._seen, range(count), strict=False)]

    def clear(self) -> None:
        self._seen.clear()
        self._order.clear()

    def _take_out(self, seen: Turn, key: Key) -> None:
        del self._order[bisect_left(self._order, (seen, key))]


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
