"""Is an HTTP edge of our own worth it? CPU per request and per streamed chunk of the bare edge, beside nginx.

The bare edge is the gateway's HTTP edge, connection pool and relay as a reverse proxy and nothing else: the hot path
cannot cost less. Both stand in front of the same engine, one after the other, several rounds in one run; the best round
of each counts, because other load on the machine can only add. The numbers behind docs/adr/0002-own-http-edge.md.

    python -m benchmarks.gateway.edge [--rounds 3] [--requests 20000] [--streams 100]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys

import uvloop

from benchmarks.rig.processes import engine_argv, free_port, leave_last_core, running
from benchmarks.rig.result import Run, options_of
from benchmarks.rig.traffic import Side, compare, cost_ratios, nginx
from greenroom.errors import GreenroomError
from greenroom.http.edge import Edge, Refusal
from greenroom.http.exchange import Exchange
from greenroom.http.headers import build_request
from greenroom.http.relays.relay import Relay, RelayOptions, RelayOutcome
from greenroom.http.request import Head
from greenroom.http.upstream import EngineAddress, Pool

# The goals of the whole gateway: the difference to the bare edge is what everything else may cost.
GOALS = {"request_ratio_max": 4.0, "chunk_ratio_max": 1.4}
CHUNKS = 150
BODY_MAX = 16 * 1024 * 1024


class BareProxy:
    def __init__(self, engine_port: int) -> None:
        self._pool = Pool(EngineAddress("127.0.0.1", engine_port), idle_max=256)
        self._host = str(self._pool.address).encode()
        self._connecting: set[asyncio.Task[None]] = set()
        self._served = 0

    def admit(self, head: Head) -> int:
        return BODY_MAX

    def handle(self, exchange: Exchange) -> None:
        head = exchange.head
        self._served += 1
        request_id = b"r-%d" % self._served
        request = build_request(
            head.method, head.target, head.headers, host=self._host, length=len(exchange.body), request_id=request_id
        )
        relay = Relay(exchange, RelayOptions([(b"x-request-id", request_id)]), on_done=self._done)
        if not self._pool.send_now(request, exchange.body, relay):
            task = asyncio.get_running_loop().create_task(self._pool.send(request, exchange.body, relay))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    def refuse(self, exchange: Exchange | None, head: Head | None, error: GreenroomError) -> Refusal:
        return error.status, [(b"content-type", b"application/json")], json.dumps({"error": error.message}).encode()

    def _done(self, relay: Relay) -> None:
        if relay.outcome is RelayOutcome.ENGINE_LOST:
            if relay.exchange.started:
                relay.exchange.cut()
            else:
                relay.exchange.respond(502, [], b"")


async def serve(port: int, engine_port: int) -> None:
    proxy = BareProxy(engine_port)
    edge = Edge(admit=proxy.admit, handle=proxy.handle, refuse=proxy.refuse)
    await edge.listen(host="127.0.0.1", port=port)
    gc.freeze()
    await asyncio.Event().wait()


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--streams", type=int, default=100)
    # How it starts itself as the proxy.
    parser.add_argument("--serve", type=int, nargs=2, metavar=("PORT", "ENGINE_PORT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return uvloop.run(serve(*options.serve))
    leave_last_core()
    engine_port, own_port, nginx_port = free_port(), free_port(), free_port()
    own_argv = [sys.executable, "-m", "benchmarks.gateway.edge", "--serve", str(own_port), str(engine_port)]
    run = Run("edge_choice", options)
    with (
        running(engine_argv(str(engine_port), chunks=CHUNKS), engine_port),
        running(own_argv, own_port) as own,
        nginx(nginx_port, engine_port) as other,
    ):
        sides = {"edge": Side(own_port, own), "nginx": Side(nginx_port, other, with_children=True)}
        figures = compare(sides, options.rounds, requests=options.requests, streams=options.streams)
    figures |= cost_ratios(figures["edge"], figures["nginx"])
    return run.report(figures, GOALS, all(figures[name.removesuffix("_max")] <= most for name, most in GOALS.items()))


if __name__ == "__main__":
    main()
