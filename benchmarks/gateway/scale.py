"""How the gateway scales: a thousand configured models, and ten thousand requests that wait at once.

Starting and listing with a thousand models are shown beside the same with one, and listing beside writing the same
JSON. Requests queue while a gate holds their engine back; when all wait, memory is read, the gate opens, and every
request must be answered. The last round has more bodies than there is memory for them: what does not fit must be
refused at once, and everything else answered.

    python -m benchmarks.gateway.scale [--requests 10000]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from benchmarks.rig.gateways import Gateway, gateway
from benchmarks.rig.processes import engine_argv, memory_mib, own_cpu_s
from benchmarks.rig.result import Run, options_of

MODELS = 1_000
GOALS = {
    "start_s_max": 2.0,
    "list_ms_max": 50.0,
    "lost_max": 0,
    # Besides its body: a connection, a task, a place in the queue.
    "kib_per_waiting_max": 32.0,
}
# So many requests are sent at a time. In the end all wait together.
SENDING_AT_ONCE = 100
ENGINE_CONCURRENCY = 64
# A request fails after this wait; the gate opens well before.
WAIT_MAX_S = 600
LISTINGS = 50
KIB = 1024


@dataclass(frozen=True, slots=True)
class Round:
    """Requests of one size, and the memory that the configuration gives to all bodies together."""

    name: str
    body_bytes: int
    bodies_memory_mib: int


ROUNDS = (
    Round("4_kb", 4_000, 512),
    Round("200_kb", 200_000, 2_048),
    Round("200_kb_in_512_mib", 200_000, 512),
)


# --- the gateway --------------------------------------------------------------------------------------------------


def started(
    models: dict[str, Any], requests: int, bodies_memory_mib: int = 512
) -> contextlib.AbstractContextManager[Gateway]:
    """A gateway that can hold so many requests at once."""
    server = {
        # The benchmark's own connections come on top.
        "connections_max": requests + 100,
        "bodies_memory_mib": bodies_memory_mib,
        "wait_max_s": WAIT_MAX_S,
    }
    return gateway(
        models,
        server=server,
        scheduler={"queue_depth_max": requests + 1},
        gpus=[{"memory_mib": 24_000}],
        log={"level": "error"},
    )


def model_of(gate: str = "") -> dict[str, Any]:
    """A model whose engine costs almost nothing; with a gate it starts when that file is there."""
    return {"cmd": engine_argv("${PORT}", gate=gate), "memory_mib": 1_000, "concurrency": ENGINE_CONCURRENCY}


# --- many models --------------------------------------------------------------------------------------------------


def start_and_list(count: int) -> dict[str, float]:
    """Seconds until the first listing is there, and milliseconds of a later one."""
    models = {f"model-{number:04}": model_of() for number in range(count)}
    began = time.perf_counter()
    with started(models, requests=100) as own:
        listed = own.ask("/v1/models")
        start_s, start_cpu_s = time.perf_counter() - began, own_cpu_s(own.pid)
        if len(listed["data"]) != count:
            raise SystemExit(f"{len(listed['data'])} of {count} models are listed")
        took_ms = [_took_ms(lambda: own.fetch("/v1/models")) for _ in range(LISTINGS)]
        list_cpu_ms = 1e3 * (own_cpu_s(own.pid) - start_cpu_s) / LISTINGS
        json_ms = median(_took_ms(lambda: json.dumps(listed).encode()) for _ in range(LISTINGS))
        return {
            "start_s": round(start_s, 2),
            "start_cpu_s": round(start_cpu_s, 2),
            "list_ms": round(median(took_ms), 2),
            "list_worst_ms": round(max(took_ms), 2),
            "list_cpu_ms": round(list_cpu_ms, 2),
            "same_json_ms": round(json_ms, 3),
            "rss_mib": round(memory_mib(own.pid), 1),
        }


def _took_ms(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


# --- many waiting requests ----------------------------------------------------------------------------------------


class Callers:
    """So many callers, each on a connection of its own. All send the same request and wait for its answer."""

    def __init__(self, port: int, count: int, request: bytes) -> None:
        self._port, self._count, self._request = port, count, request
        self._sending = asyncio.Semaphore(SENDING_AT_ONCE)
        self._unsent = count
        self._all_sent = asyncio.Event()
        self.statuses: Counter[int] = Counter()

    async def arrive(self) -> list[asyncio.Task[None]]:
        """Returns when each has sent its whole request, or was refused."""
        callers = [asyncio.create_task(self._call(), name=f"caller-{number}") for number in range(self._count)]
        await self._all_sent.wait()
        return callers

    async def _call(self) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setblocking(False)
            async with self._sending:
                await loop.sock_connect(sock, ("127.0.0.1", self._port))
                with contextlib.suppress(ConnectionError):
                    await loop.sock_sendall(sock, self._request)
                self._has_sent()
            with contextlib.suppress(ConnectionError):
                self.statuses[await _status(loop, sock)] += 1

    def _has_sent(self) -> None:
        self._unsent -= 1
        if not self._unsent:
            self._all_sent.set()


async def _status(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> int:
    """The status of the answer, read to its end; 0 if it has none."""
    seen = b""
    while (end := seen.find(b"\r\n\r\n")) < 0 or len(seen) < end + 4 + _length(seen[:end]):
        data = await loop.sock_recv(sock, 65_536)
        if not data:
            return 0
        seen += data
    return int(seen.split(b" ", 2)[1])


def _length(head: bytes) -> int:
    return int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])


def request_of(model: str, body_bytes: int) -> bytes:
    value = {"model": model, "messages": [{"role": "user", "content": ""}], "max_tokens": 64}
    value["messages"] = [{"role": "user", "content": "x" * (body_bytes - len(json.dumps(value)))}]
    body = json.dumps(value).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def queue_and_drain(which: Round, requests: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="greenroom-gate-") as folder:
        gate = Path(folder) / "open"
        with started({"gated": model_of(str(gate))}, requests, which.bodies_memory_mib) as own:
            own.fetch("/v1/models")
            return uvloop.run(_queue_and_drain(which, requests, own, gate))


async def _queue_and_drain(which: Round, requests: int, own: Gateway, gate: Path) -> dict[str, float]:
    idle_mib, idle_cpu_s = memory_mib(own.pid), own_cpu_s(own.pid)
    callers, began = Callers(own.port, requests, request_of("gated", which.body_bytes)), time.perf_counter()
    calls = await callers.arrive()
    waiting = await asyncio.to_thread(_settled_depth, own)
    queued_s, full_mib = time.perf_counter() - began, memory_mib(own.pid)
    status_ms = await asyncio.to_thread(_took_ms, lambda: own.fetch("/api/v1/status"))
    began = time.perf_counter()
    await asyncio.to_thread(gate.touch)
    await asyncio.gather(*calls)
    drained_s, answered = time.perf_counter() - began, callers.statuses
    bodies_mib = waiting * which.body_bytes / KIB / KIB
    return {
        "waiting": waiting,
        "refused": answered[503],
        "answered": answered[200],
        "lost": requests - answered[200] - answered[503],
        "queued_s": round(queued_s, 1),
        "drained_s": round(drained_s, 1),
        "drained_per_s": round(answered[200] / drained_s),
        "status_ms": round(status_ms, 1),
        "cpu_ms_per_request": round(1e3 * (own_cpu_s(own.pid) - idle_cpu_s) / requests, 2),
        "idle_mib": round(idle_mib, 1),
        "full_mib": round(full_mib, 1),
        "after_mib": round(memory_mib(own.pid), 1),
        "bodies_mib": round(bodies_mib, 1),
        "kib_per_waiting": round((full_mib - idle_mib - bodies_mib) * KIB / waiting, 1),
    }


def _settled_depth(own: Gateway) -> int:
    """How many requests wait, once that no longer grows."""
    depth, looks = -1, 0
    while looks < 10:
        now = int(own.ask("/health")["queueDepth"])
        looks = looks + 1 if now == depth else 0
        depth = now
        time.sleep(0.1)
    return depth


def is_met(many: dict[str, float], rounds: dict[str, dict[str, float]], requests: int) -> bool:
    """Where the bodies fit, all requests wait and are served; where they do not, each still gets an answer."""
    fitting = [
        rounds[which.name] for which in ROUNDS if which.body_bytes * requests < which.bodies_memory_mib * KIB * KIB
    ]
    return (
        many["start_s"] <= GOALS["start_s_max"]
        and many["list_ms"] <= GOALS["list_ms_max"]
        and all(found["lost"] <= GOALS["lost_max"] for found in rounds.values())
        and all(found["kib_per_waiting"] <= GOALS["kib_per_waiting_max"] for found in rounds.values())
        and all(found["answered"] == requests for found in fitting)
    )


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    options = parser.parse_args()
    run = Run("scale", options)
    one, many = start_and_list(1), start_and_list(MODELS)
    print("1 model      ", one, flush=True)
    print(f"{MODELS:,} models ", many, flush=True)
    rounds: dict[str, dict[str, float]] = {}
    for which in ROUNDS:
        rounds[which.name] = queue_and_drain(which, options.requests)
        print(f"{which.name:18}", rounds[which.name], flush=True)
    figures = {
        "models": many,
        "one_model": one,
        "start_ratio": round(many["start_s"] / one["start_s"], 2),
        "list_in_json_dumps": round(many["list_ms"] / many["same_json_ms"], 1),
        "queued": rounds,
    }
    run.report(figures, GOALS, is_met(many, rounds, options.requests))


if __name__ == "__main__":
    main()
