"""Fair shares between tenants: virtual service in slot-seconds, one account per tenant with work here.

Owns the accounts. Within a class the tenant that was served least goes first. A tenant that returns from idle starts at
the level of the others: idle time is no credit. So an idle account below that level holds no information, and is
deleted.
"""

from __future__ import annotations

from collections.abc import Mapping

from greenroom.core.model import TenantId

# Below this share a tenant would in effect never be served; configurations are checked against it.
WEIGHT_MIN = 1e-3
# Limits the accounts of tenants that never return. Beyond this many idle accounts, those that were served least are
# deleted, and a tenant that returns starts at their level.
IDLE_MAX = 10_000
# Accounts are swept when there are twice as many as after the last sweep, plus this many.
SWEEP_MIN = 64


class Accounts:
    def __init__(self) -> None:
        self.weights: Mapping[TenantId, float] = {}
        # The level of the tenants that were served lately. Only grows.
        self.level_s = 0.0
        self._served_s: dict[TenantId, float] = {}
        self._active: dict[TenantId, int] = {}
        self._sweep_at = SWEEP_MIN

    def __len__(self) -> int:
        return len(self._served_s)

    def served_s(self, tenant: TenantId) -> float:
        return self._served_s.get(tenant, self.level_s)

    def join(self, tenant: TenantId) -> None:
        """A request of this tenant has arrived."""
        active = self._active.get(tenant, 0)
        self._active[tenant] = active + 1
        if not active:
            # Stored even if it equals the level: the level may grow while the tenant waits, and its account must not.
            self._served_s[tenant] = max(self._served_s.get(tenant, 0.0), self.level_s)

    def leave(self, tenant: TenantId) -> None:
        """One of its requests has ended."""
        active = self._active[tenant] - 1
        if active:
            self._active[tenant] = active
            return
        del self._active[tenant]
        if len(self._served_s) >= self._sweep_at:
            self.sweep()

    def serve(self, tenant: TenantId, estimate_s: float) -> None:
        """This tenant is served next: tenants that return start from its level."""
        self.level_s = max(self.level_s, self.served_s(tenant))
        self.charge(tenant, estimate_s)

    def charge(self, tenant: TenantId, slot_s: float) -> None:
        """Add what was used, or take back what was estimated too high."""
        weight = max(WEIGHT_MIN, self.weights.get(tenant, 1.0))
        self._served_s[tenant] = self.served_s(tenant) + slot_s / weight

    def sweep(self) -> None:
        """Delete idle accounts that the others have passed. It runs so rarely that its amortized cost is negligible."""
        idle = sorted(served_s for tenant, served_s in self._served_s.items() if tenant not in self._active)
        if len(idle) > IDLE_MAX:
            self.level_s = max(self.level_s, idle[-IDLE_MAX - 1])
        self._served_s = {
            tenant: served_s
            for tenant, served_s in self._served_s.items()
            if tenant in self._active or served_s > self.level_s
        }
        self._sweep_at = 2 * len(self._served_s) + SWEEP_MIN
