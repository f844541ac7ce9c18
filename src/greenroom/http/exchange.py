"""One request and its one answer, as the upper layers see them.

Owns the framing of the answer: length, chunks or close, HEAD, keep-alive. Never reads from the connection and never
waits: a slow client shows as `paused`, a lost one as `gone`, of which a listener is told.

    respond                  one write, done
    start → write… → finish  a streamed answer
    cut                      at any time: the client sees that the answer is incomplete
    take_over                the connection leaves HTTP (Upgrade)

Also owns when bytes are written, to clients and engines alike: `WriteBatch`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Final, Protocol

from greenroom.errors import GatewayBug
from greenroom.http import headers as wire
from greenroom.http.body import Body
from greenroom.http.headers import Headers
from greenroom.http.limits import EdgeState
from greenroom.http.request import Head

log: Final = logging.getLogger("greenroom.http")

# Status, headers and body of an answer.
Refusal = tuple[int, Headers, bytes]

_BODILESS: Final = frozenset((204, 304))


class ClientListener(Protocol):
    """Told that the client has left, reads too slowly, or reads again."""

    def client_gone(self) -> None: ...
    def client_paused(self) -> None: ...
    def client_resumed(self) -> None: ...


class RawReceiver(ClientListener, Protocol):
    """Receives a client's bytes once its connection has left HTTP."""

    def client_data(self, data: bytes) -> None: ...


class AnswerWire(Protocol):
    """The client's connection, as far as an exchange needs it."""

    write: Callable[[bytes], None]

    def exchange_over(self, keep_alive: bool) -> None: ...
    def cut(self, *, hard: bool) -> None: ...
    def take_over(self, receiver: RawReceiver) -> asyncio.Transport: ...


def answer_head(request: Head, status: int, headers: Headers, framing: bytes, date: bytes) -> bytes:
    """The head of an answer to this request, with the headers that all of its answers get.

    Every answer begins here: those of engines, errors, early refusals (`client.py`) and upgrades (`tunnel.py`).
    """
    if request.answer_headers is not None:
        headers = headers + request.answer_headers
    if request.answer_lines is not None:
        framing += request.answer_lines()
    return wire.render_head(status, headers, framing, date)


class Exchange:
    """The listener is told once if the client leaves before the answer is complete, and never after that."""

    __slots__ = (
        "_chunked",
        "_connection",
        "_keep_alive",
        "_left",
        "_silent",
        "_state",
        "_write",
        "body",
        "finished",
        "gone",
        "head",
        "listener",
        "paused",
        "sent",
        "started",
    )

    def __init__(self, connection: AnswerWire, state: EdgeState, head: Head, body: Body) -> None:
        self._connection = connection
        self._state = state
        self._write = connection.write
        self.head = head
        self.body = body
        self.started = False
        self.finished = False
        self.gone = False
        self.paused = False
        # Bytes of this answer given to the transport.
        self.sent = 0
        self.listener: ClientListener | None = None
        self._keep_alive = head.keep_alive
        # Pieces go out as chunks; false again when nothing more may go out.
        self._chunked = False
        # Bytes still owed when a length was promised; -1 when none was.
        self._left = -1
        # No byte of a body goes out: HEAD, 204, 304.
        self._silent = False

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """The whole answer in one write. Does nothing when the client is gone."""
        data = self._render(status, headers, len(body))
        if self.gone:
            return
        if not self._silent:
            data += body
        self.sent += len(data)
        self._write(data)
        self._over()

    def start(self, status: int, headers: Headers, length: int | None) -> None:
        """Send the head. Without a length the body is chunked, or ended by close for HTTP/1.0."""
        head = self._render(status, headers, length)
        self._left = -1 if length is None or self._silent else length
        if not self.gone:
            self._send(head)

    def write(self, data: bytes) -> None:
        """Send a piece of the body. Does nothing when the client is gone or takes no body."""
        if self._chunked and data:
            data = wire.chunk(data)
            self.sent += len(data)
            self._write(data)
            return
        if self._silent or self.gone or self.finished or not data:
            return
        if self._left >= 0:
            if len(data) > self._left:
                self.cut()
                raise GatewayBug("More bytes were written than the length that was promised.")
            self._left -= len(data)
        self._send(data)

    def finish(self, trailers: Headers | None = None) -> None:
        """End the answer, with these trailers where it is chunked. One that is shorter than promised is cut."""
        if self.gone or self.finished:
            return
        if self._left > 0:
            self.cut()
            return
        if self._chunked:
            self._send(wire.last_chunk(trailers or []))
        self._over()

    def cut(self) -> None:
        """Close the connection without the final chunk: the client sees a truncated answer."""
        if self.gone or self.finished:
            return
        # Where only the close marks the end, an orderly one would look like a complete answer.
        hard = self.started and not self._chunked and self._left < 0
        self.finished = True
        self._chunked = False
        self.body.close()
        self._connection.cut(hard=hard)

    def take_over(self, receiver: RawReceiver) -> asyncio.Transport:
        """Leave HTTP: from now on the client's bytes go to `receiver`, first those it sent ahead."""
        if self.gone or self.finished or self.started:
            raise GatewayBug("Only a connection with a request still unanswered can be taken over.")
        self.finished = True
        self.body.close()
        return self._connection.take_over(receiver)

    def leave(self) -> None:
        """Called by the connection when the client has left. Not for upper layers."""
        if self.gone or self.finished:
            return
        self.gone = True
        self._chunked = False
        self.body.close()
        listener, self.listener = self.listener, None
        if listener is not None:
            listener.client_gone()

    def pause(self) -> None:
        """Called by the connection when the client reads too slowly. Not for upper layers."""
        self.paused = True
        if self.listener is not None:
            self.listener.client_paused()

    def resume(self) -> None:
        """Called by the connection when the client reads again. Not for upper layers."""
        self.paused = False
        if self.listener is not None:
            self.listener.client_resumed()

    def _render(self, status: int, headers: Headers, length: int | None) -> bytes:
        if self.started or self.finished:
            raise GatewayBug("An answer was started twice.")
        state, head = self._state, self.head
        old = head.http_version == "1.0"
        self._keep_alive = self._keep_alive and not state.draining and not (old and length is None)
        self._silent = head.method == b"HEAD" or status in _BODILESS
        if status in _BODILESS:
            framing = b""
        elif length is not None:
            framing = b"content-length: %d\r\n" % length
        elif old:
            framing = b""
        else:
            framing = wire.CHUNKED
            self._chunked = not self._silent
        if not self._keep_alive:
            framing += wire.CLOSE
        elif old:
            framing += wire.KEEP_ALIVE
        rendered = answer_head(head, status, headers, framing, state.date)
        self.started = True
        return rendered

    def _send(self, data: bytes) -> None:
        self.sent += len(data)
        self._write(data)

    def _over(self) -> None:
        self.finished = True
        self._chunked = False
        self.body.close()
        self._connection.exchange_over(self._keep_alive)


class RequestIds:
    """Ids for requests. The prefix keeps those of different runs apart; within a run they are counted."""

    __slots__ = ("_number", "_prefix")

    def __init__(self) -> None:
        self._prefix, self._number = f"r-{secrets.token_hex(4)}-", 0

    def next(self) -> str:
        self._number += 1
        return f"{self._prefix}{self._number}"


# --- writes that are made together ----------------------------------------------------------------------------------
#
# Once the event loop has handled all that it read in one turn. Each write wakes the process at its other end, which
# between two answers of a busy gateway falls asleep again; and while the kernel works, our own code leaves the caches.
# With writes made together a request costs a fifth less.

# What has waited for so many others goes out at once: in a long turn the first answer must not wait for the last.
WRITERS_MAX: Final = 16
# After so many turns in a row with one write each, there is little to do: so many writes are made at once, before it is
# looked again whether others come in the same turn. To look costs a callback.
LONE_TURNS: Final = 8
# More than this of one connection goes out at once, so that a slow reader is noticed.
HELD_BYTES_MAX: Final = 64 * 1024


class WriteBatch:
    """The writes of many connections. Belongs to one event loop."""

    __slots__ = ("_at_once", "_count", "_lone_turns", "_loop", "_writers")

    def __init__(self) -> None:
        # Asked for once: Python looks each time whether the process was forked, by a system call.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writers: list[Writer] = []
        # How many wrote in this turn, and how many turns before it had one write each.
        self._count = 0
        self._lone_turns = 1
        # How many writes are left to be made at once.
        self._at_once = 0

    def add(self, writer: Writer) -> None:
        if self._at_once > 0:
            self._at_once -= 1
            writer.flush()
            return
        self._count += 1
        if self._count == 1:
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._end_turn)
            if self._lone_turns > 0:
                # It need not wait for others that will not come.
                writer.flush()
                return
        self._writers.append(writer)
        if len(self._writers) >= WRITERS_MAX:
            self._flush()

    def _end_turn(self) -> None:
        self._lone_turns = self._lone_turns + 1 if self._count == 1 else 0
        if self._lone_turns >= LONE_TURNS:
            self._at_once = LONE_TURNS
        self._count = 0
        self._flush()

    def _flush(self) -> None:
        writers, self._writers = self._writers, []
        for writer in writers:
            try:
                writer.flush()
            except Exception:
                # Of one connection: those after it must still be written to.
                log.exception("writing to a connection failed")


class Writer:
    """Writes to one transport. Call `flush` before closing it; what is held when it closes otherwise is dropped."""

    __slots__ = ("_batch", "_held", "_transport")

    def __init__(self, batch: WriteBatch, transport: asyncio.Transport) -> None:
        self._batch = batch
        self._transport = transport
        self._held = b""

    def write(self, data: bytes) -> None:
        if self._held:
            self._held += data
        else:
            self._held = data
            self._batch.add(self)
        if len(self._held) > HELD_BYTES_MAX:
            self.flush()

    def flush(self) -> None:
        """Write what is held, now."""
        data, self._held = self._held, b""
        if not data:
            return
        try:
            self._transport.write(data)
        except RuntimeError:
            # So says uvloop of a transport that is closed, and was not asked whether it is, which costs more.
            if not self._transport.is_closing():
                raise
