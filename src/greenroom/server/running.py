"""One request from its grant to its last byte: waiting with heartbeats, relaying, ending.

Owns the order of things for one request. A client that leaves ends it at any point; so does the operator's cut, an
engine that hangs, an engine that is lost. Before the first byte of the engine's answer a lost one is tried again, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from greenroom.config.schema import Heartbeat
from greenroom.errors import EngineFault, EngineLost, EngineTimeout, GreenroomError
from greenroom.proxy.edge import Exchange
from greenroom.proxy.head import Headers
from greenroom.proxy.headers import build_request
from greenroom.proxy.heartbeat import HeartbeatKind, heartbeat
from greenroom.proxy.relay import Outcome, Relay
from greenroom.proxy.tunnel import Tunnel
from greenroom.runtime.tickets import Desk, Ticket
from greenroom.server import render
from greenroom.server.ask import Ask
from greenroom.server.settings import Settings

_KINDS = {Heartbeat.COMMENT: HeartbeatKind.COMMENT, Heartbeat.CHUNK: HeartbeatKind.CHUNK}
_SSE: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
# What an engine said of its own failure goes into the error up to this length.
SAID_MAX = 2000


class Running:
    """One request being served. `relay` is the last one, kept for what it saw."""

    __slots__ = (
        "_ask",
        "_beat_at",
        "_bytes_seen",
        "_desk",
        "_exchange",
        "_hung",
        "_moved_at",
        "_outlook",
        "_request_id",
        "_said",
        "_settings",
        "_ticket",
        "relay",
    )

    def __init__(
        self,
        exchange: Exchange,
        ask: Ask,
        ticket: Ticket,
        desk: Desk,
        settings: Settings,
        outlook: Callable[[str], tuple[int | None, float | None]],
    ) -> None:
        self._exchange = exchange
        self._ask = ask
        self._ticket = ticket
        self._desk = desk
        self._settings = settings
        self._outlook = outlook
        self._request_id = ticket.id.encode()
        self._beat_at = ticket.arrived + settings.heartbeat_after_s
        self._bytes_seen = -1
        self._moved_at = ticket.arrived
        self._hung = False
        self._said: GreenroomError | None = None
        self.relay: Relay | None = None

    # --- the way of one request -------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Answer the request. Raises the error to end it with; returns when it was answered or nobody is left to."""
        ticket = self._ticket
        while not self._exchange.gone:
            if not ticket.is_settled or ticket.rejection is not None:
                await ticket.wait(None)
            if await self._relay_once():
                return

    async def _relay_once(self) -> bool:
        """Use the grant. False if it was lost before the engine's first byte and another has to be waited for."""
        ticket, exchange = self._ticket, self._exchange
        slot = ticket.slot
        assert slot is not None
        relay = self.relay = self._new_relay()
        ticket.on_cut(relay.stop)
        self._bytes_seen, self._moved_at = -1, ticket.granted_at
        payload = self._ask.payload()
        await slot.pool.send(self._engine_head(len(payload)), payload, relay)
        outcome = relay.outcome or await relay.wait()
        ticket.on_cut(None)
        if outcome is Outcome.COMPLETE or outcome is Outcome.CLIENT_GONE:
            return True
        if outcome is Outcome.STOPPED:
            raise self._stopped()
        if outcome is Outcome.ENGINE_LOST and relay.before_first_byte:
            exchange.on_gone = self._client_left
            await slot.settle()
            self._desk.lost(ticket)
            return exchange.gone
        raise self._said or relay.error or EngineLost(f"The engine of {self._ask.entry.id} was lost while it answered.")

    def _client_left(self) -> None:
        """Between two grants nobody else listens; `serve` sees `gone` at its next step."""

    def _new_relay(self) -> Relay:
        if self._exchange.head.upgrade is not None:
            return Tunnel(self._exchange, extra_headers=self._extra_headers())
        return Relay(
            self._exchange,
            extra_headers=self._extra_headers(),
            committed=self._exchange.started,
            drop_usage_event=self._ask.drop_usage,
            on_bad_head=self._bad_head,
        )

    def _extra_headers(self) -> Headers:
        waited_ms = round((self._ticket.granted_at - self._ticket.arrived) * 1000)
        headers: Headers = [(b"x-request-id", self._request_id), (b"x-queue-wait-ms", b"%d" % waited_ms)]
        if self._ask.stream:
            headers.append((b"x-accel-buffering", b"no"))
        return headers

    def _engine_head(self, length: int) -> bytes:
        head = self._exchange.head
        return build_request(
            head.method,
            self._ask.target,
            head.headers,
            host=b"localhost",
            length=length,
            request_id=self._request_id,
            allowed=self._settings.forward_headers,
            upgrade=head.upgrade,
        )

    def _bad_head(self, status: int, headers: Headers, body: bytes) -> None:
        """Heartbeats have begun the stream and the engine answers with something else: its words go into the error."""
        said = body[:SAID_MAX].decode("utf-8", "replace")
        self._said = _EngineSaid(f"{self._ask.entry.id} answered {status}.", details=said, status=status)

    def _stopped(self) -> GreenroomError:
        if self._hung:
            return EngineTimeout(f"{self._ask.entry.id} sent nothing for {self._settings.answer_idle_max_s:g} s.")
        return self._ticket.cut_error or EngineLost(f"The answer of {self._ask.entry.id} was ended.")

    # --- how it can end badly ---------------------------------------------------------------------------------------

    def fail(self, error: GreenroomError) -> None:
        """Tell the client: by status while nothing was sent, by an event in a stream, by cutting it short otherwise."""
        exchange, relay = self._exchange, self.relay
        if exchange.gone or exchange.finished:
            return
        if not exchange.started:
            exchange.respond(*render.response(error, self._ticket.id))
        elif relay is not None:
            relay.fail(render.error_event(error))
        else:
            exchange.write(render.error_event(error))
            exchange.finish()

    # --- looked at by the vigil -------------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        relay = self.relay
        beats = self._ask.stream and self._ask.heartbeat is not Heartbeat.OFF
        if beats and now >= self._beat_at and self._is_waiting_for_data(relay):
            self._beat(now)
        if relay is not None and relay.outcome is None:
            self._check_progress(relay, now)

    def _is_waiting_for_data(self, relay: Relay | None) -> bool:
        return relay is None or relay.outcome is not None or relay.first_data_at is None

    def _beat(self, now: float) -> None:
        """Tell a streaming caller that it is not forgotten. The first one commits to 200 and a stream."""
        exchange, relay = self._exchange, self.relay
        if exchange.gone or exchange.finished or exchange.paused:
            return
        self._beat_at = now + self._settings.heartbeat_every_s
        if not exchange.started:
            exchange.start(200, [*_SSE, (b"x-request-id", self._request_id)], None)
            if relay is not None and relay.outcome is None:
                relay.committed = True
        elif relay is not None and not relay.at_boundary:
            return
        exchange.write(self._heartbeat())

    def _heartbeat(self) -> bytes:
        position, eta_s = self._outlook(self._ticket.id)
        return heartbeat(
            _KINDS[self._ask.heartbeat],
            model=self._ask.asked_as,
            position=position,
            eta_s=eta_s,
            shape=self._ask.route.shape,
            stream_id=self._ticket.id,
            created=int(time.time()),
        )

    def _check_progress(self, relay: Relay, now: float) -> None:
        """An engine that sends nothing for too long is hung, unless it is the client who does not read."""
        total = relay.total_bytes
        tunnelled = isinstance(relay, Tunnel) and relay.is_open
        if total != self._bytes_seen or self._exchange.paused or tunnelled:
            self._bytes_seen, self._moved_at = total, now
        elif 0 < self._settings.answer_idle_max_s < now - self._moved_at:
            self._hung = True
            relay.stop()


class _EngineSaid(EngineFault):
    """An engine's own error, told inside a stream. Its status is kept."""

    def __init__(self, message: str, *, details: str, status: int) -> None:
        super().__init__(message, details=details)
        self.status = status if 400 <= status <= 599 else 502  # type: ignore[misc]
