"""What a policy decides: which waiter goes first, and from when on a waiting model may take a resident's place.

`Pacing` has the rules that hold under every policy: how long a stay is, and when waiting has lasted too long.

A policy is one class with five small methods. It judges what it is given, changes nothing, keeps no state and logs
nothing; the scheduler carries out. `default.py` and `fifo.py` come with Greenroom. A Swapper chooses among the
residents that may be evicted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from math import inf
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


class Pacing:
    """How long a slot may stay while others wait, and when waiting has lasted too long. Numbers come from `Limits`."""

    def __init__(self, limits: Limits) -> None:
        self._residency_swaps = limits.residency_swaps
        self._batch_swaps = limits.batch_swaps
        self._overtakes_max = limits.overtakes_max

    def stay_s(self, swap_s: float, drain_s: float) -> tuple[float, float]:
        """Seconds of the minimum residency and of the batch, after a swap that took so long.

        A swap also costs the drain, in which answers end and none begin.
        """
        return self._residency_swaps * swap_s, self._batch_swaps * (swap_s + drain_s)

    def recent(self, grants: deque[float]) -> deque[float]:
        """Those of a slot's last grants that count: as many as may overtake an older waiter."""
        return deque(grants, self._overtakes_max)

    def keeps_devices(self, queue: Queue, now: float) -> bool:
        """True if devices are kept for this queue: its oldest waiter has been late for as long again.

        Not earlier: kept devices serve nothing, and smaller models could have used them.
        """
        return 2 * queue.late_at - queue.oldest <= now

    def gives_way(self, planned: int, queue: Queue, to: int, now: float) -> bool:
        """True if a plan of that priority is called off for a request of priority `to`: less urgent, and not late."""
        return planned > to and queue.late_at > now


def passed_since(recent: deque[float]) -> float:
    """Since when a slot was granted as often as others may be overtaken; inf if they may not be at all."""
    if not recent.maxlen:
        return inf
    return recent[0] if len(recent) == recent.maxlen else -inf


def overtakes_since(recent: deque[float], batch_until: float) -> float:
    """The same if all these grants came after the slot's batch, so that the policy has to be asked again; else -inf."""
    is_full = len(recent) == recent.maxlen and recent
    return recent[0] if is_full and recent[0] >= batch_until else -inf
