"""The question what a request would cause, and its answer, as JSON."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from greenroom.config.names import ID_CHARS_MAX
from greenroom.server.admin.priority_field import Priority
from greenroom.server.admin.views import Order, Tier, View
from greenroom.tenancy.tenants import NAME_CHARS_MAX

Action = Literal["serve", "join", "wait", "swap", "refuse"]


class ExplainAsk(Order):
    """A request as it might come, without what it would say."""

    model: Annotated[str, Field(max_length=ID_CHARS_MAX)]
    """Its id or an alias."""
    priority: Priority | None = None
    """high, normal, low or a number; the model's own when not given."""
    tenant: Annotated[str, Field(max_length=NAME_CHARS_MAX)] = ""
    stream: bool = False
    """Whether it would be answered by a stream, whose caller can wait longer."""
    x_budget_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds the whole answer may take."""


class Evicted(View):
    model: str
    slot: str
    to: Tier
    """Where it would go: asleep, or cold."""
    why: str


class Explained(View):
    """What would happen to a request. Nothing was changed to find out."""

    action: Action
    """serve: at once. join: its model is being loaded already. swap: its model would be brought now. wait: nothing can
    be done now. refuse: it would be answered with an error."""
    model: str
    slot: str | None = None
    """The slot that would serve it, if there is one already."""
    move: str | None = None
    """How its model would be brought: load, or wake."""
    why: str | None = None
    """What it would wait for, or why it would be refused."""
    behind: list[str] = []
    """Models whose requests go first."""
    evict: list[Evicted] = []
    """Who would leave for it."""
    calls_off: list[str] = []
    """Less urgent models that are about to be brought and would have to ask for their place anew."""
    too_late: bool = False
    """Its model would be brought, but not in the time this caller has: the caller would be refused."""
    position: int | None = None
    """Its place among all who wait; null if it would not wait."""
    eta_s: float | None = None
    """Seconds until its answer would begin; null where nothing was learned yet."""
    retry_after_s: float | None = None
    """When a refused one may be worth another try, if that is known."""
