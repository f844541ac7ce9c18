"""Requests to models: from a complete request to a complete answer, counted and remembered.

Owns one task a request. What the request is is read by `ask.py`; how it is served is in `running.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable

from greenroom.config.schema import Heartbeat
from greenroom.core.events import RequestArrived
from greenroom.core.model import RequestId
from greenroom.engines import usage
from greenroom.errors import GatewayBug, GreenroomError
from greenroom.proxy.edge import Exchange
from greenroom.proxy.relay import Outcome, Relay
from greenroom.runtime.loop import SchedulerLoop
from greenroom.runtime.tickets import Desk
from greenroom.server import render
from greenroom.server.ask import Ask, AskReader
from greenroom.server.routes import UPSTREAM, Route
from greenroom.server.running import Running
from greenroom.server.settings import Settings
from greenroom.server.vigil import Vigil
from greenroom.telemetry.activity import Activity, Record
from greenroom.telemetry.logs import get_logger
from greenroom.telemetry.metrics import Metrics
from greenroom.tenancy.keys import Caller

_log = get_logger("server")

# The status written down for a caller who left before the answer was complete; nothing is sent.
CLIENT_CLOSED = 499
SWITCHED = 101


class Inference:
    def __init__(
        self,
        reader: AskReader,
        loop: SchedulerLoop,
        desk: Desk,
        activity: Activity,
        metrics: Metrics,
        settings: Callable[[], Settings],
        clock: Callable[[], float],
    ) -> None:
        self._reader = reader
        self._loop = loop
        self._desk = desk
        self._activity = activity
        self._metrics = metrics
        self._settings = settings
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        # Ids of different runs do not meet; within one they are counted.
        self._run, self._numbers = secrets.token_hex(4), itertools.count(1)
        self.vigil = Vigil(self._sweep_s, clock)

    def handle(self, exchange: Exchange, route: Route, caller: Caller) -> None:
        """Answer this request. Returns at once; a task owns it from here on."""
        task = asyncio.get_running_loop().create_task(self._own(exchange, route, caller))
        self._tasks.add(task)
        # The relay listens instead while it runs.
        exchange.on_gone = lambda: _cancel(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def running(self) -> int:
        return len(self._tasks)

    async def finished(self) -> None:
        """Wait until every request has ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def next_id(self) -> str:
        return f"r-{self._run}-{next(self._numbers)}"

    def _sweep_s(self) -> float:
        settings = self._settings()
        idle_s = settings.answer_idle_max_s or 3600.0
        return min(settings.heartbeat_after_s, settings.heartbeat_every_s, idle_s) / 4

    async def _own(self, exchange: Exchange, route: Route, caller: Caller) -> None:
        """Whatever happens below ends here: as an answer, as an error, or in silence if nobody is left to hear it."""
        request_id = self.next_id()
        try:
            await self._serve(exchange, route, caller, request_id)
        except GreenroomError as error:
            if not exchange.started and not exchange.gone:
                exchange.respond(*render.response(error, request_id))
        except asyncio.CancelledError:
            # The client left; were it the loop that ends, the edge would have cut the connection before.
            if not exchange.gone:
                exchange.cut()
        except Exception as bug:
            _log.error("request broke", request=request_id, error=repr(bug))
            if not exchange.started:
                exchange.respond(*render.response(GatewayBug("Something went wrong in the gateway."), request_id))
            else:
                exchange.cut()

    async def _serve(self, exchange: Exchange, route: Route, caller: Caller, request_id: str) -> None:
        try:
            if route is UPSTREAM:
                ask = self._reader.read_upstream(exchange, route, caller)
            elif route.is_multipart:
                ask = await self._reader.read_form(exchange, route, caller)
            else:
                ask = self._reader.read(exchange, route, caller)
        except GreenroomError as refusal:
            self._metrics.edge_refused(refusal.code)
            raise
        record = self._begin(ask, request_id)
        failed: GreenroomError | None = None
        running: Running | None = None
        try:
            with self._desk.arrive(self._arrival(ask, request_id)) as ticket:
                self._metrics.looked_up(ask.entry.id, ticket.slot is not None)
                running = Running(exchange, ask, ticket, self._desk, self._settings(), self._outlook)
                self.vigil.add(running)
                try:
                    await running.serve()
                except GreenroomError as failure:
                    failed = failure
                    running.fail(failure)
                finally:
                    record.wait_s = max(0.0, ticket.granted_at - ticket.arrived) if ticket.granted_at else None
                    record.slot = ticket.slot.id if ticket.slot is not None else None
                    self.vigil.remove(running)
        finally:
            self._end(ask, record, exchange, running, failed)

    def _arrival(self, ask: Ask, request_id: str) -> RequestArrived:
        settings, now = self._settings(), self._clock()
        # Who hears heartbeats can wait long; who hears nothing gives up after a while without telling anyone.
        patient = ask.stream and ask.heartbeat is not Heartbeat.OFF
        wait_s = settings.stream_wait_max_s if patient else settings.wait_max_s
        if ask.budget_s is not None:
            wait_s = min(wait_s, ask.budget_s)
        return RequestArrived(
            now, RequestId(request_id), (ask.entry.id,), ask.priority, ask.tenant, now + wait_s, patient
        )

    def _outlook(self, request_id: str) -> tuple[int | None, float | None]:
        outlook = self._loop.scheduler.outlook(RequestId(request_id), self._clock())
        return (None, None) if outlook is None else (outlook.position, outlook.eta_s)

    # --- written down ---------------------------------------------------------------------------------------------

    def _begin(self, ask: Ask, request_id: str) -> Record:
        record = Record(
            id=request_id,
            model=ask.entry.id,
            asked_as=ask.asked_as,
            tenant=ask.tenant,
            client=ask.client,
            route=ask.route.name,
            stream=ask.stream,
            priority=ask.priority,
            arrived_at=time.time(),
        )
        self._activity.begin(record)
        return record

    def _end(
        self, ask: Ask, record: Record, exchange: Exchange, running: Running | None, error: GreenroomError | None
    ) -> None:
        relay = running.relay if running is not None else None
        record.total_s = max(0.0, time.time() - record.arrived_at)
        record.error_code = error.code if error is not None else None
        record.status = _status(exchange, relay, error)
        if relay is not None:
            self._read_answer(ask, record, relay)
        self._activity.end(record)
        self._metrics.request_done(
            model=ask.entry.id,
            tenant=ask.tenant,
            route=ask.route.name,
            status=record.status,
            seconds=record.total_s,
            wait_s=record.wait_s or 0.0,
            first_byte_s=record.first_byte_s,
        )

    def _read_answer(self, ask: Ask, record: Record, relay: Relay) -> None:
        """Tokens are read once, from the last bytes of the answer."""
        record.chunks = relay.events
        if relay.first_data_at is not None:
            record.first_byte_s = max(0.0, relay.first_data_at - self._clock() + (record.total_s or 0.0))
        if relay.status != 200 or ask.route is UPSTREAM:
            return
        said = ask.entry.engine.usage(relay.tail(), stream=ask.stream)
        if said is None and relay.events:
            said = usage.estimated(relay.events)
        if said is not None:
            record.prompt_tokens, record.completion_tokens = said.prompt, said.completion
            record.cached_tokens, record.estimated = said.cached, said.estimated
            self._metrics.tokens(ask.entry.id, ask.tenant, said.prompt, said.completion, said.cached)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def _status(exchange: Exchange, relay: Relay | None, error: GreenroomError | None) -> int:
    if error is not None:
        return error.status
    if exchange.gone or (relay is not None and relay.outcome is Outcome.CLIENT_GONE):
        return CLIENT_CLOSED
    if relay is None:
        return CLIENT_CLOSED
    # A connection that left HTTP was answered by the engine's 101, which no relay forwards.
    return relay.status or SWITCHED
