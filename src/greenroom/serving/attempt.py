"""One model at one slot: from the grant of the slot until its answer has ended, or has come to nothing.

Owns what the engine is sent and by which relay its answer goes to the client; a place among the engine's prompts; what
a provider may charge; and whether the engine hangs. Which model is tried next is decided by `serve.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Final

from greenroom.errors import EngineFault, EngineLost, EngineTimeout, GreenroomError
from greenroom.http.body import Payload
from greenroom.http.engine_connection import Sink
from greenroom.http.exchange import Exchange
from greenroom.http.headers import Headers
from greenroom.http.relays.relay import Relay, RelayOptions, RelayOutcome
from greenroom.http.relays.tunnel import Tunnel
from greenroom.runtime.loop import Ticket, Tickets
from greenroom.runtime.prompt_slots import CachePin, PromptCacheSlots
from greenroom.runtime.remote.spending import Bill, SpendingMeter, settle
from greenroom.runtime.slots import EXIT_FOLLOWS_S, LiveSlot
from greenroom.serving.answer_facts import (
    TRAILER,
    WAIT,
    AnswerFacts,
    model_header,
    unless_told,
    version_headers,
    wait_ms,
)
from greenroom.serving.answer_relays import ModelNameRewriter, TranslatingRelay
from greenroom.serving.buffered import BufferedRelay
from greenroom.serving.failover import BUSY, BUSY_IF_BROKEN, FailoverSink
from greenroom.serving.prefix_cache import PROMPTLESS_PATHS, expect_sole
from greenroom.serving.request import Candidate, Request, Settings
from greenroom.serving.routes import UPSTREAM, is_open
from greenroom.telemetry.activity import Record

_OF_STREAMS: Final[Headers] = [(b"x-accel-buffering", b"no"), TRAILER]
_NOTHING: Final[dict[str, bytes]] = {}
# An engine's own error text goes into our error up to this length.
SAID_MAX: Final = 2000


class Attempt:
    """Made at the grant. It is sent by `send_now` if nothing has to be waited for, else by `send`; then closed.

    `relay` is kept for its counts and its last bytes; `facts` are those of an answer with text that can be read.
    """

    __slots__ = (
        *("_bill", "_bytes_seen", "_is_hung", "_moved_at", "_pin", "_record", "_settings", "_tickets"),
        *("candidate", "exchange", "facts", "relay", "request", "slot", "ticket"),
    )

    def __init__(
        self,
        exchange: Exchange,
        request: Request,
        candidate: Candidate,
        ticket: Ticket,
        slot: LiveSlot,
        record: Record,
        settings: Settings,
        tickets: Tickets,
    ) -> None:
        self.exchange: Final = exchange
        self.request: Final = request
        self.candidate: Final = candidate
        self.ticket: Final = ticket
        self.slot: Final = slot
        self._record: Final = record
        self._settings: Final = settings
        self._tickets: Final = tickets
        self.relay: Relay | None = None
        self.facts: AnswerFacts | None = None
        # What it is expected to cost at a provider; None if nothing is known of that.
        self._bill: Bill | None = None
        # Its place among the prompts of its engine, where that has such places.
        self._pin: CachePin | None = None
        self._is_hung = False
        self._bytes_seen = -1
        self._moved_at = ticket.granted_at

    # --- sending ----------------------------------------------------------------------------------------------------

    def send_now(self, on_done: Callable[[Relay], None]) -> bool:
        """Send it if nothing has to be waited for; `on_done` is called at its end. False: `send` must do it."""
        slot, candidate = self.slot, self.candidate
        if slot.pool.idle_count == 0 or slot.is_remote or self.request.job is not None or candidate.remade is not None:
            return False
        long = candidate.content.long
        if long is not None and long.is_heavy:
            return False
        if slot.prompts is not None and (candidate.spreads or not self._pinned(slot.prompts)):
            return False
        payload = candidate.content.payload(_NOTHING if self._pin is None else self._pin.fields)
        relay = self._new_relay(on_done)
        if not slot.pool.send_now(self._head(len(payload)), payload, self._sink(relay)):
            self.relay = None
            return False
        return True

    async def send(self) -> Relay | None:
        """Send it, unless that was done, and wait until its answer has ended. None if the client left before.

        Raises NotAllowed, RemoteBudgetSpent and what keeps a job from running.
        """
        relay = self.relay
        if relay is None:
            await self._prepare()
            if self.exchange.gone:
                return None
            payload = await self._payload()
            if self.slot.meter is not None:
                await self._enter_cost(self.slot.meter, payload)
            head = self._head(len(payload))
            relay = self._new_relay(None)
            # A request that was cut meanwhile is stopped already.
            if relay.wanted:
                await self.slot.pool.send(head, payload, self._sink(relay))
        await relay.wait()
        return relay

    async def _prepare(self) -> None:
        slot = self.slot
        if self.request.job is not None:
            await self.request.job.starts(slot)
        if slot.prompts is not None and not self._pinned(slot.prompts):
            await self._wait_for_place(slot.prompts)
        if self._pin is not None and self._pin.erase:
            await slot.erase(self._pin.erase)

    async def _payload(self) -> Payload:
        content, pinned = self.candidate.content, _NOTHING if self._pin is None else self._pin.fields
        long = content.long
        return content.payload(pinned) if long is None else await long.in_thread(lambda: content.payload(pinned))

    async def _enter_cost(self, meter: SpendingMeter, payload: Payload) -> None:
        """Enter what it may cost. Raises RemoteBudgetSpent."""
        answers, long = self.candidate.content.answers, self.candidate.content.long
        bill = (
            meter.bill(payload, answers) if long is None else await long.in_thread(lambda: meter.bill(payload, answers))
        )
        meter.begin(bill)
        await meter.confirm(bill)
        self._bill = bill

    def _head(self, length: int) -> bytes:
        return self.slot.head(
            self.exchange.head,
            self.candidate.target,
            length,
            self.request.id.encode(),
            self._settings.forward_headers,
            self.candidate.cache_headers,
        )

    def _sink(self, relay: Relay) -> Sink:
        """The relay; for a task behind one that holds failures back if another of its models can serve."""
        request = self.request
        if request.choice is None or not request.has_choice or not request.may_run_again:
            return relay
        return FailoverSink(relay, self.candidate.name, self._has_other_after)

    def _has_other_after(self, status: int) -> bool:
        return self.has_other(is_busy=status in self._busy())

    # --- its place among the prompts --------------------------------------------------------------------------------

    def _pinned(self, prompts: PromptCacheSlots) -> bool:
        """Take a place among the prompts of its engine. False if there is none now. Raises NotAllowed."""
        if self._pin is None:
            owner, route = self.candidate.scope.owner, self.request.route
            if route.is_promptless:
                return True
            if route is UPSTREAM:
                is_post = self.exchange.head.method == b"POST"
                if not is_post or is_open(self.candidate.target.partition(b"?")[0], PROMPTLESS_PATHS):
                    return True
                expect_sole(prompts, owner, self.candidate.name)
            self._pin = prompts.pin(owner, spreads=self.candidate.spreads)
        return self._pin is not None

    async def _wait_for_place(self, prompts: PromptCacheSlots) -> None:
        owner = self.candidate.scope.owner
        self._pin = await prompts.place(owner, spreads=self.candidate.spreads)
        if self.request.route is UPSTREAM and self._pin.index is not None:
            # Another owner came meanwhile, and this path cannot be pinned.
            expect_sole(prompts, owner, self.candidate.name)

    # --- its relay --------------------------------------------------------------------------------------------------

    def _new_relay(self, on_done: Callable[[Relay], None] | None) -> Relay:
        self.relay = relay = self._relay_for(on_done)
        self._record.state = "serving"
        self.ticket.on_cut(relay.stop)
        return relay

    def _relay_for(self, on_done: Callable[[Relay], None] | None) -> Relay:
        """The kind of relay that this answer needs."""
        candidate, exchange = self.candidate, self.exchange
        if exchange.head.upgrade is not None:
            return Tunnel(exchange, RelayOptions(self.headers()), on_done=on_done)
        if (remade := candidate.remade) is not None:
            return BufferedRelay(exchange, remade.body(), remade.bytes_max, on_done=on_done)
        options, started, entry = self._relay_options(), exchange.started, candidate.entry
        if candidate.translation is not None:
            return TranslatingRelay(exchange, candidate.translation, options, committed=started, on_done=on_done)
        told, name = entry.engine_name, self.request.asked_as if entry.is_adhoc else candidate.name
        if told != name:
            return ModelNameRewriter(exchange, told, name, options, committed=started, on_done=on_done)
        return Relay(exchange, options, committed=started, on_done=on_done)

    def _relay_options(self) -> RelayOptions:
        request, candidate, route = self.request, self.candidate, self.request.route
        if route.is_text:
            has_comment = request.wants_facts and route.shape.has_comments
            waited_ms = wait_ms(self.ticket, self.ticket.granted_at) if has_comment else None
            self.facts = AnswerFacts(candidate.entry.engine, is_stream=request.stream, wait_ms=waited_ms)
        return RelayOptions(
            self.headers(),
            unless_told(route, candidate),
            drop_usage_event=candidate.translation is None and candidate.drop_usage,
            facts=self.facts,
        )

    def headers(self) -> Headers:
        """Those that the gateway adds to the answer. The version that answers is noted."""
        request, version = self.request, self.slot.entry.version
        waited_ms = wait_ms(self.ticket, self.ticket.granted_at)
        headers: Headers = [(b"x-request-id", request.id.encode()), (WAIT, b"%d" % waited_ms)]
        if request.stream:
            headers += _OF_STREAMS
        if request.choice is not None:
            headers.append(model_header(self.candidate.name))
        if version is not None:
            self._record.model_version, self._record.model_repo_id = version.number, version.repo_id
            headers += version_headers(version, to_operator=request.to_operator)
        return headers

    # --- how it ends ------------------------------------------------------------------------------------------------

    def was_lost(self, relay: Relay) -> bool:
        """True if the engine was lost before its first byte: it may be tried again. Raises what else went wrong."""
        self.ticket.on_cut(None)
        outcome = relay.outcome
        if outcome is RelayOutcome.COMPLETE or outcome is RelayOutcome.CLIENT_GONE:
            return False
        if outcome is RelayOutcome.STOPPED:
            raise self._stopped()
        if outcome is RelayOutcome.BAD_HEAD:
            raise _bad_head(relay, self.candidate.name)
        if not relay.before_first_byte or not self.request.may_run_again:
            raise relay.error or EngineLost(f"The engine of {self.candidate.name} was lost.")
        return not self.exchange.gone

    def _stopped(self) -> GreenroomError:
        if self._is_hung:
            return EngineTimeout(f"{self.candidate.name} sent nothing for {self._settings.answer_idle_max_s:g} s.")
        return self.ticket.cut_error or EngineLost(f"The answer of {self.candidate.name} was ended.")

    async def process_checked(self, relay: Relay) -> None:
        """Wait until an engine that was lost has ended, or is known to live."""
        if not relay.status and (check := self.slot.check()) is not None:
            # A task turns to its next model, and need not wait until this one can be loaded again.
            await self.ticket.wait_for(check, EXIT_FOLLOWS_S if self.request.has_choice else inf)

    def has_other(self, *, is_busy: bool = False) -> bool:
        """True if another model of its task can serve it.

        Models of last resort do not count if this one is local and only busy.
        """
        choice = self.request.choice
        if choice is None:
            return False
        avoided = choice.last_resort if is_busy and not self.slot.is_remote else ()
        loop = self._tickets.loop
        return any(model not in avoided for model in loop.view.candidates_left(self.ticket.id, loop.clock()))

    def was_busy(self, relay: Relay) -> bool:
        """True if a local model of a task had no room for it."""
        return self.request.choice is not None and not self.slot.is_remote and relay.status in self._busy()

    def _busy(self) -> frozenset[int]:
        """The statuses by which its engine says that it has no room now."""
        return BUSY_IF_BROKEN if self.slot.is_unavailable(self._tickets.loop.clock()) else BUSY

    def release(self) -> None:
        """Give its place back, while it still holds its slot, and note whether the engine was available."""
        slot, pin, self._pin = self.slot, self._pin, None
        if pin is not None and slot.prompts is not None:
            slot.prompts.release(pin)
        relay = self.relay
        if relay is not None and relay.status and (relay.status == 503 or slot.unavailable_since is not None):
            is_at_work = self._tickets.works_on_another(self.ticket)
            slot.answered(relay.status, self._tickets.loop.clock(), is_at_work=is_at_work)

    def settle(self) -> None:
        """Enter what it has cost, once the record says what was used."""
        bill, self._bill = self._bill, None
        if bill is not None:
            settle(bill, self._record, self.relay)

    def check_progress(self, relay: Relay, now: float) -> None:
        """An engine that sends nothing for too long is hung, unless the client does not read.

        The first byte of a provider has its own time limit, after which another model of a task is asked.
        """
        total = relay.total_bytes
        tunnelled = isinstance(relay, Tunnel) and relay.is_open
        is_begun = relay.status != 0 or not self.slot.is_remote
        if total != self._bytes_seen or self.exchange.paused or tunnelled or not is_begun:
            self._bytes_seen, self._moved_at = total, now
        elif 0 < self._settings.answer_idle_max_s < now - self._moved_at:
            self._is_hung = True
            relay.stop()


def _bad_head(relay: Relay, name: str) -> GreenroomError:
    """Heartbeats began the stream but the engine does not answer with one: its text goes into the error."""
    said = relay.bad_body[:SAID_MAX].decode("utf-8", "replace")
    return _EngineSaid(f"{name} answered {relay.status}.", details=said, status=relay.status)


class _EngineSaid(EngineFault):
    """An engine's own error, sent inside a stream, with its status and its text."""

    details_are_the_callers = True

    def __init__(self, message: str, *, details: str, status: int) -> None:
        super().__init__(message, details=details)
        self.status = status if 400 <= status <= 599 else 502  # type: ignore[misc]
