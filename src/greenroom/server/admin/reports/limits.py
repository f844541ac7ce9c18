"""`/api/v1/limits`: what tenants, keys and models may use, and how much of that is left now."""

from __future__ import annotations

import heapq
from typing import Annotated, Final, Literal

from fastapi import FastAPI, Query

from greenroom.server.admin.gateway import Gateway
from greenroom.server.admin.views import View
from greenroom.tenancy.limits import UNLIMITED, Meter

PATH: Final = "/api/v1/limits"
ROWS_MAX: Final = 1_000
_ORDER: Final = ("tenant", "key", "model")


class LimitView(View):
    """A limit that is not set is null."""

    kind: Literal["tenant", "key", "model"]
    name: str
    """`default` is for all tenants that are not named."""
    requests_per_minute: int | None
    requests_left: int | None
    """In this minute."""
    tokens_per_minute: int | None
    tokens_left: int | None
    concurrent_max: int | None
    in_flight: int
    """Its requests that are under way."""


class LimitList(View):
    count: int
    """How many there are; 0 if nothing is limited."""
    limits: list[LimitView]
    """Those of which most is used first; among equals tenants, then keys, then models."""


class LimitRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def add_to(self, app: FastAPI) -> None:
        app.get(PATH)(self.list_limits)

    async def list_limits(self, limit: Annotated[int, Query(ge=1, le=ROWS_MAX)] = 100) -> LimitList:
        """What tenants, keys and models may use, and what is left of it."""
        now, meters = self._gateway.limiter.now(), list(self._gateway.limiter.meters)
        first = heapq.nlargest(limit, meters, key=lambda meter: (_used_share(meter, now), -_ORDER.index(meter.kind)))
        return LimitList(count=len(meters), limits=[_view(meter, now) for meter in first])


def _used_share(meter: Meter, now: float) -> float:
    """Of the limit of which most is used."""
    budgets = [budget for budget in (meter.requests, meter.tokens) if budget is not None]
    used = [1 - budget.remaining(now) / budget.limit if budget.limit else 1.0 for budget in budgets]
    if meter.concurrent_max != UNLIMITED:
        used.append(meter.in_flight / meter.concurrent_max if meter.concurrent_max else 1.0)
    return max(used, default=0.0)


def _view(meter: Meter, now: float) -> LimitView:
    requests, tokens = meter.requests, meter.tokens
    return LimitView(
        kind=meter.kind,  # type: ignore[arg-type]
        name=meter.name,
        requests_per_minute=None if requests is None else requests.limit,
        requests_left=None if requests is None else max(0, requests.remaining(now)),
        tokens_per_minute=None if tokens is None else tokens.limit,
        tokens_left=None if tokens is None else max(0, tokens.remaining(now)),
        concurrent_max=None if meter.concurrent_max == UNLIMITED else meter.concurrent_max,
        in_flight=meter.in_flight,
    )
