"""How a request is put to the scheduler: how long it may wait, and by when its whole answer must be there."""

from __future__ import annotations

from greenroom.core.events import RequestArrived
from greenroom.core.model import ModelId, RequestId, TenantId
from greenroom.server.inference.settings import Settings


def arrival(
    settings: Settings,
    now: float,
    request: RequestId,
    model: ModelId,
    priority: int,
    tenant: TenantId,
    patient: bool,
    budget_s: float | None,
    keep_alive_s: float | None = None,
) -> RequestArrived:
    """A `patient` caller hears heartbeats and can wait long; who hears nothing gives up after a while unannounced."""
    wait_s = settings.stream_wait_max_s if patient else settings.wait_max_s
    answer_by: float | None = None
    if budget_s is not None:
        wait_s = min(wait_s, budget_s)
        answer_by = now + budget_s
    return RequestArrived(now, request, (model,), priority, tenant, now + wait_s, patient, answer_by, keep_alive_s)
