"""What waits: requests, operators' loads, preloads and leases, by model.

Owns the queues and their sums. Never decides what goes next: it knows the first of each lane, the total wait of a queue
and the number ahead of a waiter. Adding, removing and finding a position take O(log n) comparisons.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import islice
from math import inf

from greenroom.core.model import ModelId, MoveKind, TenantId
from greenroom.core.queue.kept_order import KeptOrder, Least
from greenroom.core.queue.waiter import ASKING, Priorities
from greenroom.core.queue.waiter import PriorityClass as PriorityClass
from greenroom.core.queue.waiter import Waiter as Waiter
from greenroom.core.queue.waiter import WaiterKind as WaiterKind

# The kind's value, not the kind: lanes are compared where turns are equal.
Lane = tuple[str, int, TenantId]
# Seconds until a model is ready from its tier, seconds per answer, and its concurrency.
Prices = tuple[float, float, int]

# With more lanes than this their order is kept; with fewer, checking each is as fast.
LANES_FEW = 8
# Rebuild the heaps of lane heads when they hold this many entries per lane, most of them outdated.
FIRSTS_PER_LANE = 4
# How long an order of lanes is good enough: age lifts by the minute.
TURNS_FRESH_S = 1.0
# After that all lanes are checked again; with more lanes than this, only a few at each turn until all have been.
LANES_MANY = 64
LANES_LOOKED_AT = 8


class Queue:
    """The waiters of one model. A lane holds those of one kind, priority and tenant in order of arrival."""

    __slots__ = (
        "_ages",
        "_ages_from",
        "_arrivals",
        "_class_of",
        "_deadline_at",
        "_late_at",
        "_lift_at",
        "_oldest",
        "_unseen",
        "askers",
        "at_once",
        "changed",
        "lanes",
        "model",
        "operators",
        "preparing",
        "priorities",
        "service_s",
        "stale",
        "swap_s",
        "tenants",
        "turns",
        "turns_at",
        "turns_left",
        "waiting",
        "weight",
    )

    def __init__(self, model: ModelId, class_of: Callable[[int], PriorityClass]) -> None:
        self.model = model
        self._class_of = class_of
        self.lanes: dict[Lane, list[Waiter]] = {}
        # Operators that want the model asleep are kept apart: they neither hold up other waiters nor wait for them.
        self.preparing: dict[str, Waiter] = {}
        # The order of the lanes as last seen, when that was, how many are still to be checked again, and the lanes
        # that have a new first waiter since.
        self.turns: KeptOrder[Lane] = KeptOrder()
        self.turns_at = -inf
        self.turns_left = 0
        self.changed: dict[Lane, None] = {}
        self.askers = 0
        # True if the first of a lane has left since the times below were computed. With many lanes: when their first
        # waiters arrived and since when they age, by priority, and the lanes not included yet.
        self.stale = False
        self._arrivals: Least[Lane] | None = None
        self._ages_from: Least[Lane] | None = None
        self._unseen: dict[Lane, None] = {}
        self.tenants: dict[TenantId, int] = {}
        # A model is as urgent as its most urgent waiter; one operator counts for the whole queue.
        self.priorities = Priorities()
        self.operators = 0
        self.waiting = 0
        self.weight = 0.0
        self._ages = 0.0
        self._deadline_at = inf
        self._late_at = inf
        self._oldest = inf
        self._lift_at = inf
        # Seconds until its model is ready from its tier, seconds per answer, and its concurrency.
        self.swap_s = 0.0
        self.service_s = 0.0
        self.at_once = 1

    @property
    def deadline_at(self) -> float:
        """When the first waiter insists."""
        if self.stale:
            self._look()
        return self._deadline_at

    @property
    def late_at(self) -> float:
        """When the first waiter is late."""
        if self.stale:
            self._look()
        return self._late_at

    @property
    def oldest(self) -> float:
        """The earliest arrival."""
        if self.stale:
            self._look()
        return self._oldest

    @property
    def lift_at(self) -> float:
        """When the first waiter reaches class 0 by age alone."""
        if self.stale:
            self._look()
        return self._lift_at

    def waited_s(self, now: float) -> float:
        """Total seconds waited, each waiter weighted by its class."""
        return max(0.0, self.weight * now - self._ages)

    @property
    def middle(self) -> float:
        """The weighted mean arrival time."""
        return self._ages / self.weight

    def price(self, prices: Prices) -> None:
        self.swap_s, self.service_s, self.at_once = prices

    def joined_by(self, waiter: Waiter, prices: Prices) -> Queue:
        """A copy with the sums as they would be with this waiter in the queue. Lanes are left out."""
        copy = Queue(self.model, self._class_of)
        copy.price(prices)
        copy.waiting, copy.weight, copy._ages, copy.tenants = self.waiting, self.weight, self._ages, {**self.tenants}
        copy.priorities, copy.operators = self.priorities.copied(), self.operators
        copy._deadline_at, copy._late_at = self.deadline_at, self.late_at
        copy._oldest, copy._lift_at = self.oldest, self.lift_at
        copy._count(waiter, +1)
        copy._lead(waiter)
        return copy

    def add(self, waiter: Waiter) -> None:
        if waiter.wants is MoveKind.PREPARE:
            self.preparing[waiter.id] = waiter
            self.waiting += 1
            self.askers += 1
            return
        key = _lane(waiter)
        lane = self.lanes.setdefault(key, [])
        if lane and lane[-1].sequence > waiter.sequence:
            insort(lane, waiter, key=_sequence)
        else:
            lane.append(waiter)
        self._count(waiter, +1)
        if lane[0] is waiter:
            self._lead(waiter)
            self.changed[key] = self._unseen[key] = None

    def remove(self, waiter: Waiter, served_at: float | None) -> None:
        if self.preparing.pop(waiter.id, None) is not None:
            self.waiting -= 1
            self.askers -= 1
            return
        key = _lane(waiter)
        lane = self.lanes[key]
        place = 0 if lane[0] is waiter else bisect_left(lane, waiter.sequence, key=_sequence)
        del lane[place]
        if lane and served_at is not None:
            # A lane that is served does not starve, however long it is: its next waiter ages from this turn on.
            lane[0].aged_from = max(lane[0].aged_from, served_at)
        self._count(waiter, -1)
        if place == 0:
            self.stale = True
            self.changed[key] = self._unseen[key] = None
        if not lane:
            del self.lanes[key], self.changed[key], self._unseen[key]

    def _count(self, waiter: Waiter, sign: int) -> None:
        self.waiting += sign
        if waiter.kind in ASKING:
            self.askers += sign
        count = self.tenants.get(waiter.tenant, 0) + sign
        if count:
            self.tenants[waiter.tenant] = count
        else:
            del self.tenants[waiter.tenant]
        if waiter.kind is not WaiterKind.PRELOAD:
            weight = sign * self._class_of(waiter.priority).weight
            self.weight += weight
            self._ages += weight * waiter.arrived
            self.priorities.count(waiter.priority, sign)
            self.operators += sign if waiter.kind is WaiterKind.OP else 0

    def _lead(self, waiter: Waiter) -> None:
        """Account for the first of a lane. Later waiters of the lane change nothing."""
        if waiter.kind is WaiterKind.PRELOAD:
            return
        its = self._class_of(waiter.priority)
        self._deadline_at = min(self._deadline_at, waiter.arrived + its.deadline_s)
        self._late_at = min(self._late_at, waiter.arrived + its.late_s)
        self._oldest = min(self._oldest, waiter.arrived)
        self._lift_at = min(self._lift_at, waiter.aged_from + waiter.priority * its.lift_s)

    def _look(self) -> None:
        """Recompute the times from the first of every lane, after one has left; with many lanes incrementally."""
        self.stale = False
        self._deadline_at = self._late_at = self._oldest = self._lift_at = inf
        if len(self.lanes) <= LANES_FEW:
            self._arrivals = self._ages_from = None
            for lane in self.lanes.values():
                self._lead(lane[0])
            return
        arrivals, ages_from = self._seen_firsts()
        lanes = self.lanes
        for priority, arrived in arrivals.of_groups(lambda at, key: key in lanes and lanes[key][0].arrived == at):
            its = self._class_of(priority)
            self._deadline_at = min(self._deadline_at, arrived + its.deadline_s)
            self._late_at = min(self._late_at, arrived + its.late_s)
            self._oldest = min(self._oldest, arrived)
        for priority, aged_from in ages_from.of_groups(lambda at, key: key in lanes and lanes[key][0].aged_from == at):
            self._lift_at = min(self._lift_at, aged_from + priority * self._class_of(priority).lift_s)

    def _seen_firsts(self) -> tuple[Least[Lane], Least[Lane]]:
        """When the first of each lane arrived and since when it ages, up to date."""
        arrivals, ages_from, changed = self._arrivals, self._ages_from, self._unseen
        if arrivals is None or ages_from is None or len(arrivals) > FIRSTS_PER_LANE * len(self.lanes):
            arrivals, ages_from, changed = Least(), Least(), dict.fromkeys(self.lanes)
            self._arrivals, self._ages_from = arrivals, ages_from
        for key in changed:
            first = self.lanes[key][0]
            if first.kind is not WaiterKind.PRELOAD:
                arrivals.put(first.priority, first.arrived, key)
                ages_from.put(first.priority, first.aged_from, key)
        self._unseen.clear()
        return arrivals, ages_from

    def ahead_of(self, waiter: Waiter) -> int:
        """How many are likely to go first: those before it in its lane, and as many of each lane no less urgent."""
        own = _lane(waiter)
        before = bisect_left(self.lanes.get(own, []), waiter.sequence, key=_sequence)
        others = (min(before + 1, len(lane)) for key, lane in self.lanes.items() if key != own and key[1] <= own[1])
        return before + sum(others)

    def heads(self) -> list[Waiter]:
        """The first of every lane, and the operators that want the model asleep."""
        return [*(lane[0] for lane in self.lanes.values()), *self.preparing.values()]

    def asking(self) -> list[Waiter]:
        """Operators and preloads, which only ask that the model be there."""
        if not self.askers:
            return []
        lanes = [lane for lane in self.lanes.values() if lane[0].kind in ASKING]
        return [*self.preparing.values(), *(waiter for lane in lanes for waiter in lane)]

    def first(self, turn: Callable[[Waiter], tuple[float, ...]], now: float) -> Waiter | None:
        """The next waiter in turn; None if all waiters only want the model asleep."""
        if not self.lanes:
            return None
        if len(self.lanes) <= LANES_FEW:
            self.turns.clear()
            self.changed.clear()
            firsts = [lane[0] for lane in self.lanes.values()]
            return min(firsts, key=turn) if len(firsts) > 1 else firsts[0]
        self._arrange(turn, now)
        while True:
            known, key = self.turns.first
            lane = self.lanes.get(key)
            if lane is None:
                self.turns.drop(key)
            elif (current := turn(lane[0])) > known:
                self.turns.put(key, current)
            else:
                return lane[0]

    def _arrange(self, turn: Callable[[Waiter], tuple[float, ...]], now: float) -> None:
        """Update changed lanes. After a while update all, a few at a time, because turns also change with age."""
        lanes, turns = self.lanes, self.turns
        if not turns:
            self.turns_at, self.turns_left, self.changed = now, 0, dict.fromkeys(lanes)
        for key in self.changed:
            turns.put(key, turn(lanes[key][0]))
        self.changed.clear()
        if not self.turns_left and not 0.0 <= now - self.turns_at < TURNS_FRESH_S:
            self.turns_at, self.turns_left = now, len(turns)
        some = self.turns_left if len(turns) <= LANES_MANY else min(self.turns_left, LANES_LOOKED_AT)
        self.turns_left -= some
        for key in turns.longest_unseen(some):
            if key in lanes:
                turns.put(key, turn(lanes[key][0]))
            else:
                turns.drop(key)

    def __iter__(self) -> Iterator[Waiter]:
        """In order of arrival."""
        waiters = [waiter for lane in self.lanes.values() for waiter in lane]
        return iter(sorted([*waiters, *self.preparing.values()], key=_sequence))


class Waitlist:
    def __init__(self, class_of: Callable[[int], PriorityClass]) -> None:
        self.class_of = class_of
        self._waiters: dict[str, Waiter] = {}
        self.queues: dict[ModelId, Queue] = {}
        # Models with a queue or costs that have changed since they were last ranked.
        self.altered: dict[ModelId, None] = {}
        # Requests with several candidates. They are few, and are checked whenever one of their models has room.
        self.choosy: dict[str, Waiter] = {}
        # Requests only: operators, preloads and leases do not count as queue depth and have no position.
        self._callers: list[tuple[int, int]] = []

    def __contains__(self, waiter_id: str) -> bool:
        return waiter_id in self._waiters

    def __iter__(self) -> Iterator[Waiter]:
        return iter(sorted(self._waiters.values(), key=_place))

    def __bool__(self) -> bool:
        return bool(self._waiters)

    @property
    def depth(self) -> int:
        return len(self._callers)

    def __getitem__(self, waiter_id: str) -> Waiter:
        return self._waiters[waiter_id]

    def get(self, waiter_id: str) -> Waiter | None:
        return self._waiters.get(waiter_id)

    def add(self, waiter: Waiter, model: ModelId | None = None) -> None:
        """Queue it for this model, or else for `waiter.model`."""
        assert waiter.id not in self._waiters, f"{waiter.id} waits already"
        if model is not None:
            waiter.model = model
        self._waiters[waiter.id] = waiter
        queue = self.queues.get(waiter.model)
        if queue is None:
            queue = self.queues[waiter.model] = Queue(waiter.model, self.class_of)
        queue.add(waiter)
        self.altered[waiter.model] = None
        if len(waiter.candidates) > 1:
            self.choosy[waiter.id] = waiter
        if waiter.kind is WaiterKind.REQUEST:
            insort(self._callers, _place(waiter))

    def remove(self, waiter_id: str, served_at: float | None = None) -> Waiter | None:
        waiter = self._waiters.pop(waiter_id, None)
        if waiter is None:
            return None
        queue = self.queues[waiter.model]
        queue.remove(waiter, served_at)
        if not queue.waiting:
            del self.queues[waiter.model]
            self.altered.pop(waiter.model, None)
        self.choosy.pop(waiter_id, None)
        if waiter.kind is WaiterKind.REQUEST:
            del self._callers[bisect_left(self._callers, _place(waiter))]
        return waiter

    def reclassify(self, class_of: Callable[[int], PriorityClass]) -> None:
        """Rebuild all queues with the classes of another policy."""
        self.class_of = class_of
        waiters, self._waiters = self._waiters, {}
        self.queues, self.altered, self.choosy, self._callers = {}, {}, {}, []
        for waiter in waiters.values():
            self.add(waiter)

    def mark_returned(self, waiter: Waiter) -> None:
        """Mark a waiter that was granted a slot and comes back."""
        waiter.came_back = True

    def strike(self, waiter: Waiter, model: ModelId) -> None:
        """Remove this model from its candidates. The waiter stays in its queue."""
        waiter.candidates = tuple(name for name in waiter.candidates if name != model)

    def price(self, model: ModelId, prices: Prices) -> None:
        """Update the costs in this model's queue."""
        self.queues[model].price(prices)
        self.altered[model] = None

    def take_altered(self, count: int) -> list[ModelId]:
        """Take up to `count` models with queues that have changed since they were last taken."""
        models = list(islice(self.altered, count))
        for model in models:
            del self.altered[model]
        return models

    def alter_all(self) -> None:
        """Mark every queue as changed."""
        self.altered.update(dict.fromkeys(self.queues))

    def of(self, model: ModelId) -> list[Waiter]:
        queue = self.queues.get(model)
        return list(queue) if queue is not None else []

    def count(self, model: ModelId) -> int:
        queue = self.queues.get(model)
        return 0 if queue is None else queue.waiting

    def position(self, waiter: Waiter) -> int:
        """1 for the next; requests only, by priority and arrival."""
        return bisect_left(self._callers, _place(waiter)) + 1


def _lane(waiter: Waiter) -> Lane:
    # `value` without the cost of its property: every add and remove calls this.
    return (waiter.kind._value_, waiter.priority, waiter.tenant)


def _sequence(waiter: Waiter) -> int:
    return waiter.sequence


def _place(waiter: Waiter) -> tuple[int, int]:
    return (waiter.priority, waiter.sequence)
