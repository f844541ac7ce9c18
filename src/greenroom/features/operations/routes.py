"""What an operator can order: load, unload, sleep, prepare, reload, flush a cache. Also the output of engines.

Orders are answered when they are done. A caller that leaves meanwhile changes nothing: the move goes on.

Of prefix caches, an admin's key may flush everything, another key only its tenant's entries. Only engines that keep a
cache for each tenant have entries; models that are asleep or cold have none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from fastapi import Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from greenroom.access.keys import Caller, Permission
from greenroom.api import views
from greenroom.api.asgi import asked_by_admin, caller_of, owner_of
from greenroom.api.declared import NeededOperation, Routes, SignedCall, by_path, get, name_in_path, of_all, post
from greenroom.api.listing import ModelPath, addressed, refuse_task
from greenroom.api.overview import Overview, refuse_while_draining
from greenroom.api.reports.memory import kv_bytes
from greenroom.api.reports.snapshot import Snapshot, tier_of
from greenroom.api.reports.streams import PLAIN, SSE, Streams, log_feed, refuse_head, shown_line
from greenroom.api.views import FromList, GovernedOrder, View
from greenroom.base.names import public_name
from greenroom.config.kinds import ID_CHARS_MAX, NAME_CHARS_MAX
from greenroom.core.model import ModelId, MoveKind, Tier
from greenroom.errors import BadRequest, GreenroomError, ModelNotFound, NotAllowed, Unsupported
from greenroom.features.operations.load_routes import LoadTaken, begin
from greenroom.features.operations.loads import Loads
from greenroom.features.operations.moves import OperatorMoves, expect_movable
from greenroom.process.logs import LINES_MAX
from greenroom.runtime.adhoc_model import NO_OPTIONS
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.models import Models
from greenroom.runtime.moves.hosted_moves import HostedMoves
from greenroom.runtime.prompt_slots import PromptCacheSlots
from greenroom.runtime.shell import Shell
from greenroom.runtime.slots import LiveSlot
from greenroom.serving.prefix_cache import TAG_CHARS_MAX, PrefixSalts, check_tag, tenant_word
from greenroom.serving.tasks import Tasks
from greenroom.telemetry.logs import get_logger

MODELS = "/api/v1/models"
_ONE = MODELS + "/{model_id:path}"
_STREAM_KINDS: dict[int | str, dict[str, Any]] = {200: {"content": {SSE: {}, PLAIN: {}}}}

# An order names few models; more is a mistake.
EVICT_MAX = 100
GRACE_MAX_S = 3_600

Lines = Annotated[int, Query(ge=0, le=LINES_MAX, description="The last so many lines.")]
NoHistory = Annotated[str | None, Query(alias="no-history", description="Only lines from now on.")]


class LoadOrder(GovernedOrder):
    evict: Annotated[
        tuple[Annotated[str, Field(max_length=ID_CHARS_MAX)], ...], Field(max_length=EVICT_MAX), FromList
    ] = ()
    """Models that must leave first."""
    force: bool = False
    """They leave also if they are pinned."""


class ForceOrder(GovernedOrder):
    force: bool = False
    """Also if it is pinned."""


class UnloadOrder(ForceOrder):
    grace_s: Annotated[float, Field(ge=0, le=GRACE_MAX_S, allow_inf_nan=False)] | None = None
    """How long running answers may go on; the model's own `grace_s` when not given."""


class Moved(View):
    model: str
    tier: views.Tier
    took_s: float
    memory: dict[str, int]
    """MiB by device it holds now."""


class Reloaded(View):
    added: list[str]
    changed: list[str]
    """These get a new slot; the old one drains."""
    relabelled: list[str]
    """Only their descriptions changed; their engines keep running."""
    removed: list[str]
    at_once: list[str]
    """Keys outside models that were applied."""
    took_s: float


@dataclass(frozen=True)
class Operating(Routes):
    _shell: Shell
    _models: Models
    _tasks: Tasks
    _loads: Loads
    _moves: OperatorMoves
    _streams: Streams
    _gateway: Overview

    @post(
        f"{_ONE}/load",
        needs=Permission.LOAD,
        signed=by_path("model-load"),
        responses={202: {"model": LoadTaken, "description": "With `wait=false`."}},
    )
    async def load(
        self,
        request: Request,
        response: Response,
        model_id: ModelPath,
        order: LoadOrder | None = None,
        wait: bool = True,
    ) -> Moved | LoadTaken:
        """Make a model ready. A failure carries the engine's last lines in `details`.

        With `wait=false` it is answered at once, with 202: `GET /v1/models/load/{taskId}` tells how far it is.
        """
        entry = await self._movable(request, model_id)
        name = _shown(request, entry)
        if entry.id != name:
            # What the name means, not what was asked for last with options.
            entry = await self._models.resolver.named(name, asker=caller_of(request))
        if not wait:
            refuse_while_draining(self._shell)
            response.status_code = 202
            evicted = () if order is None else order.evict
            return await begin(self._loads, request, name, NO_OPTIONS, evicted, force=is_forced(order))
        evict, force = self._named(order, caller_of(request)), is_forced(order)
        began = self._began()
        await self._loads.load(entry.id, evict, name=name, force=force, **owner_of(request))
        return self._moved(request, entry, began)

    @post(f"{_ONE}/unload", needs=Permission.LOAD, signed=by_path("model-unload"))
    async def unload(self, request: Request, model_id: ModelPath, order: UnloadOrder | None = None) -> Moved:
        """Stop a model. Waiting requests are rejected, running answers may go on for `grace_s`, then are cut."""
        entry = await self._movable(request, model_id)
        began, name, force = self._began(), _shown(request, entry), is_forced(order)
        grace_s = None if order is None else order.grace_s
        await self._loads.unload(entry.id, grace_s, name=name, force=force, **owner_of(request))
        return self._moved(request, entry, began)

    @post(f"{_ONE}/sleep", needs=Permission.LOAD, signed=by_path("model-unload"))
    async def sleep(self, request: Request, model_id: ModelPath, order: UnloadOrder | None = None) -> Moved:
        """Send a model that is ready to the green room: its GPU memory is freed, its weights stay in host memory.

        Waiting requests are rejected, running answers may go on for `grace_s`, then are cut. A model that is not ready
        stays where it is. 422 if its engine cannot sleep. 409 if it is pinned, unless forced.
        """
        entry = await self._movable(request, model_id)
        began, grace_s = self._began(), None if order is None else order.grace_s
        await self._moves.move(MoveKind.SLEEP, entry.id, grace_s=grace_s, force=is_forced(order))
        return self._moved(request, entry, began)

    @post(f"{_ONE}/prepare", needs=Permission.LOAD, signed=by_path("model-load"))
    async def prepare(self, request: Request, model_id: ModelPath, order: LoadOrder | None = None) -> Moved:
        """Load a cold model into the green room while others are served, so that it can wake quickly.

        422 if its engine cannot sleep.
        """
        entry = await self._movable(request, model_id)
        if entry.facts.can_sleep and not entry.engine.hosted:
            raise Unsupported(
                f"{entry.id} runs on {entry.engine.name}, which loads a model on a GPU before it can sleep. Load it, "
                "then let it sleep.",
                param="model",
            )
        evict, began = self._named(order, caller_of(request)), self._began()
        await self._moves.move(MoveKind.PREPARE, entry.id, evict=evict, force=is_forced(order))
        return self._moved(request, entry, began)

    @get(f"{_ONE}/logs", needs=Permission.READ)
    async def logs(self, request: Request, model_id: ModelPath, lines: Lines = 200) -> views.LogLines:
        """The last lines that the model's engine printed, also if it has ended."""
        entry = await self._entry(request, model_id)
        tail = self._shell.slots.log(entry.id).tail(lines)
        return views.LogLines(model=entry.id, lines=[shown_line(line) for line in tail])

    @get(f"{_ONE}/logs/stream", needs=Permission.READ, response_class=Response, responses=_STREAM_KINDS)
    async def stream_logs(
        self, request: Request, model_id: ModelPath, lines: Lines = 200, no_history: NoHistory = None
    ) -> Response:
        """The engine's output as it is printed: server-sent events of one line each, or plain text by `Accept`."""
        refuse_head(request)
        entry = await self._entry(request, model_id)
        history = lines if no_history in (None, "false", "0") else 0
        accept = request.headers.get("accept", "")
        is_plain = PLAIN in accept and SSE not in accept
        media_type = PLAIN if is_plain else SSE
        feed = log_feed(self._shell.slots.log(entry.id), history, media_type)
        return self._streams.answer(request, feed, media_type)

    @post("/api/v1/reload", needs=Permission.RELOAD, signed=of_all("config-reload"))
    async def reload(self) -> Reloaded:
        """Read the configuration file again and apply what changed. A file that cannot be used changes nothing."""
        refuse_while_draining(self._shell)
        began = self._shell.clock()
        changes = await self._gateway.reload()
        return Reloaded(
            added=list(changes.added),
            changed=list(changes.changed),
            relabelled=list(changes.relabelled),
            removed=list(changes.removed),
            at_once=list(changes.at_once),
            took_s=round(self._shell.clock() - began, 3),
        )

    def _began(self) -> float:
        """When an order begins. Raises ShuttingDown."""
        refuse_while_draining(self._shell)
        return self._shell.clock()

    def _moved(self, request: Request, entry: Entry, began: float) -> Moved:
        return Moved(
            model=_shown(request, entry),
            tier=tier_of(self._shell.loop.scheduler.view.slots_of(entry.id)).value,
            took_s=round(self._shell.clock() - began, 3),
            memory=Snapshot(self._gateway).memory(entry.id),
        )

    async def _movable(self, request: Request, model_id: str) -> Entry:
        """The model that an order moves. Raises UpdateInProgress for a version that does not serve yet."""
        entry = await self._entry(request, model_id)
        expect_movable(self._shell, entry)
        return entry

    async def _entry(self, request: Request, model_id: str) -> Entry:
        refuse_task(self._tasks, self._shell.catalog, request, model_id)
        try:
            return addressed(self._shell.catalog, request)
        except ModelNotFound:
            # It may be on disk.
            return await self._models.resolver.named(name_in_path(request.scope), asker=caller_of(request))

    def _named(self, order: LoadOrder | None, caller: Caller) -> tuple[ModelId, ...]:
        """The models that an order names to be evicted. One that is not known yet need not be."""
        known = [] if order is None else [(name, self._shell.catalog.find(name)) for name in order.evict]
        if unknown := next((name for name, entry in known if entry is None or not caller.sees(entry.base_id)), None):
            raise ModelNotFound.named(unknown, "evict")
        for _, entry in known:
            if entry is not None:
                expect_movable(self._shell, entry)
        return tuple(entry.id for _, entry in known if entry is not None)


def _shown(request: Request, entry: Entry) -> str:
    """Its name as lists have it for this caller."""
    return entry.shown_id(to_operator=asked_by_admin(request))


def is_forced(order: LoadOrder | ForceOrder | None) -> bool:
    return order is not None and order.force


PATH: Final = "/v1/cache/flush"
MIB: Final = 1024 * 1024

_log = get_logger("server")


class FlushOrder(GovernedOrder):
    """What to flush. `tenantId` and `modelId` also narrow the other scopes."""

    scope: Literal["all", "model", "tenant", "tag"]
    tenantId: Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX)] | None = None  # noqa: N815
    """The tenant; a key without `admin` can only name its own."""
    modelId: Annotated[str, Field(min_length=1, max_length=ID_CHARS_MAX)] | None = None  # noqa: N815
    tag: Annotated[str, Field(min_length=1, max_length=TAG_CHARS_MAX)] | None = None
    """What callers sent as `X-Cache-Tag`."""


class Flushed(View):
    flushed: bool
    """False if the cache of one of the models that were meant cannot be flushed."""
    entriesRemoved: int | None  # noqa: N815
    """Tokens of prompts, on every engine; null where one does not count them."""
    memoryFreedMB: float | None  # noqa: N815
    """In MiB, as everywhere here, of its KV cache: for other prompts. Null where an engine does not tell."""
    reason: str | None = None
    """Why not all of it was flushed."""


def _flush(call: SignedCall) -> NeededOperation:
    model = call.fields.get("modelId")
    if model is not None and not isinstance(model, str):
        raise BadRequest("modelId must be a text", param="modelId")
    return NeededOperation("cache-flush", model)


@dataclass(frozen=True)
class Caches(Routes):
    _shell: Shell
    # They keep prefixes apart at engines that take one.
    _salts: PrefixSalts
    _hosted: HostedMoves

    @post(PATH, needs=Permission.ASK, signed=_flush, response_model_exclude_unset=True)
    async def flush_cache(self, request: Request, order: FlushOrder) -> Flushed:
        """Empty prefix caches. An admin's key may flush everything, another key only its tenant's entries."""
        caller = caller_of(request)
        model = self._model(order, caller)
        tenant = _tenant(order, caller)
        tag = _tag(order)
        # Requests that are served from now on get other salts, also of models that are asleep or cold.
        self._salts.flush(model, tenant, tag)
        ready = self._ready(model, tenant)
        can = {live.id: _can_flush(live.entry, tenant) for live in ready}
        removed = await asyncio.gather(*(self._flush(live, tenant, tag) for live in ready if can[live.id]))
        entries, size_bytes = (_sum(counts) for counts in zip((0, 0), *removed, strict=True))
        left = {public_name(live.entry.id): caller.sees(live.entry.base_id) for live in ready if not can[live.id]}
        _log.info("cache flushed", scope=order.scope, model=model, tenant=tenant, entries=entries, bytes=size_bytes)
        freed_mib = None if size_bytes is None else round(size_bytes / MIB, 3)
        if not left:
            return Flushed(flushed=True, entriesRemoved=entries, memoryFreedMB=freed_mib)
        named = ", ".join(sorted(model for model, is_seen in left.items() if is_seen)) or "some models"
        why = f"The engines of {named} have no way to flush only that, or anything. Flush the model, or unload it."
        return Flushed(flushed=False, entriesRemoved=entries, memoryFreedMB=freed_mib, reason=why)

    def _model(self, order: FlushOrder, caller: Caller) -> ModelId | None:
        if order.modelId is None:
            if order.scope == "model":
                raise BadRequest("modelId says which model's cache to flush.", param="modelId")
            return None
        entry = self._shell.catalog.find(order.modelId)
        if entry is None or not caller.sees(entry.base_id):
            raise ModelNotFound.named(order.modelId, "modelId")
        return ModelId(public_name(entry.id))

    def _ready(self, model: ModelId | None, tenant: str | None) -> Sequence[LiveSlot]:
        """Slots that may have a cache now. A slot that is asleep or about to be has none."""
        slots = self._shell.loop.scheduler.view.slots
        return [
            live
            for live in self._shell.slots.live.values()
            if live.entry.facts.keeps_prefixes is not False
            and model in (None, live.entry.public_id)
            and (tenant is None or live.entry.tenant in (None, tenant))
            and live.id in slots
            and slots[live.id].tier is Tier.READY
        ]

    async def _flush(self, live: LiveSlot, tenant: str | None, tag: str | None) -> tuple[int | None, int | None]:
        if live.prompts is not None:
            tokens = await _erased(live, live.prompts, tenant, tag)
            return tokens, kv_bytes(self._shell, live.entry, tokens)
        if not live.entry.engine.hosted:
            return None, None
        try:
            word = None if tenant is None else tenant_word(tenant)
            entries, size_bytes = await self._hosted.flush(live.id, word, tag)
        except GreenroomError:
            if live.id not in self._shell.slots.live:
                # Its worker is gone, and its cache with it.
                return 0, 0
            raise
        self._shell.metrics.flushed(live.entry.id, size_bytes)
        return entries, size_bytes


def _can_flush(entry: Entry, tenant: str | None) -> bool:
    """Workers are told to, slots of llama.cpp are erased, salts change. Where tenants share, none has a part."""
    engine, facts = entry.engine, entry.facts
    if entry.config.isolate_tenants == "off" and tenant is not None:
        return False
    has_a_way = engine.hosted or facts.prompt_slots > 0 or engine.salt_field is not None
    return facts.keeps_prefixes is True and has_a_way


async def _erased(live: LiveSlot, prompts: PromptCacheSlots, tenant: str | None, tag: str | None) -> int | None:
    """Let no request reuse these prompts, and erase them. Returns the tokens erased; None where it does not tell."""
    # What it keeps all the same is reused by no request.
    return await live.erase(prompts.forget(lambda whose, marked: tenant in (None, whose) and tag in (None, marked)))


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _tenant(order: FlushOrder, caller: Caller) -> str | None:
    """The tenant whose entries to flush, by its name in the engine; None for all tenants. Raises NotAllowed."""
    asked = order.tenantId if caller.may(Permission.FLUSH) else _own_tenant(order, caller)
    if asked is None and order.scope == "tenant":
        raise BadRequest("tenantId says whose cache to flush.", param="tenantId")
    return asked


def _own_tenant(order: FlushOrder, caller: Caller) -> str:
    own = caller.tenant
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
