"""The APIs of llama-swap and llama.cpp as far as they do not ask a model: `/running`, `/unload`, `/logs` and
`/api/events`; `/props`, `/slots`, `/models/load` and `/models/unload`.

Owns the shapes of these answers, which are theirs. What llama-swap has in common with Ollama or with us answers as
there: `/api/version` is Ollama's, `/health` and `/metrics` are ours.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from fastapi import Query
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from greenroom.access.keys import Permission
from greenroom.api.asgi import asked_by_admin, caller_of, owner_of
from greenroom.api.declared import NeededOperation, Routes, by_body, get, of_all, post
from greenroom.api.listing import ModelPath, addressed, models_of_task
from greenroom.api.overview import Overview, refuse_while_draining
from greenroom.api.reports.snapshot import Snapshot
from greenroom.api.reports.streams import PLAIN, Feed, Streams, log_feed, plain_frame, refuse_head, shown_line
from greenroom.api.views import GovernedOrder, StatusWord
from greenroom.config.schema import Ability
from greenroom.errors import BadRequest, MethodNotAllowed, ModelNotFound, NotFound
from greenroom.features.operations.load_routes import Force, LoadAsked, LoadRoutes, Name, UnloadAsked, load_of
from greenroom.features.operations.loads import Loads
from greenroom.features.operations.moves import expect_movable
from greenroom.features.operations.routes import ForceOrder, NoHistory, is_forced
from greenroom.process.logs import LogRing, Subscription
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.shell import Shell
from greenroom.serving.tasks import Tasks

UNLOAD_ALL: Final = "/unload"
UNLOAD: Final = "/api/models/unload"
STREAM: Final = "/logs/stream"
# Lines of each engine in an answer for all of them.
LINES: Final = 200
# Words that llama-swap takes for logs of its own before it looks for a model.
GATEWAYS_LOG, ENGINES_LOGS = "proxy", "upstream"


@dataclass(frozen=True)
class LlamaSwapRoutes(Routes):
    in_schema = False

    _shell: Shell
    _loads: Loads
    _streams: Streams
    _gateway: Overview

    @get("/running", needs=Permission.ASK)
    async def running(self, request: Request) -> Response:
        """Models that are ready, come or leave, without those that run elsewhere. Commands are for operators."""
        is_admin, sees = asked_by_admin(request), caller_of(request).sees
        look = Snapshot(self._gateway)
        here = (entry for entry in self._entries if not entry.spec.is_remote and sees(entry.base_id))
        listed = [entry for entry in here if is_admin or not entry.config.unlisted]
        found = [_card(entry, state, is_admin) for entry in listed if (state := _state(look, entry)) != "stopped"]
        return JSONResponse({"running": sorted(found, key=lambda one: str(one["model"]))})

    @get(UNLOAD_ALL, needs=Permission.LOAD, signed=of_all("model-unload"))
    async def unload_by_get(self, request: Request, force: Force = False) -> Response:
        """Unload every model. That it is a GET is llama-swap's; browsers that follow a link of another page may not."""
        if request.scope.get("state", {}).get("is_head"):
            raise MethodNotAllowed(f"HEAD {UNLOAD_ALL} is not possible; it takes GET.")
        await self._unload(request, self._there(request), force)
        return PlainTextResponse("OK")

    @post(UNLOAD, needs=Permission.LOAD, signed=of_all("model-unload"))
    async def unload_all(self, request: Request, order: ForceOrder | None = None, force: Force = False) -> Response:
        await self._unload(request, self._there(request), force or is_forced(order))
        return JSONResponse({"msg": "ok"})

    @post(
        UNLOAD + "/{model_id:path}",
        needs=Permission.LOAD,
        signed=lambda call: NeededOperation("model-unload", call.in_path()),
    )
    async def unload_one(
        self, request: Request, model_id: ModelPath, order: ForceOrder | None = None, force: Force = False
    ) -> Response:
        """Unload one model, by id or alias."""
        entry = addressed(self._shell.catalog, request)
        expect_movable(self._shell, entry)
        await self._unload(request, [entry], force or is_forced(order))
        return PlainTextResponse("OK")

    @get("/logs", needs=Permission.READ)
    async def logs(self) -> Response:
        """The last lines of every engine, as text."""
        lines = [f"{_prefix(name)}{shown_line(line)}\n" for name, ring in self._rings() for line in ring.tail(LINES)]
        return PlainTextResponse("".join(lines))

    @get(STREAM, needs=Permission.READ)
    async def stream_all(self, request: Request, no_history: NoHistory = None) -> Response:
        """What every engine prints, as text."""
        refuse_head(request)
        history = LINES if no_history is None else 0
        return self._streams.answer(request, merged_log_feed(dict(self._rings()), history), PLAIN)

    @get(STREAM + "/{model_id:path}", needs=Permission.READ)
    async def stream_one(self, request: Request, model_id: ModelPath, no_history: NoHistory = None) -> Response:
        """What the engine of one model prints, as text."""
        if model_id == ENGINES_LOGS:
            return await self.stream_all(request, no_history)
        refuse_head(request)
        if model_id == GATEWAYS_LOG:
            raise NotFound("The gateway's own log goes to its standard error; /api/v1/events tells what it does.")
        entry = addressed(self._shell.catalog, request)
        ring, history = self._shell.slots.log(entry.id), LINES if no_history is None else 0
        return self._streams.answer(request, log_feed(ring, history, PLAIN), PLAIN)

    @get("/api/events", needs=Permission.READ)
    async def events(self, request: Request) -> Response:
        """Server-sent events: the state of every model now, and whenever one has changed."""
        refuse_head(request)
        return self._streams.answer(request, self._state_feed())

    # --- what there is ----------------------------------------------------------------------------------------------

    @property
    def _entries(self) -> list[Entry]:
        """Every model that callers know, without processes for single tenants and versions that do not serve yet."""
        return [one for one in self._shell.catalog.shown if one.instance_of is None and one.spec.version_of is None]

    def _there(self, request: Request) -> list[Entry]:
        """Models of the caller that are here, processes for single tenants included."""
        view, sees = self._shell.loop.scheduler.view, caller_of(request).sees
        return [
            entry
            for entry in self._shell.catalog
            if not entry.spec.is_remote
            and entry.spec.version_of is None
            and sees(entry.base_id)
            and view.slots_of(entry.id)
        ]

    async def _unload(self, request: Request, entries: Sequence[Entry], force: bool) -> None:
        """Unload them at the same time. Raises the first error, once all are done: pinned ones stay unless forced."""
        refuse_while_draining(self._shell)
        owner = owner_of(request)
        unloads = (self._loads.unload(entry.id, None, force=force, **owner) for entry in entries)
        ended = await asyncio.gather(*unloads, return_exceptions=True)
        errors = [error for error in ended if isinstance(error, BaseException)]
        # One that a reload has removed meanwhile is away, too.
        if left := next((error for error in errors if not isinstance(error, ModelNotFound)), None):
            raise left

    def _rings(self) -> list[tuple[str, LogRing]]:
        return [(entry.public_id, self._shell.slots.log(entry.id)) for entry in self._entries]

    def _states(self) -> list[dict[str, Any]]:
        look = Snapshot(self._gateway)
        return [
            {
                "id": entry.shown_id(to_operator=True),
                "name": entry.config.name or "",
                "description": entry.config.description or "",
                "state": _state(look, entry),
                "unlisted": entry.config.unlisted,
                "peerID": "",
                "aliases": list(entry.config.aliases),
            }
            for entry in self._entries
        ]

    async def _state_feed(self) -> Feed:
        """The state of all models, now and after each event that changed it."""
        with self._shell.hub.subscribe() as events:
            last = msgspec.json.encode(self._states())
            yield _state_frame(last)
            async for _ in events:
                states = msgspec.json.encode(self._states())
                if states != last:
                    last = states
                    yield _state_frame(last)


def _state_frame(states: bytes) -> bytes:
    return b"event:message\ndata:%b\n\n" % msgspec.json.encode({"type": "modelStatus", "data": states.decode()})


def _card(entry: Entry, state: str, to_operator: bool) -> dict[str, Any]:
    config = entry.config
    cmd = config.cmd or () if to_operator else ()
    return {
        "model": entry.shown_id(to_operator=to_operator),
        "state": state,
        "cmd": cmd if isinstance(cmd, str) else shlex.join(cmd),
        # Engines are asked through the gateway alone.
        "proxy": "",
        "ttl": int(entry.spec.ttl_s),
        "name": config.name or "",
        "description": config.description or "",
    }


def _state(look: Snapshot, entry: Entry) -> str:
    """In llama-swap's words. A model that is asleep has no place on a GPU: stopped."""
    word = look.word(entry)
    if word is StatusWord.LOADING:
        return "starting"
    if word is not StatusWord.LOADED:
        return "stopped"
    return "ready" if look.is_serving(entry) else "stopping"


def _prefix(name: str) -> str:
    return f"[{name}] "


# --- feeds ----------------------------------------------------------------------------------------------------------


async def merged_log_feed(rings: Mapping[str, LogRing], history: int) -> Feed:
    """The last lines of several logs, then each line as it is printed, with the name of its log before it."""
    # Both in one turn of the loop, so that no line is lost between them or sent twice.
    past = b"".join(_frame(name, line) for name, ring in rings.items() for line in ring.tail(history))
    subscriptions = {name: ring.subscribe() for name, ring in rings.items()}
    waiting: dict[asyncio.Task[str | None], str] = {}
    try:
        yield past
        while subscriptions:
            asked = set(waiting.values())
            for name, lines in subscriptions.items():
                if name not in asked:
                    waiting[asyncio.ensure_future(_line(lines))] = name
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            printed = [(waiting.pop(task), task.result()) for task in done]
            for name in [name for name, line in printed if line is None]:
                # The model is gone.
                del subscriptions[name]
            if data := b"".join(_frame(name, line) for name, line in printed if line is not None):
                yield data
    finally:
        for lines in subscriptions.values():
            lines.close()
        for task in waiting:
            task.cancel()


async def _line(lines: Subscription) -> str | None:
    return await anext(lines, None)


def _frame(name: str, line: str) -> bytes:
    return plain_frame(_prefix(name) + shown_line(line))


# --- llama.cpp ------------------------------------------------------------------------------------------------------


ModelQuery = Annotated[str | None, Query(description="The model; else server.default_model.")]


class NativeOrder(GovernedOrder):
    model: Name


class NativeUnload(NativeOrder):
    force: bool = False
    """Also if it is pinned."""


@dataclass(frozen=True)
class LlamaCppRoutes(Routes):
    """Only the order to load a model loads one, and no answer holds a prompt: they are the gateway's own facts."""

    in_schema = False

    _shell: Shell
    _tasks: Tasks
    _loads: LoadRoutes
    _gateway: Overview

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
