"""`/api/v1/models`: every model as operators see it: its slots, what it needs, how long it stays. Never loads one."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.routing import Match
from starlette.types import Scope

from greenroom.runtime.catalogue import Catalog
from greenroom.server.admin.listing import ModelPath, addressed
from greenroom.server.admin.snapshot import Snapshot
from greenroom.server.admin.views import ModelStatusList, ModelView
from greenroom.server.asgi import asked_by_admin

PATH = "/api/v1/models"
# What can be ordered of a model stands behind its id, and takes what methods it takes.
_BELOW = (b"/load", b"/unload", b"/sleep", b"/prepare", b"/logs", b"/logs/stream", b"/")


class OneModel(APIRoute):
    """A model's id may have slashes, so that this path would fit whatever stands below it too."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return (Match.NONE, {}) if scope["raw_path"].endswith(_BELOW) else super().matches(scope)


class ModelStatuses:
    def __init__(self, catalog: Catalog, look: Callable[[], Snapshot]) -> None:
        self._catalog = catalog
        self._look = look

    def add_to(self, app: FastAPI) -> None:
        app.get(PATH)(self.model_statuses)
        app.router.add_api_route(PATH + "/{model_id:path}", self.model_status, route_class_override=OneModel)

    async def model_statuses(self, request: Request) -> ModelStatusList:
        """Every model; unlisted ones, process ids and what engines said are for admin keys only."""
        return ModelStatusList(models=self._look().models(to_operator=asked_by_admin(request)))

    async def model_status(self, request: Request, model_id: ModelPath) -> ModelView:
        """One model, by id or alias."""
        entry = addressed(self._catalog, request, PATH, model_id)
        return self._look().model(entry, to_operator=asked_by_admin(request))
