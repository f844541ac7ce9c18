"""Who waits: requests, operators' loads, preloads and leases, in order, by model.

Owns order and positions. Never decides who goes: it says who is first and how many stand before whom. Adding, removing
and finding a position cost O(log n) comparisons.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from greenroom.core.model import NO_TENANT, LeaseId, ModelId, MoveKind, OpId, RequestId, TenantId

# Priority first, then arrival. The second number is unique, so keys never compare equal.
Key = tuple[int, int]


class WaiterKind(Enum):
    REQUEST = "request"
    OP = "op"
    PRELOAD = "preload"
    LEASE = "lease"


@dataclass(slots=True)
class Waiter:
    """One that waits. `model` is the queue it stands in; `candidates` are those it may be moved to."""

    id: RequestId | OpId | LeaseId
    kind: WaiterKind
    key: Key
    model: ModelId
    candidates: tuple[ModelId, ...]
    priority: int
    arrived: float
    tenant: TenantId = NO_TENANT
    give_up_at: float | None = None
    wants: MoveKind = MoveKind.LOAD
    came_back: bool = False
    granted_at: float = 0.0


class Waitlist:
    def __init__(self) -> None:
        self._waiters: dict[str, Waiter] = {}
        self._queues: dict[ModelId, list[tuple[Key, str]]] = {}
        # Callers only: operators and preloads are not counted as queue depth and are not given positions.
        self._callers: list[Key] = []

    def __contains__(self, waiter_id: str) -> bool:
        return waiter_id in self._waiters

    def __iter__(self) -> Iterator[Waiter]:
        return iter(sorted(self._waiters.values(), key=lambda waiter: waiter.key))

    def __bool__(self) -> bool:
        return bool(self._waiters)

    @property
    def depth(self) -> int:
        return len(self._callers)

    def __getitem__(self, waiter_id: str) -> Waiter:
        return self._waiters[waiter_id]

    def get(self, waiter_id: str) -> Waiter | None:
        return self._waiters.get(waiter_id)

    def add(self, waiter: Waiter) -> None:
        assert waiter.id not in self._waiters, f"{waiter.id} waits already"
        self._waiters[waiter.id] = waiter
        insort(self._queues.setdefault(waiter.model, []), (waiter.key, waiter.id))
        if waiter.kind is WaiterKind.REQUEST:
            insort(self._callers, waiter.key)

    def remove(self, waiter_id: str) -> Waiter | None:
        waiter = self._waiters.pop(waiter_id, None)
        if waiter is None:
            return None
        queue = self._queues[waiter.model]
        del queue[bisect_left(queue, (waiter.key, waiter.id))]
        if not queue:
            del self._queues[waiter.model]
        if waiter.kind is WaiterKind.REQUEST:
            del self._callers[bisect_left(self._callers, waiter.key)]
        return waiter

    def heads(self) -> list[Waiter]:
        """The first of every queue."""
        return [self._waiters[queue[0][1]] for queue in self._queues.values()]

    def first(self, model: ModelId) -> Waiter | None:
        queue = self._queues.get(model)
        return self._waiters[queue[0][1]] if queue else None

    def at(self, model: ModelId, key: Key) -> Waiter:
        """The one who stands at this place."""
        queue = self._queues[model]
        return self._waiters[queue[bisect_left(queue, key, key=_place)][1]]

    def after(self, model: ModelId, key: Key) -> Waiter | None:
        """The next in this model's queue behind that place."""
        queue = self._queues.get(model, [])
        behind = bisect_right(queue, key, key=_place)
        return self._waiters[queue[behind][1]] if behind < len(queue) else None

    def of(self, model: ModelId) -> list[Waiter]:
        return [self._waiters[waiter_id] for _, waiter_id in self._queues.get(model, ())]

    def count(self, model: ModelId) -> int:
        return len(self._queues.get(model, ()))

    def position(self, waiter: Waiter) -> int:
        """1 for the next; callers only."""
        return bisect_left(self._callers, waiter.key) + 1

    def ahead_in_queue(self, waiter: Waiter) -> int:
        """How many wait for the same model before this one."""
        return bisect_left(self._queues[waiter.model], (waiter.key, waiter.id))


def _place(entry: tuple[Key, str]) -> Key:
    return entry[0]
