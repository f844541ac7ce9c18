"""One connection to an engine: a request out, its answer back in.

Owns the parser of answers and how their end is found. Never changes a body: the sink gets its bytes as they came,
joined once for each read. The parser's callbacks only take notes; the sink is called after each read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Final, Protocol, cast

import httptools

from greenroom.errors import EngineLost, GreenroomError
from greenroom.http.body import Payload
from greenroom.http.exchange import WriteBatch, Writer
from greenroom.http.headers import HEADER_NAMES, Headers
from greenroom.http.request import stripped

log: Final = logging.getLogger("greenroom.http")

RESPONSE_HEAD_BYTES_MAX: Final = 64 * 1024
# Above this many unsent bytes of a request's body we wait for the engine to take them.
WRITE_BUFFER_BYTES_MAX: Final = 256 * 1024
# Of a spooled body so much is written before other requests get their turn.
TURN_BYTES: Final = 128 * 1024
# Bodies up to this size are joined with their head into one write.
_ONE_WRITE_MAX: Final = 64 * 1024


class Sink(Protocol):
    """Receives an engine's answer: `head`, any number of `body`, then `complete`; `lost` may end it at any time.

    `answer` replaces all of these for an answer that came in a single read.
    `upstream` is set when a connection has taken the request, and again when it was retried on another one. `wanted`
    turns false when the answer is no longer needed.
    """

    upstream: Connection | None

    @property
    def wanted(self) -> bool: ...
    def answer(self, status: int, headers: Headers, body: bytes) -> None: ...
    def head(self, status: int, headers: Headers) -> None: ...
    def body(self, data: bytes) -> None: ...
    def complete(self) -> None: ...
    def upgraded(self, headers: Headers, rest: bytes) -> None: ...
    def lost(self, error: EngineLost, before_first_byte: bool) -> None: ...


class ConnectionPool(Protocol):
    """What a connection tells the pool that it belongs to."""

    writes: WriteBatch

    def opened(self, connection: Connection) -> None: ...
    def released(self, connection: Connection) -> None: ...
    def ended(self, connection: Connection) -> None: ...
    def may_resend(self, sink: Sink) -> bool: ...
    def retry(self, head: bytes, body: Payload, sink: Sink) -> None: ...
    def lost(self, what: str) -> EngineLost: ...


class EngineReceiver(Protocol):
    """Receives an engine's bytes once the connection has left HTTP."""

    def engine_data(self, data: bytes) -> None: ...
    def engine_gone(self) -> None: ...
    def engine_paused(self) -> None: ...
    def engine_resumed(self) -> None: ...


class Connection(asyncio.Protocol):
    """Busy from `begin` until the sink was called with `complete` or `lost`; idle otherwise."""

    __slots__ = (
        "_body",
        "_complete",
        "_fault",
        "_framed",
        "_head",
        "_head_bytes",
        "_head_told",
        "_headers",
        "_heard",
        "_interim",
        "_is_sending_later",
        "_keep_alive",
        "_out",
        "_parser",
        "_parts",
        "_parts_own",
        "_pool",
        "_reading_paused",
        "_receiver",
        "_served",
        "_sink",
        "_status",
        "_surplus",
        "_unsent",
        "_writable",
        "idle_since",
        "on_body",
        "transport",
    )

    transport: asyncio.Transport
    _out: Writer

    def __init__(self, pool: ConnectionPool) -> None:
        self.idle_since = 0.0
        self._pool = pool
        # The parser adds to this list by itself, without a call into our code for each piece.
        self._parts: list[bytes] = []
        self.on_body = self._parts.append
        self._parser = httptools.HttpResponseParser(self)
        self._sink: Sink | None = None
        self._receiver: EngineReceiver | None = None
        self._served = 0
        self._writable = True
        self._reading_paused = False
        # The request, kept until its answer is complete: it may have to be sent again.
        self._head = b""
        self._body: Payload = b""
        self._unsent: Iterator[bytes] | None = None
        self._is_sending_later = False
        self._forget_answer()

    def _forget_answer(self) -> None:
        self._status = 0
        self._headers: Headers = []
        self._parts.clear()
        # How many of the parts belong to the answer, once it is complete: what follows does not.
        self._parts_own = 0
        self._head_bytes = 0
        self._head_told = False
        self._heard = False
        self._interim = False
        self._framed = False
        self._keep_alive = False
        self._complete = False
        self._surplus = False
        self._fault = ""

    # --- what the pool and the sink ask for -------------------------------------------------------------------------

    def begin(self, head: bytes, body: Payload, sink: Sink) -> None:
        """Send a request. `sink` receives the answer."""
        self._sink = sink
        self._head = head
        self._body = body
        sink.upstream = self
        if not isinstance(body, bytes):
            if body.is_spooled:
                self.transport.write(head)
                self._unsent = body.chunks()
                self._send_more()
                return
            body = body.read()
        if len(body) <= _ONE_WRITE_MAX:
            self._out.write(head + body)
        else:
            self.transport.writelines((head, body))

    def pause_reading(self) -> None:
        if not self._reading_paused and not self.transport.is_closing():
            self._reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self._reading_paused:
            self._reading_paused = False
            if not self.transport.is_closing():
                self.transport.resume_reading()

    def abort(self) -> None:
        """Close at once without calling the sink. Engines stop working on an answer when its connection closes."""
        self._sink = self._receiver = None
        self._let_go_of_request()
        self.transport.abort()

    def lose(self, what: str) -> None:
        """Close at once and call the sink's `lost`: the engine failed."""
        sink, receiver, before_first_byte = self._sink, self._receiver, not self._heard
        self.abort()
        if sink is not None:
            sink.lost(self._pool.lost(what), before_first_byte)
        if receiver is not None:
            receiver.engine_gone()

    def take_over(self, receiver: EngineReceiver) -> asyncio.Transport:
        """Leave HTTP: from now on the engine's bytes go to `receiver`."""
        self._sink = None
        self._receiver = receiver
        return self.transport

    # --- what the transport says ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._out = Writer(self._pool.writes, self.transport)
        self.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES_MAX)
        self._pool.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.ended(self)
        sink = self._sink
        if sink is not None and self._head_told and not self._framed and exc is None:
            # Without a length the end of the connection is the end of the answer.
            self._sink = None
            self._let_go_of_request()
            sink.complete()
        elif sink is not None and self._served and not self._heard and sink.wanted and self._pool.may_resend(sink):
            # A connection that was idle too long: the engine closed it before it saw our request.
            head, body = self._head, self._body
            self._sink = sink.upstream = None
            self._let_go_of_request()
            self._pool.retry(head, body, sink)
        else:
            self.lose("closed the connection while it was answering" if self._heard else "closed the connection")

    def pause_writing(self) -> None:
        self._writable = False
        if self._receiver is not None:
            self._receiver.engine_paused()

    def resume_writing(self) -> None:
        self._writable = True
        if self._receiver is not None:
            self._receiver.engine_resumed()
        elif self._unsent is not None:
            self._send_more()

    def data_received(self, data: bytes) -> None:
        sink = self._sink
        if sink is None:
            self._heard_out_of_turn(data)
            return
        self._heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._upgraded(sink, data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            # After a complete answer it is only more than was asked for.
            if self._complete:
                self._surplus = True
            else:
                self._fault = f"sent an answer that is not HTTP: {error}"
        parts = self._parts
        try:
            if self._head_told and len(parts) == 1 and not self._complete and not self._fault:
                # One more piece of a stream: what most reads bring.
                sink.body(parts.pop())
            elif self._status:
                self._tell(sink)
            else:
                self._await_head(len(data))
        except Exception:
            self._sink_failed(sink)

    def _upgraded(self, sink: Sink, rest: bytes) -> None:
        try:
            sink.upgraded(self._headers, rest)
        except Exception:
            self._sink_failed(sink)

    def _sink_failed(self, sink: Sink) -> None:
        """A bug of ours. The sink must still see an end, even if the answer was already complete here."""
        log.exception("passing on an answer failed")
        if self._sink is None or self._sink is sink:
            self.abort()
        sink.lost(self._pool.lost("answered, but that could not be passed on"), False)

    def _heard_out_of_turn(self, data: bytes) -> None:
        if self._receiver is not None:
            self._receiver.engine_data(data)
        else:
            # An engine must not send on an idle connection; one that does is not given another request.
            self.abort()

    # --- telling the sink -------------------------------------------------------------------------------------------

    def _await_head(self, length: int) -> None:
        """The head is not complete yet. One that grows too large, or is faulty, ends the connection."""
        self._head_bytes += length
        if self._fault:
            self.lose(self._fault)
        elif self._head_bytes > RESPONSE_HEAD_BYTES_MAX:
            self.lose(f"sent more than {RESPONSE_HEAD_BYTES_MAX} bytes of headers")

    def _tell(self, sink: Sink) -> None:
        """Pass on what one read brought, unless the sink has ended meanwhile."""
        if not self._head_told:
            if self._complete and not self._fault:
                self._end(sink, self._status)
                return
            self._head_told = True
            if self._head.startswith(b"HEAD "):
                # The parser would wait for a body of the length that was only announced.
                self._parser = httptools.HttpResponseParser(self)
                self._complete, self._surplus, self._parts_own = True, bool(self._parts), 0
            sink.head(self._status, self._headers)
        if self._parts and self._sink is sink:
            body = self._take_parts()
            if body:
                sink.body(body)
        if self._sink is not sink:
            return
        if self._fault:
            self.lose(self._fault)
        elif self._complete:
            self._end(sink, 0)

    def _take_parts(self) -> bytes:
        parts = self._parts[: self._parts_own] if self._complete else self._parts
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        self._parts.clear()
        return body

    def _end(self, sink: Sink, status: int) -> None:
        """The answer is complete. With a status the sink gets all of it, else only its end."""
        reusable = self._keep_alive and not self._surplus and self._unsent is None
        headers, body = self._headers, self._take_parts() if status else b""
        self._sink = None
        self._head = self._body = b""
        self._unsent = None
        self._forget_answer()
        self._served += 1
        # Released first, so that the sink can use the connection again at once.
        if reusable:
            # Reading may be paused for a slow client; the next client must not wait for it.
            if self._reading_paused:
                self.resume_reading()
            self._pool.released(self)
        else:
            self.transport.abort()
        if status:
            sink.answer(status, headers, body)
        else:
            sink.complete()

    # --- sending ----------------------------------------------------------------------------------------------------

    def _send_more(self) -> None:
        """Write pieces of a spooled body until the write buffer is full, or other requests are to get their turn."""
        written = 0
        try:
            while self._writable and self._unsent is not None and written < TURN_BYTES:
                piece = next(self._unsent, None)
                if piece is None:
                    self._unsent = None
                else:
                    self.transport.write(piece)
                    written += len(piece)
            if self._writable and self._unsent is not None and not self._is_sending_later:
                # The engine reads as fast as we write.
                self._is_sending_later = True
                asyncio.get_running_loop().call_soon(self._send_later)
        except (GreenroomError, OSError) as error:
            self.lose(f"could not be sent the request: {error}")

    def _send_later(self) -> None:
        self._is_sending_later = False
        self._send_more()

    def _let_go_of_request(self) -> None:
        self._head = self._body = b""
        self._unsent = None

    # --- the parser's notes -----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:
            self._surplus = True

    def on_header(self, name: bytes, value: bytes) -> None:
        # After the head these are trailers, which go no further.
        if not self._status:
            self._headers.append((HEADER_NAMES[name], stripped(value)))

    def on_headers_complete(self) -> None:
        if self._complete:
            return
        status = self._parser.get_status_code()
        if status == 101:
            # Overruled by the parser where the answer says to which protocol.
            self._fault = "switched protocols without saying to which"
            return
        if not 100 <= status <= 599:
            self._fault = f"answered with {status}, which is no status of HTTP"
            return
        if status < 200:
            self._interim = True
            return
        # The parser knows this only now; after the end of the message it says no.
        self._keep_alive = self._parser.should_keep_alive()
        types = 0
        for name, value in self._headers:
            if name == b"content-type":
                types += 1
            elif name == b"content-length":
                self._framed = True
            elif name == b"transfer-encoding":
                self._framed = True
                if value.lower() != b"chunked":
                    self._fault = "used a transfer encoding other than chunked"
                    return
        if types > 1:
            self._headers = _with_one_type(self._headers)
        self._status = status

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
            self._headers = []
        elif not self._complete:
            self._complete = True
            self._parts_own = len(self._parts)


def _with_one_type(headers: Headers) -> Headers:
    """With the first Content-Type only: by it the answer is read here, and no client may read it by another."""
    kept: Headers = []
    is_there = False
    for header in headers:
        if header[0] != b"content-type" or not is_there:
            kept.append(header)
        is_there = is_there or header[0] == b"content-type"
    return kept
