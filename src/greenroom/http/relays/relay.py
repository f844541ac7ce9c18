"""Copies an engine's answer to a client.

Owns the joint between one exchange and one connection to an engine: back-pressure, a client that leaves, an engine that
is lost. Never decodes a body: callers read usage, timings or an error from its last 8 KiB, or from its beginning. A
short JSON answer can be held until it is whole, for headers that only its body tells; a stream can get a comment.

    fresh:      the engine's status and headers go to the client
    committed:  heartbeats have already sent 200 and SSE headers: the engine must answer just that, anything else is bad
"""

from __future__ import annotations

import asyncio
import enum
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from greenroom.errors import EngineFault, EngineLost
from greenroom.http.engine_connection import Connection
from greenroom.http.exchange import Exchange
from greenroom.http.headers import Headers, is_short_json, length_of, response_headers
from greenroom.http.sse import EventCounter, UsageFilter

BAD_BODY_BYTES_MAX: Final = 64 * 1024
TAIL_BYTES: Final = 8 * 1024
# Of a longer answer the beginning is kept, too: some engines tell there what it cost.
FIRST_BYTES: Final = 1024
# Pieces are looked at together once they are this many bytes, which costs far less than one by one.
UNREAD_BYTES_MAX: Final = 16 * 1024
# A JSON answer up to this size is held for the headers that its body tells. Longer ones go out as they come.
HELD_BYTES_MAX: Final = 64 * 1024
_DONE: Final = b"data: [DONE]"


class RelayOutcome(enum.Enum):
    COMPLETE = "complete"
    CLIENT_GONE = "client_gone"
    ENGINE_LOST = "engine_lost"
    # The head was already sent and the engine's answer does not fit it.
    BAD_HEAD = "bad_head"
    STOPPED = "stopped"


class TailReader(ABC):
    """What the last bytes of an answer tell its client: a JSON answer by headers, unless `is_stream`; a stream by
    trailers and, if `has_comment`, by a comment before its end."""

    __slots__ = ("has_comment", "is_stream")

    is_stream: bool
    has_comment: bool

    @abstractmethod
    def headers(self, tail: bytes) -> Headers: ...

    @abstractmethod
    def trailers(self, tail: bytes) -> Headers: ...

    @abstractmethod
    def comment(self, tail: bytes) -> bytes: ...


class RelayOptions:
    """What is added to an answer, and left out. Headers that the engine sends win over `default_headers` and those that
    `facts` reads."""

    __slots__ = ("default_headers", "drop_usage_event", "extra_headers", "facts")

    def __init__(
        self,
        extra_headers: Headers,
        default_headers: Headers | None = None,
        *,
        drop_usage_event: bool = False,
        facts: TailReader | None = None,
    ) -> None:
        self.extra_headers = extra_headers
        self.default_headers = default_headers
        self.drop_usage_event = drop_usage_event
        self.facts = facts


_UNCHANGED: Final = RelayOptions([])


class Relay:
    """A Sink. Ends in exactly one outcome: await `wait()`, or be told by `on_done`.

    On COMPLETE the answer is finished. On ENGINE_LOST and BAD_HEAD the caller must end it: by `fail` if it has started.
    """

    __slots__ = (
        "_bad_body",
        "_counter",
        "_filter",
        "_first",
        "_held",
        "_on_done",
        "_options",
        "_owes_comment",
        "_read_bytes",
        "_tail",
        "_unread",
        "_unread_bytes",
        "_waiter",
        "bad_body",
        "before_first_byte",
        "committed",
        "error",
        "exchange",
        "first_data_at",
        "headers",
        "outcome",
        "status",
        "upstream",
        "was_sent",
    )

    def __init__(
        self,
        exchange: Exchange,
        options: RelayOptions = _UNCHANGED,
        *,
        committed: bool = False,
        on_done: Callable[[Relay], None] | None = None,
    ) -> None:
        self.exchange = exchange
        self.committed = committed
        self.upstream: Connection | None = None
        self.outcome: RelayOutcome | None = None
        self.error: EngineFault | None = None
        # Whether an engine that was lost had not answered a single byte.
        self.before_first_byte = True
        # A connection had taken the request, and it was not answered in full.
        self.was_sent = False
        self.status = 0
        self.headers: Headers = []
        # On BAD_HEAD the first bytes of the answer that could not be passed on.
        self.bad_body = b""
        self.first_data_at: float | None = None
        # Length and last 8 KiB of what was passed on and read; then the pieces passed on since.
        self._read_bytes = 0
        self._tail = self._first = b""
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._counter: EventCounter | None = None
        self._options = options
        self._filter = UsageFilter() if options.drop_usage_event else None
        # False once it was sent.
        self._owes_comment = options.facts is not None and options.facts.has_comment
        # Pieces of an answer that is not passed on yet; None otherwise.
        self._held: list[bytes] | None = None
        self._bad_body: bytearray | None = None
        self._on_done = on_done
        self._waiter: asyncio.Future[None] | None = None
        exchange.listener = self
        if exchange.gone:
            self._settle(RelayOutcome.CLIENT_GONE)

    # --- what the upper layers ask ----------------------------------------------------------------------------------

    @property
    def wanted(self) -> bool:
        return self.outcome is None

    @property
    def events(self) -> int:
        self._read()
        return 0 if self._counter is None else self._counter.events

    @property
    def total_bytes(self) -> int:
        """The length of the engine's answer so far."""
        return self._read_bytes + self._unread_bytes

    @property
    def at_boundary(self) -> bool:
        """True if the client has been sent whole events only, so that another event may be inserted."""
        if self._filter is not None and self._filter.at_boundary:
            return True
        if self._counter is not None:
            self._read()
            return self._counter.at_boundary
        # Only heartbeats have gone out, and they are whole events; any other answer has no events at all.
        return self.committed

    def tail(self) -> bytes:
        """The last 8 KiB of the engine's answer, from which usage, timings or an error can be read."""
        self._read()
        return self._tail

    def first(self) -> bytes:
        """The first bytes of an answer of which `tail` is a part; else nothing."""
        self._read()
        return self._first if self._read_bytes > TAIL_BYTES else b""

    async def wait(self) -> RelayOutcome:
        """Wait for the outcome. Being cancelled changes nothing: call `stop` to end the relay."""
        if self.outcome is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        assert self.outcome is not None
        return self.outcome

    def stop(self) -> None:
        """End the engine's work on this answer. The exchange is left as it is."""
        self._drop_upstream()
        self._settle(RelayOutcome.STOPPED)

    def fail(self, error_event: bytes) -> None:
        """End a started answer with an error: as one more event at a boundary, else by cutting the answer."""
        self._drop_upstream()
        if self.at_boundary:
            self.exchange.write(error_event)
            self.exchange.finish()
        else:
            self.exchange.cut()
        self._settle(RelayOutcome.STOPPED)

    # --- what the engine says ---------------------------------------------------------------------------------------

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        self._note_head(status, headers)
        if self.committed or self._counter is not None:
            self._pass_head()
            if body:
                self.body(body)
            self.complete()
            return
        self.upstream = None
        self._read_bytes = len(body)
        self._tail, self._first = body[-TAIL_BYTES:], body[:FIRST_BYTES]
        self._respond(body)

    def head(self, status: int, headers: Headers) -> None:
        self._note_head(status, headers)
        if self._facts_for_headers() is not None and not self.committed and is_short_json(headers, HELD_BYTES_MAX):
            self._held = []
        else:
            self._pass_head()

    def body(self, data: bytes) -> None:
        if self._bad_body is not None:
            self._keep_bad_body(data)
        elif self._held is not None:
            self._hold(data)
        elif self._owes_comment:
            self._comment_before_done(data)
        else:
            self._pass(data)

    def _pass(self, data: bytes) -> None:
        self._unread.append(data)
        self._unread_bytes += len(data)
        if self._unread_bytes > UNREAD_BYTES_MAX or (self.first_data_at is None and self._counter is not None):
            self._read()
        if self._filter is not None:
            data = self._filter.feed(data)
        self.exchange.write(data)

    def complete(self) -> None:
        self.upstream = None
        if self._bad_body is not None:
            self._tell_bad_head()
            return
        if self._held is not None:
            body, self._held = b"".join(self._held), None
            self._respond(body)
            return
        if self._filter is not None:
            self.exchange.write(self._filter.flush())
        facts = None if self._counter is None else self._options.facts
        if facts is not None and self._owes_comment and self.at_boundary:
            self.exchange.write(facts.comment(self.tail()))
        self.exchange.finish(None if facts is None else facts.trailers(self.tail()))
        self._settle(RelayOutcome.COMPLETE)

    def upgraded(self, headers: Headers, rest: bytes) -> None:
        """The engine left HTTP though no upgrade was requested: it is lost."""
        if self.upstream is not None:
            self.upstream.lose("switched protocols unasked")

    def lost(self, error: EngineLost, before_first_byte: bool) -> None:
        if self.outcome is not None:
            return
        if self.upstream is not None:
            self.upstream, self.was_sent = None, True
        self.error = error
        self.before_first_byte = before_first_byte
        if self._bad_body is not None:
            self._tell_bad_head()
        else:
            self._settle(RelayOutcome.ENGINE_LOST)

    def _note_head(self, status: int, headers: Headers) -> None:
        self.before_first_byte = False
        self.status = status
        self.headers = headers
        for name, value in headers:
            if name == b"content-type" and value[:17].lower() == b"text/event-stream":
                self._counter = EventCounter()

    def _pass_head(self) -> None:
        length = length_of(self.headers)
        if self._counter is None or length is not None:
            # An answer without events, or with a promised length, must be passed on whole.
            self._filter = None
        if not self.committed:
            options = self._options
            kept = response_headers(self.headers, options.extra_headers, options.default_headers)
            self.exchange.start(self.status, kept, length)
        elif self.status != 200 or self._counter is None:
            self._bad_body = bytearray()
        if self.exchange.paused:
            self.client_paused()

    def _respond(self, body: bytes) -> None:
        """Pass a whole answer on, with the headers that its body tells."""
        options, facts = self._options, self._facts_for_headers()
        defaults = options.default_headers
        if facts is not None:
            defaults = facts.headers(self.tail()) + (defaults or [])
        self.exchange.respond(self.status, response_headers(self.headers, options.extra_headers, defaults), body)
        self._settle(RelayOutcome.COMPLETE)

    def _facts_for_headers(self) -> TailReader | None:
        facts = self._options.facts
        return facts if facts is not None and not facts.is_stream and self.status == 200 else None

    def _hold(self, data: bytes) -> None:
        assert self._held is not None
        self._held.append(data)
        self._unread.append(data)
        self._unread_bytes += len(data)
        if self.total_bytes > HELD_BYTES_MAX:
            held, self._held = b"".join(self._held), None
            self._pass_head()
            self.exchange.write(held)

    def _comment_before_done(self, data: bytes) -> None:
        """Pass a piece of a stream on, with the comment before its last event: many clients read no further."""
        at, facts, counter = data.find(_DONE), self._options.facts, self._counter
        if at > 0 and data[:at].endswith((b"\n\n", b"\n\r\n")):
            self._pass(data[:at])
            data = data[at:]
        elif at != 0:
            self._pass(data)
            return
        # Inside of an event it is part of a text.
        self._read()
        if facts is not None and counter is not None and counter.at_boundary:
            self._owes_comment = False
            self.exchange.write(facts.comment(self._tail))
        self._pass(data)

    def _read(self) -> None:
        """Read what was passed on since the last time."""
        if not self._unread:
            return
        data = self._unread[0] if len(self._unread) == 1 else b"".join(self._unread)
        self._unread.clear()
        if len(self._first) < FIRST_BYTES:
            self._first += data[: FIRST_BYTES - len(self._first)]
        self._read_bytes += len(data)
        self._unread_bytes = 0
        self._tail = (self._tail + data[-TAIL_BYTES:])[-TAIL_BYTES:]
        counter = self._counter
        if counter is not None:
            counter.feed(data)
            if self.first_data_at is None and counter.has_data:
                self.first_data_at = time.monotonic()

    # --- what the client does ---------------------------------------------------------------------------------------

    def client_gone(self) -> None:
        self._drop_upstream()
        self._settle(RelayOutcome.CLIENT_GONE)

    def client_paused(self) -> None:
        if self.upstream is not None:
            self.upstream.pause_reading()

    def client_resumed(self) -> None:
        if self.upstream is not None:
            self.upstream.resume_reading()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _keep_bad_body(self, data: bytes) -> None:
        assert self._bad_body is not None
        self._bad_body += data[: BAD_BODY_BYTES_MAX - len(self._bad_body)]
        if len(self._bad_body) >= BAD_BODY_BYTES_MAX:
            self._drop_upstream()
            self._tell_bad_head()

    def _tell_bad_head(self) -> None:
        self.bad_body, self._bad_body = bytes(self._bad_body or b""), None
        self._settle(RelayOutcome.BAD_HEAD)

    def _drop_upstream(self) -> None:
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            self.was_sent = True
            upstream.abort()

    def _settle(self, outcome: RelayOutcome) -> None:
        if self.outcome is not None:
            return
        self.outcome = outcome
        exchange = self.exchange
        exchange.listener = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        # The listener holds this relay; dropping the callback here leaves no reference cycle.
        on_done, self._on_done = self._on_done, None
        if on_done is not None:
            on_done(self)
