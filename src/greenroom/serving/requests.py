"""All requests to models: each is read, begun, and when it has ended counted and recorded.

`read.py` reads what a request asks for; `serve.py` serves one request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from greenroom.access.keys import Caller
from greenroom.access.limits import QuotaHold
from greenroom.config.schema import Config
from greenroom.core.model import RequestId
from greenroom.dialects.dialect import Route
from greenroom.dialects.translation import JSON
from greenroom.errors import CoolingDown, GatewayBug, GreenroomError, RateLimited
from greenroom.http.body import Body
from greenroom.http.exchange import Exchange, RequestIds
from greenroom.http.request import Head
from greenroom.runtime.loop import Tickets
from greenroom.runtime.moves.admission import Prefetch
from greenroom.runtime.resolver import NeedsDiskLookup, Resolver
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.serving import render
from greenroom.serving.admitted import Admitted
from greenroom.serving.answer_facts import version_headers
from greenroom.serving.answers import LaterAnswer
from greenroom.serving.body.long_body import SHORT_BYTES, LongBodies, LongBody, Pending, is_plain
from greenroom.serving.read import Reader, Reading
from greenroom.serving.request import Request, Settings
from greenroom.serving.request_log import RequestLog
from greenroom.serving.routes import expect_route
from greenroom.serving.serve import Serving, Shared
from greenroom.serving.sweep import RequestSweep
from greenroom.telemetry.logs import get_logger

_log: Final = get_logger("server")


class Inference:
    def __init__(
        self,
        reader: Reader,
        loop: SchedulerLoop,
        tickets: Tickets,
        log: RequestLog,
        prefetch: Prefetch,
    ) -> None:
        self._reader = reader
        self._loop = loop
        self._log = log
        self.settings = reader.settings
        self._prefetch = prefetch
        self._tickets = tickets
        self._long_bodies = LongBodies()
        self.ids = RequestIds()
        self.sweep = RequestSweep(reader.settings, loop)
        self._shared = Shared(tickets, loop, self.sweep, log, reader)

    def configure(self, config: Config) -> None:
        """Apply a changed configuration to all requests that begin from now on."""
        self._reader.configure(config)
        self.settings = self._reader.settings
        self.sweep.configure(self.settings)

    # --- at the headers ---------------------------------------------------------------------------------------------

    def admitted(self, said: dict[bytes, bytes], route: Route | None, caller: Caller) -> Admitted:
        return Admitted.of(said, route, caller, self._reader.tenants)

    def check_cooldown(self, admitted: Admitted) -> None:
        """Raises CoolingDown if the client that the headers name makes too many mistakes."""
        if self._log.are_cooled and admitted.client:
            self._log.check_cooldown(admitted.caller, admitted.tenant, admitted.client)

    def check_open(self, head: Head, admitted: Admitted) -> None:
        """Raises NotAllowed where this path of an engine is not open to a key without `admin`."""
        self._reader.check_open(head, self._reader.narrowed(admitted))

    def narrowed(self, admitted: Admitted) -> Caller:
        """The caller, limited to the models that its profile allows."""
        return self._reader.narrowed(admitted)

    def refused(self, error: GreenroomError) -> None:
        """Count a request that never came to the scheduler."""
        self._log.refused(error)

    def count_refused(
        self, error: GreenroomError, admitted: Admitted, reading: Reading | None = None, request: Request | None = None
    ) -> None:
        """Count it in the usage of its key and tenant; of its model and its client if it was read so far."""
        client, asked = (admitted.client, "") if reading is None else (reading.client, reading.asked)
        model = ""
        if request is not None:
            model, asked = request.candidates[0].entry.base_id, request.candidates[0].name
        self._log.count_refused(error, admitted.caller, admitted.tenant, client, model, asked)

    # --- when its body has come -------------------------------------------------------------------------------------

    def handle(self, exchange: Exchange, admitted: Admitted, route: Route) -> None:
        """Answer this request. Returns at once."""
        reading = self.reading(exchange, admitted, route)
        if route.form or self._is_long(exchange.body):
            self._begin_long(reading)
            return
        try:
            self._answer(reading, reading.read())
        except NeedsDiskLookup as wanted:
            self._shared.spawn(self._handle_resolved(reading, wanted), reading.id)
        except Exception as error:
            self._refuse(reading, error)

    def _begin_long(self, reading: Reading) -> None:
        work, exchange = self._shared.spawn(self._handle_long(reading), "long body"), reading.exchange
        # While it is read, the request holds nothing but its connection.
        work.add_done_callback(lambda task: exchange.cut() if task.cancelled() else None)

    def reading(self, exchange: Exchange, admitted: Admitted, route: Route, job: LaterAnswer | None = None) -> Reading:
        return Reading(self._reader, exchange, admitted, route, RequestId(self.ids.next()), job)

    async def read(self, reading: Reading) -> Request:
        """A form, or any body however long it is. Other requests are served meanwhile. Raises the error to answer."""
        if reading.route.form:
            return await reading.read_form()
        body = reading.exchange.body
        long = self.long_body(body) if self._is_long(body) else None
        is_resolved = False
        while True:
            # Not the exception itself, which would hold this frame, and this frame it.
            try:
                return reading.read(long)
            except Pending as pending:
                step = pending.step
            except NeedsDiskLookup as wanted:
                if is_resolved:
                    raise
                is_resolved, step = True, _resolving(self._reader.resolver, wanted)
            await step()

    async def _handle_resolved(self, reading: Reading, wanted: NeedsDiskLookup) -> None:
        """Answer a request for a model that was not known yet."""
        try:
            await _resolving(self._reader.resolver, wanted)()
            self._answer(reading, reading.read())
        except Exception as error:
            self._refuse(reading, error)

    async def _handle_long(self, reading: Reading) -> None:
        try:
            self._answer(reading, await self.read(reading))
        except Exception as error:
            # If the client has left, its body cannot be read any more, and there is no one to answer.
            if not reading.exchange.gone:
                self._refuse(reading, error)

    def _is_long(self, body: Body) -> bool:
        return len(body) > SHORT_BYTES and not is_plain(body, self.settings.json_values_max)

    def long_body(self, body: Body) -> LongBody:
        """For a body above SHORT_BYTES."""
        return self._long_bodies.of(body, self.settings.json_values_max)

    async def read_job(self, reading: Reading) -> Request:
        """What a request that is answered later asks for. Raises the error to answer with."""
        # A job's path came in a body.
        expect_route(reading.admitted.caller, reading.exchange.head.path)
        return await self.read(reading)

    def begin_job(self, exchange: Exchange, request: Request, wait_max_s: float) -> None:
        """Serve it like every other request, but with more time to wait."""
        self._begin(exchange, request, replace(self.settings, wait_max_s=wait_max_s))

    def _answer(self, reading: Reading, request: Request) -> None:
        try:
            self._log.check_cooldown(request.caller, request.tenant, request.client)
            if request.keep_alive_s == 0 and self._has_left(reading.exchange, request):
                return
            self._begin(reading.exchange, request, self.settings)
        except RateLimited as error:
            self._refuse(reading, error, request)

    def _has_left(self, exchange: Exchange, request: Request) -> bool:
        """Answer a request that only lets a model leave, if that is not loaded. False for every other one."""
        translation = request.candidates[0].translation
        if translation is None or request.choice is not None:
            return False
        slots = self._loop.scheduler.view.slots_of(request.candidates[0].entry.id)
        if any(slot.is_serving or slot.is_arriving for slot in slots) or (body := translation.if_cold()) is None:
            return False
        kind = translation.stream_type if request.stream else JSON
        exchange.respond(200, [(b"content-type", kind), (b"x-request-id", request.id.encode())], body)
        return True

    def _begin(self, exchange: Exchange, request: Request, settings: Settings) -> None:
        if exchange.gone:
            return
        hold = request.hold
        if hold is not None:
            self._charge(exchange, request, hold)
        try:
            record = self._log.begin(request)
            serving = Serving(exchange, request, record, settings, self._shared)
            serving.begin()
        except BaseException:
            # It never came to the scheduler, so it does not end.
            if hold is not None:
                hold.end(0)
            raise
        is_hit = serving.ticket.granted_at == serving.ticket.arrived
        self._log.looked_up(request, is_hit)
        if not is_hit:
            self._prefetch.waits(request.candidates[0].entry)

    def _charge(self, exchange: Exchange, request: Request, hold: QuotaHold) -> None:
        """Count what the body tells: model, tokens, a place among the requests at once. Raises RateLimited."""
        # An answer that refuses it tells other numbers: those of the limit that it exceeds.
        exchange.head.answer_lines = None
        hold.begin(is_counted=request.job is not None)
        exchange.head.answer_lines = hold.answer_lines

    def _refuse(self, reading: Reading, error: Exception, request: Request | None = None) -> None:
        admitted, exchange = reading.admitted, reading.exchange
        if isinstance(error, GreenroomError):
            error = self._cooled(error, reading)
            self.refused(error)
        else:
            _log.bug("request broke", error, request=reading.id)
            error = GatewayBug("Something went wrong in the gateway.")
        self.count_refused(error, admitted, reading, request)
        if not exchange.started and not exchange.gone:
            to_operator = admitted.to_operator
            status, headers, body = render.response(
                error, reading.id, to_operator=to_operator, dialect=reading.route.dialect
            )
            if reading.asked:
                headers += version_headers(self._reader.version_of(reading.asked), to_operator=to_operator)
            exchange.respond(status, headers, body)

    def _cooled(self, error: GreenroomError, reading: Reading) -> GreenroomError:
        """The error that is told instead of this one: a client that cools down is told nothing else."""
        try:
            self._log.check_cooldown(reading.admitted.caller, reading.admitted.tenant, reading.client)
        except CoolingDown as cooling:
            return cooling
        return error

    @property
    def running(self) -> int:
        return len(self._tickets.open)

    async def finished(self) -> None:
        """Wait until every request has ended."""
        await self._loop.until(lambda: not self._tickets.open)
        while self._shared.tasks:
            await asyncio.wait(self._shared.tasks)


def _resolving(resolver: Resolver, wanted: NeedsDiskLookup) -> Callable[[], Awaitable[None]]:
    name, options, asker = wanted.name, wanted.options, wanted.asker

    async def resolve() -> None:
        await resolver.named(name, options, asker)

    return resolve
