"""Streams of events and log lines, one piece at a time, until the client leaves, the gateway drains, or no more comes.

Never buffers: a source bounds its own queue and drops what a slow reader cannot take.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import closing, suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from greenroom.api.asgi import caller_of
from greenroom.errors import MethodNotAllowed, Overload, TooManyOfKey
from greenroom.process.logs import LogRing
from greenroom.runtime.observer import Event, Hub
from greenroom.runtime.shell import Shell

# Proxies close connections that are silent for a minute or less.
HEARTBEAT_S = 15.0
# How soon a quiet stream notices that the gateway drains.
LOOK_S = 1.0
# How long a stream waits for its last events when the gateway drains.
LAST_WORD_S = 0.05
# Dashboards and shells; each costs a connection and a queue.
STREAMS_MAX = 200
# Events that are sent together where more than one waits: many at once cost little more than one.
EVENTS_MAX = 50
# How long a browser waits before it comes back.
_RETRY = b"retry: 2000\n\n"
_COMMENT = b": still here\n\n"
SSE = "text/event-stream"
PLAIN = "text/plain"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_LINE_BREAK = re.compile(r"\r\n|\r|\n")
_TERMINAL_CODE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]?|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?")
# Those that turn the direction of text around, too: what follows them would be read in another order.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def event_frame(event: Event) -> bytes:
    """Its data is JSON, which has no line breaks of its own."""
    data = msgspec.json.encode(event.data, enc_hook=str)
    return b"event: %b\nid: %d\ndata: %b\n\n" % (event.kind.encode(), event.id, data)


def line_frame(line: str) -> bytes:
    """One line as one event."""
    return f"data: {_LINE_BREAK.sub(' ', line)}\n\n".encode("utf-8", "replace")


def plain_frame(line: str) -> bytes:
    return f"{line}\n".encode("utf-8", "replace")


def shown_line(line: str) -> str:
    """Without control characters: an engine may print what its callers sent, which must not reach a terminal."""
    return _CONTROL.sub("", _TERMINAL_CODE.sub("", line))


# Subscribes with its first piece, which may be empty and whose error is the answer. Closing it ends the subscription.
Feed = AsyncGenerator[bytes]


async def event_feed(hub: Hub, after: int | None) -> Feed:
    """Events from now on, or those after the given event."""
    with hub.subscribe(after) as subscription:
        yield b""
        while events := await subscription.several(EVENTS_MAX):
            yield b"".join(map(event_frame, events))


async def log_feed(ring: LogRing, history: int, media_type: str) -> Feed:
    """The last lines in one piece, then each as it is printed. A half-printed line is sent again when complete."""
    frame = line_frame if media_type == SSE else plain_frame
    # Both in one turn of the loop, so that no line is lost between them or sent twice.
    past = ring.tail(history)
    with closing(ring.subscribe()) as lines:
        yield b"".join(frame(shown_line(line)) for line in past)
        async for line in lines:
            yield frame(shown_line(line))


class Streams:
    """Counts the open streams, and refuses too many."""

    def __init__(self, shell: Shell, streams_max: int = STREAMS_MAX, look_s: float = LOOK_S) -> None:
        self.shell = shell
        self.look_s = look_s
        self._streams_max = streams_max
        # By tenant; those of admins by an empty name.
        self.open: Counter[str] = Counter()

    def answer(self, request: Request, feed: Feed, media_type: str = SSE) -> Response:
        """Raises Overload when there are too many already, and TooManyOfKey when this tenant has half of them."""
        caller = caller_of(request)
        tenant = "" if caller.admin else caller.tenant or caller.name
        if self.open.total() >= self._streams_max:
            raise Overload(f"{self._streams_max} streams are open already; close one.", retry_after_s=10.0)
        if tenant and self.open[tenant] >= max(1, self._streams_max // 2):
            said = f"{tenant} has {self.open[tenant]} streams open, as many as one may have; close one."
            raise TooManyOfKey(said, retry_after_s=10.0)
        return _Streamed(self, tenant, feed, media_type)


class _Streamed(Response):
    """Watches for the client's disconnect itself: what is sent after it is silently dropped."""

    def __init__(self, streams: Streams, tenant: str, feed: Feed, media_type: str) -> None:
        super().__init__(media_type=media_type, headers=_HEADERS)
        del self.headers["content-length"]
        self._streams = streams
        self._tenant = tenant
        self._feed = feed
        self._is_sse = media_type == SSE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Before the first byte, so that a refusal still has its status.
        first = await anext(self._feed)
        self._streams.open[self._tenant] += 1
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send(_body((_RETRY if self._is_sse else b"") + first))
            await self._copy(receive, send)
        finally:
            self._streams.open -= Counter((self._tenant,))
            await self._feed.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _copy(self, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_until_gone(receive))
        piece = asyncio.ensure_future(self._next())
        shell, beat_at = self._streams.shell, self._streams.shell.clock() + HEARTBEAT_S
        try:
            while not gone.done():
                await asyncio.wait((gone, piece), timeout=self._streams.look_s, return_when=asyncio.FIRST_COMPLETED)
                if piece.done():
                    if (data := piece.result()) is None:
                        return
                    await send(_body(data))
                    piece = asyncio.ensure_future(self._next())
                    beat_at = shell.clock() + HEARTBEAT_S
                elif shell.is_draining:
                    # An event that was published just now may still be on its way.
                    if not (await asyncio.wait((piece,), timeout=LAST_WORD_S))[0]:
                        return
                elif self._is_sse and shell.clock() >= beat_at:
                    await send(_body(_COMMENT))
                    beat_at = shell.clock() + HEARTBEAT_S
        finally:
            await _end(gone)
            await _end(piece)

    async def _next(self) -> bytes | None:
        """None at the end."""
        return await anext(self._feed, None)


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.wait((task,))


def refuse_head(request: Request) -> None:
    """Raises MethodNotAllowed for HEAD: a stream has no end to wait for."""
    if request.scope.get("state", {}).get("is_head"):
        raise MethodNotAllowed("A stream has no HEAD; it takes GET.")
