"""asgi.py"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest_asyncio
from starlette.types import Receive, Scope, Send

from greenroom.api.asgi import AsgiBridge
from greenroom.http.exchange import Exchange
from greenroom.http.limits import EdgeLimits
from tests.http.wires import QUICK, Client, Server, echo
from tests.waiting import until

A_TURN = EdgeLimits().pipelined_per_turn_max


class App:
    """An application that waits, and notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while not self.heard or self.heard[-1] != "http.disconnect":
            self.heard.append((await receive())["type"])


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    server = Server(EdgeLimits(**QUICK))
    await server.start()
    yield server
    await server.stop()


def asked(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


async def test_call_that_is_ended_before_its_first_step_does_not_keep_its_client(server: Server) -> None:
    bridge = AsgiBridge(App())

    def handle(exchange: Exchange) -> None:
        bridge.handle(exchange, b"/", "r-1", is_admin=True)
        bridge.close()

    server.handle = handle
    client = await Client.connect(server.port)
    await client.send(asked("/"))
    assert await client.is_closed()
    await client.close()


async def test_client_that_left_before_the_application_began_is_heard_to_have_left(server: Server) -> None:
    app = App()
    bridge = AsgiBridge(app)
    left: list[bool] = []

    def handle(exchange: Exchange) -> None:
        if exchange.head.path != b"/app":
            echo(exchange)
            return
        bridge.handle(exchange, b"/app", "r-1", is_admin=True)
        asyncio.get_running_loop().call_soon(lambda: left.append(exchange.gone))

    server.handle = handle
    client = await Client.connect(server.port)
    # The last one is taken up a turn later, in the one in which its client is seen to leave.
    client.writer.write(asked("/x") * A_TURN + asked("/app"))
    client.writer.write_eof()
    await until(lambda: app.heard[-1:] == ["http.disconnect"], "the application has heard of it")
    assert left == [True]
    assert app.heard == ["http.disconnect"]
    await client.close()
