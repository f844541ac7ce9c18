"""The HTTP edge, the pool and the relay as a reverse proxy and nothing else: what the gateway's hot path cannot beat.

python benchmarks/gateway/bare_proxy.py --port 8000 --engine-port 9000
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json

import uvloop

from greenroom.errors import GreenroomError
from greenroom.http.edge import Edge, Exchange, Head, Refusal
from greenroom.http.headers import build_request
from greenroom.http.relay import Outcome, Relay
from greenroom.http.upstream import Address, Pool

BODY_MAX = 16 * 1024 * 1024


class BareProxy:
    def __init__(self, engine_port: int) -> None:
        self._pool = Pool(Address("127.0.0.1", engine_port), idle_max=256)
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
        relay = Relay(exchange, extra_headers=[(b"x-request-id", request_id)], on_done=self._done)
        if not self._pool.send_now(request, exchange.body, relay):
            task = asyncio.get_running_loop().create_task(self._pool.send(request, exchange.body, relay))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    def refuse(self, exchange: Exchange | None, head: Head | None, error: GreenroomError) -> Refusal:
        return error.status, [(b"content-type", b"application/json")], json.dumps({"error": error.message}).encode()

    def _done(self, relay: Relay) -> None:
        if relay.outcome is Outcome.ENGINE_LOST:
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engine-port", type=int, required=True)
    options = parser.parse_args()
    uvloop.run(serve(options.port, options.engine_port))


if __name__ == "__main__":
    main()
