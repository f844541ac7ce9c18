"""What an operator can order: load, unload, sleep, prepare, reload. Also the output of engines.

Orders are answered when they are done. A caller that leaves meanwhile changes nothing: the move goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import FastAPI, Query
from starlette.requests import Request
from starlette.responses import Response

from greenroom.core.model import ModelId, MoveKind
from greenroom.errors import ShuttingDown
from greenroom.process.logs import LINES_MAX
from greenroom.runtime.catalogue import Entry
from greenroom.server.admin import views
from greenroom.server.admin.gateway import Gateway
from greenroom.server.admin.listing import ModelPath, addressed, unknown_model
from greenroom.server.admin.snapshot import Snapshot, tier_of
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

MODELS = "/api/v1/models"
_ONE = MODELS + "/{model_id:path}"
_STREAM_KINDS: dict[int | str, dict[str, Any]] = {200: {"content": {SSE: {}, PLAIN: {}}}}

Lines = Annotated[int, Query(ge=0, le=LINES_MAX, description="The last so many lines.")]
NoHistory = Annotated[str | None, Query(alias="no-history", description="Only lines from now on.")]


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

    async def load(self, request: Request, model_id: ModelPath, order: views.LoadOrder | None = None) -> views.Moved:
        """Make a model ready. A failure carries the engine's last lines in `details`."""
        entry = self._entry(request, model_id, "/load")
        evict = tuple(self._named(name) for name in order.evict) if order is not None else ()
        return await self._move(MoveKind.LOAD, entry, evict, None)

    async def unload(
        self, request: Request, model_id: ModelPath, order: views.UnloadOrder | None = None
    ) -> views.Moved:
        """Stop a model. Waiting requests are rejected, running answers may go on for `grace_s`, then are cut."""
        entry = self._entry(request, model_id, "/unload")
        return await self._move(MoveKind.UNLOAD, entry, (), order.grace_s if order is not None else None)

    async def sleep(self, request: Request, model_id: ModelPath, order: views.SleepOrder | None = None) -> views.Moved:
        """Send a model that is ready to the green room: its GPU memory is freed, its weights stay in host memory.

        Waiting requests are rejected, running answers may go on for `grace_s`, then are cut. A model that is not ready
        stays where it is. 422 if its engine cannot sleep.
        """
        entry = self._entry(request, model_id, "/sleep")
        return await self._move(MoveKind.SLEEP, entry, (), order.grace_s if order is not None else None)

    async def prepare(self, request: Request, model_id: ModelPath, order: views.LoadOrder | None = None) -> views.Moved:
        """Load a cold model into the green room while others are served, so that it can wake quickly.

        422 if its engine cannot sleep.
        """
        entry = self._entry(request, model_id, "/prepare")
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

    async def reload(self) -> views.Reloaded:
        """Read the configuration file again and apply what changed. A file that cannot be used changes nothing."""
        self._refuse_while_draining()
        began = self._gateway.clock()
        changes = await self._gateway.reload()
        return views.Reloaded(
            added=list(changes.added),
            changed=list(changes.changed),
            relabelled=list(changes.relabelled),
            removed=list(changes.removed),
            at_once=list(changes.at_once),
            took_s=round(self._gateway.clock() - began, 3),
        )

    async def _move(
        self, kind: MoveKind, entry: Entry, evict: tuple[ModelId, ...], grace_s: float | None
    ) -> views.Moved:
        self._refuse_while_draining()
        began = self._gateway.clock()
        await self._gateway.operations.move(kind, entry.id, evict=evict, grace_s=grace_s)
        return views.Moved(
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
            raise unknown_model(name, "evict")
        return entry.id
