"""What would happen if a request came now. The scheduler itself makes the plan; nothing changes.

Owns how the plan is shown. The question has the same waiting time and budget as a real request.
"""

from __future__ import annotations

from typing import Annotated, Literal, assert_never

from fastapi import FastAPI
from pydantic import Field

from greenroom.config.kinds import ID_CHARS_MAX
from greenroom.config.schema import Heartbeat
from greenroom.core.events import RequestArrived
from greenroom.core.explain import Explanation, Join, Plan, Refuse, Serve, Swap, Wait
from greenroom.core.model import RequestId, TenantId
from greenroom.runtime.catalogue import Entry
from greenroom.server.admin.gateway import Gateway
from greenroom.server.admin.views import Order, Priority, Tier, View
from greenroom.server.inference.ask import Settings, arrival
from greenroom.tenancy.tenants import NAME_CHARS_MAX, parse_priority

Action = Literal["serve", "join", "wait", "swap", "refuse"]


class ExplainAsk(Order):
    """A request as it might come, without its prompt."""

    model: Annotated[str, Field(max_length=ID_CHARS_MAX)]
    """Its id or an alias."""
    priority: Priority | None = None
    """high, normal, low or a number; the model's own when not given."""
    tenant: Annotated[str, Field(max_length=NAME_CHARS_MAX)] = ""
    stream: bool = False
    """Whether the answer would be a stream; its caller can wait longer."""
    x_budget_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds the whole answer may take."""


class Evicted(View):
    model: str
    slot: str
    to: Tier
    """Where it would go: asleep, or cold."""
    why: str


class Explained(View):
    """What would happen to a request. Asking changes nothing."""

    action: Action
    """serve: at once. join: its model is being loaded already. swap: its model would be loaded now. wait: nothing can
    be done now. refuse: it would be answered with an error."""
    model: str
    slot: str | None = None
    """The slot that would serve it, if there is one already."""
    move: str | None = None
    """How its model would become ready: load, or wake."""
    why: str | None = None
    """What it would wait for, or why it would be refused."""
    behind: list[str] = []
    """Models whose requests go first."""
    beside: list[str] = []
    """Models beside which `scheduler.company` does not let it be ready."""
    evict: list[Evicted] = []
    """Models that would leave for it."""
    calls_off: list[str] = []
    """Less urgent models that are about to load and would have to wait again."""
    too_late: bool = False
    """Its model would be loaded, but not within the caller's time: the request would be refused."""
    position: int | None = None
    """Its place in the queue; null if it would not wait."""
    eta_s: float | None = None
    """Seconds until its answer would begin; null if no times are known yet."""
    wait_max_s: float | None = None
    """Seconds after which it would be refused if it still waited: its budget, or the limit of the gateway; null if it
    would not wait."""
    retry_after_s: float | None = None
    """When a refused request may be worth another try, if that is known."""


PATH = "/api/v1/explain"
# No request has this id: theirs begin with r-.
_NOBODY = RequestId("explain")


class Explaining:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def add_to(self, app: FastAPI) -> None:
        app.post(PATH)(self.explain)

    async def explain(self, ask: ExplainAsk) -> Explained:
        """What would happen if this request came now: is it served, what does it wait for, which models leave?"""
        entry = await self._gateway.resolver.named(ask.model)
        settings = Settings.of(self._gateway.config)
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
        return _told(event, self._gateway.loop.scheduler.explanation(event))


def _priority(ask: ExplainAsk, entry: Entry) -> int:
    return entry.spec.priority if ask.priority is None else parse_priority(ask.priority, param="priority")


def _told(event: RequestArrived, said: Explanation) -> Explained:
    plan, waits = said.plan, not isinstance(said.plan, Serve | Refuse)
    evict = [Evicted(model=one.model, slot=one.slot, to=one.leaves_to.value, why=one.why) for one in said.evict]
    told = Explained(
        action=_action(plan),
        model=event.candidates[0],
        behind=[str(name) for name in said.behind],
        evict=evict,
        calls_off=[str(name) for name in said.calls_off],
        too_late=said.is_too_late,
        position=said.position or None,
        eta_s=None if said.eta_s is None else round(said.eta_s, 3),
        wait_max_s=round(event.give_up_at - event.now, 3) if waits and event.give_up_at is not None else None,
    )
    return told.model_copy(update=_particulars(plan))


def _action(plan: Plan) -> Action:
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
    """Fields that only this kind of plan has."""
    match plan:
        case Serve(slot) | Join(slot):
            return {"slot": slot}
        case Swap():
            return {"slot": plan.wakes, "move": plan.kind.value}
        case Wait():
            return {"why": plan.why.value, "beside": list(plan.beside)}
        case Refuse():
            return {"why": plan.code.value, "retry_after_s": plan.retry_after_s, "beside": list(plan.beside)}
        case _:
            assert_never(plan)
