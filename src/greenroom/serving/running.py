"""One request from its arrival to its last byte: granted, relayed, ended; or waiting with heartbeats until it can be.

Owns the order of steps for one request. A request for a ready model is sent on at once and continues by callbacks; a
task exists only while the request must wait. It ends at any point if the client leaves, an operator cuts it, or the
engine hangs or is lost. If the engine is lost before its first byte, the request is tried again, once: after the end of
its process, if that is ending.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final

from greenroom.config.schema import Heartbeat
from greenroom.core.events import RequestArrived
from greenroom.core.model import RequestId
from greenroom.errors import (
    BudgetPassed,
    EngineFault,
    EngineLost,
    EngineTimeout,
    GatewayBug,
    GreenroomError,
    ModelLoading,
    RateLimited,
    RemoteBudgetSpent,
)
from greenroom.http.body import Payload
from greenroom.http.engine_connection import Sink
from greenroom.http.exchange import Exchange
from greenroom.http.headers import Headers, build_request, response_headers
from greenroom.http.relays.relay import Relay, RelayOptions, RelayOutcome
from greenroom.http.relays.translated import ModelNameRewriter, TranslatingRelay
from greenroom.http.relays.tunnel import Tunnel
from greenroom.http.sse import HeartbeatKind, heartbeat
from greenroom.library.records import Version
from greenroom.runtime.loop import Tickets
from greenroom.runtime.prompt_slots import CachePin, PromptCacheSlots
from greenroom.runtime.remote.spending import Bill, SpendingMeter, settle
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.runtime.slots import EXIT_FOLLOWS_S, LiveSlot
from greenroom.serving import render
from greenroom.serving.ask import Ask, Settings, arrival
from greenroom.serving.ask_reader import AskReader
from greenroom.serving.buffered import BufferedRelay
from greenroom.serving.failover import BUSY, BUSY_IF_BROKEN, FailoverSink
from greenroom.serving.prefix_cache import PROMPTLESS_PATHS, expect_sole
from greenroom.serving.request_log import (
    NOT_KNOWN,
    TRAILER,
    WAIT,
    AnswerFacts,
    Served,
    model_header,
    unless_told,
    version_headers,
)
from greenroom.serving.routes import UPSTREAM, is_open
from greenroom.serving.sweep import RequestSweep
from greenroom.telemetry.activity import Record
from greenroom.telemetry.logs import get_logger

_log = get_logger("server")

_KINDS: Final = {Heartbeat.COMMENT: HeartbeatKind.COMMENT, Heartbeat.CHUNK: HeartbeatKind.CHUNK}
_SSE: Final = b"text/event-stream; charset=utf-8"
_STREAMED: Final[Headers] = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_OF_STREAMS: Final[Headers] = [(b"x-accel-buffering", b"no"), TRAILER]
# A timer may end a wait so much too early.
TIMER_EARLY_S: Final = 0.05
# An engine's own error text goes into our error up to this length.
SAID_MAX: Final = 2000


@dataclass(frozen=True, slots=True)
class RequestServices:
    """What all requests use. `ended` is called exactly once for each."""

    tickets: Tickets
    sweep: RequestSweep
    loop: SchedulerLoop
    reader: AskReader
    spawn: Callable[[Running], asyncio.Task[None]]
    ended: Callable[[Running, GreenroomError | None], None]


class Running(Served):
    """One request being served. The last `relay` is kept for its counts and its last bytes."""

    __slots__ = (
        "_beat_at",
        "_bytes_seen",
        "_failure",
        "_hung",
        "_is_over",
        "_moved_at",
        "_pin",
        "_settings",
        "_shared",
        "_task",
        "bill",
        "request_id",
    )

    def __init__(
        self, exchange: Exchange, ask: Ask, request_id: str, record: Record, settings: Settings, shared: RequestServices
    ) -> None:
        self.exchange = exchange
        self.ask = ask
        self.request_id = request_id
        self.record = record
        self.relay = None
        self.facts = None
        # What it is expected to cost at a provider; None if nothing is known of that.
        self.bill: Bill | None = None
        self._settings = settings
        self._shared = shared
        self._beat_at = self._moved_at = 0.0
        self._bytes_seen = -1
        self._hung = self._is_over = False
        # Why the last model of its task that was tried did not serve it.
        self._failure: GreenroomError | None = None
        # Its place among the prompts of its engine, where that has such places.
        self._pin: CachePin | None = None
        self._task: asyncio.Task[None] | None = None

    # --- the way of one request -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Ask for a slot. If one and a connection to it are free, send at once; else a task waits for them.

        Once it holds a ticket, the request ends by itself, whatever goes wrong.
        """
        shared = self._shared
        event = self._arrival(shared.loop.clock())
        self._beat_at = event.now + self._settings.heartbeat_after_s
        self.ticket = shared.tickets.arrive(event)
        shared.sweep.add(self)
        slot = self.ticket.slot
        try:
            if slot is None or not self._send_now(slot):
                self._go_on()
        except Exception as failure:
            self._end(self._told(failure))

    def _arrival(self, now: float) -> RequestArrived:
        ask = self.ask
        rungs = ask.rungs
        return arrival(
            self._settings,
            now,
            RequestId(self.request_id),
            (ask.entry.id,) if rungs is None else tuple(rungs.asks),
            ask.priority,
            ask.tenant,
            ask.is_patient,
            ask.budget_s,
            ask.keep_alive_s,
            None if rungs is None else rungs.choice,
        )

    def _send_now(self, slot: LiveSlot) -> bool:
        if self.ask.rungs is not None and not self._bind(slot):
            return False
        if slot.pool.idle_count == 0 or self.ask.job is not None or self.ask.remade is not None:
            return False
        if (long := self.ask.long) is not None and long.is_heavy:
            return False
        if slot.remote is not None:
            return False
        if slot.prompts is not None and (self.ask.spreads or not self._pinned(slot.prompts)):
            return False
        payload = self.ask.payload(None if self._pin is None else self._pin.fields)
        relay = self._new_relay(self._relayed)
        if not slot.pool.send_now(self._engine_head(len(payload)), payload, self._sink(relay)):
            self.relay = None
            return False
        return True

    def _relayed(self, relay: Relay) -> None:
        """The relay has ended. If the request is not over, a task goes on with it."""
        if relay.outcome is RelayOutcome.COMPLETE or relay.outcome is RelayOutcome.CLIENT_GONE:
            self._end(None)
        else:
            self._go_on()

    def _go_on(self) -> None:
        """Let a task wait for the slot or the connection. The request ends with the task."""
        # A waiting request holds only its body, which may be on disk.
        self.ask.drop_peeked()
        self._task = task = self._shared.spawn(self)
        # By callback: a task that is cancelled before its first step never enters its body.
        task.add_done_callback(self._stopped_waiting)
        self.exchange.on_gone = self._leave

    def _leave(self) -> None:
        """The client left while the task waits. While a relay runs, the relay notices it."""
        assert self._task is not None, "only a task waits"
        self._task.cancel()

    def _stopped_waiting(self, task: asyncio.Task[None]) -> None:
        """End the request of a cancelled task: its client is gone, or the loop is ending."""
        if task.cancelled():
            self.exchange.cut()
            if self.relay is not None:
                self.relay.stop()
            self._end(None)

    async def run(self) -> None:
        """The part that waits, until the request has an answer or an error."""
        error: GreenroomError | None = None
        try:
            await self._serve()
        except Exception as failure:
            error = self._told(failure)
        self._end(error)

    async def _serve(self) -> None:
        relay = self.relay
        while relay is None or await self._must_try_again(relay):
            slot = await self._granted()
            if self.ask.job is not None:
                await self.ask.job.starts(slot)
            if slot.prompts is not None and not self._pinned(slot.prompts):
                await self._wait_for_place(slot.prompts)
            if self._pin is not None and self._pin.erase:
                await slot.erase(self._pin.erase)
            if self.exchange.gone:
                return
            payload = await self._payload()
            try:
                if slot.remote is not None and slot.meter is not None:
                    await self._enter_cost(slot.meter, payload)
                head = self._engine_head(len(payload)) if slot.remote is None else self._remote_head(slot, payload)
            except RemoteBudgetSpent as spent:
                if not self._has_other(slot):
                    raise
                self._turn_away(spent)
                relay = None
                continue
            relay = self._new_relay(None)
            # A request that was cut meanwhile is stopped already.
            if relay.wanted:
                await slot.pool.send(head, payload, self._sink(relay))
            await relay.wait()
        if isinstance(relay, BufferedRelay) and not self.exchange.gone:
            await self._answer_anew(relay)

    async def _payload(self) -> Payload:
        ask, pinned, long = self.ask, None if self._pin is None else self._pin.fields, self.ask.long
        return ask.payload(pinned) if long is None else await long.in_thread(lambda: ask.payload(pinned))

    async def _granted(self) -> LiveSlot:
        """Wait for a slot. Of the models of a task, those at their limits are passed over."""
        while True:
            try:
                await self.ticket.wait(None)
            except EngineLost:
                if self.ask.rungs is None or self._failure is None:
                    raise
                # No other model of its task is left: the last one's own failure says more.
                raise self._failure from None
            slot = self.ticket.slot
            assert slot is not None
            if self.ask.rungs is None or self._bind(slot):
                return slot
            assert self._failure is not None
            if not self._has_other(slot, is_busy=True):
                raise self._failure
            self._turn_away(self._failure, was_busy=slot.remote is None)

    def _bind(self, slot: LiveSlot) -> bool:
        """Ask the model of a task that was granted. False if its own limits do not allow that now."""
        ask, model = self.ask, slot.entry.id
        rungs = ask.rungs
        assert rungs is not None
        if ask.charge is not None:
            try:
                ask.charge.serve_by(rungs.meters[model])
            except RateLimited as error:
                self._failure = error
                return False
        ask.bind(model)
        self.record.model = ask.entry.public_id
        return True

    def _sink(self, relay: Relay) -> Sink:
        """The relay; for a task behind one that holds failures back if another of its models can serve."""
        if not self._has_choice or not self._may_run_again():
            return relay
        return FailoverSink(relay, self._name, self._has_other_after)

    def _has_other_after(self, status: int) -> bool:
        slot = self.ticket.slot
        return slot is not None and self._has_other(slot, is_busy=status in self._busy_at(slot))

    def _busy_at(self, slot: LiveSlot) -> frozenset[int]:
        """The statuses by which its engine says that it has no room now."""
        return BUSY_IF_BROKEN if slot.is_unavailable(self._shared.loop.clock()) else BUSY

    def _has_other(self, slot: LiveSlot, *, is_busy: bool = False) -> bool:
        """True if another model of its task can serve it.

        Models of last resort do not count if this one is local and only busy.
        """
        rungs = self.ask.rungs
        if rungs is None:
            return False
        avoided = rungs.choice.last_resort if is_busy and slot.remote is None else ()
        loop = self._shared.loop
        return any(model not in avoided for model in loop.view.candidates_left(self.ticket.id, loop.clock()))

    def _turn_away(self, why: GreenroomError | None, *, was_busy: bool = False) -> None:
        """This model does not serve it: it waits for the next one of its task, or again."""
        self._failure = why
        self.record.state = "waiting"
        self._shared.tickets.lost(self.ticket, was_busy)

    async def _answer_anew(self, relay: BufferedRelay) -> None:
        assert self.ask.remade is not None
        self.exchange.on_gone = self._leave
        # The engine has done its part: the next request need not wait until the pictures are on disk.
        self._shared.tickets.close(self.ticket)
        status, headers, body = await self.ask.remade.remade(relay.status, relay.headers, relay.take())
        self.exchange.respond(status, response_headers(headers, self._extra_headers(), unless_told(self.ask)), body)

    async def _must_try_again(self, relay: Relay) -> bool:
        """True if the engine was lost before its first byte. Raises the error if the relay failed otherwise."""
        ticket, exchange = self.ticket, self.exchange
        ticket.on_cut(None)
        if relay.outcome is RelayOutcome.COMPLETE or relay.outcome is RelayOutcome.CLIENT_GONE:
            return False
        if relay.outcome is RelayOutcome.STOPPED:
            raise self._stopped()
        if relay.outcome is RelayOutcome.BAD_HEAD:
            raise self._bad_head(relay)
        if relay.outcome is not RelayOutcome.ENGINE_LOST or not relay.before_first_byte or not self._may_run_again():
            raise relay.error or EngineLost(f"The engine of {self._name} was lost.")
        if exchange.gone:
            return False
        exchange.on_gone = self._leave
        assert ticket.slot is not None
        self._unpin()
        if self.bill is not None:
            settle(self.bill, self.record, relay)
            self.bill = None
        if not relay.status and (check := ticket.slot.check()) is not None:
            # A task turns to its next model, and need not wait until this one can be loaded again.
            await ticket.wait_for(check, EXIT_FOLLOWS_S if self._has_choice else inf)
        self._note_status(relay)
        is_local_task = self.ask.rungs is not None and ticket.slot.remote is None
        self._turn_away(relay.error, was_busy=is_local_task and relay.status in self._busy_at(ticket.slot))
        return True

    @property
    def _has_choice(self) -> bool:
        """True if several models can serve it."""
        rungs = self.ask.rungs
        return rungs is not None and len(rungs.asks) > 1

    def _note_status(self, relay: Relay) -> None:
        """Note whether the engine was available."""
        slot = self.ticket.slot
        if slot is not None and relay.status and (relay.status == 503 or slot.unavailable_since is not None):
            is_at_work = self._shared.tickets.works_on_another(self.ticket)
            slot.answered(relay.status, self._shared.loop.clock(), is_at_work=is_at_work)

    def _pinned(self, prompts: PromptCacheSlots) -> bool:
        """Take a place among the prompts of its engine. False if there is none now. Raises NotAllowed."""
        if self._pin is None:
            owner = self.ask.scope.owner
            if self.ask.route.is_promptless:
                return True
            if self.ask.route is UPSTREAM:
                is_post = self.exchange.head.method == b"POST"
                if not is_post or is_open(self.ask.target.partition(b"?")[0], PROMPTLESS_PATHS):
                    return True
                expect_sole(prompts, owner, self._name)
            self._pin = prompts.pin(owner, spreads=self.ask.spreads)
        return self._pin is not None

    async def _wait_for_place(self, prompts: PromptCacheSlots) -> None:
        owner = self.ask.scope.owner
        self._pin = await prompts.place(owner, spreads=self.ask.spreads)
        if self.ask.route is UPSTREAM and self._pin.index is not None:
            # Another owner came meanwhile, and this path cannot be pinned.
            expect_sole(prompts, owner, self._name)

    def _unpin(self) -> None:
        """Give its place back, while it still holds its slot."""
        slot, pin, self._pin = self.ticket.slot, self._pin, None
        if pin is not None and slot is not None and slot.prompts is not None:
            slot.prompts.release(pin)

    def _may_run_again(self) -> bool:
        return self.ask.job is None or self.ask.job.may_run_again

    def _new_relay(self, on_done: Callable[[Relay], None] | None) -> Relay:
        self.relay = relay = self._relay_for(on_done)
        self.record.state = "serving"
        self._bytes_seen, self._moved_at = -1, self.ticket.granted_at
        self.ticket.on_cut(relay.stop)
        return relay

    def _relay_for(self, on_done: Callable[[Relay], None] | None) -> Relay:
        """The kind of relay that this answer needs."""
        ask, exchange = self.ask, self.exchange
        if exchange.head.upgrade is not None:
            return Tunnel(exchange, RelayOptions(self._extra_headers()), on_done=on_done)
        if (remade := ask.remade) is not None:
            return BufferedRelay(exchange, remade.body(), remade.bytes_max, on_done=on_done)
        options, started = self._relay_options(), exchange.started
        if ask.translation is not None:
            return TranslatingRelay(exchange, ask.translation, options, committed=started, on_done=on_done)
        told, name = ask.entry.engine_name, ask.asked_as if ask.entry.is_adhoc else self._name
        if told != name:
            return ModelNameRewriter(exchange, told, name, options, committed=started, on_done=on_done)
        return Relay(exchange, options, committed=started, on_done=on_done)

    def _relay_options(self) -> RelayOptions:
        ask = self.ask
        ends_with_facts = ask.wants_facts and ask.route.is_text and ask.route.shape.has_comments
        # Only the comment tells the wait.
        wait_ms = self._wait_ms() if ends_with_facts else 0
        self.facts = facts = AnswerFacts(ask.entry.engine, ask.stream, wait_ms) if ask.route.is_text else None
        return RelayOptions(
            self._extra_headers(),
            unless_told(ask),
            drop_usage_event=ask.translation is None and ask.drop_usage,
            read_facts=None if facts is None or ask.stream else facts.headers,
            last_words=facts.comment if facts is not None and ends_with_facts else None,
            read_trailers=None if facts is None else facts.trailers,
        )

    def _extra_headers(self) -> Headers:
        ticket = self.ticket
        headers: Headers = [(b"x-request-id", self.request_id.encode()), (WAIT, b"%d" % self._wait_ms())]
        if self.ask.stream:
            headers += _OF_STREAMS
        if self.ask.rungs is not None:
            headers.append(model_header(self._name))
        slot = ticket.slot
        if slot is not None and (version := slot.entry.version) is not None:
            self.record.model_version, self.record.model_repo_id = version.number, version.repo_id
            headers += version_headers(version, to_operator=self.ask.to_operator)
        return headers

    @property
    def _name(self) -> str:
        return self.ask.entry.public_id

    def _version(self) -> Version | None:
        """The version that answers, or that would answer now."""
        slot = self.ticket.slot
        return self._shared.reader.version_of(self.ask.entry.id) if slot is None else slot.entry.version

    def _wait_ms(self) -> int:
        """How long it waited for its slot, or has waited so far."""
        until = self.ticket.granted_at or self._shared.loop.clock()
        return max(0, round((until - self.ticket.arrived) * 1000))

    async def _enter_cost(self, meter: SpendingMeter, payload: Payload) -> None:
        """Enter what it may cost. Raises RemoteBudgetSpent."""
        form_n, long = self.ask.form_n, self.ask.long
        bill = (
            meter.bill(payload, form_n) if long is None else await long.in_thread(lambda: meter.bill(payload, form_n))
        )
        meter.begin(bill)
        await meter.confirm(bill)
        self.bill = bill

    def _remote_head(self, slot: LiveSlot, payload: Payload) -> bytes:
        assert slot.remote is not None
        head, request_id = self.exchange.head, self.request_id.encode()
        return slot.remote.head(head.method, self.ask.target, head.headers, len(payload), request_id)

    def _engine_head(self, length: int) -> bytes:
        head = self.exchange.head
        return build_request(
            head.method,
            self.ask.target,
            head.headers,
            host=b"localhost",
            length=length,
            request_id=self.request_id.encode(),
            allowed=self._settings.forward_headers,
            upgrade=head.upgrade,
            ours=self.ask.cache_headers,
        )

    # --- how it ends ------------------------------------------------------------------------------------------------

    def _end(self, error: GreenroomError | None) -> None:
        """Exactly once: answer an error if there is one, release the slot, record the request."""
        if self._is_over:
            return
        self._is_over = True
        self.exchange.on_gone = None
        try:
            if error is not None:
                self._tell(error)
        finally:
            try:
                self._unpin()
                self._shared.sweep.remove(self)
                if self.relay is not None:
                    self._note_status(self.relay)
                self._shared.tickets.close(self.ticket)
                self._shared.ended(self, error)
            finally:
                if self.ask.job is not None:
                    self.ask.job.ended(error)

    def _told(self, failure: Exception) -> GreenroomError:
        """The error that the caller gets."""
        if isinstance(failure, ModelLoading) and self._is_over_budget():
            return BudgetPassed(f"The time given for this answer is over. {failure.public}", beside=failure.beside)
        if isinstance(failure, GreenroomError):
            return failure
        _log.bug("request broke", failure, request=self.request_id)
        return GatewayBug("Something went wrong in the gateway.")

    def _is_over_budget(self) -> bool:
        """True once its budget has passed, by which its wait ends. A request that is refused at once has not waited."""
        budget_s = self.ask.budget_s
        if budget_s is None:
            return False
        return self._shared.loop.clock() - self.ticket.arrived >= budget_s - min(TIMER_EARLY_S, budget_s / 2)

    def _tell(self, error: GreenroomError) -> None:
        """Send the error: as a status if nothing was sent, as an event in a stream, else by cutting the answer."""
        exchange, relay = self.exchange, self.relay
        if exchange.gone or exchange.finished:
            return
        if not exchange.started:
            status, headers, body = render.response(
                error, self.request_id, to_operator=self.ask.to_operator, dialect=self.ask.route.dialect
            )
            headers.append((WAIT, b"%d" % self._wait_ms()))
            headers += version_headers(self._version(), to_operator=self.ask.to_operator)
            exchange.respond(status, headers, body)
            return
        translation, sent = self.ask.translation, b"" if relay is None else relay.tail()
        event = render.error_event(
            error,
            self.request_id,
            to_operator=self.ask.to_operator,
            dialect=self.ask.route.dialect,
            number=0 if translation is None else translation.next_number(sent),
        )
        if relay is not None:
            relay.fail(event)
        else:
            exchange.write(event)
            exchange.finish()

    def _bad_head(self, relay: Relay) -> GreenroomError:
        """Heartbeats began the stream but the engine does not answer with one: its text goes into the error."""
        said = relay.bad_body[:SAID_MAX].decode("utf-8", "replace")
        return _EngineSaid(f"{self._name} answered {relay.status}.", details=said, status=relay.status)

    def _stopped(self) -> GreenroomError:
        if self._hung:
            return EngineTimeout(f"{self._name} sent nothing for {self._settings.answer_idle_max_s:g} s.")
        return self.ticket.cut_error or EngineLost(f"The answer of {self._name} was ended.")

    # --- what the sweep looks at -------------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        relay = self.relay
        if self.ask.is_patient and now >= self._beat_at and self._is_waiting_for_data(relay):
            self._beat(now)
        if relay is not None and relay.outcome is None:
            self._check_progress(relay, now)

    def _is_waiting_for_data(self, relay: Relay | None) -> bool:
        return relay is None or relay.outcome is not None or relay.first_data_at is None

    def _beat(self, now: float) -> None:
        """Send a heartbeat. The first one commits the answer to 200 and a stream."""
        exchange, relay = self.exchange, self.relay
        if exchange.gone or exchange.finished or exchange.paused:
            return
        self._beat_at = now + self._settings.heartbeat_every_s
        if not exchange.started:
            translation = self.ask.translation
            kind = _SSE if translation is None else translation.stream_type
            headers = [(b"content-type", kind), *_STREAMED, TRAILER, (b"x-request-id", self.request_id.encode())]
            # Which model of a task will serve it is not known yet.
            cache = unless_told(self.ask) if self.ask.rungs is None else NOT_KNOWN
            exchange.start(200, headers + (cache or []), None)
            if relay is not None and relay.outcome is None:
                relay.committed = True
        elif relay is not None and not relay.at_boundary:
            return
        exchange.write(self._heartbeat())

    def _heartbeat(self) -> bytes:
        position, eta_s = self._shared.loop.outlook(self.request_id)
        return heartbeat(
            _KINDS[self.ask.heartbeat],
            model=self.ask.asked_as,
            position=position,
            eta_s=eta_s,
            shape=self.ask.route.shape,
            stream_id=self.request_id,
            created=int(time.time()),
        )

    def _check_progress(self, relay: Relay, now: float) -> None:
        """An engine that sends nothing for too long is hung, unless the client does not read.

        The first byte of a provider has its own time limit, after which another model of a task is asked.
        """
        total, slot = relay.total_bytes, self.ticket.slot
        tunnelled = isinstance(relay, Tunnel) and relay.is_open
        is_begun = relay.status != 0 or slot is None or slot.remote is None
        if total != self._bytes_seen or self.exchange.paused or tunnelled or not is_begun:
            self._bytes_seen, self._moved_at = total, now
        elif 0 < self._settings.answer_idle_max_s < now - self._moved_at:
            self._hung = True
            relay.stop()


class _EngineSaid(EngineFault):
    """An engine's own error, sent inside a stream, with its status and its text."""

    details_are_the_callers = True

    def __init__(self, message: str, *, details: str, status: int) -> None:
        super().__init__(message, details=details)
        self.status = status if 400 <= status <= 599 else 502  # type: ignore[misc]
