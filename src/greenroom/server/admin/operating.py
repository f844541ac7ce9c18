"""What an operator can order: load, unload, sleep, prepare, reload, flush a cache. Also the output of engines.

Orders are answered when they are done. A caller that leaves meanwhile changes nothing: the move goes on.

Of prefix caches, an admin's key may flush everything, another key only its tenant's entries. Only engines that keep a
cache for each tenant have entries; models that are asleep or cold have none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal

from fastapi import FastAPI, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from greenroom.config.kinds import ID_CHARS_MAX
from greenroom.core.model import ModelId, MoveKind, Tier
from greenroom.errors import BadRequest, GreenroomError, ModelNotFound, NotAllowed, ShuttingDown, Unsupported
from greenroom.process.logs import LINES_MAX
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.slots import LiveSlot
from greenroom.server.admin import views
from greenroom.server.admin.gateway import Gateway
from greenroom.server.admin.listing import ModelPath, addressed
from greenroom.server.admin.snapshot import Snapshot, tier_of
from greenroom.server.admin.views import Order, View
from greenroom.server.admin.watching import (
    PLAIN,
    SSE,
    LogFeed,
    Streams,
    line_frame,
    plain_frame,
    refuse_head,
    shown_line,
)
from greenroom.server.inference.ask import TAG_CHARS_MAX, check_tag, tenant_word
from greenroom.telemetry.logs import get_logger
from greenroom.tenancy.keys import Caller

MODELS = "/api/v1/models"
_ONE = MODELS + "/{model_id:path}"
_STREAM_KINDS: dict[int | str, dict[str, Any]] = {200: {"content": {SSE: {}, PLAIN: {}}}}

# An order names few models; more is a mistake.
EVICT_MAX = 100
GRACE_MAX_S = 3_600

Lines = Annotated[int, Query(ge=0, le=LINES_MAX, description="The last so many lines.")]
NoHistory = Annotated[str | None, Query(alias="no-history", description="Only lines from now on.")]


class LoadOrder(Order):
    evict: Annotated[tuple[Annotated[str, Field(max_length=ID_CHARS_MAX)], ...], Field(max_length=EVICT_MAX)] = ()
    """Models that must leave first."""


class UnloadOrder(Order):
    grace_s: Annotated[float, Field(ge=0, le=GRACE_MAX_S, allow_inf_nan=False)] | None = None
    """How long running answers may go on; the model's own `grace_s` when not given."""


class SleepOrder(Order):
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


class Operating:
    def __init__(self, gateway: Gateway, streams: Streams, look: Callable[[], Snapshot]) -> None:
        self._gateway = gateway
        self._streams = streams
        self._look = look

    def add_to(self, app: FastAPI) -> None:
        app.post(f"{_ONE}/load")(self.load)
        app.post(f"{_ONE}/unload")(self.unload)
        app.post(f"{_ONE}/sleep")(self.sleep)
        app.post(f"{_ONE}/prepare")(self.prepare)
        app.get(f"{_ONE}/logs")(self.logs)
        app.get(f"{_ONE}/logs/stream", response_class=Response, responses=_STREAM_KINDS)(self.stream_logs)
        app.post("/api/v1/reload")(self.reload)

    async def load(self, request: Request, model_id: ModelPath, order: LoadOrder | None = None) -> Moved:
        """Make a model ready. A failure carries the engine's last lines in `details`."""
        entry = self._entry(request, model_id, "/load")
        evict = tuple(self._named(name) for name in order.evict) if order is not None else ()
        return await self._move(MoveKind.LOAD, entry, evict, None)

    async def unload(self, request: Request, model_id: ModelPath, order: UnloadOrder | None = None) -> Moved:
        """Stop a model. Waiting requests are rejected, running answers may go on for `grace_s`, then are cut."""
        entry = self._entry(request, model_id, "/unload")
        return await self._move(MoveKind.UNLOAD, entry, (), order.grace_s if order is not None else None)

    async def sleep(self, request: Request, model_id: ModelPath, order: SleepOrder | None = None) -> Moved:
        """Send a model that is ready to the green room: its GPU memory is freed, its weights stay in host memory.

        Waiting requests are rejected, running answers may go on for `grace_s`, then are cut. A model that is not ready
        stays where it is. 422 if its engine cannot sleep.
        """
        entry = self._entry(request, model_id, "/sleep")
        return await self._move(MoveKind.SLEEP, entry, (), order.grace_s if order is not None else None)

    async def prepare(self, request: Request, model_id: ModelPath, order: LoadOrder | None = None) -> Moved:
        """Load a cold model into the green room while others are served, so that it can wake quickly.

        422 if its engine cannot sleep.
        """
        entry = self._entry(request, model_id, "/prepare")
        if entry.facts.can_sleep and not entry.engine.hosted:
            raise Unsupported(
                f"{entry.id} runs on {entry.engine.name}, which loads a model on a GPU before it can sleep. Load it, "
                "then let it sleep.",
                param="model",
            )
        evict = tuple(self._named(name) for name in order.evict) if order is not None else ()
        return await self._move(MoveKind.PREPARE, entry, evict, None)

    async def logs(self, request: Request, model_id: ModelPath, lines: Lines = 200) -> views.LogLines:
        """The last lines that the model's engine printed, also if it has ended."""
        entry = self._entry(request, model_id, "/logs")
        tail = self._gateway.slots.log(entry.id).tail(lines)
        return views.LogLines(model=entry.id, lines=[shown_line(line) for line in tail])

    async def stream_logs(
        self, request: Request, model_id: ModelPath, lines: Lines = 200, no_history: NoHistory = None
    ) -> Response:
        """The engine's output as it is printed: server-sent events of one line each, or plain text by `Accept`."""
        refuse_head(request)
        entry = self._entry(request, model_id, "/logs/stream")
        history = lines if no_history in (None, "false", "0") else 0
        accept = request.headers.get("accept", "")
        is_plain = PLAIN in accept and SSE not in accept
        frame = plain_frame if is_plain else line_frame
        ring = self._gateway.slots.log(entry.id)
        return self._streams.answer(lambda: LogFeed(ring, history, frame), PLAIN if is_plain else SSE)

    async def reload(self) -> Reloaded:
        """Read the configuration file again and apply what changed. A file that cannot be used changes nothing."""
        self._refuse_while_draining()
        began = self._gateway.clock()
        changes = await self._gateway.reload()
        return Reloaded(
            added=list(changes.added),
            changed=list(changes.changed),
            relabelled=list(changes.relabelled),
            removed=list(changes.removed),
            at_once=list(changes.at_once),
            took_s=round(self._gateway.clock() - began, 3),
        )

    async def _move(self, kind: MoveKind, entry: Entry, evict: tuple[ModelId, ...], grace_s: float | None) -> Moved:
        self._refuse_while_draining()
        began = self._gateway.clock()
        await self._gateway.operations.move(kind, entry.id, evict=evict, grace_s=grace_s)
        return Moved(
            model=entry.id,
            tier=tier_of(self._gateway.loop.scheduler.view.slots_of(entry.id)).value,
            took_s=round(self._gateway.clock() - began, 3),
            memory=self._look().memory(entry.id),
        )

    def _refuse_while_draining(self) -> None:
        if self._gateway.is_draining:
            raise ShuttingDown("The gateway is shutting down and takes no more orders.", retry_after_s=5.0)

    def _entry(self, request: Request, model_id: str, order: str) -> Entry:
        return addressed(self._gateway.catalog, request, MODELS, model_id, order)

    def _named(self, name: str) -> ModelId:
        entry = self._gateway.catalog.find(name)
        if entry is None:
            raise ModelNotFound.named(name, "evict")
        return entry.id


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
            raise ModelNotFound.named(order.modelId, "modelId")
        if not _can_flush(entry):
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
            if _can_flush(live.entry)
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


def _can_flush(entry: Entry) -> bool:
    """Workers are told to flush through their control socket."""
    return entry.engine.hosted and entry.facts.keeps_prefixes


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
