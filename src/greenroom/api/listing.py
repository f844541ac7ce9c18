"""`/v1/models`: which models there are and whether they are loaded. Never loads one."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import Scope

from greenroom.access.keys import Caller, Permission
from greenroom.api.asgi import asked_by_admin, caller_of
from greenroom.api.declared import DeclaredRoute, Routes, around_name, get
from greenroom.api.overview import Overview
from greenroom.api.reports.snapshot import Snapshot
from greenroom.api.views import ModelCard, ModelList, ModelStatus, ModelStatusList, ModelView, StatusWord
from greenroom.config.kinds import RESERVED_ENDINGS, RESERVED_IDS
from greenroom.core.model import Tier
from greenroom.dialects.dialect import ModelShape
from greenroom.errors import ModelNotFound
from greenroom.library.records import LibraryRecord
from greenroom.runtime.catalogue import Catalog, Entry
from greenroom.runtime.resolver import Resolver
from greenroom.serving.routes import DIALECTS, split_model
from greenroom.serving.tasks import TaskRoute, Tasks

MODELS = "/v1/models"
PATH = "/api/v1/models"
ModelPath = Annotated[str, Path(description="A model's id or alias. Slashes may be percent-encoded.")]

# Orders for a model follow its id and have routes of their own, as have words that stand in the place of an id.
_BEHIND = (*(f"/{word}".encode() for word in RESERVED_ENDINGS), b"/logs/stream", b"/")
_INSTEAD = frozenset(f"{MODELS}/{word}".encode() for word in RESERVED_IDS)
_BELOW = f"{PATH}/".encode()
_INVENTORY = f"{MODELS}/inventory/".encode()


class OneModel(DeclaredRoute):
    """Matches a model's id, which may have slashes, but no path that has another route."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        raw = scope["raw_path"]
        is_below = raw.startswith(_BELOW) and raw.endswith(_BEHIND)
        is_order = is_below or raw in _INSTEAD or raw.startswith(_INVENTORY)
        return (Match.NONE, {}) if is_order else super().matches(scope)


class Listing(Routes):
    def __init__(self, gateway: Overview, resolver: Resolver, tasks: Tasks) -> None:
        self._gateway = gateway
        self._catalog = gateway.shell.catalog
        self._resolver = resolver
        self._tasks = tasks

    @get(MODELS, needs=Permission.ASK, response_model=ModelList)
    async def list_models(self, request: Request) -> ModelList | Response:
        """Every model and task that is not `unlisted`, with its state; then models on disk that can be asked for, too.

        Requests with the header anthropic-version are answered in Anthropic's shape.
        """
        listed = await self.list_models_of(request)
        shape = _shape_for(request)
        if shape is None:
            return listed
        models = [(card.id, card.name, card.created) for card in listed.data]
        return Response(shape.all(models), media_type="application/json")

    @get("/models", needs=Permission.ASK, include_in_schema=False)
    async def list_models_of(self, request: Request) -> ModelList:
        look, is_admin, caller = Snapshot(self._gateway), asked_by_admin(request), caller_of(request)
        sees = caller.sees
        listed = (entry for entry in self._catalog.shown if not entry.config.unlisted and sees(entry.base_id))
        cards = [look.card(entry, to_operator=is_admin) for entry in listed]
        tasks = [task for task in self._tasks.seen_by(sees) if not task.section.unlisted]
        cards += [self._task_card(look, task, caller, to_operator=is_admin) for task in tasks]
        return ModelList(data=[*cards, *(card_of(one) for one in self._resolver.unasked if sees(one.id))])

    @get(MODELS + "/{model_id:path}", needs=Permission.ASK, response_model=ModelCard, route_class_override=OneModel)
    async def show_model(self, request: Request, model_id: ModelPath) -> ModelCard | Response:
        """One model, by id or alias; unlisted ones too."""
        card = self._card(request, model_id)
        shape = _shape_for(request)
        return card if shape is None else JSONResponse(shape.one(card.id, card.name, card.created))

    def _task_card(self, look: Snapshot, task: TaskRoute, caller: Caller, *, to_operator: bool) -> ModelCard:
        """A task as its first loaded candidate, or else its first, with the names of those that the caller may use."""
        entries = [entry for name in task.section.candidates if (entry := self._catalog.find(name)) is not None]
        cards = [look.card(entry, to_operator=to_operator) for entry in entries if caller.sees(entry.base_id)]
        like = next((card for card in cards if card.status.value is StatusWord.LOADED), cards[0])
        return like.model_copy(
            update={
                "id": task.name,
                "name": None,
                "description": task.section.description,
                "aliases": [],
                "meta": {"candidates": [card.id for card in cards]},
            }
        )

    def _card(self, request: Request, model_id: str) -> ModelCard:
        caller, look, is_admin = caller_of(request), Snapshot(self._gateway), asked_by_admin(request)
        if (task := self._tasks.find(model_id)) is not None and self._tasks.is_seen(task, caller.sees):
            return self._task_card(look, task, caller, to_operator=is_admin)
        try:
            entry = addressed(self._catalog, request)
        except ModelNotFound:
            record = self._resolver.on_disk(model_id)
            if record is None or not caller.sees(record.id):
                raise
            return card_of(record)
        return look.card(entry, to_operator=is_admin)


def _shape_for(request: Request) -> ModelShape | None:
    """That of the dialect whose clients send its header; None: OpenAI's."""
    shapes = (dialect.models for dialect in DIALECTS if dialect.models is not None)
    return next((shape for shape in shapes if shape.header in request.headers), None)


def card_of(record: LibraryRecord) -> ModelCard:
    """A model on disk that was not asked for yet."""
    tier, kind = Tier.COLD.value, record.kind.value
    return ModelCard(
        id=record.id,
        created=int(record.added),
        name=None,
        description=None,
        aliases=[],
        capabilities=list(record.abilities) or None,
        status=ModelStatus(value=StatusWord.UNLOADED, eta_s=None, retry_in_s=None, last_error=None),
        meta={"tier": tier, "quantization": record.quantization, "memory_mib": record.memory_mib, "kind": kind},
    )


def addressed(catalog: Catalog, request: Request) -> Entry:
    """The model named in the path, if the caller may see it. Raises ModelNotFound.

    Read from the raw path, because the framework's `model_id` does not say which slashes were encoded; it is only used
    in the error.
    """
    raw, (before, order), caller = request.scope["raw_path"], around_name(request.scope), caller_of(request)

    def is_known(name: str) -> bool:
        entry = catalog.find(name)
        is_for_operators = entry is not None and entry.instance_of is not None
        return entry is not None and caller.sees(entry.base_id) and (caller.admin or not is_for_operators)

    found = split_model(raw[len(before) :], is_known) if raw.startswith(before) else None
    entry = catalog.find(found[0]) if found is not None and found[1] == order else None
    if entry is None:
        raise ModelNotFound.named(request.path_params["model_id"])
    return entry


def models_of_task(tasks: Tasks, catalog: Catalog, request: Request, name: str) -> list[Entry]:
    """The candidates of this task that the caller may use; none if it is no task."""
    task, sees = tasks.find(name), caller_of(request).sees
    found = [catalog.find(one) for one in (() if task is None else task.section.candidates)]
    return [one for one in found if one is not None and sees(one.base_id)]


def refuse_task(tasks: Tasks, catalog: Catalog, request: Request, name: str) -> None:
    """Raises ModelNotFound, with the models to name instead, if this is a task and no model."""
    if models := models_of_task(tasks, catalog, request, name):
        ids = ", ".join(one.public_id for one in models)
        raise ModelNotFound(f"{name} is a task. Name one of its models: {ids}.", param="model")


class ModelStatuses(Routes):
    def __init__(self, gateway: Overview, tasks: Tasks) -> None:
        self._gateway = gateway
        self._tasks = tasks

    @get(PATH, needs=Permission.ASK)
    async def model_statuses(self, request: Request) -> ModelStatusList:
        """Every model. Unlisted ones, process ids and engine messages are for admin keys only."""
        models = Snapshot(self._gateway).models(caller_of(request), to_operator=asked_by_admin(request))
        return ModelStatusList(models=models)

    @get(PATH + "/{model_id:path}", needs=Permission.ASK, route_class_override=OneModel)
    async def model_status(self, request: Request, model_id: ModelPath) -> ModelView:
        """One model, by id or alias."""
        refuse_task(self._tasks, self._gateway.shell.catalog, request, model_id)
        entry = addressed(self._gateway.shell.catalog, request)
        return Snapshot(self._gateway).model(entry, to_operator=asked_by_admin(request))
