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
from greenroom.errors import GatewayBug, GreenroomError, RateLimited
from greenroom.http.exchange import Exchange
from greenroom.http.relays.relay import Relay, RelayOutcome
from greenroom.http.request import Head
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.loop import SchedulerLoop
from greenroom.runtime.resolver import Resolver, Unresolved
from greenroom.runtime.tickets import Tickets
from greenroom.server import render
from greenroom.server.inference.answer_facts import usage_of
from greenroom.server.inference.ask import Ask, Settings
from greenroom.server.inference.ask_reader import AskReader
from greenroom.server.inference.routes import UPSTREAM, Route, answers_with_text, dialect_of, expect_route
from greenroom.server.inference.running import RequestServices, RequestSweep, Running
from greenroom.server.inference.version_headers import version_headers
from greenroom.telemetry.activity import Activity, Record
from greenroom.telemetry.logs import get_logger
from greenroom.telemetry.metrics import Metrics
from greenroom.telemetry.usage import UsageCounts
from greenroom.tenancy.keys import ANYONE, Caller, Permission
from greenroom.tenancy.limits import Charge

_log = get_logger("server")

# The status that is recorded if the caller left before the answer was complete; nothing is sent.
CLIENT_CLOSED: Final = 499
SWITCHED: Final = 101
# By it an engine tells how many seconds of sound it heard or made. An answer for more than ten days is a mistake.
AUDIO_HEADER: Final = b"x-audio-seconds"
AUDIO_MAX_S: Final = 864_000.0
# By it an engine tells how many pictures it made.
PICTURES_HEADER: Final = b"x-pictures"
_PICTURES_DIGITS_MAX: Final = 6


class Inference:
    def __init__(
        self,
        reader: AskReader,
        resolver: Resolver,
        loop: SchedulerLoop,
        tickets: Tickets,
        log: RequestLog,
        settings: Settings,
        clock: Callable[[], float],
        waits: Callable[[Entry], None] | None = None,
    ) -> None:
        """`waits` is called for every request that must wait for a model."""
        self._reader = reader
        self._resolver = resolver
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
        self._shared = RequestServices(
            tickets, self.sweep, clock, self.outlook, reader.version_of, self._spawn, self._ended
        )

    def handle(self, exchange: Exchange, route: Route, caller: Caller) -> None:
        """Answer this request. Returns at once."""
        if route.form:
            reading = self._own(self._handle_form(exchange, route, caller), "form")
            # While a form is read, the request holds nothing but its connection.
            reading.add_done_callback(lambda task: exchange.cut() if task.cancelled() else None)
            return
        request_id = self.next_id()
        try:
            self._answer(exchange, self._read(exchange, route, caller), request_id)
        except Unresolved as wanted:
            self._own(self._handle_resolved(exchange, route, caller, wanted, request_id), request_id)
        except Exception as error:
            self._refuse(exchange, error, request_id, caller)

    def _read(self, exchange: Exchange, route: Route, caller: Caller) -> Ask:
        read = self._reader.read_upstream if route is UPSTREAM else self._reader.read
        return read(exchange, route, caller, self.settings)

    async def _handle_resolved(
        self, exchange: Exchange, route: Route, caller: Caller, wanted: Unresolved, request_id: str
    ) -> None:
        """Answer a request for a model that was not known yet."""
        try:
            await self._resolver.named(wanted.name, wanted.options, wanted.asker)
            self._answer(exchange, self._read(exchange, route, caller), request_id)
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
            self._answer(exchange, await self._reader.read_form(exchange, route, caller, self.settings), request_id)
        except Exception as error:
            # If the client has left, its form cannot be read any more, and there is no one to answer.
            if not exchange.gone:
                self._refuse(exchange, error, request_id, caller)

    async def read_job(self, exchange: Exchange, route: Route, caller: Caller) -> Ask:
        """What a request that is answered later asks for. Raises the error to answer with."""
        # A job's path came in a body.
        expect_route(caller, exchange.head.path)
        if route.form:
            return await self._reader.read_form(exchange, route, caller, self.settings)
        try:
            return self._read(exchange, route, caller)
        except Unresolved as wanted:
            await self._resolver.named(wanted.name, wanted.options, wanted.asker)
            return self._read(exchange, route, caller)

    def begin_job(self, exchange: Exchange, ask: Ask, request_id: str, wait_max_s: float) -> None:
        """Serve it like every other request, but without heartbeats, and with more time to wait."""
        ask.heartbeat, ask.is_patient = Heartbeat.OFF, False
        self._begin(exchange, ask, request_id, replace(self.settings, wait_max_s=wait_max_s))

    def _answer(self, exchange: Exchange, ask: Ask, request_id: str) -> None:
        try:
            self._begin(exchange, ask, request_id)
        except RateLimited as error:
            self._refuse(exchange, error, request_id, ask.caller, ask)

    def _begin(self, exchange: Exchange, ask: Ask, request_id: str, settings: Settings | None = None) -> None:
        if exchange.gone:
            return
        charge = ask.charge
        if charge is not None:
            self._charge(exchange, ask, charge)
        try:
            record = self._log.begin(ask, request_id)
            running = Running(exchange, ask, request_id, record, settings or self.settings, self._shared)
            running.begin()
        except BaseException:
            # It never came to the scheduler, so it does not end.
            if charge is not None:
                charge.end(0)
            raise
        is_hit = running.ticket.granted_at == running.ticket.arrived
        self._log.looked_up(ask, is_hit)
        if not is_hit and self._waits is not None:
            self._waits(ask.entry)

    def _charge(self, exchange: Exchange, ask: Ask, charge: Charge) -> None:
        """Count what the body tells: model, tokens, a place among the requests at once. Raises RateLimited."""
        # An answer that refuses it tells other numbers: those of the limit that it exceeds.
        exchange.head.answer_lines = None
        charge.begin(is_counted=ask.job is not None)
        exchange.head.answer_lines = charge.answer_lines

    def _ended(self, running: Running, error: GreenroomError | None) -> None:
        try:
            self._log.ended(running, error)
        finally:
            charge = running.ask.charge
            if charge is not None:
                charge.end(_tokens_used(running))

    def refused(self, error: GreenroomError) -> None:
        """Count a request that never came to the scheduler."""
        self._log.refused(error)

    def count_refused(self, error: GreenroomError, head: Head, caller: Caller, ask: Ask | None = None) -> None:
        """Count it in the usage of its key and tenant; of its model if it was read so far."""
        model = "" if ask is None else ask.entry.base_id
        self._log.count_refused(error, caller, self._reader.tenant_of(head, caller), model)

    def _refuse(
        self, exchange: Exchange, error: Exception, request_id: str, caller: Caller, ask: Ask | None = None
    ) -> None:
        if isinstance(error, GreenroomError):
            self.refused(error)
        else:
            _log.bug("request broke", error, request=request_id)
            error = GatewayBug("Something went wrong in the gateway.")
        self.count_refused(error, exchange.head, caller, ask)
        if not exchange.started and not exchange.gone:
            to_operator = caller.may(Permission.READ)
            status, headers, body = render.response(
                error, request_id, to_operator=to_operator, dialect=dialect_of(exchange.head.path)
            )
            if (asked := exchange.head.asked) is not None:
                headers += version_headers(self._reader.version_of(asked), to_operator=to_operator)
            exchange.respond(status, headers, body)

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
    """Writes each request down: in the recent activity, the metrics, the usage and, if configured, in a file."""

    def __init__(
        self,
        activity: Activity,
        metrics: Metrics,
        write_down: Callable[[Record], None] | None = None,
        usage: UsageCounts | None = None,
    ) -> None:
        """`write_down` is called for every request that has ended. Without `usage` none is kept."""
        self._activity = activity
        self._metrics = metrics
        self._write_down = write_down
        self._usage = usage
        self._wall: Callable[[], float] = time.time

    def begin(self, ask: Ask, request_id: str) -> Record:
        """The record of a request that begins now. `ended` completes it."""
        record = Record(
            id=request_id,
            model=ask.entry.public_id,
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
        self._metrics.looked_up(ask.entry.public_id, is_hit)

    def refused(self, error: GreenroomError) -> None:
        self._metrics.edge_refused(error.code)

    def count_refused(self, error: GreenroomError, caller: Caller, tenant: str, model: str) -> None:
        if self._usage is not None:
            self._usage.refused(_key_of(caller), tenant, model, error.status)

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
            self._read_answer(running, relay)
        self._activity.end(record)
        if self._write_down is not None:
            self._write_down(record)
        if self._usage is not None and not (relay is None and ask.job is not None and ask.job.is_put_back(error)):
            self._usage.ended(_key_of(ask.caller), ask.tenant, ask.entry.base_id, record, _is_uncounted(running))
        self._metrics.request_done(
            model=ask.entry.public_id,
            tenant=ask.tenant,
            route=ask.route.name,
            status=record.status,
            seconds=total_s,
            wait_s=record.wait_s or 0.0,
            not_there_s=ticket.not_there_s,
            first_byte_s=record.first_byte_s,
        )

    def _read_answer(self, running: Running, relay: Relay) -> None:
        """Tokens are read once, from the last bytes of the answer; sound and pictures are told by its headers."""
        ask, record = running.ask, running.record
        record.chunks = relay.events
        if relay.first_data_at is not None:
            record.first_byte_s = max(0.0, relay.first_data_at - running.ticket.arrived)
        if relay.status != 200 or (ask.route is UPSTREAM and running.exchange.head.method != b"POST"):
            return
        if relay.outcome is RelayOutcome.COMPLETE and not ask.route.is_text:
            self._count_media(ask, record, relay)
        if ask.route.is_sound:
            return
        estimates = ask.route.is_text or (ask.route is UPSTREAM and answers_with_text(ask.target))
        said = usage_of(ask.entry.engine, relay, ask.stream, running.facts, estimates=estimates)
        if said is None:
            return
        record.prompt_tokens, record.completion_tokens = said.prompt, said.completion
        record.cached_tokens, record.estimated = 0 if ask.is_not_cached else said.cached, said.estimated
        record.gpu_time_ms = None if said.gpu_ms is None else round(said.gpu_ms)
        self._metrics.tokens(ask.entry.public_id, ask.tenant, said.prompt, said.completion, said.cached or 0)
        if said.cached is not None and not ask.is_not_cached and ask.route.is_text:
            self._metrics.prefix_looked_up(ask.entry.public_id, said.cached > 0)

    def _count_media(self, ask: Ask, record: Record, relay: Relay) -> None:
        """By headers, which an engine need not send."""
        for name, value in relay.headers:
            if name == AUDIO_HEADER:
                record.audio_s = _seconds(value)
            elif name == PICTURES_HEADER and value.isdigit() and len(value) <= _PICTURES_DIGITS_MAX:
                record.pictures = int(value)
        if record.audio_s is not None and ask.route.is_sound:
            took_s = max(0.0, (record.total_s or 0.0) - (record.wait_s or 0.0))
            self._metrics.audio(ask.entry.public_id, ask.route.name, record.audio_s, took_s)


def _key_of(caller: Caller) -> str:
    """The name of the caller's key; empty where there are no keys."""
    return "" if caller is ANYONE else caller.name


def _is_uncounted(running: Running) -> bool:
    """True if an engine worked for this request and nothing tells how much."""
    record, relay, ask = running.record, running.relay, running.ask
    if relay is None or not (relay.status == 200 or (relay.status == 0 and relay.outcome is RelayOutcome.CLIENT_GONE)):
        return False
    if record.completion_tokens is not None or record.audio_s is not None or record.pictures is not None:
        return False
    return ask.route is not UPSTREAM or answers_with_text(ask.target)


def _tokens_used(running: Running) -> int | None:
    """None if they are not known although an engine worked: a caller that leaves does not get its tokens back."""
    record = running.record
    if record.completion_tokens is None and _is_uncounted(running):
        return None
    return (record.prompt_tokens or 0) + (record.completion_tokens or 0)


def _seconds(value: bytes) -> float | None:
    """A plain number of seconds; None for anything else."""
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if 0.0 <= seconds <= AUDIO_MAX_S else None


def _status(exchange: Exchange, relay: Relay | None, error: GreenroomError | None) -> int:
    if error is not None:
        return error.status
    if relay is None or exchange.gone or relay.outcome is RelayOutcome.CLIENT_GONE:
        return CLIENT_CLOSED
    # A connection that left HTTP was answered by the engine's 101, which no relay forwards.
    return relay.status or SWITCHED
