"""What an operator can see: health, metrics, status, events, requests, decisions, and streams of some of these.

Changes nothing, loads nothing. `streams.py` sends the streams.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Annotated

from fastapi import Header, Query
from starlette.requests import Request
from starlette.responses import Response

from greenroom.access.keys import Caller, Permission
from greenroom.api import views
from greenroom.api.asgi import asked_by_admin, caller_of
from greenroom.api.declared import Routes, get
from greenroom.api.overview import Overview
from greenroom.api.reports.live import LiveState, state_feed
from greenroom.api.reports.memory import cache_view, gpu_used_mib, green_room_used_mib, memory_split
from greenroom.api.reports.snapshot import Snapshot
from greenroom.api.reports.streams import SSE, Streams, event_feed, refuse_head
from greenroom.base.detached import run_detached
from greenroom.base.names import public_name
from greenroom.core.model import DeviceId
from greenroom.core.view import SchedulerView, SlotFacts
from greenroom.errors import NotFound
from greenroom.library.records import shown_as
from greenroom.telemetry.exposition import (
    CacheCounts,
    DeviceMemory,
    Gauges,
    GpuFigures,
    LeaseFigures,
    StoreFigures,
    render,
)
from greenroom.telemetry.logs import lost_lines

API = "/api/v1"
# As many as are kept.
REQUESTS_SHOWN_MAX = 2_000
DECISIONS_SHOWN_MAX = 1_000
# Events and decisions are counted; no gateway ever reaches this number.
EVENT_ID_MAX = 2**53
# Left out of what is shown of a request: in a list, and for a key without `admin`.
_BRIEF = {"details": None}
_DISCREET = {"reason": None, "details": None, "slot": None}

EventId = Annotated[int | None, Query(ge=0, le=EVENT_ID_MAX, description="Begin after this event.")]
Since = Annotated[int, Query(ge=0, le=EVENT_ID_MAX, description="Only decisions after the one with this `seq`.")]
WithState = Annotated[bool, Query(description="Also send events `state`: all models, then those that change.")]
LastEventId = Annotated[int | None, Header(alias="Last-Event-ID", ge=0, le=EVENT_ID_MAX)]


class Watching(Routes):
    def __init__(self, gateway: Overview, streams: Streams) -> None:
        self._gateway = gateway
        self._streams = streams
        self._live = LiveState(gateway, streams.look_s)
        # Rendering runs in a thread; two at once would only slow each other and the loop down.
        self._rendering = asyncio.Lock()

    @get("/health", needs=Permission.ASK, responses={503: {"model": views.Health}})
    async def health(self, response: Response) -> views.Health:
        """200 while requests can be served; 503 if the queue is full, models cannot be loaded, or memory ran out."""
        health = Snapshot(self._gateway).health()
        response.status_code = 200 if health.status == "healthy" else 503
        return health

    @get("/healthz", needs=Permission.ASK)
    async def is_alive(self) -> views.ProbeAnswer:
        """200 while the gateway answers at all, whatever becomes of its models: a probe by which it is restarted."""
        return views.ProbeAnswer(status="ok")

    @get("/readyz", needs=Permission.ASK, responses={503: {"model": views.ProbeAnswer}})
    async def is_ready(self, response: Response) -> views.ProbeAnswer:
        """200 while requests are accepted; 503 while it starts, catches up or ends, and while its queue is full."""
        ready = Snapshot(self._gateway).ready()
        response.status_code = 200 if ready.status == "ok" else 503
        return ready

    @get("/metrics", needs=Permission.ASK, response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics(self, request: Request) -> Response:
        """Everything that is counted, in the text format of Prometheus; tenants and unlisted models for admins only.

        Callers are told everything where there are no keys: a monitor could send none.
        """
        gateway, caller = self._gateway, caller_of(request)
        if not gateway.shell.config.server.metrics:
            raise NotFound("Metrics are off (server.metrics).")
        known = (entry for entry in gateway.shell.catalog if not entry.config.unlisted and caller.sees(entry.base_id))
        seen = {public_name(entry.id) for entry in known}
        listed = None if asked_by_admin(request) or caller.tenant is None else seen
        async with self._rendering:
            now = gauges(gateway)
            body, content_type = await run_detached(
                lambda: render(gateway.shell.metrics, now, only_models=listed), "write metrics"
            )
        return Response(body, headers={"content-type": content_type})

    @get(f"{API}/status", needs=Permission.READ)
    async def status(self) -> views.StatusView:
        """The whole gateway at this moment: devices, models, slots, the queue."""
        return Snapshot(self._gateway).status()

    @get(f"{API}/events", needs=Permission.READ, response_class=Response, responses={200: {"content": {SSE: {}}}})
    async def events(
        self, request: Request, after: EventId = None, last_event_id: LastEventId = None, state: WithState = False
    ) -> Response:
        """Server-sent events: one for each move, rejection, reload …; `data` is JSON."""
        refuse_head(request)
        # A browser that comes back sends both; the header is newer than the address it was given once.
        begin = after if last_event_id is None else last_event_id
        hub = self._gateway.shell.hub
        feed = state_feed(hub, self._live, begin) if state else event_feed(hub, begin)
        return self._streams.answer(request, feed)

    @get(f"{API}/requests", needs=Permission.READ)
    async def list_requests(
        self, limit: Annotated[int, Query(ge=1, le=REQUESTS_SHOWN_MAX)] = 100, model: str | None = None
    ) -> views.RequestList:
        """Requests that run or ended lately, without `details`."""
        entry = self._gateway.shell.catalog.find(model) if model is not None else None
        records = self._gateway.activity.recent(limit, model if entry is None else entry.public_id)
        return views.RequestList(requests=[views.RequestView(**record.as_dict() | _BRIEF) for record in records])

    @get(f"{API}/requests/{{request_id}}", needs=Permission.ASK)
    async def show_request(self, request: Request, request_id: str) -> views.RequestView:
        """One request by its `X-Request-Id`; without an admin's key only one of the caller's tenant."""
        record, is_admin = self._gateway.activity.get(request_id), asked_by_admin(request)
        caller = caller_of(request)
        # A request of another tenant is answered like an unknown one, so that ids cannot be guessed.
        if record is None or not (is_admin or (record.tenant == caller.tenant and self._sees(caller, record.model))):
            raise NotFound(f"There is no request {request_id}; only those that run or ended lately are kept.")
        shown = record.as_dict() | ({} if is_admin else _DISCREET)
        if (repo_id := record.model_repo_id) is not None:
            shown["model_repo_id"] = shown_as(repo_id, to_operator=is_admin)
        return views.RequestView(**shown)

    def _sees(self, caller: Caller, model: str) -> bool:
        entry = self._gateway.shell.catalog.find(model)
        return caller.sees(model if entry is None else entry.base_id)

    @get(f"{API}/decisions", needs=Permission.READ)
    async def list_decisions(
        self,
        limit: Annotated[int, Query(ge=1, le=DECISIONS_SHOWN_MAX)] = 100,
        model: str | None = None,
        since: Since = 0,
        what: views.DecisionKind | None = None,
    ) -> views.DecisionList:
        """Recent decisions of the scheduler, and why; for one model also the evictions made for it."""
        entry = self._gateway.shell.catalog.find(model) if model is not None else None
        wanted = model if entry is None else public_name(entry.id)
        newest_first = (
            decision
            for decision in reversed(self._gateway.shell.observer.decisions)
            if decision["seq"] > since
            and what in (None, decision["what"])
            and (wanted is None or wanted in (decision.get("model"), decision.get("for_model")))
        )
        return views.DecisionList(decisions=[dict(decision) for decision in islice(newest_first, limit)][::-1])


def gauges(gateway: Overview) -> Gauges:
    """Configured models always have values, zeros included; others only while they hold something."""
    state = gateway.shell.loop.scheduler.view
    waiting: Counter[str] = Counter({public_name(entry.id): 0 for entry in gateway.shell.catalog})
    in_flight = waiting.copy()
    waiting.update(public_name(caller.model) for caller in state.callers())
    # A lease has a slot too. Callers choose its id, which must not become a model's label.
    models = [slot for slot in state.slots.values() if slot.lease is None]
    in_flight.update(public_name(slot.model) for slot in models for _ in slot.in_flight)
    return Gauges(
        queue_depth=waiting,
        in_flight=in_flight,
        slots=Counter((public_name(slot.model), slot.tier.value) for slot in models),
        memory_mib=_memory_mib(state, models),
        caches=_caches(gateway),
        devices=_devices(state),
        gpus=_gpus(gateway),
        store=_store(gateway),
        leases=_leases(gateway),
        green_room_size_mib=state.limits.green_room_mib,
        green_room_used_mib=green_room_used_mib(state),
        connections=gateway.edge.connections,
        event_listeners=gateway.shell.hub.listeners,
        log_lines_lost=lost_lines(),
        uptime_s=gateway.shell.clock() - gateway.began,
    )


def _caches(gateway: Overview) -> dict[str, CacheCounts]:
    state = gateway.shell.loop.scheduler.view
    shown = [
        (entry, cache_view(gateway.shell.slots, state.slots_of(entry.id))) for entry in gateway.shell.catalog.shown
    ]
    return {
        public_name(entry.id): (view.kv_used, view.prefix_queries, view.prefix_hits)
        for entry, view in shown
        if view is not None
    }


def _store(gateway: Overview) -> StoreFigures | None:
    sharing = gateway.sharing
    return None if sharing is None else StoreFigures(sharing.failure is None, sharing.slots_without_lease)


def _leases(gateway: Overview) -> LeaseFigures:
    """Leases of programs, in whichever store. Devices always have a value, zero included."""
    devices = gateway.shell.loop.scheduler.view.ledger.devices
    total: dict[str, float] = {str(device): 0 for device in devices}
    programs = [lease for lease in gateway.leasing.known() if lease.kind == "program"]
    held = [lease for lease in programs if lease.state == "held"]
    for lease in held:
        for device, mib in lease.claim.items():
            total[device] = total.get(device, 0) + mib
    return LeaseFigures(len(held), len(programs) - len(held), total)


def _memory_mib(state: SchedulerView, models: Iterable[SlotFacts]) -> dict[tuple[str, str], float]:
    total: dict[tuple[str, str], float] = {}
    for slot in models:
        for device, mib in state.ledger.held_by(slot.id).items():
            key = public_name(slot.model), device
            total[key] = total.get(key, 0) + mib
    return total


def _gpus(gateway: Overview) -> dict[str, GpuFigures]:
    parts, found = memory_split(gateway), {}
    for gpu in gateway.memory_watch.last.reading.gpus:
        of = parts[DeviceId(gpu.uuid)]
        split = {"weights": of.weights_mib, "kv": of.kv_mib, "other": of.other_mib}
        used_mib = gpu_used_mib(gateway, gpu)
        found[gpu.uuid] = GpuFigures(gpu.total_mib, used_mib, gpu.utilisation, gpu.temperature_c, gpu.index, split)
    return found


def _devices(state: SchedulerView) -> dict[str, DeviceMemory]:
    ledger, free = state.ledger, state.ledger.free_mib(frozenset())
    return {
        str(device.id): DeviceMemory(device.capacity_mib, max(0, free[device.id]), ledger.foreign.get(device.id, 0))
        for device in ledger.devices.values()
    }
