"""Mutations of valid requests: whatever comes, the answer is HTTP or a close, and nothing is misread.

The oracle for what the handler saw is another reading of the same bytes, written here the simplest way: the bytes
before the end of each request that was served must be that request, whole and alone.
"""

from __future__ import annotations

import asyncio
import random
import re

import pytest

from greenroom.http.exchange import Exchange

from .conftest import Serve
from .wires import DEADLINE_S, Client, Seen, Server, get, parse_head, post

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
