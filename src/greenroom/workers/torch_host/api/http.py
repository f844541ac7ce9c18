"""A small HTTP/1.1 server on a Unix socket: one request at a time on each connection, whole answers or event streams.

Owns the connections and their bounds. A client that leaves, at any moment, cancels what was done for it. Never knows an
endpoint: a handler answers. Only a gateway connects, so that there is no TLS, no pipelining to speak of and no key.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from pathlib import Path

from .http_parser import Request, RequestParser
from .refusals import Refused

CONNECTIONS_MAX = 1_024
BACKLOG = 512
# A request that has begun is complete within this time: it comes from the same machine.
REQUEST_TIMEOUT_S = 60.0
# What may be sent ahead while a request is answered. We keep reading, because only so we hear that the client left.
AHEAD_BYTES_MAX = 64 * 1024
# Above this many unsent bytes an answer is choked: streams then join what they have to say.
UNSENT_BYTES_MAX = 256 * 1024
CLOSE_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


class Answer:
    """What is sent back for one request. Sending to a client that has left does nothing."""

    def __init__(self, transport: asyncio.Transport, keeps_alive: bool) -> None:
        self._transport = transport
        self.keeps_alive = keeps_alive
        self.has_begun = False
        self.is_over = False
        self.is_choked = False
        self.on_relief: Callable[[], None] = _nothing
        """Called when the client has caught up after the answer was choked."""

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

    def refuse(self, error: Refused) -> None:
        """The error as the answer, or as the last event of a stream that has begun."""
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


class Server:
    """The listening socket and everyone connected to it."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._connections: set[_Connection] = set()
        self._listening: asyncio.Server | None = None
        self._path: Path | None = None

    async def open(self, socket_path: Path) -> None:
        """Listen here; only this user may connect. A socket left behind by another is replaced."""
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_unix_server(self._connected, str(socket_path), backlog=BACKLOG)
        self._path = socket_path
        os.chmod(socket_path, 0o600)

    async def close(self) -> None:
        """Stop listening and cut everyone off. Returns when nothing of it runs any more."""
        if self._listening is not None:
            self._listening.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        tasks = [task for connection in list(self._connections) if (task := connection.cut()) is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)

    def _connected(self) -> _Connection:
        return _Connection(self._handler, self._connections)


class _Connection(asyncio.Protocol):
    def __init__(self, handler: Handler, everyone: set[_Connection]) -> None:
        self._handler = handler
        self._everyone = everyone
        self._loop = asyncio.get_running_loop()
        self._parser = RequestParser()
        self._answer: Answer | None = None
        self._task: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._is_choked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        if len(self._everyone) >= CONNECTIONS_MAX:
            self._refuse_all(Refused("Too many connections.", status=503, code="overloaded"))
            return
        self._everyone.add(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed(data)
        if self._task is None:
            self._advance()
        if self._task is not None and self._parser.pending_bytes > AHEAD_BYTES_MAX:
            self._transport.abort()

    def eof_received(self) -> bool:
        """Nobody sends half a goodbye here: who stops sending has left."""
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
        """Begin with the next request if it is complete."""
        try:
            request = self._parser.next_request()
        except Refused as error:
            self._refuse_all(error)
            return
        if request is not None:
            self._begin(request)
        elif self._parser.is_in_request and self._deadline is None:
            self._deadline = self._loop.call_later(REQUEST_TIMEOUT_S, self._refuse_all, _TOO_SLOW)
        if self._parser.take_continue() and request is None:
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
        except Refused as error:
            answer.refuse(error)
        except Exception:
            _log.exception("%s %s failed", request.method, request.path)
            answer.refuse(Refused("Something went wrong inside the worker.", status=500, code="internal_error"))

    def _served(self, task: asyncio.Task[None]) -> None:
        answer, self._task, self._answer = self._answer, None, None
        if task.cancelled() or answer is None or not answer.is_over or self._transport.is_closing():
            self._transport.abort()
        elif not answer.keeps_alive:
            self._transport.close()
        else:
            self._advance()

    def _refuse_all(self, error: Refused) -> None:
        """Answer what cannot be understood, and end the connection: nothing after it can be trusted."""
        self._stop_deadline()
        Answer(self._transport, keeps_alive=False).refuse(error)
        self._transport.close()

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


_TOO_SLOW = Refused("The request did not arrive in time.", status=408, code="request_timeout")


def _nothing() -> None:
    pass
