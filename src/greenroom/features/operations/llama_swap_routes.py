"""llama-swap's own API, for programs that watch it or tell it to unload: `/running`, `/unload`, `/logs`, `/api/events`.

Owns the shapes of these answers, which are llama-swap's. What it has in common with Ollama or with us answers as there:
`/api/version` is Ollama's, `/health` and `/metrics` are ours.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from greenroom.access.keys import Permission
from greenroom.api.asgi import asked_by_admin, caller_of, owner_of
from greenroom.api.declared import NeededOperation, Routes, SignedCall, get, of_all, post
from greenroom.api.models.listing import ModelPath, addressed
from greenroom.api.overview import Overview, refuse_while_draining
from greenroom.api.reports.snapshot import Snapshot
from greenroom.api.reports.streams import PLAIN, LogFeed, Streams, plain_frame, refuse_head, shown_line
from greenroom.api.views import StatusWord
from greenroom.errors import MethodNotAllowed, ModelNotFound, NotFound
from greenroom.features.operations.load_routes import Force
from greenroom.features.operations.loads import Loads
from greenroom.features.operations.moves import ComingVersions, expect_movable
from greenroom.features.operations.routes import ForceOrder, NoHistory, is_forced
from greenroom.process.logs import LogRing, Subscription
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.observer import Hub
from greenroom.runtime.shell import Shell

UNLOAD_ALL: Final = "/unload"
UNLOAD: Final = "/api/models/unload"
STREAM: Final = "/logs/stream"
# Lines of each engine in an answer for all of them.
LINES: Final = 200
# Words that llama-swap takes for logs of its own before it looks for a model.
GATEWAYS_LOG, ENGINES_LOGS = "proxy", "upstream"


def _unload(call: SignedCall) -> NeededOperation:
    return NeededOperation("model-unload", call.in_path())


class LlamaSwapRoutes(Routes):
    in_schema = False

    def __init__(self, shell: Shell, loads: Loads, coming: ComingVersions, streams: Streams, gateway: Overview) -> None:
        self._shell = shell
        self._loads = loads
        self._coming = coming
        self._streams = streams
        self._gateway = gateway

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

    @post(UNLOAD + "/{model_id:path}", needs=Permission.LOAD, signed=_unload)
    async def unload_one(
        self, request: Request, model_id: ModelPath, order: ForceOrder | None = None, force: Force = False
    ) -> Response:
        """Unload one model, by id or alias."""
        entry = addressed(self._shell.catalog, request)
        expect_movable(self._coming, entry)
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
        return self._streams.answer(request, lambda: MergedLogFeed(dict(self._rings()), history), PLAIN)

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
        return self._streams.answer(request, lambda: LogFeed(ring, history, plain_frame), PLAIN)

    @get("/api/events", needs=Permission.READ)
    async def events(self, request: Request) -> Response:
        """Server-sent events: the state of every model now, and whenever one has changed."""
        refuse_head(request)
        return self._streams.answer(request, lambda: ModelStateFeed(self._shell.hub, self._states))

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


class MergedLogFeed:
    """The last lines of several logs, then each line as it is printed, with the name of its log before it."""

    def __init__(self, rings: Mapping[str, LogRing], history: int) -> None:
        # Both in one turn of the loop, so that no line is lost between them or sent twice.
        self._past = [(name, line) for name, ring in rings.items() for line in ring.tail(history)]
        self._open = {name: ring.subscribe() for name, ring in rings.items()}
        self._next: dict[asyncio.Task[str | None], str] = {}

    async def piece(self) -> bytes | None:
        if self._past:
            past, self._past = self._past, []
            return b"".join(_frame(name, line) for name, line in past)
        while self._open:
            asked = set(self._next.values())
            for name, lines in self._open.items():
                if name not in asked:
                    self._next[asyncio.ensure_future(_line(lines))] = name
            done, _ = await asyncio.wait(self._next, return_when=asyncio.FIRST_COMPLETED)
            if data := b"".join(self._taken(task) for task in done):
                return data
        return None

    def _taken(self, task: asyncio.Task[str | None]) -> bytes:
        name, line = self._next.pop(task), task.result()
        if line is None:
            # The model is gone.
            del self._open[name]
            return b""
        return _frame(name, line)

    def close(self) -> None:
        for lines in self._open.values():
            lines.close()
        for task in self._next:
            task.cancel()


async def _line(lines: Subscription) -> str | None:
    return await anext(lines, None)


def _frame(name: str, line: str) -> bytes:
    return plain_frame(_prefix(name) + shown_line(line))


class ModelStateFeed:
    """The state of all models, now and after each event that changed it."""

    def __init__(self, hub: Hub, states: Callable[[], list[dict[str, Any]]]) -> None:
        self._subscription = hub.subscribe(None)
        self._states = states
        self._last: bytes | None = None

    async def piece(self) -> bytes | None:
        while self._last is None or await anext(self._subscription, None) is not None:
            told = msgspec.json.encode(self._states())
            if told != self._last:
                self._last = told
                data = msgspec.json.encode({"type": "modelStatus", "data": told.decode()})
                return b"event:message\ndata:%b\n\n" % data
        return None

    def close(self) -> None:
        self._subscription.close()
