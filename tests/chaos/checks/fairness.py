"""Fair shares: tenants that always wait for the same model get the same virtual service, up to a stated bound.

Watches duels: tenants of one class, one model, no request lifted by age. Virtual service is slot-seconds by the
weight of the tenant; a slot's time is shared by the answers it gives at once. The scheduler charges an estimate at the
grant and settles it at the end, so what it believes differs from what was had by at most one answer for each one in
flight. With c answers at once, the longest of them taking m, the lightest weight w and the longest load l, two tenants
differ by no more than ((2c + 1) m + l) / w.
"""

from __future__ import annotations

from greenroom.core import events as ev
from greenroom.core.effects import Reason
from greenroom.core.model import LeaseId, Move, RequestId, SlotId, TenantId
from greenroom.sim.records import Violation
from tests.chaos.checks.base import Check


class FairShares(Check):
    def __init__(self, tenants: tuple[TenantId, ...], concurrency: int) -> None:
        self.judged = 0
        self._tenants = tenants
        self._concurrency = concurrency
        self._weights: dict[TenantId, float] = {}
        self._tenant_of: dict[str, TenantId] = {}
        self._waiting = dict.fromkeys(tenants, 0)
        self._served_s = dict.fromkeys(tenants, 0.0)
        self._running: dict[str, float] = {}
        self._now = 0.0
        self._longest_s = self._load_s = 0.0
        self._is_on = False

    def tell(self, event: ev.Event) -> None:
        """Time has passed: add its share to each running request."""
        passed_s, self._now = max(0.0, event.now - self._now), event.now
        for request in self._running:
            tenant = self._tenant_of[request]
            self._served_s[tenant] += passed_s / len(self._running) / self._weights.get(tenant, 1.0)

    def config_changed(self, event: ev.ConfigChanged) -> None:
        if event.limits is not None:
            self._weights = dict(event.limits.tenant_weights)
        for learned in (event.learned or {}).values():
            self._load_s = max(self._load_s, *learned.moves_s.values())

    def request_arrived(self, event: ev.RequestArrived) -> None:
        if event.tenant in self._waiting:
            self._tenant_of[event.request] = event.tenant
            self._waiting[event.tenant] += 1

    def move(self, move: Move, reason: Reason) -> None:
        self._is_on = False

    def move_done(self, event: ev.MoveDone) -> None:
        # It is loaded once, and from then on every tenant waits.
        self._is_on = True
        self._served_s = dict.fromkeys(self._tenants, 0.0)

    def grant(self, request: RequestId | LeaseId, slot: SlotId, reason: Reason) -> None:
        tenant = self._tenant_of.get(request)
        if tenant is None:
            return
        self._waiting[tenant] -= 1
        self._running[request] = self._now
        self._is_on = self._is_on and all(self._waiting.values())
        if self._is_on:
            self._judge()

    def _judge(self) -> None:
        self.judged += 1
        longest_s = max(self._longest_s, *(self._now - since for since in self._running.values()))
        lightest = min(1.0, *(self._weights.get(tenant, 1.0) for tenant in self._tenants))
        bound_s = ((2 * self._concurrency + 1) * longest_s + self._load_s) / lightest
        # Shares are learned: a tenth more or less.
        most, least = max(self._served_s.values()), min(self._served_s.values())
        if most - least > bound_s + 0.1 * most:
            raise Violation(f"tenants had {self._served_s}, which differs by more than {bound_s:.1f} s")

    def serve_done(self, event: ev.ServeDone) -> None:
        since = self._running.pop(event.request, None)
        if since is not None:
            self._longest_s = max(self._longest_s, event.now - since)
            del self._tenant_of[event.request]
