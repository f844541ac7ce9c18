"""First come, first served, as in simple routers: a ready model serves its own queue, an idle one gives way.

Requests go by priority (lower first), then by arrival. Busy models are never evicted, so a model in constant use keeps
the others out; `default.py` prevents that.
"""

from __future__ import annotations

from math import inf
from typing import Final

from greenroom.core.events import Limits
from greenroom.core.policy.base import Turn
from greenroom.core.policy.swapper import Resident, Swapper
from greenroom.core.queue.waitlist import PriorityClass, Queue, Waiter

# Large enough that age never makes up for a class.
_CLASS_S: Final = 1e9


class FirstCome:
    def __init__(self, limits: Limits, swapper: Swapper) -> None:
        self.swapper = swapper

    def priority_class(self, priority: int) -> PriorityClass:
        return PriorityClass(deadline_s=inf, lift_s=_CLASS_S)

    def turn(self, waiter: Waiter, served_s: float, now: float) -> Turn:
        return (waiter.priority, waiter.sequence)

    def rank(self, queue: Queue, now: float) -> Turn:
        return (queue.lift_at,)

    def takes_at(self, queue: Queue, resident: Resident, now: float) -> float:
        return inf if resident.is_busy else now

    def loss(self, resident: Resident, now: float) -> float:
        """The least recently used is evicted first, whatever it costs to bring back."""
        return 1.0 / (1.0 + max(0.0, now - resident.last_used))
