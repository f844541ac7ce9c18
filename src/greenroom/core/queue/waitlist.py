"""What waits: requests, operators' loads, preloads and leases, by model.

Owns the queues and their sums. Never decides what goes next: it finds the head of each flow, the total wait of a queue
and the number ahead of a waiter. Adding and removing take O(log n) comparisons; a position also adds up some lengths.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from math import inf
from typing import Final

from greenroom.core.model import ModelId, MoveKind, TenantId
from greenroom.core.queue.index import Flow, FlowHeads, Turn, TurnIndex
from greenroom.core.queue.waiter import ASKING, Accounts, Priorities
from greenroom.core.queue.waiter import PriorityClass as PriorityClass
from greenroom.core.queue.waiter import Waiter as Waiter
from greenroom.core.queue.waiter import WaiterKind as WaiterKind

# Seconds until a model is ready from its tier, seconds per answer, and its concurrency.
Prices = tuple[float, float, int]

# A tenant floods a model if it has this many waiting requests, and this part of all.
FLOODS_FROM, FLOODS_PART = 8, 0.2

# With more waiting models than this, each round ranks only some of them anew: ranking takes microseconds per model.
MODELS_FEW: Final = 64

# Requests are listed for their positions by so many numbers: in one list of all, each removal would move thousands.
NUMBERS_PER_LIST: Final = 1_024


class Queue:
    """The waiters of one model. A flow holds those of one kind, priority and tenant in order of arrival."""

    __slots__ = (
        "_aged_from",
        "_arrivals",
        "_class_of",
        "_deadline_at",
        "_floods",
        "_flows",
        "_heads",
        "_is_stale",
        "_lift_at",
        "_oldest",
        "askers",
        "at_once",
        "model",
        "operators",
        "preparing",
        "priorities",
        "service_s",
        "swap_s",
        "tenants",
        "waiting",
    )

    def __init__(self, model: ModelId, class_of: Callable[[int], PriorityClass]) -> None:
        self.model = model
        self._class_of = class_of
        self._flows: dict[Flow, list[Waiter]] = {}
        self._heads = FlowHeads()
        # Operators that want the model asleep are kept apart: they neither hold up other waiters nor wait for them.
        self.preparing: dict[str, Waiter] = {}
        self.askers = 0
        self.tenants: dict[TenantId, int] = {}
        self._floods: dict[TenantId, None] = {}
        # The sum of the times at which they came.
        self._arrivals = 0.0
        # A model is as urgent as its most urgent waiter; one operator counts for the whole queue.
        self.priorities = Priorities()
        self.operators = 0
        self.waiting = 0
        # Earliest times of the heads. They are stale when a head has left since they were computed.
        self._is_stale = False
        self._deadline_at = inf
        self._oldest = inf
        self._aged_from = inf
        self._lift_at = inf
        # Seconds until its model is ready from its tier, seconds per answer, and its concurrency.
        self.swap_s = 0.0
        self.service_s = 0.0
        self.at_once = 1

    @property
    def deadline_at(self) -> float:
        """When the first waiter insists."""
        if self._is_stale:
            self._look()
        return self._deadline_at

    @property
    def oldest(self) -> float:
        """The earliest arrival."""
        if self._is_stale:
            self._look()
        return self._oldest

    @property
    def mean_arrival(self) -> float:
        """When its waiters came, on average."""
        return self._arrivals / self.waiting

    @property
    def aged_from(self) -> float:
        """The earliest time from which a waiter ages."""
        if self._is_stale:
            self._look()
        return self._aged_from

    @property
    def lift_at(self) -> float:
        """When the first waiter reaches class 0 by age alone."""
        if self._is_stale:
            self._look()
        return self._lift_at

    def joined_by(self, waiter: Waiter, prices: Prices) -> Queue:
        """A copy with the sums as they would be with this waiter in the queue. Flows are left out."""
        copy = self.priced(prices)
        copy._count(waiter, +1)
        copy._lead(waiter)
        return copy

    def priced(self, prices: Prices) -> Queue:
        """A copy with these prices. Flows are left out."""
        copy = Queue(self.model, self._class_of)
        copy.swap_s, copy.service_s, copy.at_once = prices
        copy.waiting, copy.tenants = self.waiting, {**self.tenants}
        copy._arrivals = self._arrivals
        copy.priorities, copy.operators = self.priorities.copied(), self.operators
        copy._deadline_at, copy._oldest = self.deadline_at, self.oldest
        copy._aged_from, copy._lift_at = self.aged_from, self.lift_at
        return copy

    def add(self, waiter: Waiter) -> None:
        if waiter.wants is MoveKind.PREPARE:
            self.preparing[waiter.id] = waiter
            self.waiting += 1
            self._arrivals += waiter.arrived
            self.askers += 1
            return
        key = _flow(waiter)
        flow = self._flows.setdefault(key, [])
        if flow and flow[-1].sequence > waiter.sequence:
            insort(flow, waiter, key=_sequence)
        else:
            flow.append(waiter)
        self._count(waiter, +1)
        if flow[0] is waiter:
            self._lead(waiter)
            self._heads.put(key, waiter)

    def remove(self, waiter: Waiter, accounts: Accounts, served_at: float | None) -> None:
        if self.preparing.pop(waiter.id, None) is not None:
            self.waiting -= 1
            self._arrivals -= waiter.arrived
            self.askers -= 1
            return
        key = _flow(waiter)
        flow = self._flows[key]
        place = 0 if flow[0] is waiter else bisect_left(flow, waiter.sequence, key=_sequence)
        del flow[place]
        head_changed = place == 0
        if flow and served_at is not None and (floods := self._floods_with(waiter.tenant)):
            # A tenant that asks for more than its share counts as if it had asked more slowly. It ages from this turn
            # on at the latest: having used what others left is no debt.
            may_ask_at = waiter.aged_from + accounts.pause_s(waiter.tenant, floods)
            flow[0].is_flood = may_ask_at >= served_at
            if flow[0].aged_from < (age_from := min(served_at, may_ask_at)):
                flow[0].aged_from = age_from
                head_changed = True
        self._count(waiter, -1)
        self._is_stale = self._is_stale or head_changed
        if not flow:
            del self._flows[key]
            self._heads.drop(key)
        elif head_changed:
            self._heads.put(key, flow[0])

    def _floods_with(self, tenant: TenantId) -> list[TenantId]:
        """The tenants that flood the model, if this is one of them: each has much of what waits, together most of it.

        Empty otherwise: then it is no flood but a crowd, which goes by age.
        """
        part = self.waiting * FLOODS_PART
        if tenant not in self._floods or self.tenants[tenant] < part:
            return []
        floods = [one for one in self._floods if self.tenants[one] >= part]
        return floods if 2 * sum(self.tenants[one] for one in floods) > self.waiting else []

    def _count(self, waiter: Waiter, sign: int) -> None:
        self.waiting += sign
        self._arrivals += sign * waiter.arrived
        if waiter.kind in ASKING:
            self.askers += sign
        count = self.tenants.get(waiter.tenant, 0) + sign
        if count == FLOODS_FROM and sign > 0:
            self._floods[waiter.tenant] = None
        elif count == FLOODS_FROM - 1 and sign < 0:
            del self._floods[waiter.tenant]
        if count:
            self.tenants[waiter.tenant] = count
        else:
            del self.tenants[waiter.tenant]
        if waiter.kind is not WaiterKind.PRELOAD:
            self.priorities.count(waiter.priority, sign)
            self.operators += sign if waiter.kind is WaiterKind.OP else 0

    def _lead(self, waiter: Waiter) -> None:
        """Account for the head of a flow. Later waiters of the flow change nothing."""
        if waiter.kind is WaiterKind.PRELOAD:
            return
        its = self._class_of(waiter.priority)
        self._deadline_at = min(self._deadline_at, waiter.arrived + its.deadline_s)
        self._oldest = min(self._oldest, waiter.arrived)
        self._aged_from = min(self._aged_from, waiter.aged_from)
        self._lift_at = min(self._lift_at, waiter.aged_from + waiter.priority * its.lift_s)

    def _look(self) -> None:
        """Compute the earliest times again, after a head has left."""
        self._is_stale = False
        deadline_at = oldest = first_aged_from = lift_at = inf
        for priority, arrived, aged_from in self._heads.earliest():
            its = self._class_of(priority)
            deadline_at = min(deadline_at, arrived + its.deadline_s)
            oldest = min(oldest, arrived)
            first_aged_from = min(first_aged_from, aged_from)
            lift_at = min(lift_at, aged_from + priority * its.lift_s)
        self._deadline_at, self._oldest, self._aged_from, self._lift_at = deadline_at, oldest, first_aged_from, lift_at

    def ahead_of(self, waiter: Waiter) -> int:
        """How many are likely to be answered first: those before it in its flow, and as many of each no less urgent.

        Operators and preloads get no answer.
        """
        own = _flow(waiter)
        before = bisect_left(self._flows.get(own, []), waiter.sequence, key=_sequence)
        others = [flow for key, flow in self._flows.items() if key != own and key[1] <= own[1]]
        return before + sum(min(before + 1, len(flow)) for flow in others if flow[0].kind not in ASKING)

    def heads(self) -> list[Waiter]:
        """The head of every flow, and the operators that want the model asleep."""
        return [*self._heads.items.values(), *self.preparing.values()]

    def asking(self) -> list[Waiter]:
        """Operators and preloads, which only ask that the model be there."""
        if not self.askers:
            return []
        flows = [flow for flow in self._flows.values() if flow[0].kind in ASKING]
        return [*self.preparing.values(), *(waiter for flow in flows for waiter in flow)]

    def first(self, turn: Callable[[Waiter], Turn], now: float) -> Waiter | None:
        """The next waiter in turn; None if all waiters only want the model asleep."""
        return self._heads.first(turn, now)

    def __iter__(self) -> Iterator[Waiter]:
        """In order of arrival."""
        waiters = [waiter for flow in self._flows.values() for waiter in flow]
        return iter(sorted([*waiters, *self.preparing.values()], key=_sequence))


class Waitlist:
    def __init__(self, class_of: Callable[[int], PriorityClass]) -> None:
        self.class_of = class_of
        self._waiters: dict[str, Waiter] = {}
        self._index: TurnIndex[ModelId, Queue] = TurnIndex(MODELS_FEW)
        self.queues = self._index.items
        # Requests with several candidates. They are few, and are checked whenever one of their models has room.
        self.with_choice: dict[str, Waiter] = {}
        # Requests only: operators, preloads and leases do not count as queue depth and have no position.
        self.depth = 0
        # Their numbers in order of arrival, by `_listed`.
        self._callers: dict[tuple[int, int], list[int]] = {}
        self._depth_of: dict[TenantId, int] = {}

    @property
    def has_many_models(self) -> bool:
        """True if a round asks for only some of the models that are waited for."""
        return len(self.queues) > MODELS_FEW

    def ranking(
        self, rank: Callable[[Queue, float], Turn], counts: Callable[[Queue, float], bool], now: float
    ) -> list[Queue]:
        """Queues that count, in order of rank; with many models the first ones and some others, each now and then."""
        return self._index.leading(rank, counts, now)

    def __contains__(self, waiter_id: str) -> bool:
        return waiter_id in self._waiters

    def __iter__(self) -> Iterator[Waiter]:
        return iter(sorted(self._waiters.values(), key=_place))

    def __bool__(self) -> bool:
        return bool(self._waiters)

    def depth_of(self, tenant: TenantId) -> int:
        """Number of waiting requests of this tenant."""
        return self._depth_of.get(tenant, 0)

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
        queue = self.queues.get(waiter.model) or Queue(waiter.model, self.class_of)
        queue.add(waiter)
        self._index.put(waiter.model, queue)
        if len(waiter.candidates) > 1:
            self.with_choice[waiter.id] = waiter
        if waiter.kind is WaiterKind.REQUEST:
            self.depth += 1
            insort(self._callers.setdefault(_listed(waiter), []), waiter.sequence)
            self._depth_of[waiter.tenant] = self.depth_of(waiter.tenant) + 1

    def remove(self, waiter_id: str, accounts: Accounts, served_at: float | None = None) -> Waiter | None:
        """Remove this waiter, which is served or leaves; None if it does not wait."""
        waiter = self._waiters.pop(waiter_id, None)
        if waiter is None:
            return None
        queue = self.queues[waiter.model]
        queue.remove(waiter, accounts, served_at)
        if not queue.waiting:
            self._index.drop(waiter.model)
        self.with_choice.pop(waiter_id, None)
        if waiter.kind is WaiterKind.REQUEST:
            self.depth -= 1
            callers = self._callers[listed := _listed(waiter)]
            del callers[bisect_left(callers, waiter.sequence)]
            if not callers:
                del self._callers[listed]
            self._depth_of[waiter.tenant] -= 1
            if not self._depth_of[waiter.tenant]:
                del self._depth_of[waiter.tenant]
        return waiter

    def reclassify(self, class_of: Callable[[int], PriorityClass]) -> None:
        """Rebuild all queues with the classes of another policy."""
        self.class_of = class_of
        waiters, self._waiters = self._waiters, {}
        self._index, self.with_choice = TurnIndex(MODELS_FEW), {}
        self.depth, self._callers, self._depth_of = 0, {}, {}
        self.queues = self._index.items
        for waiter in waiters.values():
            self.add(waiter)

    def choosing(self) -> list[Waiter]:
        """The waiters with several candidates, the most urgent first."""
        return sorted(self.with_choice.values(), key=_place) if self.with_choice else []

    def mark_failed(self, waiter: Waiter) -> None:
        """Mark a waiter that a model has failed. It returns to no model that it was granted after that."""
        waiter.had_failure = True

    def strike(self, waiter: Waiter, model: ModelId) -> None:
        """Remove this model, which cannot serve it, from its candidates. The waiter stays in its queue."""
        waiter.had_failure = True
        waiter.candidates = tuple(name for name in waiter.candidates if name != model)

    def price(self, model: ModelId, prices: Prices) -> None:
        """Update the costs in this model's queue."""
        queue = self.queues[model]
        queue.swap_s, queue.service_s, queue.at_once = prices
        self._index.put(model, queue)

    def of(self, model: ModelId) -> list[Waiter]:
        queue = self.queues.get(model)
        return list(queue) if queue is not None else []

    def count(self, model: ModelId) -> int:
        queue = self.queues.get(model)
        return 0 if queue is None else queue.waiting

    def position(self, waiter: Waiter) -> int:
        """1 for the next; requests only, by priority and arrival."""
        own = _listed(waiter)
        before = sum([len(callers) for listed, callers in self._callers.items() if listed < own])
        return before + bisect_left(self._callers.get(own, []), waiter.sequence) + 1


def _flow(waiter: Waiter) -> Flow:
    # `value` without the cost of its property: every add and remove calls this.
    return (waiter.kind._value_, waiter.priority, waiter.tenant)


def _listed(waiter: Waiter) -> tuple[int, int]:
    """In which list of callers it is; the lists are in order of position."""
    return (waiter.priority, waiter.sequence // NUMBERS_PER_LIST)


def _sequence(waiter: Waiter) -> int:
    return waiter.sequence


def _place(waiter: Waiter) -> tuple[int, int]:
    return (waiter.priority, waiter.sequence)
