"""`POST /v1/cache/flush`: empty prefix caches, all of them or those of a model, a tenant or a tag.

Owns the permissions: an admin's key may flush everything, another key only its tenant's entries. Only engines that
keep a cache for each tenant have entries; models that are asleep or cold have none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request

from greenroom.config.kinds import ID_CHARS_MAX
from greenroom.core.model import ModelId, Tier
from greenroom.errors import BadRequest, GreenroomError, NotAllowed, Unsupported
from greenroom.runtime.slots import LiveSlot
from greenroom.server.admin.gateway import Gateway
from greenroom.server.admin.listing import unknown_model
from greenroom.server.admin.views import Order, View
from greenroom.server.inference.ask import TAG_CHARS_MAX, check_tag, tenant_word
from greenroom.telemetry.logs import get_logger
from greenroom.tenancy.keys import Caller

PATH: Final = "/v1/cache/flush"
TENANT_CHARS_MAX: Final = 256
MIB: Final = 1024 * 1024

_log = get_logger("server")


class FlushOrder(Order):
    """What to flush. `tenantId` and `modelId` also narrow the other scopes."""

    scope: Literal["all", "model", "tenant", "tag"]
    tenantId: Annotated[str, Field(min_length=1, max_length=TENANT_CHARS_MAX)] | None = None  # noqa: N815
    """The tenant; a key without `admin` can only name its own."""
    modelId: Annotated[str, Field(min_length=1, max_length=ID_CHARS_MAX)] | None = None  # noqa: N815
    tag: Annotated[str, Field(min_length=1, max_length=TAG_CHARS_MAX)] | None = None
    """What callers sent as `X-Cache-Tag`."""
    verifiedOpToken: Any = None  # noqa: N815
    """Accepted because clients send it. It is ignored: the API key decides."""


class Flushed(View):
    flushed: Literal[True] = True
    entriesRemoved: int  # noqa: N815
    memoryFreedMB: float  # noqa: N815
    """In MiB, as everywhere here."""


class Caches:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def add_to(self, app: FastAPI) -> None:
        app.post(PATH)(self.flush_cache)

    async def flush_cache(self, request: Request, order: FlushOrder) -> Flushed:
        """Empty prefix caches. An admin's key may flush everything, another key only its tenant's entries."""
        model = self._model(order)
        tenant = _tenant(order, request.scope.get("state", {}))
        tag = _tag(order)
        removed = await asyncio.gather(*(self._flush(live, tenant, tag) for live in self._keepers(model)))
        entries, size_bytes = (sum(counts) for counts in zip((0, 0), *removed, strict=True))
        _log.info("cache flushed", scope=order.scope, model=model, tenant=tenant, entries=entries, bytes=size_bytes)
        return Flushed(entriesRemoved=entries, memoryFreedMB=round(size_bytes / MIB, 3))

    def _model(self, order: FlushOrder) -> ModelId | None:
        if order.modelId is None:
            if order.scope == "model":
                raise BadRequest("modelId says which model's cache to flush.", param="modelId")
            return None
        entry = self._gateway.catalog.find(order.modelId)
        if entry is None:
            raise unknown_model(order.modelId, "modelId")
        if not entry.engine.hosted:
            raise Unsupported(
                f"{entry.id} runs on {entry.engine.name}, whose cache cannot be flushed from here. Unload it instead: "
                f"POST /api/v1/models/{entry.id}/unload.",
                param="modelId",
            )
        return entry.id

    def _keepers(self, model: ModelId | None) -> Sequence[LiveSlot]:
        """Slots that have a cache now. A slot that is asleep or about to be has none."""
        slots = self._gateway.loop.scheduler.view.slots
        return [
            live
            for live in self._gateway.slots.live.values()
            if live.entry.engine.hosted
            and model in (None, live.entry.id)
            and live.id in slots
            and slots[live.id].tier is Tier.READY
        ]

    async def _flush(self, live: LiveSlot, tenant: str | None, tag: str | None) -> tuple[int, int]:
        try:
            entries, size_bytes = await self._gateway.flush(live.id, tenant, tag)
        except GreenroomError:
            if live.id not in self._gateway.slots.live:
                # Its worker is gone, and its cache with it.
                return 0, 0
            raise
        self._gateway.metrics.green_room.flushed(live.entry.id, size_bytes)
        return entries, size_bytes


def _tenant(order: FlushOrder, state: dict[str, Any]) -> str | None:
    """The tenant whose entries to flush, by its name in the engine; None for all tenants. Raises NotAllowed."""
    asked = order.tenantId
    if not state.get("is_admin"):
        asked = _own_tenant(order, state.get("caller"))
    if asked is None and order.scope == "tenant":
        raise BadRequest("tenantId says whose cache to flush.", param="tenantId")
    return None if asked is None else tenant_word(asked)


def _own_tenant(order: FlushOrder, caller: Caller | None) -> str:
    own = None if caller is None else caller.tenant
    if own is None or order.scope in ("all", "model") or order.tenantId not in (None, own):
        raise NotAllowed(
            "A key without `admin: true` may flush its own tenant only: scope tenant, or scope tag, and no other "
            "tenantId.",
            param="scope",
        )
    return own


def _tag(order: FlushOrder) -> str | None:
    if order.tag is None:
        if order.scope == "tag":
            raise BadRequest("tag says what to flush.", param="tag")
        return None
    check_tag(order.tag.encode("utf-8", "replace"), "tag")
    return order.tag
