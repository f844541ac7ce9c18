"""A waiter: a request, an operator's load, a preload or a lease; and the class that a policy gives its priority.

Owns the facts about one waiter. `waitlist.py` knows its place among others.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from greenroom.core.model import NO_TENANT, LeaseId, ModelId, MoveKind, OpId, RequestId, TenantId


class WaiterKind(Enum):
    REQUEST = "request"
    OP = "op"
    PRELOAD = "preload"
    LEASE = "lease"


ASKING = (WaiterKind.OP, WaiterKind.PRELOAD)
# The priority of a queue without urgent waiters.
NO_PRIORITY = 2**62


@dataclass(slots=True, eq=False)
class Waiter:
    """A request, operator's load, preload or lease in a queue. `candidates` are models that may serve it."""

    id: RequestId | OpId | LeaseId
    kind: WaiterKind
    sequence: int  # Counts arrivals; unique.
    model: ModelId
    candidates: tuple[ModelId, ...]
    priority: int
    arrived: float
    tenant: TenantId = NO_TENANT
    give_up_at: float | None = None
    answer_by: float | None = None
    wants: MoveKind = MoveKind.LOAD
    keep_alive_s: float | None = None
    # Age counts from here: from its arrival, or from when the waiter before it in its flow was served.
    aged_from: float = 0.0
    came_back: bool = False

    def __post_init__(self) -> None:
        self.aged_from = self.arrived


@dataclass(frozen=True, slots=True)
class PriorityClass:
    """What a policy says about a priority, once and for all.

    Its weight in the total wait of a queue; the wait after which it insists; the wait after which it is late and goes
    before all that are not; and the wait that lifts it by one class.
    """

    weight: float
    deadline_s: float
    late_s: float
    lift_s: float


class Priorities:
    """How many wait at each priority, and the most urgent priority."""

    __slots__ = ("_counts", "first")

    def __init__(self) -> None:
        self.first = NO_PRIORITY
        self._counts: dict[int, int] = {}

    def count(self, priority: int, sign: int) -> None:
        count = self._counts.get(priority, 0) + sign
        if count:
            self._counts[priority] = count
            self.first = min(self.first, priority)
            return
        del self._counts[priority]
        if priority == self.first:
            self.first = min(self._counts, default=NO_PRIORITY)

    def copied(self) -> Priorities:
        copy = Priorities()
        copy.first, copy._counts = self.first, {**self._counts}
        return copy
