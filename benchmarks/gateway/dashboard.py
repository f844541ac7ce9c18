"""What the dashboard costs the gateway: its CPU with five viewers and with none, under the same load, and its size.

A thousand models are configured, some of which serve 200 requests a second. Hundreds of requests wait for a model that
never comes, and further ones are refused. A viewer does what a tab does: it reads the state as a stream and what its
page asks for; viewers are on different pages. Rounds with and without take turns.

    python -m benchmarks.gateway.dashboard [--viewers 5] [--models 1000] [--rate 200] [--seconds 20] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

import uvloop

import greenroom
from benchmarks.rig.gateways import Gateway, gateway
from benchmarks.rig.load import request_bytes
from benchmarks.rig.processes import engine_argv, own_cpu_s
from benchmarks.rig.result import Run, options_of

GOALS = {"added_share_max": 0.20, "assets_gzipped_kb_max": 150.0}
SERVING: Final = 8
# Requests that wait, and how often one more is refused.
WAITING: Final = 300
REFUSED_EVERY_S: Final = 0.1
NEVER: Final = "never"
SETTLE_S: Final = 2.0
SERVED_MIN: Final = 0.9
ASSETS = Path(greenroom.__file__).parent / "server" / "ui" / "assets"


def configuration(count: int) -> dict[str, Any]:
    models = {
        f"model-{number:04}": {"cmd": engine_argv("${PORT}"), "memory_mib": 1_000, "concurrency": 64}
        for number in range(count)
    }
    for name in list(models)[:SERVING]:
        models[name]["preload"] = True
    # Its engine never answers, so its requests wait: one tenant may fill half of the queue.
    models[NEVER] = {"cmd": ["sh", "-c", "sleep 100000", "${PORT}"], "memory_mib": 700, "load_timeout_s": 3_600}
    return {
        "models": models,
        # Room for all of them: swaps would cost more than all else that is measured.
        "gpus": [{"memory_mib": 1_100 * SERVING, "margin_mib": 0}],
        "scheduler": {"queue_depth_max": 2 * WAITING},
        "log": {"level": "error"},
    }


# --- load -------------------------------------------------------------------------------------------------------------


async def calls(port: int, model: str, every_s: float, answered: list[int]) -> None:
    """One caller on one connection, which asks at a steady pace until it is cancelled."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = request_bytes("/v1/chat/completions", model, stream=False)
    loop = asyncio.get_running_loop()
    due = loop.time()
    try:
        while True:
            writer.write(request)
            await _answer(reader)
            answered[0] += 1
            due = max(due + every_s, loop.time() - 1.0)
            await asyncio.sleep(due - loop.time())
    finally:
        writer.close()


async def waits(port: int) -> None:
    """A caller whose model never comes."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request_bytes("/v1/chat/completions", NEVER, stream=False))
        await asyncio.Event().wait()
    finally:
        writer.close()


async def is_refused(port: int) -> None:
    """A caller that asks for it when the queue is full, again and again."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while True:
            writer.write(request_bytes("/v1/chat/completions", NEVER, stream=False))
            await _answer(reader, b"503")
            await asyncio.sleep(REFUSED_EVERY_S)
    finally:
        writer.close()


async def _answer(reader: asyncio.StreamReader, status: bytes = b"200") -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 " + status):
        raise SystemExit(f"unexpected answer: {head[:300]!r}")
    lines = (line.partition(b":") for line in head.lower().split(b"\r\n"))
    length = next(int(value) for name, _, value in lines if name == b"content-length")
    return await reader.readexactly(length)


# --- viewers ----------------------------------------------------------------------------------------------------------


Next = Callable[[dict[str, Any]], str]
"""What to ask for after this answer; `{}` before the first."""


def _same(path: str) -> Next:
    return lambda _: path


class _History:
    """The last time that was told: an answer may hold none."""

    def __init__(self) -> None:
        self._at = 0.0

    def __call__(self, before: dict[str, Any]) -> str:
        self._at = (before.get("at") or [self._at])[-1]
        return f"/api/v1/history?since={self._at}"


def _timeline(before: dict[str, Any]) -> str:
    return f"/api/v1/timeline?seconds=900&since={before['now'] - 1 if before else 0}"


# What the pages ask for, and how often: ui/src/pages.
def pages() -> list[list[tuple[Next, float]]]:
    return [
        [(_same("/api/v1/queue?limit=200&offset=0"), 1.5)],
        [(_timeline, 2.0), (_History(), 5.0)],
        [(_same("/api/v1/requests?limit=150"), 1.0)],
        [(_same("/api/v1/decisions?limit=500"), 1.0)],
        [(_same("/api/v1/limits?limit=60"), 3.0), (_same("/api/v1/clients?limit=1000"), 5.0)],
    ]


async def watches(port: int, seen: list[int], page: int) -> None:
    """A tab: the stream, and what its page asks for."""
    asked = pages()[page % len(pages())]
    await asyncio.gather(_streams(port, seen), *(_polls(port, ask, every_s, seen) for ask, every_s in asked))


async def _streams(port: int, seen: list[int]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /api/v1/events?state=true HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        while data := await reader.read(1 << 16):
            seen[0] += len(data)
        raise SystemExit("the stream ended")
    finally:
        writer.close()


async def _polls(port: int, ask: Next, every_s: float, seen: list[int]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    said: dict[str, Any] = {}
    try:
        while True:
            writer.write(f"GET {ask(said)} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            body = await _answer(reader)
            said = json.loads(body)
            seen[0] += len(body)
            await asyncio.sleep(every_s)
    finally:
        writer.close()


# --- rounds -----------------------------------------------------------------------------------------------------------


async def one_round(own: Gateway, options: argparse.Namespace, viewers: int) -> dict[str, float]:
    """The gateway's share of a core, requests per second and what each viewer was sent."""
    answered, seen, names = [0], [0], [f"model-{number:04}" for number in range(SERVING)]
    callers = 2 * SERVING
    tasks = [
        asyncio.create_task(calls(own.port, names[number % SERVING], callers / options.rate, answered))
        for number in range(callers)
    ]
    tasks += [asyncio.create_task(waits(own.port)) for _ in range(WAITING)]
    await asyncio.sleep(SETTLE_S)
    tasks.append(asyncio.create_task(is_refused(own.port)))
    tasks += [asyncio.create_task(watches(own.port, seen, number)) for number in range(viewers)]
    await asyncio.sleep(SETTLE_S)
    loop = asyncio.get_running_loop()
    began, cpu_s, before, sent = loop.time(), own_cpu_s(own.pid), answered[0], seen[0]
    await asyncio.sleep(options.seconds)
    took_s = loop.time() - began
    figures = {
        "share": round((own_cpu_s(own.pid) - cpu_s) / took_s, 4),
        "requests_per_s": round((answered[0] - before) / took_s, 1),
        "kb_per_s_and_viewer": round((seen[0] - sent) / took_s / 1e3 / max(1, viewers), 1),
    }
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return figures


def assets_kb() -> dict[str, float]:
    """Kilobytes of each file as it is sent."""
    return {path.name: round(len(gzip.compress(path.read_bytes(), 9)) / 1e3, 1) for path in sorted(ASSETS.iterdir())}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--viewers", type=int, default=5)
    parser.add_argument("--models", type=int, default=1_000)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    run = Run("gateway_dashboard", options)
    rounds: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    with gateway(**configuration(options.models)) as own:
        for name in (f"model-{number:04}" for number in range(SERVING)):
            own.ask("/v1/chat/completions", {"model": name, "messages": [{"role": "user", "content": "hi"}]})
        for _ in range(options.rounds):
            for name, viewers in (("without", 0), ("with", options.viewers)):
                rounds[name].append(uvloop.run(one_round(own, options, viewers)))
                print(name, rounds[name][-1], flush=True)
    sizes = assets_kb()
    print("gzipped kB", sizes, flush=True)
    shares = {name: median(one["share"] for one in seen) for name, seen in rounds.items()}
    figures = {
        "viewers": options.viewers,
        "models": options.models,
        "share": shares,
        "added_share": round(shares["with"] - shares["without"], 4),
        "kb_per_s_and_viewer": median(one["kb_per_s_and_viewer"] for one in rounds["with"]),
        "requests_per_s": median(one["requests_per_s"] for one in rounds["with"]),
        "assets_gzipped_kb": round(sum(sizes.values()), 1),
    }
    # A machine that cannot serve the load tells nothing about the cost.
    is_served = figures["requests_per_s"] >= SERVED_MIN * options.rate
    met = is_served and all(figures[name.removesuffix("_max")] <= most for name, most in GOALS.items())
    run.report(figures, GOALS, met)


if __name__ == "__main__":
    main()
