"""`/api/v1/limits`: what tenants, keys and models may use, and how much of that is left now."""

from __future__ import annotations

from typing import Final, Literal

from fastapi import FastAPI

from greenroom.server.admin.gateway import Gateway
from greenroom.server.admin.views import View
from greenroom.tenancy.limits import UNLIMITED, Meter

PATH: Final = "/api/v1/limits"


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
    limits: list[LimitView]
    """Empty if nothing is limited. Tenants, then keys, then models."""


class LimitRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def add_to(self, app: FastAPI) -> None:
        app.get(PATH)(self.list_limits)

    async def list_limits(self) -> LimitList:
        """What tenants, keys and models may use, and what is left of it."""
        now, meters = self._gateway.limiter.now(), self._gateway.limiter.meters
        order = ("tenant", "key", "model")
        return LimitList(limits=[_view(meter, now) for meter in sorted(meters, key=lambda one: order.index(one.kind))])


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
