"""A waiter: a request, an operator's load, a preload or a lease; the class of its priority, and its tenant's share.

Owns the facts about one waiter, and the accounts of tenants. `waitlist.py` keeps its place among others.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from greenroom.core.events import Choice
from greenroom.core.model import NO_TENANT, LeaseId, ModelId, MoveKind, OpId, RequestId, TenantId, learn


class WaiterKind(Enum):
    REQUEST = "request"
    OP = "op"
    PRELOAD = "preload"
    LEASE = "lease"


ASKING: Final = (WaiterKind.OP, WaiterKind.PRELOAD)
# The priority of a queue without urgent waiters.
NO_PRIORITY: Final = 2**62
# Below this share a tenant would in effect never be served; configurations are checked against it.
WEIGHT_MIN: Final = 1e-3
# Limits the accounts of tenants that never return. Beyond this many idle accounts, those that were served least are
# deleted, and a tenant that returns starts at their level.
IDLE_MAX: Final = 10_000
# What counts as clearly more than a share.
CLEARLY_MORE: Final = 1.1
# Accounts are swept when there are twice as many as after the last sweep, plus this many.
SWEEP_MIN: Final = 64


class Waiter:
    """A request, operator's load, preload or lease in a queue. `candidates` are models that may serve it."""

    __slots__ = (
        "aged_from",
        "answer_by",
        "arrived",
        "candidates",
        "choice",
        "give_up_at",
        "had_failure",
        "id",
        "is_flood",
        "keep_alive_s",
        "kind",
        "model",
        "priority",
        "sequence",
        "tenant",
        "wants",
    )

    def __init__(
        self,
        id: RequestId | OpId | LeaseId,
        kind: WaiterKind,
        sequence: int,
        model: ModelId,
        candidates: tuple[ModelId, ...],
        priority: int,
        arrived: float,
        tenant: TenantId = NO_TENANT,
        give_up_at: float | None = None,
        answer_by: float | None = None,
        wants: MoveKind = MoveKind.LOAD,
        keep_alive_s: float | None = None,
        choice: Choice | None = None,
    ) -> None:
        self.id = id
        self.kind = kind
        # Counts arrivals; unique.
        self.sequence = sequence
        self.model = model
        self.candidates = candidates
        self.priority = priority
        self.arrived = arrived
        self.tenant = tenant
        self.give_up_at = give_up_at
        self.answer_by = answer_by
        self.wants = wants
        self.keep_alive_s = keep_alive_s
        self.choice = choice
        # Age counts from here: from its arrival, or later if its tenant asks faster than it may (`Queue.remove`).
        self.aged_from = arrived
        # Its tenant asks for clearly more than its share, so that age alone does not order its requests.
        self.is_flood = False
        # A model has failed it: the one that it asks now is its last if no other is left.
        self.had_failure = False

    @property
    def preferred(self) -> tuple[ModelId, ...]:
        """Its candidates without those of last resort; all if there are no others."""
        if self.choice is None or not self.choice.last_resort:
            return self.candidates
        return tuple(name for name in self.candidates if name not in self.choice.last_resort) or self.candidates

    def next_of(self, known: Container[ModelId], but: ModelId) -> ModelId | None:
        """The candidate to turn to when `but` is gone: the first that is known, those of last resort at the end."""
        names = (*self.preferred, *self.candidates)
        return next((name for name in names if name != but and name in known), None)


@dataclass(frozen=True, slots=True)
class PriorityClass:
    """What a policy says about a priority, once and for all.

    The wait before which no busy model is closed for it, and the wait that lifts it by one class.
    """

    deadline_s: float
    lift_s: float


class Priorities:
    """How many wait at each priority, and the most urgent priority."""

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


class Accounts:
    """Fair shares between tenants: virtual service in slot-seconds, one account per tenant with work here.

    Within a class the tenant that was served least goes first. A tenant that returns from idle starts at the level of
    the others: idle time is no credit. So an idle account below that level holds no information, and is deleted.
    """

    def __init__(self, idle_max: int = IDLE_MAX) -> None:
        self._idle_max = idle_max
        self.weights: Mapping[TenantId, float] = {}
        # The level of the tenants that were served lately. Only grows.
        self.level_s = 0.0
        # What each tenant was served; `served_s` has the level for others.
        self.by_tenant: dict[TenantId, float] = {}
        # What an answer of each tenant usually uses.
        self._usual_s: dict[TenantId, float] = {}
        self._active: dict[TenantId, int] = {}
        self._sweep_at = SWEEP_MIN

    def __len__(self) -> int:
        return len(self.by_tenant)

    def served_s(self, tenant: TenantId) -> float:
        return self.by_tenant.get(tenant, self.level_s)

    def join(self, tenant: TenantId) -> None:
        """A request of this tenant has arrived."""
        active = self._active.get(tenant, 0)
        self._active[tenant] = active + 1
        if not active:
            # Stored even if it equals the level: the level may grow while the tenant waits, and its account must not.
            self.by_tenant[tenant] = max(self.by_tenant.get(tenant, 0.0), self.level_s)

    def leave(self, tenant: TenantId) -> None:
        """One of its requests has ended."""
        active = self._active[tenant] - 1
        if active:
            self._active[tenant] = active
            return
        del self._active[tenant]
        if len(self.by_tenant) >= self._sweep_at:
            self.sweep()

    def serve(self, tenant: TenantId, estimate_s: float) -> None:
        """This tenant is served next: tenants that return start from its level."""
        served_s = self.served_s(tenant)
        self.level_s = max(self.level_s, served_s)
        self.by_tenant[tenant] = served_s + estimate_s / self._weight(tenant)

    def charge(self, tenant: TenantId, slot_s: float) -> None:
        """Add what was used, or take back what was estimated too high."""
        self.by_tenant[tenant] = self.served_s(tenant) + slot_s / self._weight(tenant)

    def settle(self, tenant: TenantId, used_s: float, estimate_s: float) -> None:
        """An answer has ended: charge what it used instead of the estimate, and learn how much that usually is."""
        self.charge(tenant, used_s - estimate_s)
        self._usual_s[tenant] = learn(self._usual_s.get(tenant), used_s)

    def pause_s(self, tenant: TenantId, floods: Iterable[TenantId]) -> float:
        """How far apart its requests may come if it is to use no more than its share, where these flood a model.

        Its share is by weight among them; alone it leaves room for one other tenant.
        """
        own = self._weight(tenant)
        sharing = max(own + 1.0, sum(self._weight(one) for one in floods))
        return self._usual_s.get(tenant, 0.0) * CLEARLY_MORE * sharing / own

    def _weight(self, tenant: TenantId) -> float:
        return max(WEIGHT_MIN, self.weights.get(tenant, 1.0))

    def sweep(self) -> None:
        """Delete idle accounts that the others have passed. It runs so rarely that its amortized cost is negligible."""
        idle = sorted(served_s for tenant, served_s in self.by_tenant.items() if tenant not in self._active)
        if len(idle) > self._idle_max:
            self.level_s = max(self.level_s, idle[-self._idle_max - 1])
        self.by_tenant = {
            tenant: served_s
            for tenant, served_s in self.by_tenant.items()
            if tenant in self._active or served_s > self.level_s
        }
        self._usual_s = {tenant: usual_s for tenant, usual_s in self._usual_s.items() if tenant in self.by_tenant}
        self._sweep_at = 2 * len(self.by_tenant) + SWEEP_MIN
