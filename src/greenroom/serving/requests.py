"""All requests to models: each is read, begun, and when it has ended counted and recorded.

`ask.py` reads what a request asks for; `running.py` serves one request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

from greenroom.access.keys import Caller, Permission
from greenroom.access.limits import QuotaHold
from greenroom.config.schema import Heartbeat
from greenroom.dialects.dialect import Route
from greenroom.dialects.translation import JSON
from greenroom.errors import CoolingDown, GatewayBug, GreenroomError, RateLimited
from greenroom.http.body import Body
from greenroom.http.exchange import Exchange, RequestIds
from greenroom.http.request import Head
from greenroom.runtime.loop import Tickets
from greenroom.runtime.moves.admission import Prefetch
from greenroom.runtime.remote.spending import settle
from greenroom.runtime.resolver import NeedsDiskLookup, Resolver
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.serving import render
from greenroom.serving.ask import Ask, Settings, client_named
from greenroom.serving.ask_reader import AskReader
from greenroom.serving.body.long_body import SHORT_BYTES, LongBodies, LongBody, Pending, is_plain
from greenroom.serving.request_log import RequestLog, tokens_used, version_headers
from greenroom.serving.routes import UPSTREAM, dialect_of, expect_route
from greenroom.serving.running import RequestServices, Running
from greenroom.serving.sweep import RequestSweep
from greenroom.telemetry.logs import get_logger

_log = get_logger("server")


class Inference:
    def __init__(
        self,
        reader: AskReader,
        resolver: Resolver,
        loop: SchedulerLoop,
        tickets: Tickets,
        log: RequestLog,
        settings: Settings,
        prefetch: Prefetch,
    ) -> None:
        self._reader = reader
        self._resolver = resolver
        self._loop = loop
        self._log = log
        self.settings = settings
        self._prefetch = prefetch
        self._tickets = tickets
        self._long_bodies = LongBodies()
        self._tasks: set[asyncio.Task[None]] = set()
        self.ids = RequestIds()
        self.sweep = RequestSweep(settings, loop)
        self._shared = RequestServices(
            tickets,
            self.sweep,
            loop,
            reader,
            self._spawn,
            self._ended,
        )

    def handle(self, exchange: Exchange, route: Route, caller: Caller) -> None:
        """Answer this request. Returns at once."""
        if route.form or self._is_long(exchange.body):
            self._begin_long(exchange, route, caller)
            return
        request_id = self.ids.next()
        try:
            self._answer(exchange, self._read(exchange, route, caller), request_id)
        except NeedsDiskLookup as wanted:
            self._own(self._handle_resolved(exchange, route, caller, wanted, request_id), request_id)
        except Exception as error:
            self._refuse(exchange, error, request_id, caller)

    def _read(self, exchange: Exchange, route: Route, caller: Caller, long: LongBody | None = None) -> Ask:
        if route is UPSTREAM:
            return self._reader.read_upstream(exchange, route, caller, self.settings, long)
        return self._reader.read(exchange, route, caller, self.settings, long)

    async def _read_long(self, exchange: Exchange, route: Route, caller: Caller) -> Ask:
        """A form, or any body however long it is. Other requests are served meanwhile."""
        if route.form:
            return await self._reader.read_form(exchange, route, caller, self.settings)
        long = self.long_body(exchange.body) if self._is_long(exchange.body) else None
        is_resolved = False
        while True:
            # Not the exception itself, which would hold this frame, and this frame it.
            try:
                return self._read(exchange, route, caller, long)
            except Pending as pending:
                step = pending.step
            except NeedsDiskLookup as wanted:
                if is_resolved:
                    raise
                is_resolved, step = True, _resolving(self._resolver, wanted)
            await step()

    async def _handle_resolved(
        self, exchange: Exchange, route: Route, caller: Caller, wanted: NeedsDiskLookup, request_id: str
    ) -> None:
        """Answer a request for a model that was not known yet."""
        try:
            await _resolving(self._resolver, wanted)()
            self._answer(exchange, self._read(exchange, route, caller), request_id)
        except Exception as error:
            self._refuse(exchange, error, request_id, caller)

    def configure(self, settings: Settings) -> None:
        """Apply changed settings to all requests that begin from now on."""
        self.settings = settings
        self.sweep.configure(settings)

    def check_open(self, head: Head, caller: Caller) -> None:
        """Raises NotAllowed where this path of an engine is not open to a key without `admin`."""
        self._reader.check_open(head, caller)

    def _begin_long(self, exchange: Exchange, route: Route, caller: Caller) -> None:
        reading = self._own(self._handle_long(exchange, route, caller), "long body")
        # While it is read, the request holds nothing but its connection.
        reading.add_done_callback(lambda task: exchange.cut() if task.cancelled() else None)

    async def _handle_long(self, exchange: Exchange, route: Route, caller: Caller) -> None:
        request_id = self.ids.next()
        try:
            self._answer(exchange, await self._read_long(exchange, route, caller), request_id)
        except Exception as error:
            # If the client has left, its body cannot be read any more, and there is no one to answer.
            if not exchange.gone:
                self._refuse(exchange, error, request_id, caller)

    def _is_long(self, body: Body) -> bool:
        return len(body) > SHORT_BYTES and not is_plain(body, self.settings.json_values_max)

    def long_body(self, body: Body) -> LongBody:
        """For a body above SHORT_BYTES."""
        return self._long_bodies.of(body, self.settings.json_values_max)

    async def read_job(self, exchange: Exchange, route: Route, caller: Caller) -> Ask:
        """What a request that is answered later asks for. Raises the error to answer with."""
        # A job's path came in a body.
        expect_route(caller, exchange.head.path)
        return await self._read_long(exchange, route, caller)

    def begin_job(self, exchange: Exchange, ask: Ask, request_id: str, wait_max_s: float) -> None:
        """Serve it like every other request, but without heartbeats, and with more time to wait."""
        ask.heartbeat, ask.is_patient = Heartbeat.OFF, False
        self._begin(exchange, ask, request_id, replace(self.settings, wait_max_s=wait_max_s))

    def _answer(self, exchange: Exchange, ask: Ask, request_id: str) -> None:
        try:
            self._log.check_cooldown(ask.caller, ask.tenant, ask.client)
            if ask.keep_alive_s == 0 and self._has_left(exchange, ask, request_id):
                return
            self._begin(exchange, ask, request_id)
        except RateLimited as error:
            self._refuse(exchange, error, request_id, ask.caller, ask)

    def _has_left(self, exchange: Exchange, ask: Ask, request_id: str) -> bool:
        """Answer a request that only lets a model leave, if that is not loaded. False for every other one."""
        translation = ask.translation
        if translation is None or ask.rungs is not None:
            return False
        slots = self._loop.scheduler.view.slots_of(ask.entry.id)
        if any(slot.is_serving or slot.is_arriving for slot in slots) or (body := translation.if_cold()) is None:
            return False
        kind = translation.stream_type if ask.stream else JSON
        exchange.respond(200, [(b"content-type", kind), (b"x-request-id", request_id.encode())], body)
        return True

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
        if not is_hit:
            self._prefetch.waits(ask.entry)

    def _charge(self, exchange: Exchange, ask: Ask, charge: QuotaHold) -> None:
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
                charge.end(tokens_used(running))
            if running.bill is not None:
                settle(running.bill, running.record, running.relay)

    def refused(self, error: GreenroomError) -> None:
        """Count a request that never came to the scheduler."""
        self._log.refused(error)

    def count_refused(self, error: GreenroomError, head: Head, caller: Caller, ask: Ask | None = None) -> None:
        """Count it in the usage of its key and tenant; of its model if it was read so far."""
        model, asked = ("", head.asked or "") if ask is None else (ask.entry.base_id, ask.entry.public_id)
        tenant = self._reader.tenant_of(head, caller)
        self._log.count_refused(error, caller, tenant, client_named(head), model, asked)

    def check_cooldown(self, head: Head, caller: Caller) -> None:
        """Raises CoolingDown if the client that the headers name makes too many mistakes."""
        if self._log.are_cooled and (client := client_named(head)):
            self._log.check_cooldown(caller, self._reader.tenant_of(head, caller), client)

    def narrowed(self, head: Head, caller: Caller) -> Caller:
        """The caller, limited to the models that its profile allows."""
        return self._reader.narrowed(head, caller)

    def _refuse(
        self, exchange: Exchange, error: Exception, request_id: str, caller: Caller, ask: Ask | None = None
    ) -> None:
        if isinstance(error, GreenroomError):
            error = self._cooled(error, exchange.head, caller)
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

    def _cooled(self, error: GreenroomError, head: Head, caller: Caller) -> GreenroomError:
        """The error that is told instead of this one: a client that cools down is told nothing else."""
        try:
            self._log.check_cooldown(caller, self._reader.tenant_of(head, caller), client_named(head))
        except CoolingDown as cooling:
            return cooling
        return error

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


def _resolving(resolver: Resolver, wanted: NeedsDiskLookup) -> Callable[[], Awaitable[None]]:
    name, options, asker = wanted.name, wanted.options, wanted.asker

    async def resolve() -> None:
        await resolver.named(name, options, asker)

    return resolve
