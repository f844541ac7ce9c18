"""A small HTTP/1.1 server on a Unix socket: one request at a time on each connection, whole answers or event streams.

Owns the connections and their bounds. A client that leaves, at any moment, cancels what was done for it. Depends on no
endpoint: a handler answers. Only a gateway connects, so there is no TLS and no key.

h11 parses requests. Answers are written here: h11's `send` would cost several times as much for each event of a stream,
and the two shapes of an answer need no more than a head and chunk sizes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from pathlib import Path

from .errors import ApiError
from .request_reader import BODY_BYTES_MAX, Request, RequestReader

CONNECTIONS_MAX = 1_024
BACKLOG = 512
# A request that has begun is complete within this time: it comes from the same machine.
REQUEST_TIMEOUT_S = 60.0
# What may be sent ahead while a request is answered. We keep reading, because only then we learn that the client left.
AHEAD_BYTES_MAX = 64 * 1024
# Above this many unsent bytes an answer is choked: streams then join their events.
UNSENT_BYTES_MAX = 256 * 1024
CLOSE_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


class AnswerWriter:
    """The response to one request. Sending to a client that has left does nothing."""

    def __init__(self, transport: asyncio.Transport, keeps_alive: bool) -> None:
        self._transport = transport
        self.keeps_alive = keeps_alive
        self.has_begun = False
        self.is_over = False
        self.is_choked = False
        self.on_relief: Callable[[], None] = lambda: None
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


Handler = Callable[[Request, AnswerWriter], Awaitable[None]]


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
        self.handler = handler
        self.connections_max = connections_max
        self.request_timeout_s = request_timeout_s
        self.body_bytes_max = body_bytes_max
        self.connections: set[_Connection] = set()
        self._listening: asyncio.Server | None = None
        self._path: Path | None = None

    async def open(self, socket_path: Path) -> None:
        """Listen here; only this user may connect. A stale socket is replaced."""
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_unix_server(lambda: _Connection(self), str(socket_path), backlog=BACKLOG)
        self._path = socket_path
        os.chmod(socket_path, 0o600)

    async def close(self) -> None:
        """Stop listening and cut all connections. Returns when their handlers have ended, or after CLOSE_TIMEOUT_S."""
        if self._listening is not None:
            self._listening.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        tasks = [task for connection in list(self.connections) if (task := connection.cut()) is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)


class _Connection(asyncio.Protocol):
    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._reader = RequestReader(server.body_bytes_max)
        self._answer: AnswerWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._is_choked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        if len(self._server.connections) >= self._server.connections_max:
            self._refuse_all(ApiError("Too many connections.", status=503, code="overloaded"))
            return
        self._server.connections.add(self)

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
        self._server.connections.discard(self)
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
            self._deadline = self._loop.call_later(self._server.request_timeout_s, self._refuse_all, _TOO_SLOW)
        if request is None and self._reader.take_continue():
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _begin(self, request: Request) -> None:
        self._stop_deadline()
        self._answer = AnswerWriter(self._transport, request.keeps_alive)
        self._answer.is_choked = self._is_choked
        name = f"{request.method} {request.path}"
        self._task = self._loop.create_task(self._serve(request, self._answer), name=name)
        self._task.add_done_callback(self._served)

    async def _serve(self, request: Request, answer: AnswerWriter) -> None:
        try:
            await self._server.handler(request, answer)
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
        AnswerWriter(self._transport, keeps_alive=False).refuse(error)
        self._transport.close()

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


_TOO_SLOW = ApiError("The request did not arrive in time.", status=408, code="request_timeout")
