"""What a policy decides: who goes first, and from when on a waiting model may take another's place.

A policy is one class of five small methods. It is given what it judges, changes nothing, keeps no state and is silent;
the scheduler asks it and carries out. `default.py` and `fifo.py` are the two that come with Greenroom. A Swapper
chooses among those who may be made to leave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from greenroom.core.events import Limits
from greenroom.core.policy.swapper import Resident, Swapper
from greenroom.core.queue.waitlist import PriorityClass, Queue, Waiter

# Compared from the left; smaller goes first. The last part must be unique, so that no two are equal.
Turn = tuple[float, ...]


class Policy(Protocol):
    swapper: Swapper

    def priority_class(self, priority: int) -> PriorityClass:
        """The weight of a priority in a queue's waiting, its deadline, and how long it waits for a lift."""
        ...

    def turn(self, waiter: Waiter, served_s: float, now: float) -> Turn:
        """The order within one model's queue. `served_s` is what the waiter's tenant has had so far."""
        ...

    def rank(self, queue: Queue, now: float) -> Turn:
        """The order between models that are not ready, when several of them could come."""
        ...

    def takes_at(self, queue: Queue, resident: Resident, now: float) -> float:
        """From when on this queue's model may take this resident's place; infinity if only an end of its work helps."""
        ...

    def loss(self, resident: Resident, now: float) -> float:
        """How bad it would be to lose this resident; the swapper takes the least bad."""
        ...


PolicyFactory = Callable[[Limits, Swapper], Policy]
Policies = Mapping[str, PolicyFactory]
