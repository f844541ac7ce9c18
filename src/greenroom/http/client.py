"""One client's connection: bytes in, one exchange at a time out.

Owns the transport, the phase of the connection, its deadlines and how it ends. Requests sent ahead wait as raw bytes
until the answer before them is done, so answers keep their order and nothing is executed early. Never interprets bytes:
`request.py` reads requests and `exchange.py` writes answers.

    READ ─▶ ANSWER ─▶ READ …      TUNNEL: left HTTP      LINGER: refused, draining so that the answer gets read
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import struct
from collections.abc import Callable
from typing import Final, Protocol, cast

from greenroom.errors import GatewayBug, GreenroomError, TooSlow
from greenroom.http import headers as wire
from greenroom.http.body import BodyBudget
from greenroom.http.exchange import Exchange, RawReceiver, Refusal, WriteBatch, Writer, answer_head
from greenroom.http.limits import EdgeState
from greenroom.http.request import ClientRequestReader, Head

log: Final = logging.getLogger("greenroom.http")

# In the order a connection goes through them: plain numbers because they are compared for every read.
READ: Final = 0
ANSWER: Final = 1
TUNNEL: Final = 2
LINGER: Final = 3
CLOSED: Final = 4

# The peer has closed its sending side, or is gone. Systems without the first flag report only the second.
_HUNG_UP: Final[int] = getattr(select, "POLLRDHUP", select.POLLHUP)
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)


class ConnectionOwner(Protocol):
    """What a connection asks of the edge that accepted it."""

    state: EdgeState
    bodies: BodyBudget
    writes: WriteBatch
    admit: Callable[[Head], int]
    handle: Callable[[Exchange], None]

    def refusal(self, exchange: Exchange | None, head: Head | None, error: GreenroomError) -> Refusal: ...
    def joined(self, connection: ClientConnection) -> None: ...
    def left(self, connection: ClientConnection) -> None: ...


class ClientConnection(asyncio.Protocol):
    __slots__ = (
        "_advancing",
        "_backlog",
        "_body_since",
        "_deadline",
        "_exchange",
        "_handle",
        "_idle",
        "_linger_left",
        "_out",
        "_owner",
        "_phase",
        "_reader",
        "_reading_paused",
        "_receiver",
        "_sent",
        "_stall_mark",
        "_stall_since",
        "_state",
        "_writing_paused",
        "peer_ip",
        "transport",
        "write",
    )

    transport: asyncio.Transport
    write: Callable[[bytes], None]
    _out: Writer

    def __init__(self, owner: ConnectionOwner) -> None:
        self._owner = owner
        self._state = owner.state
        self._handle = owner.handle
        self.peer_ip = ""
        self._phase = READ
        self._reader = ClientRequestReader(owner.admit, owner.bodies, owner.state.limits)
        self._exchange: Exchange | None = None
        self._receiver: RawReceiver | None = None
        self._backlog = b""
        self._advancing = False
        self._reading_paused = False
        # The client does not read its answers, so it gets no new ones.
        self._writing_paused = False
        # Between requests, so that the next one's deadline starts with its first byte.
        self._idle = False
        self._deadline = 0.0
        # When the body began to be awaited; negative while it is not.
        self._body_since = -1.0
        self._linger_left = 0
        # Bytes given to the transport, without those of the answer that is running.
        self._sent = 0
        self._stall_mark = -1
        self._stall_since = 0.0

    # --- what the transport says ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._out = Writer(self._owner.writes, self.transport)
        self.write = self._out.write
        high = self._state.limits.write_buffer_bytes_max
        self.transport.set_write_buffer_limits(high=high, low=high // 4)
        peer = transport.get_extra_info("peername")
        # A Unix socket has no address of its own; its file's permissions are its limit.
        self.peer_ip = self._reader.peer_ip = peer[0] if isinstance(peer, tuple) else ""
        self._deadline = self._state.now + self._state.limits.header_timeout_s
        self._owner.joined(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._phase = CLOSED
        self._owner.left(self)
        self._client_left()

    def eof_received(self) -> bool:
        # A client that closes its sending side has left: one that only half-closes cannot be told from it.
        # Requests that it sent ahead are not begun: there is no client to answer.
        unanswered = self._exchange is not None
        self._phase = CLOSED
        self._backlog = b""
        self._client_left()
        if unanswered:
            self.transport.abort()
        return False

    def pause_writing(self) -> None:
        self._writing_paused = True
        if self._exchange is not None:
            self._exchange.pause()
        elif self._receiver is not None:
            self._receiver.client_paused()

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._exchange is not None:
            self._exchange.resume()
        elif self._receiver is not None:
            self._receiver.client_resumed()
        elif self._backlog and not self._advancing:
            self._take_backlog()

    def data_received(self, data: bytes) -> None:
        phase = self._phase
        if phase == READ and not self._backlog and not self._writing_paused:
            self._advance(data)
        elif phase <= ANSWER:
            self._set_aside(data)
        elif phase == TUNNEL:
            self._deadline = self._state.now + self._state.limits.write_timeout_s
            if self._receiver is not None:
                self._receiver.client_data(data)
        elif phase == LINGER:
            self._linger_left -= len(data)
            if self._linger_left < 0:
                self.transport.abort()

    # --- what the exchange asks for ---------------------------------------------------------------------------------

    def _send(self, data: bytes) -> None:
        """Send bytes that belong to no exchange."""
        self._sent += len(data)
        self.write(data)

    def exchange_over(self, keep_alive: bool) -> None:
        """The answer is complete: take the next request, or close."""
        self._forget_exchange()
        if not keep_alive or self._state.draining:
            self._close_politely()
            return
        self._phase = READ
        self._idle = True
        self._deadline = self._state.now + self._state.limits.keepalive_s
        if self._backlog and not self._advancing:
            self._take_backlog()

    def cut(self, *, hard: bool) -> None:
        """Close without an answer: by a reset if an orderly close would look like the end of an answer."""
        self._forget_exchange()
        if not hard:
            self._close()
            return
        self._phase = CLOSED
        self._out.flush()
        sock = self.transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.transport.abort()

    def take_over(self, receiver: RawReceiver) -> asyncio.Transport:
        """Leave HTTP: give `receiver` the bytes that were sent ahead, then every later byte."""
        self._forget_exchange()
        self._phase = TUNNEL
        self._receiver = receiver
        self._resume_reading()
        self._out.flush()
        ahead, self._backlog = self._backlog, b""
        if ahead:
            receiver.client_data(ahead)
        return self.transport

    def _forget_exchange(self) -> None:
        if self._exchange is not None:
            self._sent += self._exchange.sent
            self._exchange = None

    # --- what the edge asks -----------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Between requests, with no byte of the next one received."""
        return self._phase == READ and not self._backlog and not self._reader.has_begun

    def close_idle(self) -> None:
        self._close()

    def turn_away(self, error: GreenroomError, *, linger: bool = True) -> None:
        """Answer an error and close, whatever else the client sends."""
        self._state.stats.refused += 1
        head = self._reader.head
        status, headers, body = self._owner.refusal(None, head, error)
        framing, date = b"content-length: %d\r\n%b" % (len(body), wire.CLOSE), self._state.date
        if head is None:
            self._send(wire.render_head(status, headers, framing, date) + body)
        else:
            rendered = answer_head(head, status, headers, framing, date)
            self._send(rendered if head.method == b"HEAD" else rendered + body)
        if linger:
            self._linger()
        else:
            self.close_idle()

    def sweep(self, now: float) -> None:
        """End this connection if one of its deadlines has passed. Only clients have deadlines, answers have none."""
        if self._phase == READ:
            if self._body_since >= 0:
                self._check_body(now)
            elif now > self._deadline and not self._backlog:
                self._head_overdue()
        elif self._is_over(now):
            self.transport.abort()
            return
        waiting = self.transport.get_write_buffer_size()
        if waiting:
            exchange = self._exchange
            sent = self._sent if exchange is None else self._sent + exchange.sent
            self._check_stall(now, sent - waiting)
        else:
            self._stall_mark = -1

    # --- reading requests -------------------------------------------------------------------------------------------

    def _advance(self, data: bytes) -> None:
        """Read requests from these bytes until they are used up, or until an answer must be sent first."""
        reader = self._reader
        requests_left = self._state.limits.pipelined_per_turn_max
        self._advancing = True
        try:
            while data and self._phase == READ and not self._writing_paused:
                data = reader.feed(data)
                if reader.is_complete:
                    self._dispatch(reader)
                    requests_left -= 1
                    if not requests_left:
                        break
                elif not data:
                    self._await_rest(reader.head)
                elif reader.head is not None and reader.head.chunked:
                    # Of its many chunks the rest has its turn later.
                    self._await_rest(reader.head)
                    break
        except GreenroomError as error:
            self.turn_away(error)
            return
        except Exception:
            log.exception("reading a request failed")
            self._state.stats.bugs += 1
            self.turn_away(GatewayBug("The request could not be admitted."))
            return
        finally:
            self._advancing = False
        if not data:
            return
        if self._phase == TUNNEL:
            # Sent ahead of an upgrade that was taken at once.
            self.data_received(data)
        elif self._phase <= ANSWER:
            self._set_aside(data)
            if self._phase == READ and not self._writing_paused:
                # Other connections get their turn before the rest.
                asyncio.get_running_loop().call_soon(self._take_backlog)

    def _await_rest(self, head: Head | None) -> None:
        """Part of a request has come: start the deadline for the rest."""
        if head is not None:
            if self._body_since < 0:
                self._body_since = self._state.now
                if head.expects_continue:
                    self._send(wire.CONTINUE)
        elif self._idle:
            # The first request's deadline has been running since accept.
            self._idle = False
            self._deadline = self._state.now + self._state.limits.header_timeout_s

    def _take_backlog(self) -> None:
        if self._phase == READ and not self._writing_paused:
            data, self._backlog = self._backlog, b""
            self._resume_reading()
            self._advance(data)

    def _set_aside(self, data: bytes) -> None:
        """Keep bytes sent ahead. Above a bound reading is paused; then only the sweep sees the client leave."""
        self._backlog += data
        if len(self._backlog) > self._state.limits.pipelined_bytes_max and not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._reading_paused:
            self._reading_paused = False
            self.transport.resume_reading()

    def _dispatch(self, reader: ClientRequestReader) -> None:
        refusal = reader.refusal
        head, body = reader.take()
        self._phase = ANSWER
        self._body_since = -1.0
        self._exchange = exchange = Exchange(self, self._state, head, body)
        try:
            if refusal is not None:
                self._state.stats.refused += 1
                raise refusal
            self._state.stats.requests += 1
            self._handle(exchange)
        except GreenroomError as error:
            self._answer_error(exchange, error)
        except Exception:
            log.exception("handling a request failed")
            self._state.stats.bugs += 1
            self._answer_error(exchange, GatewayBug("The request could not be handled."))

    def _answer_error(self, exchange: Exchange, error: GreenroomError) -> None:
        if exchange.started:
            exchange.cut()
        else:
            exchange.respond(*self._owner.refusal(exchange, exchange.head, error))

    # --- ending -----------------------------------------------------------------------------------------------------

    def _linger(self) -> None:
        """Close the sending side, then read and drop a bounded number of bytes.

        Closing with unread bytes would reset the connection, and the client could lose the answer.
        """
        self._phase = LINGER
        self._reader.drop()
        self._backlog = b""
        self._linger_left = self._state.limits.linger_bytes_max
        self._deadline = self._state.now + self._state.limits.linger_s
        self._resume_reading()
        self._out.flush()
        with contextlib.suppress(OSError, RuntimeError):
            self.transport.write_eof()

    def _close_politely(self) -> None:
        if self._backlog:
            self._linger()
            return
        self._close()

    def _close(self) -> None:
        """Close once everything is written."""
        self._phase = CLOSED
        self._out.flush()
        self.transport.close()

    def _client_left(self) -> None:
        self._reader.drop()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            self._state.stats.gone += 1
            exchange.leave()
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.client_gone()

    def _is_over(self, now: float) -> bool:
        """True if lingering has taken long enough, or the client has left while reading is paused."""
        if self._phase == LINGER:
            return now > self._deadline
        if self._phase == TUNNEL:
            # The engine does not read. It is given a short time for what the client sent before it left.
            return now > self._deadline and not self.transport.is_reading() and self._has_hung_up()
        return self._reading_paused and self._has_hung_up()

    def _has_hung_up(self) -> bool:
        """Whether the client has left. Does not read what it sent before."""
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), _HUNG_UP)
        return bool(poll.poll(0))

    # --- deadlines --------------------------------------------------------------------------------------------------

    def _head_overdue(self) -> None:
        if self._idle:
            self._state.stats.idle_closed += 1
        else:
            self._state.stats.header_timeouts += 1
        if self._reader.has_begun:
            self.turn_away(TooSlow("The headers did not arrive in time."))
        else:
            # No request was begun, so none is answered.
            self.close_idle()

    def _check_body(self, now: float) -> None:
        limits = self._state.limits
        allowed_s = max(limits.body_timeout_s, self._reader.received_bytes / limits.body_rate_min_bytes_s)
        if now - self._body_since > allowed_s:
            self._state.stats.body_timeouts += 1
            self.turn_away(TooSlow("The body did not arrive in time."))

    def _check_stall(self, now: float, accepted: int) -> None:
        if accepted != self._stall_mark:
            self._stall_mark = accepted
            self._stall_since = now
        elif now - self._stall_since > self._state.limits.write_timeout_s:
            self._state.stats.write_timeouts += 1
            self.transport.abort()
