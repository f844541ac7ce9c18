"""`/api/v1/models/{id}/pin`: keep a model where it is, or let it leave again, without a reload."""

from __future__ import annotations

from typing import Final

from fastapi import FastAPI
from starlette.requests import Request

from greenroom.errors import Unsupported
from greenroom.server.admin.gateway import Gateway
from greenroom.server.admin.models.listing import ModelPath, addressed
from greenroom.server.admin.views import GovernedOrder, View

MODELS: Final = "/api/v1/models"


class PinOrder(GovernedOrder):
    pinned: bool = True
    """False: it may be evicted, and leaves when it is idle."""


class Pinned(View):
    model: str
    pinned: bool


class PinRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def add_to(self, app: FastAPI) -> None:
        app.post(f"{MODELS}/{{model_id:path}}/pin")(self.pin)

    async def pin(self, request: Request, model_id: ModelPath, order: PinOrder | None = None) -> Pinned:
        """Never evict this model and never unload it for being idle, or no longer. It is not loaded by this.

        It holds until the gateway restarts or the model is changed by a reload; `pinned` in the configuration stays.
        """
        entry, pinned = addressed(self._gateway.catalog, request, MODELS, model_id, "/pin"), True
        if order is not None:
            pinned = order.pinned
        if (name := entry.spec.version_of) is not None:
            raise self._gateway.updates.moves_only(entry.id, name)
        if entry.spec.is_remote:
            raise Unsupported(f"{entry.id} is remote: it takes no memory here, and is always there.", param="model")
        await self._gateway.pin(entry.id, pinned)
        return Pinned(model=entry.id, pinned=pinned)
