"""Requests that could be read in two ways are refused, those of a table and those that a seed has mutated."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re

import pytest

from greenroom.http.exchange import Exchange

from .conftest import Connect, Dial, Serve
from .wires import DEADLINE_S, Client, Seen, Server, get, parse_head, post

POST = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
HOST = b"Host: localhost\r\n"
AMBIGUOUS = {
    "content-length and transfer-encoding": POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "transfer-encoding and content-length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "transfer-encoding twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "unknown transfer-encoding": POST + b"Transfer-Encoding: gzip\r\n\r\n",
    "transfer-encoding before chunked": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "transfer-encoding identity": POST + b"Transfer-Encoding: identity\r\n\r\n",
    "vertical tab before chunked": POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "quoted chunked": POST + b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "chunked in http/1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two equal content-lengths": POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "two different content-lengths": POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "content-length list": POST + b"Content-Length: 3, 3\r\n\r\nabc",
    "content-length with a plus": POST + b"Content-Length: +3\r\n\r\nabc",
    "content-length with an underscore": POST + b"Content-Length: 3_0\r\n\r\nabc",
    "negative content-length": POST + b"Content-Length: -1\r\n\r\n",
    "hexadecimal content-length": POST + b"Content-Length: 0x3\r\n\r\nabc",
    "empty content-length": POST + b"Content-Length:\r\n\r\n",
    "content-length beyond 64 bits": POST + b"Content-Length: 99999999999999999999999\r\n\r\n",
    "content-length of 19 digits": POST + b"Content-Length: 9223372036854775807\r\n\r\n",
    "space before the colon": POST + b"Content-Length : 3\r\n\r\nabc",
    "bare lf line ends": b"GET / HTTP/1.1\nHost: localhost\n\n",
    "bare lf after a header": b"GET / HTTP/1.1\r\nHost: localhost\nA: b\r\n\r\n",
    "bare lf at the end": b"GET / HTTP/1.1\r\nHost: localhost\r\n\n",
    "bare cr in a header": b"GET / HTTP/1.1\r\nHost: localhost\rA: b\r\n\r\n",
    "folded header": b"GET / HTTP/1.1\r\nHost: localhost\r\nA: b\r\n c\r\n\r\n",
    "folded with a tab": b"GET / HTTP/1.1\r\nHost: localhost\r\nA: b\r\n\tc\r\n\r\n",
    "space before the first header": b"GET / HTTP/1.1\r\n Host: localhost\r\n\r\n",
    "chunk size with 0x": CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n",
    "chunk data without its crlf": CHUNKED + b"3\r\nabcXX0\r\n\r\n",
    "chunk longer than its size": CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n",
    "lf in a chunk extension": CHUNKED + b"3;a\nb\r\nabc\r\n0\r\n\r\n",
    "lf after a chunk size": CHUNKED + b"3\nabc\r\n0\r\n\r\n",
    "space after a chunk size": CHUNKED + b"3 \r\nabc\r\n0\r\n\r\n",
    "negative chunk size": CHUNKED + b"-3\r\nabc\r\n0\r\n\r\n",
    "chunk size with an underscore": CHUNKED + b"1_0\r\n" + b"x" * 16 + b"\r\n0\r\n\r\n",
    "chunk size beyond 64 bits": CHUNKED + b"fffffffffffffffff\r\nabc\r\n0\r\n\r\n",
    "empty chunk size": CHUNKED + b"\r\nabc\r\n0\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\nAccept: */*\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
    "two hosts spelt differently": b"GET / HTTP/1.1\r\nHost: localhost\r\nhOST: evil\r\n\r\n",
    "empty host": b"GET / HTTP/1.1\r\nHost:\r\n\r\n",
    "host with a path": b"GET / HTTP/1.1\r\nHost: localhost/admin\r\n\r\n",
    "host with a user": b"GET / HTTP/1.1\r\nHost: me@localhost\r\n\r\n",
    "host list": b"GET / HTTP/1.1\r\nHost: localhost, evil\r\n\r\n",
    "trailer content-length": CHUNKED + b"3\r\nabc\r\n0\r\nContent-Length: 5\r\n\r\n",
    "trailer transfer-encoding": CHUNKED + b"3\r\nabc\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n",
    "trailer host": CHUNKED + b"3\r\nabc\r\n0\r\nHost: evil\r\n\r\n",
    "trailer authorization": CHUNKED + b"3\r\nabc\r\n0\r\nAuthorization: Bearer x\r\n\r\n",
    "two authorizations": b"GET / HTTP/1.1\r\n" + HOST + b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n",
    "two keys": b"GET / HTTP/1.1\r\n" + HOST + b"X-Api-Key: a\r\nx-api-key: a\r\n\r\n",
    "two origins": b"GET / HTTP/1.1\r\n" + HOST + b"Origin: http://a\r\norigin: http://b\r\n\r\n",
    "two tenants": b"GET / HTTP/1.1\r\n" + HOST + b"X-Tenant-ID: a\r\nx-tenant-id: b\r\n\r\n",
    "nul in the target": b"GET /a\x00b HTTP/1.1\r\n" + HOST + b"\r\n",
    "control character in the target": b"GET /a\x01b HTTP/1.1\r\n" + HOST + b"\r\n",
    "delete in the target": b"GET /a\x7fb HTTP/1.1\r\n" + HOST + b"\r\n",
    "raw utf-8 in the target": b"GET /\xc3\xa9 HTTP/1.1\r\n" + HOST + b"\r\n",
    "space in the target": b"GET /a b HTTP/1.1\r\n" + HOST + b"\r\n",
    "two spaces before the target": b"GET  /a HTTP/1.1\r\n" + HOST + b"\r\n",
    "two spaces before the version": b"GET /a  HTTP/1.1\r\n" + HOST + b"\r\n",
    "tab after the method": b"GET\t/a HTTP/1.1\r\n" + HOST + b"\r\n",
    "fragment in the target": b"GET /a#b HTTP/1.1\r\n" + HOST + b"\r\n",
    "target without a slash": b"GET a HTTP/1.1\r\n" + HOST + b"\r\n",
    "asterisk target": b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n",
    "absolute target of another host": b"GET http://evil/a HTTP/1.1\r\n" + HOST + b"\r\n",
    "absolute target without a path": b"GET http://localhost HTTP/1.1\r\n" + HOST + b"\r\n",
    "absolute target of another scheme": b"GET file://localhost/etc HTTP/1.1\r\n" + HOST + b"\r\n",
    "http/0.9": b"GET /\r\n\r\n",
    "http/1.2": b"GET / HTTP/1.2\r\n" + HOST + b"\r\n",
    "http/2.0": b"GET / HTTP/2.0\r\n" + HOST + b"\r\n",
    "http/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "lower-case version": b"GET / http/1.1\r\n" + HOST + b"\r\n",
    "unknown method": b"FOO / HTTP/1.1\r\n" + HOST + b"\r\n",
    "lower-case method": b"get / HTTP/1.1\r\n" + HOST + b"\r\n",
    "space in a header name": b"GET / HTTP/1.1\r\n" + HOST + b"A b: c\r\n\r\n",
    "nul in a header": b"GET / HTTP/1.1\r\n" + HOST + b"A: \x00\r\n\r\n",
    "control character in a header": b"GET / HTTP/1.1\r\n" + HOST + b"A: \x01\r\n\r\n",
    "empty header name": b"GET / HTTP/1.1\r\n" + HOST + b": b\r\n\r\n",
    "header without a colon": b"GET / HTTP/1.1\r\n" + HOST + b"A\r\n\r\n",
    "bare lf before the request": b"\n" + get(),
    "two empty lines before the request": b"\r\n\r\n" + get(),
    "tls hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "chunked body before an upgrade": POST
    + b"Connection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "body of one-byte chunks": CHUNKED + b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n",
    "endless chunk extension": CHUNKED + b"3;" + b"a" * 60_000,
    "endless trailer": CHUNKED + b"3\r\nabc\r\n0\r\nA: " + b"a" * 60_000,
}
TOO_LARGE = {
    "one header of 100 kB": b"GET / HTTP/1.1\r\n" + HOST + b"A: " + b"a" * 100_000 + b"\r\n\r\n",
    "10,000 headers": b"GET / HTTP/1.1\r\n" + HOST + b"A: b\r\n" * 10_000 + b"\r\n",
    "101 headers": b"GET / HTTP/1.1\r\n" + HOST + b"A: b\r\n" * 100 + b"\r\n",
    "headers without end": b"GET / HTTP/1.1\r\n" + HOST + b"A: " + b"a" * 40_000,
    "request line of 9 kB": b"GET /" + b"a" * 9_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "request line without end": b"GET /" + b"a" * 9_000,
}


async def refuse_everywhere(serve: Serve, connect: Connect, data: bytes, status: int, bytewise: bool) -> None:
    server = await serve()
    client = await connect(server)
    await client.send(data, bytewise=bytewise)
    response = await client.response()
    assert response.status == status
    assert response.headers["connection"] == "close"
    assert response.body.startswith(b'{"error"')
    assert await client.is_closed()
    assert server.seen == []
    other = await connect(server)
    await other.send(get("/still-here"))
    assert (await other.response()).body == b"GET /still-here "


@pytest.mark.parametrize("name", AMBIGUOUS)
async def test_ambiguous_request_is_refused_and_closed(name: str, serve: Serve, connect: Connect) -> None:
    await refuse_everywhere(serve, connect, AMBIGUOUS[name], 400, bytewise=False)


@pytest.mark.parametrize("name", [name for name, data in AMBIGUOUS.items() if len(data) < 1000])
async def test_ambiguous_request_is_refused_byte_by_byte_too(name: str, serve: Serve, connect: Connect) -> None:
    await refuse_everywhere(serve, connect, AMBIGUOUS[name], 400, bytewise=True)


@pytest.mark.parametrize("name", TOO_LARGE)
async def test_headers_beyond_a_limit_are_refused_and_closed(name: str, serve: Serve, connect: Connect) -> None:
    await refuse_everywhere(serve, connect, TOO_LARGE[name], 431, bytewise=False)


@pytest.mark.parametrize(("name", "said"), [("101 headers", "headers"), ("request line of 9 kB", "request line")])
async def test_what_is_too_large_is_named(name: str, said: str, dial: Dial) -> None:
    _, client = await dial()
    told = json.loads((await client.ask(TOO_LARGE[name])).body)["error"]["message"]
    assert [word for word in ("headers", "request line") if word in told] == [said]


async def test_connect_is_refused(serve: Serve, connect: Connect) -> None:
    await refuse_everywhere(serve, connect, b"CONNECT evil:443 HTTP/1.1\r\nHost: evil:443\r\n\r\n", 405, bytewise=False)


async def test_ambiguous_request_behind_a_good_one_is_refused_after_its_answer(dial: Dial) -> None:
    server, client = await dial()
    assert (await client.ask(get("/good") + AMBIGUOUS["two hosts"] + get("/never"))).body == b"GET /good "
    assert (await client.response()).status == 400
    assert await client.is_closed()
    assert [seen.target for seen in server.seen] == [b"/good"]


async def test_connection_without_a_byte_is_closed_by_the_deadline(dial: Dial) -> None:
    server, client = await dial(header_timeout_s=0.2)
    assert await client.is_closed()
    assert server.edge.stats.header_timeouts == 1


async def test_trickled_header_is_refused_by_the_deadline(dial: Dial) -> None:
    """It counts from the first byte: every byte would re-arm one that counted from the last."""
    server, client = await dial(header_timeout_s=0.3)
    for byte in get("/" + "a" * 10_000):
        client.writer.write(bytes([byte]))
        with contextlib.suppress(ConnectionError):
            await client.writer.drain()
        if server.edge.stats.header_timeouts:
            break
        await asyncio.sleep(0.01)
    assert (await client.response()).status == 408
    assert await client.is_closed()
    assert server.edge.stats.header_timeouts == 1


SEED = 20_261_115
IN_PARALLEL = 40
SEEDS = [
    get("/v1/models"),
    get("/a?b=c", "Accept: */*\r\nConnection: keep-alive\r\n") + get("/second"),
    post(b'{"model":"m"}', "/v1/chat/completions", "Content-Type: application/json\r\nAuthorization: Bearer k\r\n"),
    post(b"ab") + post(b"cdef") + get("/third"),
    b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n10\r\n0123456789abcdef\r\n0\r\n\r\n",
    b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1;x=y\r\na\r\n0\r\nX-T: v\r\n\r\n"
    + get("/after"),
    b"POST /e HTTP/1.1\r\nHost: h:1\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\nbody",
    b"HEAD /h HTTP/1.1\r\nHost: h\r\n\r\n",
    b"GET /ws HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"GET /old HTTP/1.0\r\nConnection: keep-alive\r\n\r\nGET /older HTTP/1.0\r\n\r\n",
]
PIECES = [
    *(
        b"\r\n",
        b"\n",
        b"\r",
        b"\0",
        b" ",
        b"\t",
        b":",
        b"\x0b",
        b"\x7f",
        b"\xff",
        b"0",
        b"/",
        b"#",
        b"HTTP/1.1",
        b"chunked",
    ),
    *(b"\r\n\r\n", b"0\r\n\r\n", b"Transfer-Encoding: chunked\r\n", b"Content-Length: 3\r\n", b"Content-Length: 0\r\n"),
    *(b"Host: evil\r\n", b"Connection: close\r\n", b"Expect: 100-continue\r\n", b"Upgrade: x\r\n", get("/smuggled")),
]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to four small damages."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        to = min(len(data), at + rng.randint(1, 12))
        kind = rng.randrange(6)
        if kind == 0:
            data = data[:at] + rng.choice(PIECES) + data[at:]
        elif kind == 1:
            data = data[:at] + data[to:]
        elif kind == 2:
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        elif kind == 3:
            data = data[:at] + data[at:to] * rng.randint(2, 4) + data[to:]
        elif kind == 4:
            data = data[:at] + data[at:to].swapcase() + data[to:]
        else:
            other = rng.choice(SEEDS)
            data = data[:at] + other[rng.randrange(len(other)) :]
        data = data or b"G"
    return data


def explains(data: bytes, seen: list[Seen]) -> bool:
    """Whether these bytes, read from the start, begin with exactly the requests that were served."""
    for request in seen:
        data = data.removeprefix(b"\r\n")
        raw, found, data = data.partition(b"\r\n\r\n")
        lines = raw.split(b"\r\n")
        headers = [tuple(line.split(b":", 1)) for line in lines[1:]]
        names = [name.lower() for name, _ in headers]
        values = {name.lower(): value.strip(b" \t") for name, value in headers}
        target = lines[0].split(b" ")[1]
        if b"://" in target:
            target = b"/" + target.split(b"/", 3)[3]
        if not found or lines[0].split(b" ")[0] != request.method or target != request.target:
            return False
        if [name for name, _ in request.headers] != names or names.count(b"host") > 1:
            return False
        if b"transfer-encoding" in values:
            body, data = dechunk(data)
        else:
            length = int(values.get(b"content-length", b"0"))
            body, data = data[:length], data[length:]
        if body != request.body:
            return False
    return True


def dechunk(data: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        line, _, data = data.partition(b"\r\n")
        size = int(re.match(rb"[0-9a-fA-F]+", line).group(), 16)  # type: ignore[union-attr]
        if not size:
            break
        body += data[:size]
        assert data[size : size + 2] == b"\r\n"
        data = data[size + 2 :]
    while line := data.partition(b"\r\n")[0]:
        data = data[len(line) + 2 :]
    return body, data[2:]


async def attack(server: Server, data: bytes, cuts: list[int]) -> int:
    """Send it in pieces, end the sending side, read what comes to the end. Gives our port, to know what was served."""
    client = await Client.connect(server.port)
    port: int = client.writer.get_extra_info("sockname")[1]
    try:
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            client.writer.write(data[start:end])
            await asyncio.sleep(0)
        client.writer.write_eof()
        async with asyncio.timeout(DEADLINE_S):
            check_answers(data, await client.reader.read())
    except OSError:
        # The server may be done with us before we are done sending.
        pass
    finally:
        client.reset()
    return port


def check_answers(data: bytes, answer: bytes) -> None:
    """Nothing but whole responses, of the kinds that this server gives."""
    while answer:
        raw, found, answer = answer.partition(b"\r\n\r\n")
        assert found, (data, raw)
        status, headers = parse_head(raw + b"\r\n\r\n")
        assert status in (100, 200, 400, 405, 413, 417, 431), (data, status)
        if status >= 200 and headers.get("x-method") != "HEAD":
            answer = answer[int(headers["content-length"]) :]


@pytest.mark.parametrize("mutations", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_mutations(serve: Serve, mutations: int) -> None:
    server = await serve()
    served: dict[int, list[Seen]] = {}

    def handle(exchange: Exchange) -> None:
        port = exchange._connection.transport.get_extra_info("peername")[1]
        served.setdefault(port, []).append(server.seen.pop())
        exchange.respond(200, [(b"x-method", exchange.head.method)], b"ok")

    server.handle = handle
    rng = random.Random(SEED)
    count = 0
    for _ in range(mutations // IN_PARALLEL):
        served.clear()
        wave = [mutate(rng.choice(SEEDS), rng) for _ in range(IN_PARALLEL)]
        cuts = [sorted(rng.sample(range(len(data)), min(len(data), rng.choice((0, 0, 1, 3))))) for data in wave]
        ports = await asyncio.gather(*[attack(server, data, cut) for data, cut in zip(wave, cuts, strict=True)])
        for data, port in zip(wave, ports, strict=True):
            seen = served.get(port, [])
            assert explains(data, seen), (data, seen)
            count += len(seen)
    # A generator that only made rubbish would prove little.
    assert count > mutations // 5
    assert server.edge.stats.bugs == 0
    client = await Client.connect(server.port)
    await client.send(get("/still-here"))
    assert (await client.response()).status == 200
    await client.close()
