"""`/api/v1/queue`: what waits, how long still, and why; and `DELETE /api/v1/requests/{id}`, which ends a request.

A page at a time, however long the queue is. Why a model is not there yet is asked of the scheduler, once for each model
of a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

from fastapi import Query, Request

from greenroom.access.keys import Permission
from greenroom.api.asgi import caller_of
from greenroom.api.declared import NEVER, Routes, delete, get
from greenroom.api.views import ModelName, View
from greenroom.core.explain import Wait
from greenroom.core.model import ModelId, RequestId
from greenroom.core.view import WaitingCaller
from greenroom.errors import Cancelled, NotFound
from greenroom.features.planning.explain_routes import action_of, naming_policy, why_waits
from greenroom.runtime.loop import Tickets
from greenroom.runtime.shell import Shell
from greenroom.serving.request import Settings, arrival
from greenroom.telemetry.activity import Activity
from greenroom.telemetry.logs import get_logger

PATH: Final = "/api/v1/queue"
ROWS_MAX: Final = 200
OFFSET_MAX: Final = 10_000_000
# Further models of a page have no reason: each costs a plan of the scheduler.
REASONS_MAX: Final = 20

_log = get_logger("server")


class QueuedRequest(View):
    id: str
    position: int
    """1 is the next; requests of models that are there may overtake."""
    model: ModelName
    asked_as: str
    """The id, alias or task that its caller sent."""
    tenant: str
    client: str | None
    route: str
    priority: int
    """Lower goes first."""
    waited_s: float
    eta_s: float | None
    """Seconds until its answer should begin; null while the time of its move or of answers ahead is not known."""
    plan: Literal["serve", "join", "wait", "swap", "refuse"] | None
    """What happens to its model. join: it is loading; swap: it can be loaded now; wait: it cannot, see `why`; serve: it
    is there, and this request is next. Null for models beyond the first 20 of a page."""
    why: str | None
    """What it waits for, if `plan` is wait."""
    behind: list[ModelName]
    """Models whose requests go first."""


class QueuePage(View):
    depth: int
    """Requests that wait, on all pages."""
    max: int
    """More are refused."""
    requests: list[QueuedRequest]
    """The next one first."""


class CancelledView(View):
    id: str
    state: Literal["waiting", "serving"]
    """What it did until now."""


class QueueRoutes(Routes):
    def __init__(self, shell: Shell, activity: Activity, tickets: Tickets) -> None:
        self._shell = shell
        self._activity = activity
        self._tickets = tickets

    @get(PATH, needs=Permission.READ)
    async def list_queue(
        self,
        limit: Annotated[int, Query(ge=1, le=ROWS_MAX)] = 50,
        offset: Annotated[int, Query(ge=0, le=OFFSET_MAX)] = 0,
    ) -> QueuePage:
        """Requests that wait, what each waits for, and for how long still."""
        state = self._shell.loop.scheduler.view
        callers = list(state.callers())
        page = callers[offset : offset + limit]
        reasons = self._reasons(page)
        rows = [self._row(caller, offset + place, reasons) for place, caller in enumerate(page, 1)]
        return QueuePage(depth=len(callers), max=state.limits.queue_depth_max, requests=rows)

    @delete("/api/v1/requests/{request_id}", needs=Permission.MANAGE, signed=NEVER)
    async def cancel_request(self, request: Request, request_id: str) -> CancelledView:
        """End a request: one that waits leaves the queue, a running answer is cut. Its caller gets 410 `cancelled`."""
        record = self._activity.get(request_id)
        if record is None or record.state == "done" or request_id not in self._tickets.open:
            raise NotFound(f"There is no request {request_id} that waits or is answered.")
        state: Literal["waiting", "serving"] = "waiting" if record.state == "waiting" else "serving"
        self._tickets.cancel(request_id, Cancelled("An operator cancelled this request."))
        told = {"request": request_id, "model": record.model, "state": state, "key": caller_of(request).name}
        _log.info("cancelled", **told)
        self._shell.hub.publish("cancel", told)
        return CancelledView(id=request_id, state=state)

    def _reasons(self, page: Sequence[WaitingCaller]) -> dict[ModelId, dict[str, object]]:
        first: dict[ModelId, WaitingCaller] = {}
        for caller in page:
            if len(first) < REASONS_MAX:
                first.setdefault(caller.model, caller)
        return {model: self._reason(caller) for model, caller in first.items()}

    def _reason(self, caller: WaitingCaller) -> dict[str, object]:
        """What would happen to another request like this one."""
        settings, now = Settings.of(self._shell.config), self._shell.clock()
        like_it = arrival(
            settings, now, RequestId("queue"), (caller.model,), caller.priority, caller.tenant, False, None
        )
        scheduler = self._shell.loop.scheduler
        with naming_policy(scheduler, like_it):
            said = scheduler.view.explanation(like_it)
        why = why_waits(said.plan, said) if isinstance(said.plan, Wait) else None
        behind = [str(model) for model in said.behind if model != caller.model]
        return {"plan": action_of(said.plan), "why": why, "behind": behind}

    def _row(self, caller: WaitingCaller, position: int, reasons: dict[ModelId, dict[str, object]]) -> QueuedRequest:
        now, record = self._shell.clock(), self._activity.get(caller.id)
        outlook = self._shell.loop.scheduler.view.outlook(RequestId(caller.id), now)
        eta_s = None if outlook is None else outlook.eta_s
        return QueuedRequest(
            id=caller.id,
            position=position,
            model=caller.model,
            asked_as=caller.model if record is None else record.asked_as,
            tenant=caller.tenant,
            client=None if record is None else record.client,
            route="" if record is None else record.route,
            priority=caller.priority,
            waited_s=round(max(0.0, now - caller.arrived), 3),
            eta_s=None if eta_s is None else round(eta_s, 1),
            **reasons.get(caller.model, {"plan": None, "why": None, "behind": []}),  # type: ignore[arg-type]
        )
