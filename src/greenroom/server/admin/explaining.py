"""What would happen if a request came now. The core is asked, not a copy of its rules; nothing changes.

Owns how its plan is told. The question is put as a request would put it: with the same patience and the same budget.
"""

from __future__ import annotations

from typing import assert_never

from fastapi import FastAPI

from greenroom.config.schema import Heartbeat
from greenroom.core.decide.decision import Join, Plan, Refuse, Serve, Swap, Wait
from greenroom.core.explain import Explanation
from greenroom.core.model import ModelId, RequestId, TenantId
from greenroom.runtime.catalogue import Entry
from greenroom.server.admin import explain_views as views
from greenroom.server.admin.gateway import Gateway
from greenroom.server.admin.listing import unknown_model
from greenroom.server.inference.arrival import arrival
from greenroom.server.inference.settings import Settings
from greenroom.tenancy.tenants import parse_priority

PATH = "/api/v1/explain"
# No request has this id: theirs begin with r-.
_NOBODY = RequestId("explain")


class Explaining:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def add_to(self, app: FastAPI) -> None:
        app.post(PATH)(self.explain)

    async def explain(self, ask: views.ExplainAsk) -> views.Explained:
        """What would happen if this request came now: served, or whom it would wait for and who would leave."""
        entry = self._gateway.catalog.find(ask.model)
        if entry is None:
            raise unknown_model(ask.model, "model")
        settings = Settings.of(self._gateway.config.server)
        event = arrival(
            settings,
            self._gateway.clock(),
            _NOBODY,
            entry.id,
            _priority(ask, entry),
            TenantId(ask.tenant),
            ask.stream and settings.heartbeat is not Heartbeat.OFF,
            ask.x_budget_s,
        )
        return _told(entry.id, self._gateway.loop.scheduler.explanation(event))


def _priority(ask: views.ExplainAsk, entry: Entry) -> int:
    return entry.spec.priority if ask.priority is None else parse_priority(ask.priority, param="priority")


def _told(model: ModelId, said: Explanation) -> views.Explained:
    plan = said.plan
    evict = [views.Evicted(model=one.model, slot=one.slot, to=one.leaves_to.value, why=one.why) for one in said.evict]
    told = views.Explained(
        action=_action(plan),
        model=model,
        behind=[str(name) for name in said.behind],
        evict=evict,
        calls_off=[str(name) for name in said.calls_off],
        too_late=said.is_too_late,
        position=said.position or None,
        eta_s=None if said.eta_s is None else round(said.eta_s, 3),
    )
    return told.model_copy(update=_particulars(plan))


def _action(plan: Plan) -> views.Action:
    match plan:
        case Serve():
            return "serve"
        case Join():
            return "join"
        case Wait():
            return "wait"
        case Swap():
            return "swap"
        case Refuse():
            return "refuse"
        case _:
            assert_never(plan)


def _particulars(plan: Plan) -> dict[str, object]:
    """What only this kind of plan says."""
    match plan:
        case Serve(slot) | Join(slot):
            return {"slot": slot}
        case Swap():
            return {"slot": plan.wakes, "move": plan.kind.value}
        case Wait():
            return {"why": plan.why}
        case Refuse():
            return {"why": plan.code.value, "retry_after_s": plan.retry_after_s}
        case _:
            assert_never(plan)
