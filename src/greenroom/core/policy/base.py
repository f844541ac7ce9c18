"""What a policy decides: which waiter goes first, and from when on a waiting model may take a resident's place.

`Pacing` has the rules that hold under every policy: when devices are kept, and when a plan is called off.

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
        """Before when no busy model is closed for a waiter of this priority, and how age lifts it."""
        ...

    def turn(self, waiter: Waiter, served_s: float, now: float) -> Turn:
        """The order within one model's queue. `served_s` is what the waiter's tenant has received so far."""
        ...

    def rank(self, queue: Queue, now: float) -> Turn:
        """The order between models that are not ready, when several of them could come."""
        ...

    def takes_at(self, queue: Queue, resident: Resident, now: float) -> float:
        """When this queue's model may take this resident's place; infinity if only the end of its work helps.

        Never sooner where the resident takes longer to come back (`reload_s`): one that may not be put to sleep yet is
        not asked again whether it may be unloaded.
        """
        ...

    def loss(self, resident: Resident, now: float) -> float:
        """The cost of losing this resident; the swapper chooses the smallest."""
        ...


PolicyFactory = Callable[[Limits, Swapper], Policy]
Policies = Mapping[str, PolicyFactory]


class Pacing:
    """Rules that hold under every policy, because they concern how plans are carried out."""

    def __init__(self, limits: Limits) -> None:
        self._away_share = limits.away_share

    def keeps_for_s(self, queue: Queue, now: float) -> float:
        """How long devices may be kept for this queue: a share of what its oldest request has waited, once that is due.

        Kept devices serve nothing. Without them smaller models take, bit by bit, what a large one needs at once.
        """
        return self._away_share * (now - queue.oldest) if queue.deadline_at <= now else 0.0

    def gives_way(self, planned: int, queue: Queue, to: int, now: float) -> bool:
        """True if a plan of that priority is called off for a request of priority `to`: less urgent, not yet due."""
        return planned > to and queue.deadline_at > now
