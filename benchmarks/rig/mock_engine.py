"""An engine that costs almost nothing, so that what is measured is the gateway.

Speaks just enough HTTP/1.1 for a benchmark: a small JSON answer at once, or a stream of events at a steady pace when
the body asks for one. One timer paces all streams together. With --gate it listens only once that file is there. Never
checks its input.

    python benchmarks/rig/mock_engine.py --port 9000 --chunks 100 --chunk-s 0.02
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from typing import cast

import uvloop

GATE_POLL_S = 0.05
_CHOICE = {"index": 0, "message": {"role": "assistant", "content": "x" * 260}, "finish_reason": "stop"}
_USAGE = {"prompt_tokens": 12, "completion_tokens": 64, "total_tokens": 76}
_ANSWER = json.dumps(
    {"id": "cmpl-0", "object": "chat.completion", "created": 0, "model": "mock", "choices": [_CHOICE], "usage": _USAGE}
).encode()
JSON_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nServer: mock\r\nContent-Length: %d\r\n\r\n%b" % (
    len(_ANSWER),
    _ANSWER,
)
HEALTH_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n" + b'{"status":"ok"}'
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nServer: mock\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def event(text: str) -> bytes:
    """One event of a chat stream in its own HTTP chunk."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    value = {"id": "cmpl-0", "object": "chat.completion.chunk", "created": 0, "model": "mock", "choices": [choice]}
    data = b"data: %b\n\n" % json.dumps(value).encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


STREAM_EVENT = event("token")
_DONE = b"data: [DONE]\n\n"
STREAM_END = b"%x\r\n%b\r\n0\r\n\r\n" % (len(_DONE), _DONE)


class Pace:
    """Sends every open stream its next event at each tick."""

    def __init__(self, chunks: int, chunk_s: float) -> None:
        self._chunks = chunks
        self._chunk_s = chunk_s
        self._streams: dict[asyncio.Transport, int] = {}
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.time()
        self._tick()

    def open(self, transport: asyncio.Transport) -> None:
        transport.write(STREAM_HEAD)
        self._streams[transport] = self._chunks

    def close(self, transport: asyncio.Transport) -> None:
        self._streams.pop(transport, None)

    def _tick(self) -> None:
        for transport, left in list(self._streams.items()):
            if left:
                transport.write(STREAM_EVENT)
                self._streams[transport] = left - 1
            else:
                transport.write(STREAM_END)
                del self._streams[transport]
        self._next += self._chunk_s
        self._loop.call_at(self._next, self._tick)


class Engine(asyncio.Protocol):
    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._seen = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pace.close(self._transport)

    def data_received(self, data: bytes) -> None:
        self._seen += data
        while (end := self._seen.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._seen[:end]).lower()
            _, found, rest = head.partition(b"content-length:")
            length = int(rest.split(b"\r\n", 1)[0]) if found else 0
            if len(self._seen) < end + 4 + length:
                return
            body = self._seen[end + 4 : end + 4 + length]
            del self._seen[: end + 4 + length]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytearray) -> None:
        if head.startswith(b"get "):
            self._transport.write(HEALTH_ANSWER)
        elif b'"stream":true' in body or b'"stream": true' in body:
            self._pace.open(self._transport)
        else:
            self._transport.write(JSON_ANSWER)


async def serve(host: str, port: int, chunks: int, chunk_s: float) -> None:
    loop = asyncio.get_running_loop()
    pace = Pace(chunks, chunk_s)
    if "/" in host:
        await loop.create_unix_server(lambda: Engine(pace), host, backlog=1024)
    else:
        await loop.create_server(lambda: Engine(pace), host, port, backlog=1024)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="an address, or the path of a socket")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--chunks", type=int, default=100)
    parser.add_argument("--chunk-s", type=float, default=0.02)
    parser.add_argument("--gate", default="")
    # It may stand in for llama-server, which has more options.
    options, _ = parser.parse_known_args()
    while options.gate and not os.path.exists(options.gate):
        time.sleep(GATE_POLL_S)
    uvloop.run(serve(options.host, options.port, options.chunks, options.chunk_s))


if __name__ == "__main__":
    main()
