"""Raw bytes both ways after an Upgrade."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from greenroom.http.relays.relay import RelayOutcome
from greenroom.http.relays.tunnel import Tunnel
from greenroom.http.request import Head
from tests.http.conftest import Asked, Behind, Connect, Engines, Facing
from tests.http.wires import DEADLINE_S, Call, Proxy, get, leave, saying
from tests.waiting import until, until_still

ASK = get("/ws", "Connection: Upgrade\r\nUpgrade: echo\r\nSec-WebSocket-Key: k\r\n")
AGREE = (
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\nSec-WebSocket-Accept: a\r\n"
    b"Server: e\r\n\r\n"
)


async def echoing(call: Call) -> None:
    await call.say(AGREE + b"hello ")
    with contextlib.suppress(ConnectionError):
        while data := await call.reader.read(65536):
            await call.say(data)
    call.writer.close()


def tunnel_of(proxy: Proxy) -> Tunnel:
    tunnel = proxy.relays[0]
    assert isinstance(tunnel, Tunnel)
    return tunnel


async def test_bytes_pass_both_ways(engines: Engines, behind: Behind, connect: Connect) -> None:
    engine = await engines(echoing)
    proxy = await behind(engine)
    client = await connect(proxy.server)
    response = await client.ask(ASK + b"ahead ")
    assert (response.status, response.headers["upgrade"], response.headers["connection"]) == (101, "echo", "upgrade")
    assert response.headers["sec-websocket-accept"] == "a"
    assert "server" not in response.headers
    await client.send(b"\x00\xffGET / HTTP/1.1\r\n\r\n")
    expected = b"hello ahead \x00\xffGET / HTTP/1.1\r\n\r\n"
    async with asyncio.timeout(DEADLINE_S):
        assert await client.reader.readexactly(len(expected)) == expected
    tunnel = tunnel_of(proxy)
    assert tunnel.is_open
    assert (tunnel.bytes_from_client, tunnel.bytes_from_engine) == (len(expected) - 6, len(expected))
    assert b"upgrade: echo\r\nsec-websocket-key: k\r\n" in engine.calls[0].head
    await client.close()
    assert await tunnel.wait() is RelayOutcome.COMPLETE
    await until(lambda: proxy.pool.open_count == 0)


async def test_upgrade_has_the_headers_of_every_answer(engines: Engines, behind: Behind, connect: Connect) -> None:
    def admit(head: Head) -> int:
        head.add_to_answer([(b"x-ours", b"1")])
        head.answer_lines = lambda: b"x-left: 5\r\n"
        return 0

    proxy = await behind(await engines(echoing))
    proxy.server.admit = admit
    client = await connect(proxy.server)
    response = await client.ask(ASK)
    assert (response.status, response.headers["x-ours"], response.headers["x-left"]) == (101, "1", "5")


@pytest.mark.parametrize("who", ["client", "engine", "us", "pool"])
async def test_both_sides_end_when_either_ends(who: str, facing: Facing) -> None:
    left = asyncio.Event()

    async def script(call: Call) -> None:
        await call.say(AGREE + b"hi")
        if who == "engine":
            call.writer.close()
        await call.left()
        left.set()

    proxy, client = await facing(script)
    assert (await client.ask(ASK)).status == 101
    assert await client.reader.readexactly(2) == b"hi"
    if who == "client":
        await client.close()
    elif who == "us":
        tunnel_of(proxy).stop()
    elif who == "pool":
        proxy.pool.close()
    async with asyncio.timeout(DEADLINE_S):
        await left.wait()
        assert await tunnel_of(proxy).wait() is RelayOutcome.COMPLETE
    if who != "client":
        assert await client.is_closed()
    await until(lambda: proxy.pool.open_count == 0 and proxy.server.edge.connections == 0)
    assert not tunnel_of(proxy).is_open


async def test_engine_that_declines_is_answered_as_http(facing: Facing) -> None:
    proxy, client = await facing(saying(b"HTTP/1.1 426 Upgrade Required\r\nContent-Length: 2\r\n\r\nno"))
    for _ in range(2):
        response = await client.ask(ASK)
        assert (response.status, response.body) == (426, b"no")
    assert not tunnel_of(proxy).is_open


async def test_engine_chooses_among_the_protocols_that_are_asked_for(facing: Facing) -> None:
    _, client = await facing(echoing)
    response = await client.ask(ASK.replace(b"Upgrade: echo", b"Upgrade: other, Echo"))
    assert (response.status, response.headers["upgrade"]) == (101, "echo")


@pytest.mark.parametrize("named", [b"Upgrade: other\r\n", b"Upgrade: echo\r\nUpgrade: other\r\n"])
async def test_engine_that_agrees_to_another_protocol_is_lost(named: bytes, asked: Asked) -> None:
    async def script(call: Call) -> None:
        await call.say(AGREE.replace(b"Upgrade: echo\r\n", named) + b"hello ")
        await call.left()

    proxy, _ = await asked(script, ASK)
    async with asyncio.timeout(DEADLINE_S):
        await until(lambda: bool(proxy.relays))
        assert await tunnel_of(proxy).wait() is RelayOutcome.ENGINE_LOST


async def test_client_that_leaves_before_the_engine_agrees_ends_the_request(asked: Asked) -> None:
    left = asyncio.Event()

    async def script(call: Call) -> None:
        await call.left()
        left.set()

    proxy, client = await asked(script, ASK)
    await until(lambda: bool(proxy.relays) and proxy.relays[0].upstream is not None)
    await client.close()
    assert await tunnel_of(proxy).wait() is RelayOutcome.CLIENT_GONE
    async with asyncio.timeout(DEADLINE_S):
        await left.wait()


async def test_tunnel_stopped_before_it_opens_ends_the_request(asked: Asked) -> None:
    left = asyncio.Event()

    async def script(call: Call) -> None:
        await call.left()
        left.set()

    proxy, _ = await asked(script, ASK)
    await until(lambda: bool(proxy.relays) and proxy.relays[0].upstream is not None)
    tunnel_of(proxy).stop()
    assert await tunnel_of(proxy).wait() is RelayOutcome.STOPPED
    async with asyncio.timeout(DEADLINE_S):
        await left.wait()
    proxy.relays[0].exchange.cut()


async def test_tunnel_waits_for_the_side_that_reads_slowly(engines: Engines, behind: Behind, connect: Connect) -> None:
    sent = 0
    reading = asyncio.Event()

    async def script(call: Call) -> None:
        nonlocal sent
        await call.say(AGREE)
        for _ in range(1000):
            await call.say(b"x" * 65536)
            sent += 65536
            if reading.is_set():
                break
        await reading.wait()
        while await call.reader.read(1 << 20):
            pass

    proxy = await behind(await engines(script), write_timeout_s=60)
    client = await connect(proxy.server)
    assert (await client.ask(ASK)).status == 101
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await until_still(lambda: sent)
    assert sent < 40_000_000

    # The other way: the engine does not read yet.
    async def flood() -> None:
        for _ in range(1000):
            await client.send(b"y" * 65536)

    flooding = asyncio.create_task(flood())
    tunnel = tunnel_of(proxy)
    await until_still(lambda: tunnel.bytes_from_client)
    assert not flooding.done() and tunnel.bytes_from_client < 40_000_000
    reading.set()
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]

    async def drain() -> None:
        while await client.reader.read(1 << 20):
            pass

    draining = asyncio.create_task(drain())
    async with asyncio.timeout(DEADLINE_S):
        await flooding
    await until(lambda: tunnel.bytes_from_client == 65_536_000)
    await client.close()
    await asyncio.wait([draining])
    async with asyncio.timeout(DEADLINE_S):
        await tunnel.wait()


@pytest.mark.parametrize("how", ["fin", "rst", "half-close"])
async def test_client_of_a_deaf_engine_is_seen_to_leave(
    how: str, engines: Engines, behind: Behind, connect: Connect
) -> None:
    async def script(call: Call) -> None:
        await call.say(AGREE)
        await asyncio.Event().wait()

    proxy = await behind(await engines(script), write_timeout_s=0.5)
    client = await connect(proxy.server)
    assert (await client.ask(ASK)).status == 101
    tunnel, sent = tunnel_of(proxy), 0
    # Until one piece stays in the socket: the client is made to wait.
    while tunnel.bytes_from_client == sent:
        await client.send(b"y" * 65536)
        sent += 65536
        with contextlib.suppress(AssertionError):
            await until(lambda: tunnel.bytes_from_client == sent, within_s=0.3)  # noqa: B023
    leave(client, how)
    async with asyncio.timeout(DEADLINE_S):
        assert await tunnel.wait() is RelayOutcome.COMPLETE
    await until(lambda: proxy.server.edge.connections == 0)
    await until(lambda: proxy.pool.open_count == 0)


async def test_tunnel_is_cut_when_the_edge_is(facing: Facing) -> None:
    proxy, client = await facing(echoing)
    assert (await client.ask(ASK)).status == 101
    await proxy.server.edge.close()
    await client.send(b"still open")
    async with asyncio.timeout(DEADLINE_S):
        assert await client.reader.readexactly(16) == b"hello still open"
    proxy.server.edge.abort()
    assert await tunnel_of(proxy).wait() is RelayOutcome.COMPLETE
