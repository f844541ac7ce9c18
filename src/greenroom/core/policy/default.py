"""The default policy: first come, first served, with a bound on being overtaken and fair turns between tenants.

Owns the rules of `docs/design/scheduling.md`: ages by class and tenant, when a busy model is closed for another one,
and what the loss of a resident costs. Numbers come from `Limits`.
"""

from __future__ import annotations

from math import ceil
from typing import Final

from greenroom.core.events import Limits
from greenroom.core.policy.base import Turn
from greenroom.core.policy.swapper import Resident, Swapper
from greenroom.core.queue.waitlist import PriorityClass, Queue, Waiter

# Requests of tenants that flood a model are of one age if they came within this time, and go by their tenants' shares.
ALIKE_S: Final = 60.0
# A resident that is used more than this hardly catches up. Its use is an estimate, so it counts as no more.
USE_MAX: Final = 0.95
# A busy model is closed this many times the switch before callers give up: it may take longer than usual.
IN_TIME: Final = 2.0
# The policy is asked again after an answer, and after this if it is not known how long that takes.
_MOMENT_S: Final = 0.1


class BoundedFirstCome:
    def __init__(self, limits: Limits, swapper: Swapper) -> None:
        self._limits = limits
        self.swapper = swapper
        self._classes = tuple(PriorityClass(deadline_s, limits.lift_s) for deadline_s in limits.deadlines_s)

    def priority_class(self, priority: int) -> PriorityClass:
        return self._classes[priority if 0 <= priority <= 2 else 0 if priority < 0 else 2]

    # --- order ----------------------------------------------------------------------------------------------------

    def turn(self, waiter: Waiter, served_s: float, now: float) -> Turn:
        """By age, where a class counts as `lift_s`, then by arrival. Tenants that flood the model take fair turns."""
        came = ceil(waiter.aged_from / ALIKE_S) * ALIKE_S if waiter.is_flood else waiter.aged_from
        return (came + waiter.priority * self._limits.lift_s, served_s, waiter.sequence)

    def rank(self, queue: Queue, now: float) -> Turn:
        """By the age of the oldest request, where a class counts as `lift_s`."""
        return (queue.lift_at, queue.oldest)

    # --- switching ------------------------------------------------------------------------------------------------

    def takes_at(self, queue: Queue, resident: Resident, now: float) -> float:
        """An idle resident gives way at once. A busy one is closed when that is due, after the turns that it owes.

        It is due at the class's deadline, or when those that wait outweigh those that would have to, if that is later;
        at the latest when the resident was there for so long that it is away for at most `away_share` of the time, or
        when callers would soon give up, which brings the deadline forward by up to a half. So a request is overtaken
        only by requests that came at most that much later, and by those that waited when the resident came.
        """
        if not resident.is_busy:
            return now
        own = resident.queue
        # As urgent as its last request, or as its most urgent waiter: these would have to wait just like the others.
        urgency = resident.priority if own is None else min(resident.priority, own.priorities.first)
        steps = queue.priorities.first - urgency
        if steps < 0:
            return queue.deadline_at
        away_s = resident.drain_s + queue.swap_s + queue.service_s + resident.reload_s
        oldest, deadline_at = queue.oldest, queue.deadline_at
        latest_at = oldest + away_s / self._limits.away_share
        if self._limits.wait_max_s is not None:
            in_time_at = oldest + self._limits.wait_max_s - IN_TIME * (resident.drain_s + queue.swap_s)
            latest_at = min(latest_at, in_time_at)
            deadline_at = min(deadline_at, max(in_time_at, (oldest + deadline_at) / 2))
        due_at = max(deadline_at, min(latest_at, _outweighs_at(queue, resident, away_s)))
        if own is None:
            return due_at
        if resident.owes:
            due_at = max(due_at, now + max(resident.owes * resident.service_s / resident.at_once, _MOMENT_S))
        if own.tenants.keys().isdisjoint(queue.tenants) and own.aged_from - own.oldest > away_s:
            # More waits there than a tenant may ask for, and it has nothing to gain here: each has half of the time.
            # While it drains, it still serves its own.
            due_at = min(due_at, oldest + steps * self._limits.lift_s + away_s - resident.drain_s)
        return due_at

    # --- worth ----------------------------------------------------------------------------------------------------

    def loss(self, resident: Resident, now: float) -> float:
        """Seconds of waiting that its leaving costs.

        Idle: its reload, the less likely the longer it has not been used. Busy: those that wait for it, and those that
        will come meanwhile, wait until its answers have ended and it is back.
        """
        if not resident.is_busy:
            return 1.0 / (1.0 + max(0.0, now - resident.last_used))
        away_s = resident.drain_s + resident.reload_s
        waiting = resident.queue.waiting if resident.queue is not None else 0
        return away_s * (1.0 + waiting + resident.rate * away_s / 2)


def _outweighs_at(queue: Queue, resident: Resident, away_s: float) -> float:
    """When those in the queue will have waited as long, all together, as the switch makes others wait.

    That is all that wait for the resident, and those that come until it has caught up: the busier it is, the longer.
    """
    waiting = resident.queue.waiting if resident.queue is not None else 0
    use = min(USE_MAX, resident.rate * resident.service_s / resident.at_once)
    others_s = away_s * (waiting + resident.rate * away_s / 2) / (1.0 - use)
    return queue.mean_arrival + others_s / queue.waiting
