"""llama.cpp's own API as far as it does not ask a model: `/props`, `/slots`, `/models/load` and `/models/unload`.

Owns the shapes of these answers, which are llama.cpp's. Only the order to load a model loads one, and no answer
holds a prompt: the answers come from the gateway's own facts.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from greenroom.access.keys import Permission
from greenroom.api.asgi import asked_by_admin, caller_of
from greenroom.api.declared import Routes, by_body, get, post
from greenroom.api.listing import models_of_task
from greenroom.api.overview import Overview
from greenroom.api.reports.snapshot import Snapshot
from greenroom.api.views import GovernedOrder
from greenroom.config.schema import Ability
from greenroom.errors import BadRequest, ModelNotFound
from greenroom.features.operations.load_routes import LoadAsked, LoadRoutes, Name, UnloadAsked, load_of
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.shell import Shell
from greenroom.serving.tasks import Tasks

ModelQuery = Annotated[str | None, Query(description="The model; else server.default_model.")]


class NativeOrder(GovernedOrder):
    model: Name


class NativeUnload(NativeOrder):
    force: bool = False
    """Also if it is pinned."""


class NativeRoutes(Routes):
    in_schema = False

    def __init__(self, shell: Shell, tasks: Tasks, loads: LoadRoutes, gateway: Overview) -> None:
        self._shell = shell
        self._tasks = tasks
        self._loads = loads
        self._gateway = gateway

    @get("/props", needs=Permission.ASK)
    async def props(self, request: Request, model: ModelQuery = None) -> Response:
        """What is known of a model without loading it."""
        entry = self._entry(request, model)
        abilities = entry.facts.abilities or frozenset()
        shown: dict[str, Any] = {
            "default_generation_settings": {"n_ctx": entry.config.ctx_size},
            "total_slots": entry.engine.concurrency(entry.config),
            "model_alias": entry.shown_id(to_operator=asked_by_admin(request)),
            "modalities": {"vision": Ability.VISION in abilities, "audio": Ability.AUDIO in abilities},
            "is_sleeping": self._view(request, entry).tier == "asleep",
        }
        if asked_by_admin(request):
            shown["model_path"] = entry.config.path
        return JSONResponse(shown)

    @get("/slots", needs=Permission.ASK)
    async def slots(self, request: Request, model: ModelQuery = None) -> Response:
        """How many requests of a model are answered at once, and how many are now. No prompts."""
        entry = self._entry(request, model)
        view = self._view(request, entry)
        count = 0 if view.tier != "ready" else view.concurrency or 0
        return JSONResponse(
            [
                {"id": place, "n_ctx": entry.config.ctx_size, "is_processing": place < view.in_flight}
                for place in range(count)
            ]
        )

    @post("/models/load", needs=Permission.LOAD, signed=lambda call: load_of(call.named("model")))
    async def load(self, request: Request, asked: NativeOrder) -> Response:
        """Begin to load a model; GET /models tells when it is there."""
        self._refuse_task(request, asked.model, "load")
        await self._loads.start_load(request, Response(), LoadAsked(model=asked.model))
        return JSONResponse({"success": True})

    @post("/models/unload", needs=Permission.LOAD, signed=by_body("model-unload", "model"))
    async def unload(self, request: Request, asked: NativeUnload) -> Response:
        self._refuse_task(request, asked.model, "unload")
        await self._loads.unload_model(request, UnloadAsked(model=asked.model, force=asked.force))
        return JSONResponse({"success": True})

    def _view(self, request: Request, entry: Entry) -> Any:
        return Snapshot(self._gateway).model(entry, to_operator=asked_by_admin(request))

    def _refuse_task(self, request: Request, name: str, order: str) -> None:
        if models := models_of_task(self._tasks, self._shell.catalog, request, name):
            ids = ", ".join(one.public_id for one in models)
            raise BadRequest(f"{name} is a task: say which of its models to {order} ({ids}).", param="model")

    def _entry(self, request: Request, name: str | None) -> Entry:
        """The model of this name; of a task, its first candidate that the caller may use. Raises ModelNotFound."""
        name = name or self._shell.config.server.default_model
        if name is None:
            raise BadRequest("Say which model by ?model=: there is no server.default_model.", param="model")
        catalog = self._shell.catalog
        entry = catalog.find(name) or next(iter(models_of_task(self._tasks, catalog, request, name)), None)
        if entry is None or not caller_of(request).sees(entry.base_id):
            raise ModelNotFound.named(name)
        return entry
