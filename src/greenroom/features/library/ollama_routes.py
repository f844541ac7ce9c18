"""Ollama's API as far as it does not ask a model: `/`, `/api/tags`, `show`, `ps`, `version`, `pull` and `delete`.

Owns the shapes of these answers, which are Ollama's; what they tell is the gateway's own. A body is read whatever its
Content-Type says, as Ollama does. Pulls are downloads of the hub like all others: they go on if the caller leaves.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from greenroom.access.keys import Permission
from greenroom.api.asgi import asked_by_admin, caller_of, order_to_fetch
from greenroom.api.declared import NEVER, NeededOperation, Routes, SignedCall, by_body, delete, get, post
from greenroom.api.overview import Overview
from greenroom.api.reports.snapshot import Snapshot
from greenroom.api.views import ModelView
from greenroom.base.names import public_name
from greenroom.config.schema import Ability
from greenroom.core.model import Tier
from greenroom.dialects.ollama import OLLAMA
from greenroom.dialects.ollama.answers import LINES
from greenroom.dialects.ollama.requests import pulled, tagged, untagged
from greenroom.errors import BadRequest, FetchFailed, ModelNotFound
from greenroom.features.library.downloads import Downloads
from greenroom.features.library.routes import LibraryRoutes
from greenroom.library.library import Library
from greenroom.library.orders import read_order
from greenroom.library.records import LibraryRecord
from greenroom.runtime.operations.files import Operation, OperationStatus
from greenroom.runtime.resolver import Resolver
from greenroom.runtime.shell import Shell
from greenroom.serving import render
from greenroom.serving.tasks import Tasks

# Of Ollama, whose API this is like: some clients refuse an older one.
API_VERSION: Final = "0.13.0"
# How often a pull tells how far it is.
TELL_EVERY_S: Final = 0.5
MIB: Final = 1024 * 1024
_CAPABILITIES: Final = {
    Ability.CHAT: "completion",
    Ability.TOOLS: "tools",
    Ability.VISION: "vision",
    Ability.EMBEDDINGS: "embedding",
}


class _Order(msgspec.Struct):
    model: str | None = None
    # The older name of the same field.
    name: str | None = None
    stream: bool | None = None


_order: Final = msgspec.json.Decoder(_Order)


def _pull(call: SignedCall) -> NeededOperation:
    """By the id of the hub, however it is written."""
    name = pulled(call.named("model", "name"))
    return NeededOperation("model-download", name, read_fetch=lambda rules: read_order(rules, model=name))


@dataclass(frozen=True)
class OllamaRoutes(Routes):
    in_schema = False

    _shell: Shell
    _resolver: Resolver
    _tasks: Tasks
    _library: Library
    _downloads: Downloads
    _routes: LibraryRoutes
    _gateway: Overview

    @get("/", needs=Permission.ASK)
    async def root(self) -> Response:
        """Programs look here whether anything answers, mostly by HEAD: Ollama's own before every command."""
        return PlainTextResponse("Greenroom is running\n")

    @get("/api/tags", needs=Permission.ASK)
    async def tags(self, request: Request) -> Response:
        """Every model and task that is listed, then those on disk that can be asked for as well."""
        sees = caller_of(request).sees
        listed = [entry for entry in self._shell.catalog.shown if not entry.config.unlisted and sees(entry.base_id)]
        models = [self._card(public_name(entry.id), entry.config.path, entry.engine.name) for entry in listed]
        tasks = [task for task in self._tasks.seen_by(sees) if not task.section.unlisted]
        models += [self._card(task.name, None, "task") for task in tasks]
        others = [one for one in self._resolver.unasked if sees(one.id)]
        return JSONResponse({"models": [*models, *(self._card(one.id, one.path, one.kind.value) for one in others)]})

    @get("/api/ps", needs=Permission.ASK)
    async def ps(self, request: Request) -> Response:
        """Models that are ready now."""
        models = Snapshot(self._gateway).models(caller_of(request), to_operator=asked_by_admin(request))
        return JSONResponse({"models": [self._running(one) for one in models if one.tier == Tier.READY.value]})

    @get("/api/version", needs=Permission.ASK)
    async def version(self) -> Response:
        return JSONResponse({"version": API_VERSION})

    @post("/api/show", needs=Permission.ASK, signed=NEVER)
    async def show(self, request: Request) -> Response:
        """One model, by id or alias; of a task, its first candidate that the caller may use."""
        sees = caller_of(request).sees
        name = self._meant((await _read(request))[0], request)
        entry = self._shell.catalog.find(name)
        if entry is None and (task := self._tasks.find(name)) is not None:
            candidates = (self._shell.catalog.find(one) for one in task.section.candidates)
            entry = next((one for one in candidates if one is not None and sees(one.base_id)), None)
        record = self._resolver.on_disk(name) if entry is None else self._record(entry.config.path)
        if (entry is None or not sees(entry.base_id)) and (record is None or not sees(record.id)):
            raise ModelNotFound.named(name)
        abilities = (None if entry is None else entry.facts.abilities) or frozenset({Ability.CHAT})
        engine = (
            record.kind.value if entry is None and record is not None else "" if entry is None else entry.engine.name
        )
        return JSONResponse(
            {
                "modelfile": "",
                "parameters": "",
                "template": "",
                "details": _details(engine, record),
                "model_info": _info(engine, record),
                "capabilities": [word for ability, word in _CAPABILITIES.items() if ability in abilities],
                "modified_at": _time(0.0 if record is None else record.added),
            }
        )

    @post("/api/pull", needs=Permission.DOWNLOAD, signed=_pull)
    async def pull(self, request: Request) -> Response:
        """Download a model of the hub, such as `hf.co/org/name:Q4_K_M`."""
        name, stream = await _read(request)
        downloads, caller = self._downloads, caller_of(request)
        order = order_to_fetch(request, lambda: read_order(downloads.rules, model=pulled(name)))
        row = await downloads.submit(order, tenant=caller.tenant or caller.name, key=caller.name)
        if stream:
            return StreamingResponse(self._told(request, row), media_type=LINES.decode())
        ended = await downloads.ended(row.id)
        if ended is not None and ended.status is not OperationStatus.DONE:
            raise FetchFailed(_why(ended))
        return JSONResponse({"status": "success"})

    @delete("/api/delete", needs=Permission.DELETE, signed=by_body("model-delete", "model", "name"))
    async def delete(self, request: Request) -> Response:
        """Delete a model from disk. 409 if it is loaded, asleep or configured."""
        name = self._meant((await _read(request))[0], request)
        await self._routes.remove(request, name)
        return Response()

    def _meant(self, name: str, request: Request) -> str:
        """The name without a tag that only Ollama's lists have."""
        caller, tasks = caller_of(request), self._tasks
        return untagged(name, lambda one: self._resolver.is_seen(one, caller) or tasks.is_task(one, caller.sees))

    async def _told(self, request: Request, row: Operation) -> AsyncIterator[bytes]:
        """A line whenever more is there, until the download has ended; then how, in the words of an answer."""
        downloads = self._downloads
        yield _line({"status": "pulling manifest"})
        while (now := downloads.get(row.id)) is not None and not now.status.is_over:
            [facts] = await downloads.facts([now])
            if facts.total_bytes:
                known = {"digest": row.id, "total": facts.total_bytes, "completed": facts.bytes}
                yield _line({"status": f"pulling {row.model}", **known})
            await asyncio.sleep(TELL_EVERY_S)
        if now is not None and now.status is OperationStatus.DONE:
            yield _line({"status": "success"})
        else:
            error, is_admin = FetchFailed(_why(now)), asked_by_admin(request)
            yield render.error_event(error, "", to_operator=is_admin, dialect=OLLAMA)

    def _record(self, path: str | None) -> LibraryRecord | None:
        return None if path is None else self._library.find(path)

    def _card(self, id: str, path: str | None, engine: str) -> dict[str, Any]:
        record = self._record(path)
        return {
            "name": tagged(id),
            "model": tagged(id),
            "modified_at": _time(self._gateway.started_at if record is None else record.added),
            "size": 0 if record is None else record.bytes,
            "digest": _digest(id),
            "details": _details(engine, record),
        }

    def _running(self, model: ModelView) -> dict[str, Any]:
        entry = self._shell.catalog.find(model.id)
        record = None if entry is None else self._record(entry.config.path)
        on_gpus = {device: mib for device, mib in model.memory.items() if device != "host"}
        leaves_s = model.unload_in_s
        until = None if leaves_s is None else datetime.now(UTC) + timedelta(seconds=leaves_s)
        return {
            "name": tagged(model.id),
            "model": tagged(model.id),
            "size": sum(model.memory.values()) * MIB,
            "size_vram": sum(on_gpus.values()) * MIB,
            "digest": _digest(model.id),
            "details": _details(model.engine, record),
            "expires_at": None if until is None else until.isoformat(),
        }


async def _read(request: Request) -> tuple[str, bool]:
    """The model that a body names, and whether the answer streams. Raises BadRequest."""
    try:
        order = _order.decode(await request.body())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"The body is not a JSON object that names a model: {error}.", param="model") from None
    name = order.model or order.name
    if not name:
        raise BadRequest("The body names no model.", param="model")
    return name, order.stream is not False


def _details(engine: str, record: LibraryRecord | None) -> dict[str, Any]:
    kind = engine if record is None else record.kind.value
    parameters = None if record is None else record.parameters
    return {
        "parent_model": "",
        "format": kind,
        "family": engine,
        "families": [engine],
        "parameter_size": "" if parameters is None else f"{parameters / 1e9:.1f}B",
        "quantization_level": "" if record is None else record.quantization or "",
    }


def _info(engine: str, record: LibraryRecord | None) -> Mapping[str, Any]:
    known: dict[str, Any] = {"general.architecture": engine}
    if record is not None and record.parameters is not None:
        known["general.parameter_count"] = record.parameters
    if record is not None and record.context_length is not None:
        known[f"{engine}.context_length"] = record.context_length
    return known


def _why(row: Operation | None) -> str:
    error = None if row is None else row.error
    return "The download was cancelled." if error is None else error.message


def _digest(id: str) -> str:
    """Clients tell models apart by it; files are not read for it."""
    return hashlib.sha256(id.encode("utf-8", "replace")).hexdigest()


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _line(value: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(value) + b"\n"
