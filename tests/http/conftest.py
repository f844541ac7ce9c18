"""Every asynchronous test of this directory runs on both event loops, and fails if an exception reached the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import pytest
import uvloop

from greenroom.http.limits import EdgeLimits
from greenroom.http.upstream import Pool
from tests.waiting import until

from .wires import QUICK, Client, Engine, Proxy, Script, Server, address, post

Serve = Callable[..., Awaitable[Server]]
Connect = Callable[[Server], Awaitable[Client]]
Engines = Callable[[Script], Awaitable[Engine]]
Behind = Callable[..., Awaitable[Proxy]]
Dial = Callable[..., Awaitable[tuple[Server, Client]]]
Facing = Callable[..., Awaitable[tuple[Proxy, Client]]]
Asked = Facing


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
async def loop_errors() -> AsyncIterator[list[dict[str, Any]]]:
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    yield errors
    assert errors == []


@pytest.fixture
async def serve(loop_errors: list[dict[str, Any]]) -> AsyncIterator[Serve]:
    """Start a server with these limits. At the end every connection and every byte of body budget must be back."""
    servers: list[Server] = []

    async def start(**limits: Any) -> Server:
        server = Server(EdgeLimits(**{**QUICK, **limits}))
        servers.append(server)
        await server.start()
        return server

    yield start
    for server in servers:
        await server.stop()
        assert server.edge.bodies.memory_bytes == 0
        assert server.edge.bodies.spool_bytes == 0
        # Nothing outside of the edge shows that an address is forgotten.
        assert not server.edge._per_ip


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    clients: list[Client] = []

    async def open_one(server: Server) -> Client:
        client = await Client.connect(server.port)
        clients.append(client)
        return client

    yield open_one
    for client in clients:
        await client.close()


@pytest.fixture
def dial(serve: Serve, connect: Connect) -> Dial:
    """Start a server with these limits, and connect one client to it."""

    async def start(**limits: Any) -> tuple[Server, Client]:
        server = await serve(**limits)
        return server, await connect(server)

    return start


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    started: list[Engine] = []

    async def start(script: Script) -> Engine:
        engine = Engine(script)
        started.append(engine)
        await engine.start()
        return engine

    yield start
    for engine in started:
        await engine.stop()


@pytest.fixture
async def behind(serve: Serve) -> AsyncIterator[Behind]:
    """A server that relays everything to an engine."""
    pools: list[Pool] = []

    async def start(engine: Engine, loop: Any = None, **limits: Any) -> Proxy:
        server = await serve(**limits)
        pool = Pool(address(engine), loop=loop)
        pools.append(pool)
        return Proxy(server, pool)

    yield start
    for pool in pools:
        pool.close()
        await until(lambda pool=pool: pool.open_count == 0, "every connection to the engine closed")  # type: ignore[misc]


@pytest.fixture
def facing(engines: Engines, behind: Behind, connect: Connect) -> Facing:
    """A proxy with these options before an engine that follows the script, and a client of it."""

    async def start(script: Script, **options: Any) -> tuple[Proxy, Client]:
        proxy = await behind(await engines(script))
        for name, value in options.items():
            setattr(proxy, name, value)
        return proxy, await connect(proxy.server)

    return start


@pytest.fixture
def asked(facing: Facing) -> Asked:
    """The same, with a request of the client on its way."""

    async def start(script: Script, request: bytes = post(b"{}"), **options: Any) -> tuple[Proxy, Client]:
        proxy, client = await facing(script, **options)
        await client.send(request)
        return proxy, client

    return start
