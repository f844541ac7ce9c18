"""A load generator: raw keep-alive connections, no client library between the clock and the socket.

Two kinds of load, each ends in one JSON line. `requests` sends small requests one after the other on each connection;
`streams` opens paced streams and counts events and reads, because a slow proxy coalesces chunks and then looks cheap.

    python benchmarks/rig/load.py requests --port 8000 --concurrency 16 --count 20000
    python benchmarks/rig/load.py streams  --port 8000 --concurrency 100
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import cast

import uvloop

_PROMPT = "Tell me a story about a green room. " * 22


def request_bytes(path: str, model: str, *, stream: bool) -> bytes:
    """A chat request of about 1 KB, as the usual clients of this path send it."""
    value: dict[str, object] = {"model": model, "stream": stream}
    if path == "/v1/responses":
        value |= {"input": _PROMPT, "max_output_tokens": 64}
    elif path == "/api/chat":
        value |= {"messages": [{"role": "user", "content": _PROMPT}], "options": {"num_predict": 64}}
    else:
        value |= {"messages": [{"role": "user", "content": _PROMPT}], "max_tokens": 64}
    body = json.dumps(value).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: application/json\r\nContent-Type: application/json\r\n"
        f"User-Agent: OpenAI/Python 2.0\r\nAuthorization: Bearer none\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Caller(asyncio.Protocol):
    """One connection that sends requests one after the other. Reads just enough of an answer to find its end."""

    def __init__(self, request: bytes, left: list[int], latencies_s: list[float], over: asyncio.Event) -> None:
        self._request = request
        self._left = left
        self._latencies_s = latencies_s
        self._over = over
        self._seen = b""
        self._since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        self._over.set()

    def _ask(self) -> None:
        if self._left[0] <= 0:
            self._transport.close()
            return
        self._left[0] -= 1
        self._since = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        data = self._seen + data
        if not _is_whole(data):
            self._seen = data
            return
        self._latencies_s.append(time.perf_counter() - self._since)
        self._seen = b""
        if not data.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"unexpected answer: {data[:300]!r}")
        self._ask()


def _is_whole(data: bytes) -> bool:
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return False
    head = data[:end].lower()
    _, found, rest = head.partition(b"content-length:")
    if found:
        return len(data) >= end + 4 + int(rest.split(b"\r\n", 1)[0])
    return data.endswith(b"0\r\n\r\n")


class Listener(asyncio.Protocol):
    """One stream: counts events and the reads they came in, and the time to the first one."""

    def __init__(self, request: bytes, results: list[Listener], over: asyncio.Event, expected: int) -> None:
        self._request = request
        self._results = results
        self._over = over
        self._expected = expected
        self._last = b""
        self.events = 0
        self.reads = 0
        self.first_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._since = time.perf_counter()
        self._transport.write(self._request)

    def connection_lost(self, exc: Exception | None) -> None:
        self._results.append(self)
        if len(self._results) == self._expected:
            self._over.set()

    def data_received(self, data: bytes) -> None:
        # Lines of Ollama have no `data:`.
        events = data.count(b"data: {") or data.count(b'"done":false')
        if events:
            if not self.events:
                self.first_s = time.perf_counter() - self._since
            self.events += events
            self.reads += 1
        self._last = (self._last + data)[-5:]
        if self._last == b"0\r\n\r\n":
            self._transport.close()


async def run_requests(port: int, request: bytes, concurrency: int, count: int) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    latencies_s: list[float] = []
    left = [count]
    overs = [asyncio.Event() for _ in range(concurrency)]
    since = time.perf_counter()
    for over in overs:
        await loop.create_connection(lambda o=over: Caller(request, left, latencies_s, o), "127.0.0.1", port)  # type: ignore[misc]
    for over in overs:
        await over.wait()
    took_s = time.perf_counter() - since
    latencies_s.sort()
    return {
        "count": len(latencies_s),
        "wanted": count,
        "took_s": took_s,
        "per_s": len(latencies_s) / took_s,
        "p50_us": 1e6 * latencies_s[len(latencies_s) // 2],
        "p99_us": 1e6 * latencies_s[len(latencies_s) * 99 // 100],
    }


async def run_streams(port: int, request: bytes, concurrency: int) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    results: list[Listener] = []
    over = asyncio.Event()
    since = time.perf_counter()
    for _ in range(concurrency):
        await loop.create_connection(lambda: Listener(request, results, over, concurrency), "127.0.0.1", port)
    await over.wait()
    events = sum(listener.events for listener in results)
    firsts_s = sorted(listener.first_s for listener in results)
    return {
        "streams": len(results),
        "chunks": events,
        "chunks_per_read": events / max(1, sum(listener.reads for listener in results)),
        "first_p50_us": 1e6 * firsts_s[len(firsts_s) // 2],
        "took_s": time.perf_counter() - since,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("requests", "streams"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", default="/v1/chat/completions")
    parser.add_argument("--model", default="mock")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--count", type=int, default=20_000)
    options = parser.parse_args()
    request = request_bytes(options.path, options.model, stream=options.kind == "streams")
    if options.kind == "requests":
        result = uvloop.run(run_requests(options.port, request, options.concurrency, options.count))
    else:
        result = uvloop.run(run_streams(options.port, request, options.concurrency))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
