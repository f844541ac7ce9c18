"""Fair shares between tenants: virtual service in slot-seconds, one account for each that has work here.

Owns the accounts. Who has been served least goes first within a class. A tenant that comes back from idle starts where
the others are: time in which it asked for nothing is no credit. An account that is behind the others says nothing that
coming back would not say, so idle ones are forgotten when the others have passed them.
"""

from __future__ import annotations

from collections.abc import Mapping

from greenroom.core.model import TenantId

# Below this share a tenant would in effect never be served; configurations are checked against it.
WEIGHT_MIN = 1e-3
# Tenants that come once and never again would be remembered for ever. Beyond this many idle ones, those that were
# served least are forgotten, and whoever comes back starts from there.
IDLE_MAX = 10_000
# Accounts are looked through when there are twice as many as were left the last time, and this many more.
SWEEP_MIN = 64


class Accounts:
    def __init__(self) -> None:
        self.weights: Mapping[TenantId, float] = {}
        # How far those who were served lately have come. Only grows.
        self.level_s = 0.0
        self._served_s: dict[TenantId, float] = {}
        self._active: dict[TenantId, int] = {}
        self._sweep_at = SWEEP_MIN

    def __len__(self) -> int:
        return len(self._served_s)

    def served_s(self, tenant: TenantId) -> float:
        return self._served_s.get(tenant, self.level_s)

    def join(self, tenant: TenantId) -> None:
        """A request of this tenant has come."""
        active = self._active.get(tenant, 0)
        self._active[tenant] = active + 1
        if not active:
            # Written down even where it is the level: while it waits the level may grow, and it must not grow with it.
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
        """It is served next: others who come back start from here."""
        self.level_s = max(self.level_s, self.served_s(tenant))
        self.charge(tenant, estimate_s)

    def charge(self, tenant: TenantId, slot_s: float) -> None:
        """Add what was used, or take back what was estimated too high."""
        weight = max(WEIGHT_MIN, self.weights.get(tenant, 1.0))
        self._served_s[tenant] = self.served_s(tenant) + slot_s / weight

    def sweep(self) -> None:
        """Forget idle accounts that the others have passed. Done so seldom that it costs next to nothing each time."""
        idle = sorted(served_s for tenant, served_s in self._served_s.items() if tenant not in self._active)
        if len(idle) > IDLE_MAX:
            self.level_s = max(self.level_s, idle[-IDLE_MAX - 1])
        self._served_s = {
            tenant: served_s
            for tenant, served_s in self._served_s.items()
            if tenant in self._active or served_s > self.level_s
        }
        self._sweep_at = 2 * len(self._served_s) + SWEEP_MIN
