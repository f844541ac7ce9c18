"""`/api/v1/clients`: what each client of a key asks for, how often, with which errors, and whether it cools down.

`/api/v1/limits`: what tenants, keys and models may use, and how much of that is left now. For operators alone: they
tell of all tenants. `access/client_stats.py` and `access/limits.py` count.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Annotated, Any, Final

from fastapi import Query
from pydantic import Field, create_model

from greenroom.access.budgets import LIMITS, Limit
from greenroom.access.client_stats import ROWS_MAX, ClientRecord, ClientStats
from greenroom.access.keys import ANYONE, Permission
from greenroom.access.limits import KEY, MODEL, TENANT, Kind, Limiter
from greenroom.access.profiles import Profiles
from greenroom.api.declared import Routes, get
from greenroom.api.views import View
from greenroom.runtime.shell import Shell

CLIENTS_PATH: Final = "/api/v1/clients"


class AskedModel(View):
    model: str
    """Its id; `other` for all beyond the first twenty."""
    requests: int


class ClientErrors(View):
    code: str
    """The code of the error, or `status_400` and the like where the engine answered so."""
    count: int


class ClientView(View):
    """One client of a key, since the start of the gateway or since it was last forgotten."""

    key: str | None
    """The name of its key; null for requests without one."""
    tenant: str | None
    client: str | None
    """The id that it gives (X-Client-ID, x_client_id); null if it gives none. `other` has all clients of a key beyond
    those that are kept apart."""
    profile: str | None
    """The name of the profile that its requests go by now."""
    requests: int
    requests_per_minute: float
    """Within the last minute."""
    models: list[AskedModel]
    """What it asked for, the most often asked first."""
    errors: list[ClientErrors]
    """What it was answered instead, the most frequent first."""
    mistakes: int
    """Requests that failed by its own fault."""
    failed: int
    """Requests that failed by ours: answered with 5xx."""
    cooldowns: int
    """How often it had to cool down."""
    cooling_down_s: float | None
    """How long it still has to; null if it has not."""
    first_seen_s: float
    """Seconds since its first request."""
    last_seen_s: float
    """Seconds since its last request."""


class ClientList(View):
    clients: list[ClientView]


class ClientRoutes(Routes):
    def __init__(self, shell: Shell, client_stats: ClientStats) -> None:
        self._shell = shell
        self._requestors = client_stats

    @get(CLIENTS_PATH, needs=Permission.READ)
    async def list_clients(self, limit: Annotated[int, Query(ge=1, le=ROWS_MAX)] = 100) -> ClientList:
        """What asked models lately, by key, tenant and client; that which asked last first."""
        client_stats, profiles = self._requestors, Profiles(self._shell.config.profiles)
        now = client_stats.now()
        return ClientList(clients=[_client(row, profiles, now) for row in client_stats.rows()[:limit]])


def _client(row: ClientRecord, profiles: Profiles, now: float) -> ClientView:
    profile = profiles.of(row.key or ANYONE.name, row.tenant, row.client)
    return ClientView(
        key=row.key or None,
        tenant=row.tenant or None,
        client=row.client or None,
        profile=None if profile is None else profile.name,
        requests=row.requests,
        requests_per_minute=round(row.per_minute(now), 1),
        models=[AskedModel(model=model, requests=count) for model, count in _most(row.models)],
        errors=[ClientErrors(code=code, count=count) for code, count in _most(row.errors)],
        mistakes=row.mistakes,
        failed=row.failed,
        cooldowns=row.cooldowns,
        cooling_down_s=round(row.cools_until - now, 3) if row.cools_until > now else None,
        first_seen_s=round(now - row.since, 3),
        last_seen_s=round(now - row.seen_at, 3),
    )


def _most(counts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda pair: -pair[1])


LIMITS_PATH: Final = "/api/v1/limits"
LIMITS_MAX: Final = 1_000
_ORDER: Final = (TENANT, KEY, MODEL)


def _fields(limit: Limit) -> Iterator[tuple[str, Any]]:
    """Those of the view: the limit, and what is left of it or in use."""
    yield limit.key, (int | None, ...)
    yield limit.left, (int | None if limit.period_s else int, Field(description=limit.about))


class _Limited(View):
    kind: Kind
    name: str
    """`default` is for all tenants that are not named."""


LimitView = create_model(
    "LimitView",
    __base__=_Limited,
    __doc__="A limit that is not set is null.",
    **{name: field for row in LIMITS for name, field in _fields(row)},
)


class LimitList(View):
    count: int
    """How many there are; 0 if nothing is limited."""
    limits: list[LimitView]  # type: ignore[valid-type]
    """Those of which most is used first; among equals tenants, then keys, then models."""


class LimitRoutes(Routes):
    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter

    @get(LIMITS_PATH, needs=Permission.READ)
    async def list_limits(self, limit: Annotated[int, Query(ge=1, le=LIMITS_MAX)] = 100) -> LimitList:
        """What tenants, keys and models may use, and what is left of it."""
        now, quotas = self._limiter.now(), list(self._limiter.quotas)
        first = heapq.nlargest(limit, quotas, key=lambda quota: (quota.used_share(now), -_ORDER.index(quota.kind)))
        rows = [LimitView(kind=one.kind, name=one.name, **one.figures(now)) for one in first]
        return LimitList(count=len(quotas), limits=rows)
