"""One request from its arrival to its last byte: granted, sent, ended; or waiting with heartbeats until it can be.

Owns the order of steps for one request. A request for a ready model is sent on at once and continues by callbacks; a
task exists only while the request must wait. It ends at any point if the client leaves, an operator cuts it, or the
engine hangs or is lost. If the engine is lost before its first byte, the request is tried again, once: after the end of
its process, if that is ending. A request for a task turns to the next model that can serve it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Final

from greenroom.config.schema import Heartbeat
from greenroom.dialects.heartbeat import HeartbeatKind, heartbeat
from greenroom.errors import (
    BudgetPassed,
    EngineLost,
    GatewayBug,
    GreenroomError,
    ModelLoading,
    RateLimited,
    RemoteBudgetSpent,
)
from greenroom.http.exchange import Exchange
from greenroom.http.headers import Headers, response_headers
from greenroom.http.relays.relay import Relay, RelayOutcome
from greenroom.library.records import Version
from greenroom.runtime.loop import Tickets
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.runtime.slots import LiveSlot
from greenroom.serving import render
from greenroom.serving.answer_facts import NOT_KNOWN, TRAILER, WAIT, unless_told, version_headers, wait_ms
from greenroom.serving.attempt import Attempt
from greenroom.serving.buffered import BufferedRelay
from greenroom.serving.read import Reader
from greenroom.serving.request import Request, Settings
from greenroom.serving.request_log import RequestLog, Served, tokens_used
from greenroom.serving.sweep import RequestSweep
from greenroom.telemetry.activity import Record
from greenroom.telemetry.logs import get_logger

_log: Final = get_logger("server")

_KINDS: Final = {Heartbeat.COMMENT: HeartbeatKind.COMMENT, Heartbeat.CHUNK: HeartbeatKind.CHUNK}
_SSE: Final = b"text/event-stream; charset=utf-8"
_STREAMED: Final[Headers] = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
# A timer may end a wait so much too early.
TIMER_EARLY_S: Final = 0.05


class Shared:
    """What all requests use while they are served, and the tasks of those that wait."""

    def __init__(
        self, tickets: Tickets, loop: SchedulerLoop, sweep: RequestSweep, log: RequestLog, reader: Reader
    ) -> None:
        self.tickets: Final = tickets
        self.loop: Final = loop
        self.sweep: Final = sweep
        self.log: Final = log
        self.reader: Final = reader
        self.tasks: Final[set[asyncio.Task[None]]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


class Serving(Served):
    __slots__ = ("_beat_at", "_failure", "_is_over", "_settings", "_shared", "_task")

    def __init__(
        self, exchange: Exchange, request: Request, record: Record, settings: Settings, shared: Shared
    ) -> None:
        self.exchange = exchange
        self.request = request
        self.record = record
        self.candidate = request.candidates[0]
        self.attempt = None
        self._settings: Final = settings
        self._shared: Final = shared
        self._beat_at = 0.0
        self._is_over = False
        # Why the last model that was tried did not serve it.
        self._failure: GreenroomError | None = None
        self._task: asyncio.Task[None] | None = None

    # --- the way of one request -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Ask for a slot. If one and a connection to it are free, send at once; else a task waits for them.

        Once it holds a ticket, the request ends by itself, whatever goes wrong.
        """
        shared = self._shared
        event = self.request.arrival(shared.loop.clock(), self._settings)
        self._beat_at = event.now + self._settings.heartbeat_after_s
        self.ticket = shared.tickets.arrive(event)
        shared.sweep.add(self)
        slot = self.ticket.slot
        try:
            if slot is None or not self._send_now(slot):
                self._go_on()
        except Exception as failure:
            self._end(self._told(failure))

    def _send_now(self, slot: LiveSlot) -> bool:
        attempt = self._attempt_at(slot)
        try:
            self._use(attempt)
        except RateLimited:
            # Of this model of a task alone: the next one may serve it.
            return False
        return attempt.send_now(self._relayed)

    def _attempt_at(self, slot: LiveSlot) -> Attempt:
        request = self.request
        candidate = request.candidates[0] if request.choice is None else request.candidate(slot.entry.id)
        return Attempt(
            self.exchange, request, candidate, self.ticket, slot, self.record, self._settings, self._shared.tickets
        )

    def _use(self, attempt: Attempt) -> None:
        """Have this one serve the request. Raises RateLimited if the limits of its model do not allow that now."""
        request, candidate = self.request, attempt.candidate
        if request.choice is not None:
            if request.hold is not None:
                request.hold.serve_by(candidate.quota)
            self.record.model = candidate.name
        self.candidate, self.attempt = candidate, attempt

    def _relayed(self, relay: Relay) -> None:
        """The relay has ended. If the request is not over, a task goes on with it."""
        if relay.outcome is RelayOutcome.COMPLETE or relay.outcome is RelayOutcome.CLIENT_GONE:
            self._end(None)
        else:
            self._go_on()

    def _go_on(self) -> None:
        """Let a task wait for the slot or the connection. The request ends with the task."""
        # A waiting request holds only its body, which may be on disk.
        self.request.release()
        self._task = task = self._shared.spawn(self._run(), self.request.id)
        # By callback: a task that is cancelled before its first step never enters its body.
        task.add_done_callback(self._stopped_waiting)
        self.exchange.listener = self

    # What the client does while the task waits. While a relay runs, the relay listens.

    def client_gone(self) -> None:
        assert self._task is not None, "only a task waits"
        self._task.cancel()

    def client_paused(self) -> None:
        """Heartbeats see `exchange.paused`."""

    def client_resumed(self) -> None:
        """The next heartbeat is sent."""

    def _stopped_waiting(self, task: asyncio.Task[None]) -> None:
        """End the request of a cancelled task: its client is gone, or the loop is ending."""
        if task.cancelled():
            self.exchange.cut()
            if (relay := self.relay) is not None:
                relay.stop()
            self._end(None)

    async def _run(self) -> None:
        """The part that waits, until the request has an answer or an error."""
        error: GreenroomError | None = None
        try:
            await self._serve()
        except Exception as failure:
            error = self._told(failure)
        self._end(error)

    async def _serve(self) -> None:
        while True:
            attempt = await self._granted() if self.attempt is None else self.attempt
            try:
                relay = await attempt.send()
            except RemoteBudgetSpent as spent:
                if not attempt.has_other():
                    raise
                self._turn_away(spent)
                continue
            if relay is None or not attempt.was_lost(relay):
                break
            self.exchange.listener = self
            attempt.release()
            attempt.settle()
            await attempt.process_checked(relay)
            self._turn_away(relay.error, was_busy=attempt.was_busy(relay))
        if isinstance(relay, BufferedRelay) and not self.exchange.gone:
            await self._answer_anew(attempt, relay)

    async def _granted(self) -> Attempt:
        """Wait for a slot. Of the models of a task, those at their limits are passed over."""
        while True:
            try:
                await self.ticket.wait(None)
            except EngineLost:
                if self.request.choice is None or self._failure is None:
                    raise
                # No other model of its task is left: the last one's own failure says more.
                raise self._failure from None
            slot = self.ticket.slot
            assert slot is not None
            attempt = self._attempt_at(slot)
            try:
                self._use(attempt)
            except RateLimited as limited:
                if not attempt.has_other(is_busy=True):
                    raise
                self._turn_away(limited, was_busy=not slot.is_remote)
            else:
                return attempt

    def _turn_away(self, why: GreenroomError | None, *, was_busy: bool = False) -> None:
        """This model does not serve it: it waits for the next one of its task, or again."""
        self.attempt, self._failure = None, why
        self.record.state = "waiting"
        self._shared.tickets.lost(self.ticket, was_busy)

    async def _answer_anew(self, attempt: Attempt, relay: BufferedRelay) -> None:
        remade, exchange = attempt.candidate.remade, self.exchange
        assert remade is not None
        exchange.listener = self
        # The engine has done its part: the next request need not wait until the pictures are on disk.
        self._shared.tickets.close(self.ticket)
        status, headers, body = await remade.remade(relay.status, relay.headers, relay.take())
        default_headers = unless_told(self.request.route, attempt.candidate)
        exchange.respond(status, response_headers(headers, attempt.headers(), default_headers), body)

    # --- how it ends ------------------------------------------------------------------------------------------------

    def _end(self, error: GreenroomError | None) -> None:
        """Exactly once: answer an error if there is one, release the slot, record the request."""
        if self._is_over:
            return
        self._is_over = True
        self.exchange.listener = None
        shared, request, attempt = self._shared, self.request, self.attempt
        try:
            if error is not None:
                self._tell(error)
        finally:
            try:
                if attempt is not None:
                    attempt.release()
                shared.sweep.remove(self)
                shared.tickets.close(self.ticket)
                shared.log.end(self, error)
            finally:
                if request.hold is not None:
                    request.hold.end(tokens_used(self))
                if attempt is not None:
                    attempt.settle()
                if request.job is not None:
                    request.job.ended(error)

    def _told(self, failure: Exception) -> GreenroomError:
        """The error that the caller gets."""
        if isinstance(failure, ModelLoading) and self._is_over_budget():
            return BudgetPassed(f"The time given for this answer is over. {failure.public}", beside=failure.beside)
        if isinstance(failure, GreenroomError):
            return failure
        _log.bug("request broke", failure, request=self.request.id)
        return GatewayBug("Something went wrong in the gateway.")

    def _is_over_budget(self) -> bool:
        """True once its budget has passed, by which its wait ends. A request that is refused at once has not waited."""
        budget_s = self.request.budget_s
        if budget_s is None:
            return False
        return self._shared.loop.clock() - self.ticket.arrived >= budget_s - min(TIMER_EARLY_S, budget_s / 2)

    def _tell(self, error: GreenroomError) -> None:
        """Send the error: as a status if nothing was sent, as an event in a stream, else by cutting the answer."""
        exchange, relay, request = self.exchange, self.relay, self.request
        if exchange.gone or exchange.finished:
            return
        if not exchange.started:
            status, headers, body = render.response(
                error, request.id, to_operator=request.to_operator, dialect=request.route.dialect
            )
            headers.append((WAIT, b"%d" % wait_ms(self.ticket, self._shared.loop.clock())))
            headers += version_headers(self._version(), to_operator=request.to_operator)
            exchange.respond(status, headers, body)
            return
        translation, sent = self.candidate.translation, b"" if relay is None else relay.tail()
        event = render.error_event(
            error,
            request.id,
            to_operator=request.to_operator,
            dialect=request.route.dialect,
            number=0 if translation is None else translation.next_number(sent),
        )
        if relay is not None:
            relay.fail(event)
        else:
            exchange.write(event)
            exchange.finish()

    def _version(self) -> Version | None:
        """The version that answers, or that would answer now."""
        slot = self.ticket.slot
        return self._shared.reader.version_of(self.candidate.entry.id) if slot is None else slot.entry.version

    # --- what the sweep looks at -------------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        attempt, relay = self.attempt, self.relay
        if relay is not None and relay.outcome is not None:
            # It has ended, and the request goes on.
            relay = None
        if now >= self._beat_at and self.request.is_patient and (relay is None or relay.first_data_at is None):
            self._beat(now, relay)
        if attempt is not None and relay is not None:
            attempt.check_progress(relay, now)

    def _beat(self, now: float, relay: Relay | None) -> None:
        """Send a heartbeat. The first one commits the answer to 200 and a stream."""
        exchange = self.exchange
        if exchange.gone or exchange.finished or exchange.paused:
            return
        self._beat_at = now + self._settings.heartbeat_every_s
        if not exchange.started:
            self._commit()
            if relay is not None:
                relay.committed = True
        elif relay is not None and not relay.at_boundary:
            return
        exchange.write(self._heartbeat())

    def _commit(self) -> None:
        request, translation = self.request, self.candidate.translation
        kind = _SSE if translation is None else translation.stream_type
        headers = [(b"content-type", kind), *_STREAMED, TRAILER, (b"x-request-id", request.id.encode())]
        # Which model of a task will serve it is not known yet.
        cache = unless_told(request.route, self.candidate) if request.choice is None else NOT_KNOWN
        self.exchange.start(200, headers + (cache or []), None)

    def _heartbeat(self) -> bytes:
        request = self.request
        position, eta_s = self._shared.loop.outlook(request.id)
        return heartbeat(
            _KINDS[request.heartbeat],
            model=request.asked_as,
            position=position,
            eta_s=eta_s,
            shape=request.route.shape,
            stream_id=request.id,
            created=int(time.time()),
        )
