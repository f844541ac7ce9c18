"""All requests to models: each is read, begun, and when it has ended counted and recorded.

`ask.py` reads what a request asks for; `running.py` serves one request.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Final

from greenroom.config.schema import Heartbeat
from greenroom.core.model import RequestId
from greenroom.engines import base
from greenroom.errors import GatewayBug, GreenroomError
from greenroom.http.exchange import Exchange
from greenroom.http.relay import Relay, RelayOutcome
from greenroom.http.request import Head
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.loop import SchedulerLoop
from greenroom.runtime.tickets import Tickets
from greenroom.server import render
from greenroom.server.inference.ask import Ask, AskReader, Settings
from greenroom.server.inference.routes import UPSTREAM, Route
from greenroom.server.inference.running import RequestServices, RequestSweep, Running
from greenroom.telemetry.activity import Activity, Record
from greenroom.telemetry.logs import get_logger
from greenroom.telemetry.metrics import Metrics
from greenroom.tenancy.keys import Caller

_log = get_logger("server")

# The status that is recorded if the caller left before the answer was complete; nothing is sent.
CLIENT_CLOSED: Final = 499
SWITCHED: Final = 101


class Inference:
    def __init__(
        self,
        reader: AskReader,
        loop: SchedulerLoop,
        tickets: Tickets,
        log: RequestLog,
        settings: Settings,
        clock: Callable[[], float],
        waits: Callable[[Entry], None] | None = None,
    ) -> None:
        """`waits` is called for every request that must wait for a model."""
        self._reader = reader
        self._loop = loop
        self._log = log
        self.settings = settings
        self._clock = clock
        self._waits = waits
        self._tickets = tickets
        self._tasks: set[asyncio.Task[None]] = set()
        # The prefix keeps ids of different runs apart; within a run they are counted.
        self._prefix, self._number = f"r-{secrets.token_hex(4)}-", 0
        self.sweep = RequestSweep(self._sweep_s, clock)
        self._shared = RequestServices(tickets, self.sweep, clock, self.outlook, self._spawn, log.ended)

    def handle(self, exchange: Exchange, route: Route, caller: Caller) -> None:
        """Answer this request. Returns at once."""
        if route.is_multipart:
            reading = self._own(self._handle_form(exchange, route, caller), "form")
            # While a form is read, the request holds nothing but its connection.
            reading.add_done_callback(lambda task: exchange.cut() if task.cancelled() else None)
            return
        request_id = self.next_id()
        try:
            if route is UPSTREAM:
                ask = self._reader.read_upstream(exchange, route, caller, self.settings)
            else:
                ask = self._reader.read(exchange, route, caller, self.settings)
            self._begin(exchange, ask, request_id)
        except Exception as error:
            self._refuse(exchange, error, request_id, caller)

    def configure(self, settings: Settings) -> None:
        """Apply changed settings to all requests that begin from now on."""
        self.settings = settings

    def check_open(self, head: Head, caller: Caller) -> None:
        """Raises NotAllowed where this path of an engine is not open to a key without `admin`."""
        self._reader.check_open(head, caller)

    async def _handle_form(self, exchange: Exchange, route: Route, caller: Caller) -> None:
        request_id = self.next_id()
        try:
            self._begin(exchange, await self._reader.read_form(exchange, route, caller, self.settings), request_id)
        except Exception as error:
            # If the client has left, its form cannot be read any more, and there is no one to answer.
            if not exchange.gone:
                self._refuse(exchange, error, request_id, caller)

    async def read_job(self, exchange: Exchange, route: Route, caller: Caller) -> Ask:
        """What a request that is answered later asks for. Raises the error to answer with."""
        if route.is_multipart:
            return await self._reader.read_form(exchange, route, caller, self.settings)
        if route is UPSTREAM:
            return self._reader.read_upstream(exchange, route, caller, self.settings)
        return self._reader.read(exchange, route, caller, self.settings)

    def begin_job(self, exchange: Exchange, ask: Ask, request_id: str, wait_max_s: float) -> None:
        """Serve it like every other request, but without heartbeats, and with more time to wait."""
        ask.heartbeat, ask.is_patient = Heartbeat.OFF, False
        self._begin(exchange, ask, request_id, replace(self.settings, wait_max_s=wait_max_s))

    def _begin(self, exchange: Exchange, ask: Ask, request_id: str, settings: Settings | None = None) -> None:
        if exchange.gone:
            return
        record = self._log.begin(ask, request_id)
        running = Running(exchange, ask, request_id, record, settings or self.settings, self._shared)
        running.begin()
        is_hit = running.ticket.granted_at == running.ticket.arrived
        self._log.looked_up(ask, is_hit)
        if not is_hit and self._waits is not None:
            self._waits(ask.entry)

    def refused(self, error: GreenroomError) -> None:
        """Count a request that never came to the scheduler."""
        self._log.refused(error)

    def _refuse(self, exchange: Exchange, error: Exception, request_id: str, caller: Caller) -> None:
        if isinstance(error, GreenroomError):
            self.refused(error)
        else:
            _log.bug("request broke", error, request=request_id)
            error = GatewayBug("Something went wrong in the gateway.")
        if not exchange.started and not exchange.gone:
            exchange.respond(*render.response(error, request_id, to_operator=caller.admin))

    # --- tasks ----------------------------------------------------------------------------------------------------

    def _spawn(self, running: Running) -> asyncio.Task[None]:
        return self._own(running.run(), running.request_id)

    def _own(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def running(self) -> int:
        return len(self._tickets.open)

    async def finished(self) -> None:
        """Wait until every request has ended."""
        await self._loop.until(lambda: not self._tickets.open)
        while self._tasks:
            await asyncio.wait(self._tasks)

    def next_id(self) -> str:
        self._number += 1
        return f"{self._prefix}{self._number}"

    def _sweep_s(self) -> float:
        settings = self.settings
        idle_s = settings.answer_idle_max_s or 3600.0
        return min(settings.heartbeat_after_s, settings.heartbeat_every_s, idle_s) / 4

    def outlook(self, request_id: str) -> tuple[int | None, float | None]:
        """Its place in the queue, and in how many seconds it should begin; None where it does not wait."""
        outlook = self._loop.scheduler.outlook(RequestId(request_id), self._clock())
        return (None, None) if outlook is None else (outlook.position, outlook.eta_s)


class RequestLog:
    """Writes each request down: in the recent activity, in the metrics and, if configured, in a file."""

    def __init__(
        self, activity: Activity, metrics: Metrics, write_down: Callable[[Record], None] | None = None
    ) -> None:
        """`write_down` is called for every request that has ended."""
        self._activity = activity
        self._metrics = metrics
        self._write_down = write_down
        self._wall: Callable[[], float] = time.time

    def begin(self, ask: Ask, request_id: str) -> Record:
        """The record of a request that begins now. `ended` completes it."""
        record = Record(
            id=request_id,
            model=ask.entry.id,
            asked_as=ask.asked_as,
            tenant=ask.tenant,
            client=ask.client,
            route=ask.route.name,
            stream=ask.stream,
            priority=ask.priority,
            arrived_at=self._wall(),
        )
        self._activity.begin(record)
        return record

    def looked_up(self, ask: Ask, is_hit: bool) -> None:
        """A hit found its model ready and with room."""
        self._metrics.looked_up(ask.entry.id, is_hit)

    def refused(self, error: GreenroomError) -> None:
        self._metrics.edge_refused(error.code)

    def ended(self, running: Running, error: GreenroomError | None) -> None:
        ask, record, ticket, relay = running.ask, running.record, running.ticket, running.relay
        record.total_s = total_s = max(0.0, self._wall() - record.arrived_at)
        record.status = _status(running.exchange, relay, error)
        if error is not None:
            record.error_code = error.code
            record.error_message = render.words(error, record.id, to_operator=False).message
            record.reason, record.details = render.words(error, record.id, to_operator=True)
        if ticket.granted_at:
            record.wait_s = ticket.granted_at - ticket.arrived
        if ticket.slot is not None:
            record.slot = ticket.slot.id
        if relay is not None:
            self._read_answer(ask, record, relay, ticket.arrived)
        self._activity.end(record)
        if self._write_down is not None:
            self._write_down(record)
        self._metrics.request_done(
            model=ask.entry.id,
            tenant=ask.tenant,
            route=ask.route.name,
            status=record.status,
            seconds=total_s,
            wait_s=record.wait_s or 0.0,
            not_there_s=ticket.not_there_s,
            first_byte_s=record.first_byte_s,
        )

    def _read_answer(self, ask: Ask, record: Record, relay: Relay, arrived: float) -> None:
        """Tokens are read once, from the last bytes of the answer."""
        record.chunks = relay.events
        if relay.first_data_at is not None:
            record.first_byte_s = max(0.0, relay.first_data_at - arrived)
        if relay.status != 200 or ask.route is UPSTREAM:
            return
        said = ask.entry.engine.usage(relay.tail(), stream=ask.stream)
        if said is None and relay.events:
            said = base.estimated(relay.events)
        if said is not None:
            record.prompt_tokens, record.completion_tokens = said.prompt, said.completion
            record.cached_tokens, record.estimated = said.cached, said.estimated
            self._metrics.tokens(ask.entry.id, ask.tenant, said.prompt, said.completion, said.cached)


def _status(exchange: Exchange, relay: Relay | None, error: GreenroomError | None) -> int:
    if error is not None:
        return error.status
    if relay is None or exchange.gone or relay.outcome is RelayOutcome.CLIENT_GONE:
        return CLIENT_CLOSED
    # A connection that left HTTP was answered by the engine's 101, which no relay forwards.
    return relay.status or SWITCHED
