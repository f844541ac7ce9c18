"""The default policy: decides by cost, is fair between tenants, and bounds the wait.

Owns the rules of `docs/design/scheduling.md`: classes that age, rent-or-buy switching, minimum residency, the gated
batch, lingering, and the worth of a resident. Numbers come from `Limits`.
"""

from __future__ import annotations

from math import ceil, exp, inf, log

from greenroom.core.events import Limits
from greenroom.core.policy.base import Turn
from greenroom.core.policy.swapper import Resident, Swapper
from greenroom.core.queue.waitlist import PriorityClass, Queue, Waiter, WaiterKind

# A class weighs twice as much as the next lower one.
WEIGHTS = (2.0, 1.0, 0.5)
# A request is late after this many of its deadlines: it then goes strictly by age, before all that are not late. High
# priority is late at its deadline.
LATE_DEADLINES = (1.0, 2.0, 2.0)
# With fewer requests than this in the time its answers take to end, a model soon falls idle by itself. Closing it would
# hardly be faster, and would cost a batch of its own later.
RESTS_BELOW = 0.7
# Avoids division by zero.
_MOMENT_S = 1e-3


class ByCost:
    def __init__(self, limits: Limits, swapper: Swapper) -> None:
        self._limits = limits
        self.swapper = swapper
        self._classes = tuple(
            PriorityClass(weight, deadline_s, late * deadline_s, limits.lift_s)
            for weight, late, deadline_s in zip(WEIGHTS, LATE_DEADLINES, limits.deadlines_s, strict=True)
        )

    def priority_class(self, priority: int) -> PriorityClass:
        return self._classes[priority if 0 <= priority <= 2 else 0 if priority < 0 else 2]

    # --- order ----------------------------------------------------------------------------------------------------

    def turn(self, waiter: Waiter, served_s: float, now: float) -> Turn:
        """Late waiters by age, whatever their class; then by class, by fair share, by arrival."""
        lift_s = self._limits.lift_s
        # A preload is never late: it waits for room, and must not go before waiters that can evict.
        is_preload = waiter.kind is WaiterKind.PRELOAD
        if not is_preload and waiter.aged_from + self.priority_class(waiter.priority).late_s <= now:
            return (0.0, waiter.aged_from, 0.0, waiter.sequence)
        return (1.0, _class(waiter.aged_from + waiter.priority * lift_s, lift_s, now), served_s, waiter.sequence)

    def rank(self, queue: Queue, now: float) -> Turn:
        """Late queues by age; then by class; then by total wait per second that serving the queue takes.

        Serving many at once takes hardly longer than serving one, as in broadcast scheduling. There, longest total wait
        first is known to keep the mean low without starving any queue.
        """
        if queue.late_at <= now:
            return (0.0, queue.late_at, 0.0, queue.oldest)
        visit_s = queue.swap_s + queue.service_s * (1.0 + log(max(1, queue.waiting))) + _MOMENT_S
        return (1.0, _class(queue.lift_at, self._limits.lift_s, now), -queue.waited_s(now) / visit_s, queue.oldest)

    # --- switching ------------------------------------------------------------------------------------------------

    def takes_at(self, queue: Queue, resident: Resident, now: float) -> float:
        if resident.is_busy and resident.stays_until > now:
            return resident.stays_until
        rests_at = resident.last_used + self._linger_s(resident)
        is_higher = resident.priority < _class(queue.lift_at, self._limits.lift_s, now)
        if not resident.is_busy and rests_at <= now and not is_higher:
            return now
        due_at = min(queue.deadline_at, self._pays_at(queue, resident, now))
        if resident.is_busy:
            return max(
                resident.stays_until, min(_ends_at(max(due_at, now), queue, resident), _passed_at(queue, resident, now))
            )
        free_at = min(due_at, rests_at)
        return max(resident.stays_until, free_at) if is_higher else free_at

    def _pays_at(self, queue: Queue, resident: Resident, now: float) -> float:
        """Rent or buy: when the waiters that a switch would serve have waited as long as the switch costs in total.

        A switch costs the swap in, and the resident's drain and reload for each waiter that it leaves behind. Waiting
        counts from when the resident became ready: earlier waiting was paid for by its own swap.
        """
        if not queue.weight:
            return inf
        away_s = queue.swap_s + resident.reload_s + (resident.drain_s if resident.is_busy else 0.0)
        if resident.queue is None:
            served, left = queue.weight, resident.rate * away_s
        else:
            served, left = _counted(queue, resident.queue)
        since = max(resident.ready_since, queue.middle)
        return max(now, since + away_s * (1.0 + left) / min(served, queue.at_once))

    def _linger_s(self, resident: Resident) -> float:
        """Seconds to stay idle: more than 0 if another request is more likely than not within the time of a reload."""
        likely = 1.0 - exp(-resident.rate * resident.reload_s)
        return resident.reload_s * max(0.0, 2.0 * likely - 1.0)

    # --- worth ----------------------------------------------------------------------------------------------------

    def loss(self, resident: Resident, now: float) -> float:
        """Seconds of loading per second that its absence will cost; per MiB this is the classic greedy-dual score.

        For busy residents the drain is added, so that the one with the shortest drain is evicted.
        """
        return resident.rate * resident.reload_s + (resident.drain_s if resident.is_busy else 0.0)


def _counted(queue: Queue, own: Queue) -> tuple[float, float]:
    """How many waiters the switch would serve, and how many it would leave behind.

    Of a tenant with requests in both queues every request counts, on both sides. Any other tenant counts as one waiter,
    and its requests for the resident do not delay the switch: tenants share turns, not queue lengths.
    """
    served, left = float(len(queue.tenants)), 0.0
    few, many = (queue.tenants, own.tenants) if len(queue.tenants) <= len(own.tenants) else (own.tenants, queue.tenants)
    for tenant in few:
        if tenant in many:
            served += queue.tenants[tenant] - 1
            left += own.tenants[tenant]
    return served, left


def _ends_at(due_at: float, queue: Queue, resident: Resident) -> float:
    """When a busy resident must stop for a queue that is due. A late queue does not wait for it to fall idle."""
    own = resident.queue
    if own is None:
        # With few requests in the time its answers take, it falls idle by itself almost as soon.
        rests_soon = resident.rate * resident.drain_s < RESTS_BELOW
        return queue.late_at if rests_soon else due_at
    # If requests of the same tenants are past their deadlines on both sides, each model serves a whole batch in turn.
    in_turn = own.deadline_at <= due_at and not own.tenants.keys().isdisjoint(queue.tenants)
    return max(due_at, resident.batch_until) if in_turn else due_at


def _passed_at(queue: Queue, resident: Resident, now: float) -> float:
    """When the batch is over and this queue was overtaken as often as allowed."""
    if resident.passed_since == inf:
        return resident.batch_until
    return now if resident.passed_since >= max(resident.batch_until, queue.oldest) else inf


def _class(lift_at: float, lift_s: float, now: float) -> int:
    """The class by age: one less for every `lift_s` waited."""
    return ceil((lift_at - now) / lift_s) if lift_at != inf else 1_000_000
