"""One that waits: a request, an operator's load, a preload or a lease, and what a policy says of its priority.

Owns what is known of it. Where it stands among others is `waitlist.py`'s.
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
# Of a queue in which nobody waits who could be urgent.
NO_PRIORITY = 2**62


@dataclass(slots=True, eq=False)
class Waiter:
    """One that waits. `model` is the queue it stands in; `candidates` are those it may be moved to."""

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
    # Age counts from here: its arrival, or when the one before it in its lane was served.
    aged_from: float = 0.0
    came_back: bool = False

    def __post_init__(self) -> None:
        self.aged_from = self.arrived


@dataclass(frozen=True, slots=True)
class PriorityClass:
    """What a policy says of a priority once and for all.

    Its weight in a queue's waiting; after how long it insists; after how long it goes before all who have not waited so
    long; and how much waiting lifts it by one class.
    """

    weight: float
    deadline_s: float
    late_s: float
    lift_s: float


class Priorities:
    """How many wait with which priority, and the most urgent of these."""

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
