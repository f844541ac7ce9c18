"""`/v1/models`: which models there are and whether they are loaded. Never loads one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import FastAPI, Path
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.routing import Match
from starlette.types import Scope

from greenroom.errors import ModelNotFound
from greenroom.runtime.catalogue import Catalog, Entry
from greenroom.server.admin.snapshot import Snapshot
from greenroom.server.admin.views import ModelCard, ModelList, ModelStatusList, ModelView
from greenroom.server.asgi import asked_by_admin
from greenroom.server.inference.routes import split_model

MODELS = "/v1/models"
ModelPath = Annotated[str, Path(description="A model's id or alias. Slashes may be percent-encoded.")]


class Listing:
    def __init__(self, catalog: Catalog, look: Callable[[], Snapshot]) -> None:
        self._catalog = catalog
        self._look = look

    def add_to(self, app: FastAPI) -> None:
        app.get(MODELS)(self.list_models)
        app.get("/models", include_in_schema=False)(self.list_models)
        app.get(MODELS + "/{model_id:path}")(self.show_model)

    async def list_models(self, request: Request) -> ModelList:
        """Every model that is not `unlisted`, with its state."""
        look, is_admin = self._look(), asked_by_admin(request)
        listed = (entry for entry in self._catalog if not entry.config.unlisted)
        return ModelList(data=[look.card(entry, to_operator=is_admin) for entry in listed])

    async def show_model(self, request: Request, model_id: ModelPath) -> ModelCard:
        """One model, by id or alias; unlisted ones too."""
        entry = addressed(self._catalog, request, MODELS, model_id)
        return self._look().card(entry, to_operator=asked_by_admin(request))


def addressed(catalog: Catalog, request: Request, prefix: str, model_id: str, order: str = "") -> Entry:
    """The model named in the path between `prefix` and `order`. Raises ModelNotFound.

    Read from the raw path, because the framework's `model_id` does not say which slashes were encoded; it is only used
    in the error.
    """
    raw, start = request.scope["raw_path"], prefix.encode() + b"/"
    found = split_model(raw[len(start) :], catalog.is_known) if raw.startswith(start) else None
    entry = catalog.find(found[0]) if found is not None and found[1] == order.encode() else None
    if entry is None:
        raise ModelNotFound.named(model_id)
    return entry


PATH = "/api/v1/models"
# Orders for a model follow its id and have routes of their own.
_BELOW = (b"/load", b"/unload", b"/sleep", b"/prepare", b"/logs", b"/logs/stream", b"/")


class OneModel(APIRoute):
    """Matches a model's id, which may have slashes, but not the orders that follow an id."""

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
        """Every model. Unlisted ones, process ids and engine messages are for admin keys only."""
        return ModelStatusList(models=self._look().models(to_operator=asked_by_admin(request)))

    async def model_status(self, request: Request, model_id: ModelPath) -> ModelView:
        """One model, by id or alias."""
        entry = addressed(self._catalog, request, PATH, model_id)
        return self._look().model(entry, to_operator=asked_by_admin(request))
