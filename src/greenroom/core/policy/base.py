"""What a policy decides: which waiter goes first, and from when on a waiting model may take a resident's place.

A policy is one class with five small methods. It judges what it is given, changes nothing, keeps no state and logs
nothing; the scheduler carries out. `default.py` and `fifo.py` come with Greenroom. A Swapper chooses among the
residents that may be evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from greenroom.core.events import Limits
from greenroom.core.policy.swapper import Resident, Swapper
from greenroom.core.queue.waitlist import PriorityClass, Queue, Waiter

# Compared from the left; smaller goes first. The last part must be unique, so that no two turns are equal.
Turn = tuple[float, ...]


class Policy(Protocol):
    swapper: Swapper

    def priority_class(self, priority: int) -> PriorityClass:
        """The weight of a priority in a queue's total wait, and when a waiter insists, is late or is lifted."""
        ...

    def turn(self, waiter: Waiter, served_s: float, now: float) -> Turn:
        """The order within one model's queue. `served_s` is what the waiter's tenant has received so far."""
        ...

    def rank(self, queue: Queue, now: float) -> Turn:
        """The order between models that are not ready, when several of them could come."""
        ...

    def takes_at(self, queue: Queue, resident: Resident, now: float) -> float:
        """When this queue's model may take this resident's place; infinity if only the end of its work helps."""
        ...

    def loss(self, resident: Resident, now: float) -> float:
        """The cost of losing this resident; the swapper chooses the smallest."""
        ...


PolicyFactory = Callable[[Limits, Swapper], Policy]
Policies = Mapping[str, PolicyFactory]
