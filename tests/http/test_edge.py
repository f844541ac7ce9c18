"""The listening side as a client sees it: keep-alive, bodies, pipelining, deadlines, limits and how connections end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from greenroom.errors import BadRequest, GatewayBug, InvalidKey
from greenroom.http.client import ClientConnection
from greenroom.http.exchange import Exchange
from greenroom.http.request import Head
from tests.waiting import until, until_still

from .conftest import Connect, Dial, Serve
from .wires import DEADLINE_S, Client, Leaving, echo, get, leave, post

CHUNKED = b"POST /c HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


# --- requests and answers -------------------------------------------------------------------------------------------


async def test_connection_serves_one_request_after_another(dial: Dial) -> None:
    server, client = await dial()
    for number in range(5):
        response = await client.ask(post(b"body %d" % number, f"/{number}?a=b"))
        assert response.body == b"POST /%d?a=b body %d" % (number, number)
        assert "connection" not in response.headers
        assert "date" in response.headers
    assert server.edge.stats.accepted == 1


async def test_head_keeps_the_raw_path_and_lowers_names(dial: Dial) -> None:
    server, client = await dial()
    await client.ask(get("/upstream/a%2Fb/../c?x=%20", "X-Thing: One \r\n"))
    head = server.admitted[0]
    assert (head.path, head.query) == (b"/upstream/a%2Fb/../c", b"x=%20")
    assert head.get(b"x-thing") == b"One"
    assert head.get(b"absent") is None
    assert head.peer_ip == "127.0.0.1"


async def test_absolute_target_of_our_host_is_read_as_its_path(dial: Dial) -> None:
    server, client = await dial()
    await client.send(b"GET http://LocalHost:80/a?b HTTP/1.1\r\nHost: localhost:80\r\n\r\n")
    assert (await client.response()).body == b"GET /a?b "
    assert server.admitted[0].path == b"/a"


async def test_one_empty_line_before_a_request_is_forgiven(dial: Dial) -> None:
    _, client = await dial()
    assert (await client.ask(b"\r\n" + get("/a") + b"\r\n" + get("/b"))).body == b"GET /a "
    assert (await client.response()).body == b"GET /b "


async def test_client_that_asks_to_close_is_closed(dial: Dial) -> None:
    _, client = await dial()
    assert (await client.ask(get("/", "Connection: close\r\n"))).headers["connection"] == "close"
    assert await client.is_closed()


async def test_http_1_0_is_closed_unless_it_asks_to_stay(dial: Dial) -> None:
    _, client = await dial()
    await client.send(b"GET /stay HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert (await client.response()).headers["connection"] == "keep-alive"
    response = await client.ask(b"GET /go HTTP/1.0\r\n\r\n")
    assert (response.body, response.headers["connection"]) == (b"GET /go ", "close")
    assert await client.is_closed()


async def test_head_gets_the_length_and_no_body(dial: Dial) -> None:
    _, client = await dial()
    response = await client.ask(b"HEAD /a HTTP/1.1\r\nHost: localhost\r\n\r\n" + get("/b"), head_only=True)
    assert response.headers["content-length"] == str(len(b"HEAD /a "))
    assert (await client.response()).body == b"GET /b "


async def test_head_of_a_streamed_answer_gets_no_chunk(dial: Dial) -> None:
    server, client = await dial()
    server.handle = stream_two
    await client.send(b"HEAD /a HTTP/1.1\r\nHost: localhost\r\n\r\n" + get("/b"))
    assert (await client.response(head_only=True)).headers["transfer-encoding"] == "chunked"
    assert (await client.response()).body == b"one two"


def stream_two(exchange: Exchange) -> None:
    exchange.start(200, [], None)
    exchange.write(b"one ")
    exchange.write(b"")
    exchange.write(b"two")
    exchange.finish()


async def test_streamed_answer_is_chunked_and_the_connection_stays(dial: Dial) -> None:
    server, client = await dial()
    server.handle = stream_two
    for _ in range(3):
        response = await client.ask(get())
        assert (response.body, response.headers["transfer-encoding"]) == (b"one two", "chunked")


async def test_streamed_answer_to_http_1_0_ends_with_the_connection(dial: Dial) -> None:
    server, client = await dial()
    server.handle = stream_two
    response = await client.ask(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert response.body == b"one two"
    assert "transfer-encoding" not in response.headers


async def test_answer_without_content_has_no_length(dial: Dial) -> None:
    server, client = await dial()
    server.handle = lambda exchange: exchange.respond(204, [], b"")
    assert "content-length" not in (await client.ask(get() + get())).headers
    assert (await client.response()).status == 204


# --- bodies ---------------------------------------------------------------------------------------------------------


async def test_chunked_body_is_joined(dial: Dial) -> None:
    _, client = await dial()
    await client.send(CHUNKED + b"3\r\nabc\r\n5;x=y\r\n\r\n\r\nd\r\n0\r\nX-Note: fine\r\n\r\n" + get("/next"))
    assert (await client.response()).body == b"POST /c abc\r\n\r\nd"
    assert (await client.response()).body == b"GET /next "


async def test_no_answer_waits_until_the_one_before_it_is_acknowledged(dial: Dial) -> None:
    server, client = await dial()
    assert (await client.ask(get("/a"))).body == b"GET /a "
    assert server.sends_at_once()


async def test_requests_are_the_same_wherever_the_bytes_are_split(dial: Dial) -> None:
    _, client = await dial()
    data = (
        CHUNKED + b"2\r\n\r\n\r\n1\r\nx\r\n0\r\n\r\n" + post(b"\r\n\r\n") + CHUNKED + b"0\r\nA: b\r\n\r\n" + get("/z")
    )
    expected = [b"POST /c \r\nx", b"POST / \r\n\r\n", b"POST /c ", b"GET /z "]
    for cut in range(1, len(data)):
        await client.send(data[:cut])
        await asyncio.sleep(0)
        await client.send(data[cut:])
        assert [(await client.response()).body for _ in expected] == expected, cut


@pytest.mark.parametrize(
    "sent",
    [
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 101\r\n\r\n",
        CHUNKED + b"64\r\n" + b"x" * 100 + b"\r\n1\r\nx\r\n",
    ],
    ids=["announced", "chunked"],
)
async def test_body_beyond_the_limit_is_refused(sent: bytes, dial: Dial) -> None:
    server, client = await dial()
    server.body_max = 100
    response = await client.ask(sent)
    assert (response.status, response.headers["connection"], server.seen) == (413, "close", [])
    assert await client.is_closed()


@pytest.mark.parametrize("extra", ["", "Expect: 100-continue\r\n"])
async def test_body_that_stops_coming_is_refused_by_its_deadline(extra: str, dial: Dial) -> None:
    server, client = await dial(body_timeout_s=0.2)
    # A promise of much more does not buy more time.
    await client.send(f"POST / HTTP/1.1\r\nHost: localhost\r\n{extra}Content-Length: 4000000\r\n\r\n".encode())
    if extra:
        assert (await client.response()).status == 100
    assert (await client.response()).status == 408
    assert await client.is_closed()
    assert server.edge.stats.body_timeouts == 1


# --- admission ------------------------------------------------------------------------------------------------------


def deny(head: Head) -> int:
    raise InvalidKey("Not with this key.")


async def test_refused_request_without_a_body_leaves_the_connection_open(dial: Dial) -> None:
    server, client = await dial()
    server.admit = deny
    await client.send(get("/a") + get("/b"))
    for _ in range(2):
        response = await client.response()
        assert response.status == 401
        assert "connection" not in response.headers
    server.admit = lambda head: 0
    assert (await client.ask(get("/c"))).body == b"GET /c "
    assert server.edge.stats.refused == 2


@pytest.mark.parametrize("body", [b"", b"{}"])
@pytest.mark.parametrize("ends", ["answered", "refused", "body too large", "bug"])
async def test_every_answer_has_what_admit_added(body: bytes, ends: str, dial: Dial) -> None:
    def admit(head: Head) -> int:
        head.add_to_answer([(b"x-one", b"1")])
        head.add_to_answer([(b"x-two", b"2")])
        head.answer_lines = lambda: b"x-left: 5\r\n"
        if ends == "refused":
            raise InvalidKey("no key")
        if ends == "bug":
            raise ValueError
        return 1 if ends == "body too large" else 2

    server, client = await dial()
    server.admit = admit
    headers = (await client.ask(post(body))).headers
    assert [headers[name] for name in ("x-one", "x-two", "x-left")] == ["1", "2", "5"]


async def test_refused_upload_can_read_why(dial: Dial) -> None:
    server, client = await dial()
    server.admit = deny
    # Far more than socket buffers hold: a server that closed at once would destroy its own answer.
    assert (await client.ask(post(b"x" * 8_000_000))).status == 401
    assert await client.is_closed()
    assert server.seen == []


async def test_refused_upload_without_end_is_cut_off(dial: Dial) -> None:
    server, client = await dial(linger_bytes_max=100_000, linger_s=30)
    server.admit = deny
    with pytest.raises(ConnectionError):
        await client.send(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n")
        while True:
            await client.send(b"x" * 65536)
            await asyncio.sleep(0)


async def test_refused_client_that_does_not_leave_is_cut_off(dial: Dial) -> None:
    server, client = await dial(linger_s=0.1)
    assert (await client.ask(b"nonsense\r\n\r\n")).status == 400
    await until(lambda: server.edge.connections == 0)


async def test_expectation_is_answered_after_admission(dial: Dial) -> None:
    server, client = await dial()
    request = post(b"abc", extra="Expect: 100-continue\r\n")
    assert (await client.ask(request[:-3])).status == 100
    assert server.seen == []
    assert (await client.ask(b"abc")).body == b"POST / abc"
    server.admit = deny
    assert (await client.ask(request[:-3])).status == 401


async def test_body_sent_along_needs_no_continue(dial: Dial) -> None:
    _, client = await dial()
    assert (await client.ask(post(b"abc", extra="Expect: 100-continue\r\n"))).status == 200


async def test_other_expectations_fail(dial: Dial) -> None:
    _, client = await dial()
    assert (await client.ask(post(b"abc", extra="Expect: the-unexpected\r\n"))).status == 417
    assert await client.is_closed()


async def test_bug_in_admit_handle_or_refuse_is_answered_with_500(serve: Serve, connect: Connect) -> None:
    server = await serve()

    def broken(*_: object) -> int:
        raise RuntimeError("broken")

    server.admit = broken
    client = await connect(server)
    assert (await client.ask(get())).status == 500
    server.admit = lambda head: 0
    server.handle = broken  # type: ignore[assignment]
    client = await connect(server)
    assert (await client.ask(get())).status == 500
    server.refuse = broken  # type: ignore[assignment]
    assert (await client.ask(get())).status == 500
    assert server.edge.stats.bugs == 4


async def test_error_raised_by_the_handler_is_rendered(dial: Dial) -> None:
    server, client = await dial()

    def handle(exchange: Exchange) -> None:
        raise BadRequest("no such thing")

    server.handle = handle
    await client.send(get() + get())
    assert [(await client.response()).status for _ in range(2)] == [400, 400]


# --- pipelining -----------------------------------------------------------------------------------------------------


async def test_requests_sent_ahead_are_answered_in_order_and_not_before(dial: Dial) -> None:
    server, client = await dial()
    held: list[Exchange] = []
    server.handle = held.append
    await client.send(b"".join(post(b"%d" % number) for number in range(50)))
    for number in range(50):
        await until(lambda number=number: len(held) == number + 1)  # type: ignore[misc]
        echo(held[number])
    assert [(await client.response()).body for _ in range(50)] == [b"POST / %d" % number for number in range(50)]


async def test_many_requests_sent_ahead_are_all_answered(dial: Dial) -> None:
    _, client = await dial()
    count = 3000
    sending = asyncio.create_task(client.send(get("/x") * count))
    for _ in range(count):
        assert (await client.response()).body == b"GET /x "
    await sending


async def test_client_that_asks_without_reading_is_not_served_on(dial: Dial) -> None:
    server, client = await dial(write_timeout_s=60)
    server.handle = lambda exchange: exchange.respond(200, [], b"x" * 100_000)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    sending = asyncio.create_task(client.send(get() * 20_000))
    await until_still(lambda: len(server.seen))
    assert len(server.seen) < 1000
    assert server.buffered() < 500_000
    sending.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sending
    client.reset()


async def test_nothing_sent_ahead_is_begun_after_the_client_stopped_sending(dial: Dial) -> None:
    """What was answered before is still delivered."""
    server, client = await dial()
    server.handle = lambda exchange: exchange.respond(200, [], b"x" * 1_000_000)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await client.send(get() * 60)
    client.writer.write_eof()
    await until(lambda: len(server.seen) > 0)
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]
    answers = 0
    with contextlib.suppress(asyncio.IncompleteReadError):
        while len((await client.response()).body) == 1_000_000:
            answers += 1
    # Sixty are far more than fit between the two.
    assert answers == len(server.seen) < 60


@pytest.mark.parametrize("how", ["fin", "rst", "half-close"])
async def test_client_that_sent_far_ahead_is_seen_to_leave(how: str, dial: Dial) -> None:
    server, client = await dial(pipelined_bytes_max=1000)
    held: list[Exchange] = []
    server.handle = held.append
    await client.send(post(b"first") + get() * 1000)
    await until(lambda: len(held) == 1)
    leave(client, how)
    await until(lambda: held[0].gone)
    await until(lambda: server.edge.connections == 0)
    assert len(held) == 1


# --- how answers end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [None, 100])
async def test_cut_answer_is_seen_as_truncated(length: int | None, dial: Dial) -> None:
    server, client = await dial()

    def handle(exchange: Exchange) -> None:
        exchange.start(200, [], length)
        exchange.write(b"some")
        exchange.cut()

    server.handle = handle
    response = await client.ask(get())
    assert (response.body, response.whole) == (b"some", False)


async def test_cut_answer_to_http_1_0_is_reset(dial: Dial) -> None:
    server, client = await dial()
    held: list[Exchange] = []

    def handle(exchange: Exchange) -> None:
        exchange.start(200, [], None)
        exchange.write(b"some")
        held.append(exchange)

    server.handle = handle
    await client.send(b"GET / HTTP/1.0\r\n\r\n")
    await client.reader.readuntil(b"some")
    held[0].cut()
    with pytest.raises(ConnectionResetError):
        await client.reader.read()


async def test_answer_shorter_than_promised_is_cut(dial: Dial) -> None:
    server, client = await dial()

    def handle(exchange: Exchange) -> None:
        exchange.start(200, [], 10)
        exchange.write(b"short")
        exchange.finish()

    server.handle = handle
    assert not (await client.ask(get())).whole


async def test_answer_longer_than_promised_is_cut(dial: Dial) -> None:
    server, client = await dial()
    failures: list[GatewayBug] = []

    def handle(exchange: Exchange) -> None:
        exchange.start(200, [], 3)
        exchange.write(b"ab")
        try:
            exchange.write(b"cd")
        except GatewayBug as error:
            failures.append(error)

    server.handle = handle
    assert not (await client.ask(get())).whole
    assert len(failures) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"x-model", b"a\r\nset-cookie: evil"),
        (b"x-model", b"a\nb"),
        (b"x-model", b"a\rb"),
        (b"x-model", b"a\0b"),
        (b"x model", b"a"),
        (b"x:model", b"a"),
        (b"", b"a"),
        (b"x\r\nevil", b"a"),
    ],
)
async def test_header_that_would_split_the_answer_is_not_sent(name: bytes, value: bytes, dial: Dial) -> None:
    server, client = await dial()

    def handle(exchange: Exchange) -> None:
        with pytest.raises(GatewayBug):
            exchange.respond(200, [(name, value)], b"")
        exchange.respond(200, [(b"x-fine", b"yes")], b"")

    server.handle = handle
    assert (await client.ask(get())).headers["x-fine"] == "yes"


async def test_status_without_a_name_is_sent_and_a_wrong_one_is_not(dial: Dial) -> None:
    server, client = await dial()

    def handle(exchange: Exchange) -> None:
        for status in (0, 99, 1000):
            with pytest.raises(GatewayBug):
                exchange.respond(status, [], b"")
        exchange.respond(599, [], b"")

    server.handle = handle
    assert (await client.ask(get())).status == 599


async def test_answer_cannot_be_started_twice(dial: Dial) -> None:
    server, client = await dial()

    def handle(exchange: Exchange) -> None:
        exchange.start(200, [], None)
        with pytest.raises(GatewayBug):
            exchange.start(200, [], None)
        exchange.finish()
        with pytest.raises(GatewayBug):
            exchange.respond(200, [], b"")
        exchange.finish()
        exchange.write(b"late")
        exchange.cut()

    server.handle = handle
    await client.send(get() + get())
    assert [(await client.response()).whole for _ in range(2)] == [True, True]


# --- clients that leave or stall ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fin", "rst", "half-close"])
@pytest.mark.parametrize("started", [False, True])
async def test_client_that_leaves_is_told_once(how: str, started: bool, dial: Dial) -> None:
    server, client = await dial()
    gone: list[Exchange] = []
    held: list[Exchange] = []

    def handle(exchange: Exchange) -> None:
        exchange.listener = Leaving(lambda: gone.append(exchange))
        if started:
            exchange.start(200, [], None)
            exchange.write(b"some")
        held.append(exchange)

    server.handle = handle
    await client.send(post(b"body"))
    await until(lambda: len(held) == 1)
    leave(client, how)
    await until(lambda: len(gone) == 1)
    assert held[0].gone
    assert server.edge.bodies.memory_bytes == 0
    held[0].write(b"late")
    held[0].finish()
    held[0].cut()
    await until(lambda: server.edge.connections == 0)
    assert len(gone) == 1
    assert server.edge.stats.gone == 1


async def test_client_that_leaves_after_its_answer_is_not_gone(dial: Dial) -> None:
    server, client = await dial()
    gone: list[int] = []

    def handle(exchange: Exchange) -> None:
        exchange.listener = Leaving(lambda: gone.append(1))
        echo(exchange)

    server.handle = handle
    await client.ask(get())
    await client.close()
    await until(lambda: server.edge.connections == 0)
    assert gone == []


async def test_client_that_reads_a_little_is_not_cut(serve: Serve) -> None:
    server = await serve(write_timeout_s=0.5)
    await server.pass_time(0)
    server.handle = lambda exchange: exchange.respond(200, [], b"x" * 60_000_000)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=4096)
    writer.write(get())
    await reader.readuntil(b"\r\n\r\n")
    for _ in range(10):
        waiting = server.buffered()
        # The kernel opens its window again when enough was read.
        while server.buffered() >= waiting:
            assert await reader.readexactly(10_000)
        # The first sweep sees that something was read, the second that nothing was since.
        for _ in range(2):
            await server.pass_time(0.2)
    assert server.edge.stats.write_timeouts == 0
    writer.transport.abort()


async def test_idle_connection_is_closed_without_a_word(dial: Dial) -> None:
    server, client = await dial(keepalive_s=0.2, header_timeout_s=30)
    await client.ask(get())
    assert await client.is_closed()
    assert server.edge.stats.idle_closed == 1


async def test_deadline_of_a_later_request_starts_with_its_first_byte(dial: Dial) -> None:
    server, client = await dial(keepalive_s=30, header_timeout_s=0.4)
    await server.pass_time(0)
    await client.ask(get())
    await server.pass_time(20)
    await client.send(get()[:10])
    await server.pass_time(0.3)
    assert (await client.ask(get()[10:])).status == 200
    await client.send(b"GET")
    late = asyncio.create_task(client.response())
    while not late.done():
        await server.pass_time(0.1)
    assert late.result().status == 408


async def test_answering_has_no_deadline(dial: Dial) -> None:
    server, client = await dial(header_timeout_s=0.1, body_timeout_s=0.1, keepalive_s=0.1, write_timeout_s=0.1)
    await server.pass_time(0)
    held: list[Exchange] = []
    server.handle = held.append
    await client.send(post(b"abc"))
    await until(lambda: len(held) == 1)
    for _ in range(3):
        await server.pass_time(10)
    echo(held[0])
    assert (await client.response()).body == b"POST / abc"


# --- the edge itself ------------------------------------------------------------------------------------------------


async def test_connections_beyond_the_limit_are_turned_away(serve: Serve, connect: Connect) -> None:
    server = await serve(connections_max=2)
    first, _ = await connect(server), await connect(server)
    await until(lambda: server.edge.connections == 2)
    third = await connect(server)
    assert (await third.response()).status == 503
    assert await third.is_closed()
    await first.close()
    await until(lambda: server.edge.connections == 1)
    fourth = await connect(server)
    assert (await fourth.ask(get())).status == 200


class FarAway(asyncio.Transport):
    """A connection that looks as if it came from another machine."""

    def __init__(self, ip: str = "10.0.0.1") -> None:
        super().__init__({"peername": (ip, 5)})
        self.written = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


async def test_connections_of_one_address_are_limited(serve: Serve, connect: Connect) -> None:
    server = await serve(connections_per_ip_max=1)
    # From here there may be as many as like.
    await connect(server)
    await connect(server)
    await until(lambda: server.edge.connections == 2)
    first, second = FarAway(), FarAway()
    connections = [ClientConnection(server.edge), ClientConnection(server.edge)]
    for connection, transport in zip(connections, (first, second), strict=True):
        connection.connection_made(transport)
    assert (first.written, first.closed) == (b"", False)
    assert second.written.startswith(b"HTTP/1.1 503 ")
    assert second.closed
    assert server.edge.stats.over_limit == 1
    for connection in connections:
        connection.connection_lost(None)


@pytest.mark.parametrize("ip", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", ""])
async def test_loopback_is_recognised(serve: Serve, ip: str) -> None:
    server = await serve(connections_per_ip_max=1)
    connections = [ClientConnection(server.edge) for _ in range(6)]
    transports = [FarAway(origin) for origin in (ip, "10.0.0.1", "fe80::1%eth0") for _ in range(2)]
    for connection, transport in zip(connections, transports, strict=True):
        connection.connection_made(transport)
    assert [transport.closed for transport in transports] == [False, False, False, True, False, True]
    for connection in connections:
        connection.connection_lost(None)


async def test_closing_lets_running_answers_finish(serve: Serve, connect: Connect) -> None:
    server = await serve()
    held: list[Exchange] = []
    server.handle = held.append
    idle, busy = await connect(server), await connect(server)
    await busy.send(get())
    await until(lambda: len(held) == 1 and server.edge.connections == 2)
    await server.edge.close()
    assert await idle.is_closed()
    with pytest.raises(ConnectionError):
        await Client.connect(server.port)
    echo(held[0])
    response = await busy.response()
    assert (response.status, response.headers["connection"]) == (200, "close")
    assert await busy.is_closed()


async def test_client_that_accepts_nothing_is_cut(dial: Dial) -> None:
    server, client = await dial(write_timeout_s=0.3)
    gone: list[int] = []

    def handle(exchange: Exchange) -> None:
        exchange.listener = Leaving(lambda: gone.append(1))
        exchange.start(200, [], None)
        exchange.write(b"x" * 20_000_000)

    server.handle = handle
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await client.send(get())
    await until(lambda: gone == [1])
    assert server.edge.stats.write_timeouts == 1
    client.reset()


async def test_aborting_cuts_everything(dial: Dial) -> None:
    server, client = await dial()
    held: list[Exchange] = []
    server.handle = held.append
    await client.send(get())
    await until(lambda: len(held) == 1)
    server.edge.abort()
    assert await client.is_closed()
    assert held[0].gone


async def test_a_name_that_no_host_can_have_is_an_error_of_the_system(serve: Serve) -> None:
    server = await serve()
    for name in ("a" * 64, "a..b"):
        with pytest.raises(OSError, match="is no name of a host"):
            await server.edge.bind(name, 0)


async def test_unix_socket_is_served_to_its_owner_only(serve: Serve, tmp_path: Path) -> None:
    server = await serve()
    path = str(tmp_path / "edge.sock")
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(path)
    stale.close()
    await server.edge.listen(path=path)
    assert os.stat(path).st_mode & 0o777 == 0o600
    client = Client(*await asyncio.open_unix_connection(path))
    assert (await client.ask(get("/u"))).body == b"GET /u "
    assert server.admitted[0].peer_ip == ""
    with pytest.raises(OSError, match=r"[Aa]ddress already in use"):
        await server.edge.listen(path=path)
    await client.close()
    await server.edge.close()
    assert not os.path.exists(path)


async def test_connection_taken_over_leaves_http(dial: Dial) -> None:
    server, client = await dial()

    class Shout:
        def __init__(self, exchange: Exchange) -> None:
            self.gone = False
            self.heard = b""
            self.transport = exchange.take_over(self)
            self.transport.write(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")

        def client_data(self, data: bytes) -> None:
            self.heard += data
            if data.endswith(b"!"):
                self.transport.write(self.heard.upper())

        def client_gone(self) -> None:
            self.gone = True

        def client_paused(self) -> None: ...
        def client_resumed(self) -> None: ...

    shouts: list[Shout] = []
    server.handle = lambda exchange: shouts.append(Shout(exchange))
    assert (await client.ask(get("/", "Connection: Upgrade\r\nUpgrade: shout\r\n") + b"ahead ")).status == 101
    assert server.admitted[0].upgrade == b"shout"
    await client.send(b"GET / HTTP/1.1!")
    async with asyncio.timeout(DEADLINE_S):
        assert await client.reader.readexactly(21) == b"AHEAD GET / HTTP/1.1!"
    await client.close()
    await until(lambda: shouts[0].gone)


async def test_answered_connection_cannot_be_taken_over(dial: Dial) -> None:
    server, client = await dial()

    def handle(exchange: Exchange) -> None:
        exchange.start(200, [], 0)
        with pytest.raises(GatewayBug):
            exchange.take_over(None)  # type: ignore[arg-type]
        exchange.finish()

    server.handle = handle
    assert (await client.ask(get())).status == 200


class Odd(FarAway):
    """A transport that cannot say how much it still has to write."""

    connection: ClientConnection

    def get_write_buffer_size(self) -> int:
        raise RuntimeError("odd")

    def abort(self) -> None:
        self.close()
        self.connection.connection_lost(None)


async def test_bug_in_the_sweep_ends_one_connection_and_not_the_sweep(dial: Dial) -> None:
    server, client = await dial(keepalive_s=0.2)
    odd = Odd()
    odd.connection = ClientConnection(server.edge)
    odd.connection.connection_made(odd)
    await client.ask(get())
    await until(lambda: odd.closed)
    assert await client.is_closed()
    assert (server.edge.stats.bugs, server.edge.stats.idle_closed) == (1, 1)


async def test_a_sweep_that_fails_is_not_the_last(
    dial: Dial, loop_errors: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client = await dial(keepalive_s=0.2)
    await client.ask(get())

    def short_of_memory() -> float:
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr(time, "time", short_of_memory)
    await until(lambda: loop_errors)
    assert isinstance(loop_errors.pop()["exception"], MemoryError)
    async with asyncio.timeout(10):
        assert await client.is_closed()


async def test_an_upgrade_that_is_not_taken_is_answered_as_http(dial: Dial) -> None:
    server, client = await dial()
    upgrade = "Connection: Upgrade\r\nUpgrade: h2c\r\n"
    await client.send(get("/a", upgrade) + post(b"abc", "/b", upgrade) + get("/c", "Upgrade: h2c\r\n"))
    assert [(await client.response()).body for _ in range(3)] == [b"GET /a ", b"POST /b abc", b"GET /c "]
    assert [head.upgrade for head in server.admitted] == [b"h2c", None, None]
