"""A small HTTP/1.1 server on a Unix socket: one request at a time on each connection, whole answers or event streams.

Owns the connections and their bounds. A client that leaves, at any moment, cancels what was done for it. Never knows an
endpoint: a handler answers. Only a gateway connects, so there is no TLS and no key.

h11 parses requests. Answers are written here: h11's `send` would cost several times as much for each event of a stream,
and the two shapes of an answer need no more than a head and chunk sizes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import h11

from .errors import ApiError

CONNECTIONS_MAX = 1_024
BACKLOG = 512
# A request that has begun is complete within this time: it comes from the same machine.
REQUEST_TIMEOUT_S = 60.0
# What may be sent ahead while a request is answered. We keep reading, because only then we learn that the client left.
AHEAD_BYTES_MAX = 64 * 1024
# Above this many unsent bytes an answer is choked: streams then join their events.
UNSENT_BYTES_MAX = 256 * 1024
CLOSE_TIMEOUT_S = 5.0
HEAD_BYTES_MAX = 64 * 1024
HEADERS_MAX = 128
# Four million tokens of text, escaped. Python parses JSON without yielding, a quarter of a second for so much.
BODY_BYTES_MAX = 32 * 1024 * 1024
# Bytes of framing for each byte of a body. A chunk of one byte has five; more is spent on extensions.
FRAMING_MAX = 8

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    """Without its query."""
    query: str
    headers: Mapping[str, str]
    """By lower-case name; of a repeated header the last counts."""
    body: bytes
    keeps_alive: bool


class Answer:
    """The response to one request. Sending to a client that has left does nothing."""

    def __init__(self, transport: asyncio.Transport, keeps_alive: bool) -> None:
        self._transport = transport
        self.keeps_alive = keeps_alive
        self.has_begun = False
        self.is_over = False
        self.is_choked = False
        self.on_relief: Callable[[], None] = _nothing
        """Called when the client has caught up."""

    def whole(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        length = {"content-type": "application/json", "content-length": str(len(body))}
        self._write(self._head(status, {**length, **(headers or {})}) + body)
        self.has_begun = self.is_over = True

    def begin_events(self, headers: Mapping[str, str] | None = None) -> None:
        shape = {"content-type": "text/event-stream", "cache-control": "no-cache", "transfer-encoding": "chunked"}
        self._write(self._head(200, {**shape, **(headers or {})}))
        self.has_begun = True

    def event(self, data: bytes) -> None:
        """One server-sent event as one chunk."""
        self._write(b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data))

    def end_events(self) -> None:
        self._write(b"0\r\n\r\n")
        self.is_over = True

    def refuse(self, error: ApiError) -> None:
        """Send the error as the answer, or as the last event of a stream that has begun."""
        if not self.has_begun:
            self.whole(error.status, error.body())
        elif not self.is_over:
            self.event(error.body())
            self.end_events()

    def _head(self, status: int, headers: Mapping[str, str]) -> bytes:
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if not self.keeps_alive:
            lines.append("connection: close")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


Handler = Callable[[Request, Answer], Awaitable[None]]


class HttpServer:
    """The listening socket and its connections."""

    def __init__(
        self,
        handler: Handler,
        *,
        connections_max: int = CONNECTIONS_MAX,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        body_bytes_max: int = BODY_BYTES_MAX,
    ) -> None:
        self._handler = handler
        self._connections_max = connections_max
        self._request_timeout_s = request_timeout_s
        self._body_bytes_max = body_bytes_max
        self._connections: set[_Connection] = set()
        self._listening: asyncio.Server | None = None
        self._path: Path | None = None

    async def open(self, socket_path: Path) -> None:
        """Listen here; only this user may connect. A stale socket is replaced."""
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_unix_server(self._connected, str(socket_path), backlog=BACKLOG)
        self._path = socket_path
        os.chmod(socket_path, 0o600)

    async def close(self) -> None:
        """Stop listening and cut all connections. Returns when their handlers have ended, or after CLOSE_TIMEOUT_S."""
        if self._listening is not None:
            self._listening.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        tasks = [task for connection in list(self._connections) if (task := connection.cut()) is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)

    def _connected(self) -> _Connection:
        reader = RequestReader(self._body_bytes_max)
        return _Connection(self._handler, self._connections, self._connections_max, self._request_timeout_s, reader)


class _Connection(asyncio.Protocol):
    def __init__(
        self,
        handler: Handler,
        everyone: set[_Connection],
        connections_max: int,
        request_timeout_s: float,
        reader: RequestReader,
    ) -> None:
        self._handler = handler
        self._connections_max = connections_max
        self._request_timeout_s = request_timeout_s
        self._everyone = everyone
        self._loop = asyncio.get_running_loop()
        self._reader = reader
        self._answer: Answer | None = None
        self._task: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._is_choked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        if len(self._everyone) >= self._connections_max:
            self._refuse_all(ApiError("Too many connections.", status=503, code="overloaded"))
            return
        self._everyone.add(self)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        if self._task is None:
            self._advance()
        if self._task is not None and self._reader.ahead_bytes > AHEAD_BYTES_MAX:
            self._transport.abort()

    def eof_received(self) -> bool:
        """The client has left: the gateway never closes only its sending side."""
        self._transport.abort()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._everyone.discard(self)
        self._stop_deadline()
        if self._task is not None:
            self._task.cancel("the client left")

    def pause_writing(self) -> None:
        self._is_choked = True
        if self._answer is not None:
            self._answer.is_choked = True

    def resume_writing(self) -> None:
        self._is_choked = False
        if self._answer is not None:
            self._answer.is_choked = False
            self._answer.on_relief()

    def cut(self) -> asyncio.Task[None] | None:
        self._transport.abort()
        if self._task is not None:
            self._task.cancel("the server closes")
        return self._task

    def _advance(self) -> None:
        """Start the next request if it is complete."""
        try:
            request = self._reader.next_request()
        except ApiError as error:
            self._refuse_all(error)
            return
        if request is not None:
            self._begin(request)
        elif self._reader.is_in_request and self._deadline is None:
            self._deadline = self._loop.call_later(self._request_timeout_s, self._refuse_all, _TOO_SLOW)
        if request is None and self._reader.take_continue():
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _begin(self, request: Request) -> None:
        self._stop_deadline()
        self._answer = Answer(self._transport, request.keeps_alive)
        self._answer.is_choked = self._is_choked
        name = f"{request.method} {request.path}"
        self._task = self._loop.create_task(self._serve(request, self._answer), name=name)
        self._task.add_done_callback(self._served)

    async def _serve(self, request: Request, answer: Answer) -> None:
        try:
            await self._handler(request, answer)
        except ApiError as error:
            answer.refuse(error)
        except Exception:
            _log.exception("%s %s failed", request.method, request.path)
            answer.refuse(ApiError("Something went wrong inside the worker.", status=500, code="internal_error"))

    def _served(self, task: asyncio.Task[None]) -> None:
        answer, self._task, self._answer = self._answer, None, None
        if task.cancelled() or answer is None or not answer.is_over or self._transport.is_closing():
            self._transport.abort()
        elif not answer.keeps_alive:
            self._transport.close()
        else:
            self._advance()

    def _refuse_all(self, error: ApiError) -> None:
        """Answer with this error and close the connection: its next bytes cannot be trusted."""
        self._stop_deadline()
        Answer(self._transport, keeps_alive=False).refuse(error)
        self._transport.close()

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class RequestReader:
    """Bytes in, requests out, in order. After it has raised it is of no further use."""

    def __init__(self, body_bytes_max: int = BODY_BYTES_MAX) -> None:
        self._body_bytes_max = body_bytes_max
        self._unread = bytearray()
        self._head: h11.Request | None = None
        self._headers: Mapping[str, str] = {}
        # What has come until the head is complete; h11 refuses a head that is too long.
        self._raw_head = b""
        self._is_told = False
        self._begin()

    @property
    def is_in_request(self) -> bool:
        """A request has begun and is not complete."""
        return self._taken_bytes > 0

    @property
    def ahead_bytes(self) -> int:
        """Received after the last complete request."""
        return len(self._unread)

    def feed(self, data: bytes) -> None:
        self._unread += data

    def next_request(self) -> Request | None:
        """The next complete request, or None while bytes are missing. Raises ApiError for what is not HTTP."""
        self._hand_over()
        try:
            while not isinstance(event := self._http.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Request):
                    _check_lines(self._raw_head)
                    self._raw_head = b""
                    self._head, self._headers = event, _headers(event)
                    _check_size(int(self._headers.get("content-length", 0)), self._body_bytes_max)
                elif isinstance(event, h11.Data):
                    self._take(event.data)
                else:
                    self._check_framing()
                    return None
        except h11.RemoteProtocolError as error:
            raise _refused(error) from None
        return self._complete()

    def take_continue(self) -> bool:
        """True if the client waits to be told before it sends its body; once for each request."""
        wants = self._http.they_are_waiting_for_100_continue and not self._is_told
        self._is_told = self._is_told or wants
        return wants

    def _begin(self) -> None:
        # One h11 connection for each request: it is not told what is answered, so it could not go on to the next.
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._head = None
        self._raw_head = b""
        self._pieces: list[bytes] = []
        self._body_bytes = 0
        self._taken_bytes = 0
        self._is_told = False

    def _hand_over(self) -> None:
        if not self._taken_bytes:
            # An empty line before a request is forgiven, as the standard asks.
            while self._unread.startswith(b"\r\n"):
                del self._unread[:2]
        if self._unread:
            self._taken_bytes += len(self._unread)
            data = bytes(self._unread)
            if self._head is None:
                self._raw_head += data
            self._http.receive_data(data)
            self._unread.clear()

    def _take(self, data: bytes) -> None:
        self._body_bytes += len(data)
        _check_size(self._body_bytes, self._body_bytes_max)
        self._pieces.append(bytes(data))

    def _check_framing(self) -> None:
        if self._taken_bytes - self._body_bytes > 2 * HEAD_BYTES_MAX + FRAMING_MAX * self._body_bytes:
            raise ApiError("The body is mostly chunk sizes.", code="bad_framing")

    def _complete(self) -> Request:
        head = self._head
        assert head is not None
        path, _, query = head.target.decode().partition("?")
        request = Request(
            method=head.method.decode(),
            path=path,
            query=query,
            headers=self._headers,
            body=b"".join(self._pieces),
            keeps_alive=self._http.their_state is h11.DONE,
        )
        rest, _ = self._http.trailing_data
        self._begin()
        self._unread += rest
        return request


def _check_lines(received: bytes) -> None:
    """Raises ApiError for what h11 forgives in a head and another program may read differently."""
    head, end, _ = received.partition(b"\r\n\r\n")
    if not end or _ODD.search(head):
        raise ApiError("A line of the head is folded, or has an odd end or character.", code="bad_framing")


def _headers(head: h11.Request) -> Mapping[str, str]:
    """The headers, by name. Raises ApiError for a head that h11 accepts and we do not."""
    # h11's own sequence of headers is slow to walk, so it is walked once.
    pairs = list(head.headers)
    if len(pairs) > HEADERS_MAX:
        raise ApiError(f"There are more than {HEADERS_MAX} headers.", status=431, code="headers_too_large")
    if head.http_version not in (b"1.1", b"1.0"):
        raise ApiError("The first line is not an HTTP/1.1 request.", code="bad_framing")
    headers = {name.decode(): value.decode("latin-1") for name, value in pairs}
    if sum(map(len, headers)) + sum(map(len, headers.values())) + len(head.target) > HEAD_BYTES_MAX:
        raise _head_too_long()
    if "content-length" in headers and "transfer-encoding" in headers:
        # Two programs that read such a body differently could be led to see different requests.
        raise ApiError("A body is either chunked or of a stated length.", code="bad_framing")
    return headers


def _check_size(size: int, size_max: int) -> None:
    if size > size_max:
        raise ApiError(f"The body is larger than {size_max} bytes.", status=413, code="body_too_large")


def _refused(error: h11.RemoteProtocolError) -> ApiError:
    if error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
        return _head_too_long()
    return ApiError(f"This is not HTTP/1.1: {error}.", code="bad_framing")


def _head_too_long() -> ApiError:
    return ApiError(f"The headers are longer than {HEAD_BYTES_MAX} bytes.", status=431, code="headers_too_large")


# A folded line, CR or LF alone, and control characters other than tabs.
_ODD = re.compile(rb"\r\n[ \t]|\r(?!\n)|(?<!\r)\n|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_TOO_SLOW = ApiError("The request did not arrive in time.", status=408, code="request_timeout")


def _nothing() -> None:
    pass
