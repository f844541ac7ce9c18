"""Orders that are kept while what they go by changes bit by bit, so that nobody has to go through all of it at once.

Owns what was last seen of each key, and the order of that. Never knows what the keys are or what decides. Seeing,
changing and dropping one cost O(log n) comparisons.
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
    """Everybody in turn. A few are looked at again each time, those first that were not looked at for longest."""

    def __init__(self) -> None:
        # Those that were not looked at for longest come first.
        self._seen: OrderedDict[Key, Turn] = OrderedDict()
        self._order: list[tuple[Turn, Key]] = []

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: Key) -> bool:
        return key in self._seen

    def __iter__(self) -> Iterator[Key]:
        """The first in turn first. Only for as long as nothing changes."""
        return (key for _, key in self._order)

    @property
    def first(self) -> tuple[Turn, Key]:
        """The first in turn, and its turn as it was last seen."""
        return self._order[0]

    def turn(self, key: Key) -> Turn:
        """What was last seen of it."""
        return self._seen[key]

    def put(self, key: Key, turn: Turn) -> None:
        """This was seen of it just now."""
        seen = self._seen.get(key)
        if seen != turn:
            if seen is not None:
                self._take_out(seen, key)
            insort(self._order, (turn, key))
            self._seen[key] = turn
        self._seen.move_to_end(key)

    def drop(self, key: Key) -> None:
        """It is no longer there, if it was."""
        seen = self._seen.pop(key, None)
        if seen is not None:
            self._take_out(seen, key)

    def longest_unseen(self, count: int) -> list[Key]:
        """Up to so many that were not looked at for longest."""
        return [key for key, _ in zip(self._seen, range(count), strict=False)]

    def clear(self) -> None:
        self._seen.clear()
        self._order.clear()

    def _take_out(self, seen: Turn, key: Key) -> None:
        del self._order[bisect_left(self._order, (seen, key))]


class Least(Generic[Key]):
    """The smallest number in each of some groups. What does not hold any more is passed over when it comes to light."""

    def __init__(self) -> None:
        self._groups: dict[int, list[tuple[float, Key]]] = {}
        self._size = 0

    def __len__(self) -> int:
        """How many are remembered, those included that do not hold any more."""
        return self._size

    def put(self, group: int, number: float, key: Key) -> None:
        heappush(self._groups.setdefault(group, []), (number, key))
        self._size += 1

    def of_groups(self, holds: Callable[[float, Key], bool]) -> list[tuple[int, float]]:
        """The smallest number that holds, for each group that has one."""
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
