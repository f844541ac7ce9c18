"""What the tests of this directory talk with: raw sockets on one side, a scripted engine on the other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from greenroom.errors import GreenroomError
from greenroom.http.edge import Edge, Refusal
from greenroom.http.exchange import Exchange
from greenroom.http.headers import Headers, build_request
from greenroom.http.limits import EdgeLimits
from greenroom.http.relays.relay import Relay, RelayOptions, RelayOutcome, TailReader
from greenroom.http.relays.tunnel import Tunnel
from greenroom.http.request import Head
from greenroom.http.upstream import EngineAddress, Pool
from tests.waiting import until

DEADLINE_S = 20.0
BODY_MAX = 4 * 1024 * 1024
QUICK = {"sweep_s": 0.02}


def render(exchange: Exchange | None, head: Head | None, error: GreenroomError) -> Refusal:
    body = json.dumps({"error": {"message": error.message, "code": error.code}}).encode()
    return error.status, [(b"content-type", b"application/json")], body


@dataclass
class Seen:
    """One request as a handler saw it."""

    method: bytes
    target: bytes
    headers: Headers
    body: bytes


class Server:
    """An edge on loopback whose handler can be replaced, and which remembers what it saw."""

    def __init__(self, limits: EdgeLimits) -> None:
        self.clock: Callable[[], float] = time.monotonic
        self.edge = Edge(
            admit=self._admit, handle=self._handle, refuse=self._refuse, limits=limits, clock=lambda: self.clock()
        )
        self.seen: list[Seen] = []
        self.admitted: list[Head] = []
        self.body_max = BODY_MAX
        self.admit: Callable[[Head], int] = lambda head: self.body_max
        self.handle: Callable[[Exchange], None] = echo
        self.refuse: Callable[[Exchange | None, Head | None, GreenroomError], Refusal] = render

    async def start(self) -> None:
        await self.edge.listen(host="127.0.0.1", port=0)

    @property
    def port(self) -> int:
        return int(self.edge.addresses[0].rpartition(":")[2])

    async def pass_time(self, seconds: float) -> None:
        """Put the edge's clock, which stands still from now on, forward; return when every deadline was looked at."""
        now = self.edge.state.now + seconds
        self.clock = lambda: now
        await until(lambda: self.edge.state.now == now, "a sweep")

    async def stop(self) -> None:
        await self.edge.close()
        self.edge.abort()
        await until(lambda: self.edge.connections == 0, "every connection closed")

    def buffered(self) -> int:
        """Bytes from or for the only client that wait in this process. Only tests ask for it."""
        (connection,) = self.edge._connections
        return connection.transport.get_write_buffer_size() + len(connection._backlog)

    def sends_at_once(self) -> bool:
        """The kernel does not hold back small writes to the only client until others are acknowledged."""
        (connection,) = self.edge._connections
        sock = connection.transport.get_extra_info("socket")
        return bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    def _refuse(self, exchange: Exchange | None, head: Head | None, error: GreenroomError) -> Refusal:
        return self.refuse(exchange, head, error)

    def _admit(self, head: Head) -> int:
        self.admitted.append(head)
        return self.admit(head)

    def _handle(self, exchange: Exchange) -> None:
        head = exchange.head
        self.seen.append(Seen(head.method, head.target, head.headers, exchange.body.read()))
        self.handle(exchange)


def echo(exchange: Exchange) -> None:
    """Answer with the method, the target and the body."""
    text = b"%b %b %b" % (exchange.head.method, exchange.head.target, exchange.body.read())
    exchange.respond(200, [(b"content-type", b"text/plain")], text)


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    body: bytes
    # The body ended as the framing promised.
    whole: bool = True


class Client:
    """A raw connection. Reads responses strictly: what is not HTTP/1.1 fails the test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def send(self, data: bytes, *, bytewise: bool = False) -> None:
        if not bytewise:
            self.writer.write(data)
            await self.writer.drain()
            return
        # A refusal may end the connection before everything is sent.
        with contextlib.suppress(ConnectionError):
            for index in range(len(data)):
                self.writer.write(data[index : index + 1])
                await self.writer.drain()
                await asyncio.sleep(0)

    async def response(self, *, head_only: bool = False) -> Response:
        """The next response, interim ones included."""
        async with asyncio.timeout(DEADLINE_S):
            raw = await self.reader.readuntil(b"\r\n\r\n")
            status, headers = parse_head(raw)
            if head_only or status in (204, 304) or status < 200:
                return Response(status, headers, b"")
            return await self._body(status, headers)

    async def ask(self, data: bytes, *, head_only: bool = False) -> Response:
        """The answer to this request."""
        await self.send(data)
        return await self.response(head_only=head_only)

    async def _body(self, status: int, headers: dict[str, str]) -> Response:
        if "content-length" in headers:
            try:
                return Response(status, headers, await self.reader.readexactly(int(headers["content-length"])))
            except asyncio.IncompleteReadError as error:
                return Response(status, headers, error.partial, whole=False)
        if headers.get("transfer-encoding") == "chunked":
            return await self.chunks(status, headers)
        return Response(status, headers, await self.reader.read())

    async def chunks(self, status: int, headers: dict[str, str]) -> Response:
        body = b""
        try:
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                body += await self.reader.readexactly(size)
                assert await self.reader.readexactly(2) == b"\r\n"
            assert await self.reader.readexactly(2) == b"\r\n"
        except (asyncio.IncompleteReadError, ConnectionError):
            return Response(status, headers, body, whole=False)
        return Response(status, headers, body)

    async def is_closed(self) -> bool:
        """Wait for the server's end of the connection. Fails the test if anything else comes."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                rest = await self.reader.read(1)
        except ConnectionError:
            return True
        assert rest == b"", rest
        return True

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    def reset(self) -> None:
        """Leave without a word (RST)."""
        self.writer.transport.abort()


def parse_head(raw: bytes) -> tuple[int, dict[str, str]]:
    lines = raw.decode("latin-1").split("\r\n")
    assert lines[-2:] == ["", ""], raw
    version, status, _ = lines[0].split(" ", 2)
    assert version == "HTTP/1.1", raw
    headers: dict[str, str] = {}
    for line in lines[1:-2]:
        name, colon, value = line.partition(": ")
        assert colon and name == name.lower() and name not in headers, raw
        headers[name] = value
    return int(status), headers


def get(path: str = "/", extra: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{extra}\r\n".encode()


def post(body: bytes, path: str = "/", extra: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{extra}Content-Length: {len(body)}\r\n\r\n".encode() + body


def leave(client: Client, how: str) -> None:
    if how == "fin":
        client.writer.close()
    elif how == "rst":
        sock = client.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        client.reset()
    else:
        client.writer.write_eof()


@dataclass
class Call:
    """One request as the scripted engine received it."""

    head: bytes
    body: bytes
    connection: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def left(self) -> bool:
        """Wait until the other side is gone."""
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(65536):
                    pass
        return True


Script = Callable[[Call], Awaitable[None]]


def saying(*parts: bytes, pause_s: float = 0.0, closes: bool = False) -> Script:
    """Say these parts, with a pause after each, and then close the connection or leave it open."""

    async def script(call: Call) -> None:
        for part in parts:
            await call.say(part)
            await asyncio.sleep(pause_s)
        if closes:
            call.writer.close()

    return script


@dataclass
class Engine:
    """An engine that does what its script says with each request. A script that returns keeps the connection open."""

    script: Script
    calls: list[Call] = field(default_factory=list)
    connections: int = 0
    port: int = 0
    # A script that wants to read slowly, or not at all, reads bodies itself.
    reads_bodies: bool = True
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def stop_listening(self) -> None:
        """Connections that are there stay."""
        assert self._server is not None
        self._server.close()

    async def start(self, path: str | None = None) -> None:
        if path is not None:
            self._server = await asyncio.start_unix_server(self._serve, path)
            return
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        number = self.connections
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(_length_of(head)) if self.reads_bodies else b""
                call = Call(head, body, number, reader, writer)
                self.calls.append(call)
                await self.script(call)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()


def _length_of(head: bytes) -> int:
    _, found, rest = head.lower().partition(b"content-length:")
    return int(rest.split(b"\r\n", 1)[0]) if found else 0


class Leaving:
    """Notes that the client left."""

    def __init__(self, on_gone: Callable[[], object]) -> None:
        self._on_gone = on_gone

    def client_gone(self) -> None:
        self._on_gone()

    def client_paused(self) -> None: ...
    def client_resumed(self) -> None: ...


class Proxy:
    """Edge, pool and relay put together the way the upper layers will, with every relay kept for inspection."""

    def __init__(self, server: Server, pool: Pool) -> None:
        self.server = server
        self.pool = pool
        self.relays: list[Relay] = []
        self.committed = False
        self.drop_usage_event = False
        self.facts: TailReader | None = None
        self.extra = [(b"x-request-id", b"r-1")]
        self.bad_heads: list[tuple[int, bytes]] = []
        self.on_done: Callable[[Relay], None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        server.handle = self.handle

    def handle(self, exchange: Exchange) -> None:
        head = exchange.head
        request = build_request(
            head.method,
            head.target,
            head.headers,
            host=b"engine",
            length=len(exchange.body),
            request_id=b"r-1",
            upgrade=head.upgrade,
        )
        relay = self._relay(exchange)
        self.relays.append(relay)
        if self.committed:
            exchange.start(200, [(b"content-type", b"text/event-stream")], None)
            exchange.write(b": waiting\n\n")
        task = asyncio.get_running_loop().create_task(self.pool.send(request, exchange.body, relay))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _relay(self, exchange: Exchange) -> Relay:
        if exchange.head.upgrade is not None:
            return Tunnel(exchange, RelayOptions(self.extra), on_done=self._done)
        options = RelayOptions(self.extra, drop_usage_event=self.drop_usage_event, facts=self.facts)
        return Relay(exchange, options, committed=self.committed, on_done=self._done)

    def _done(self, relay: Relay) -> None:
        if relay.outcome is RelayOutcome.BAD_HEAD:
            self.bad_heads.append((relay.status, relay.bad_body))
        if self.on_done is not None:
            self.on_done(relay)
        elif relay.error is not None:
            end_lost(relay)


def end_lost(relay: Relay) -> None:
    """What an upper layer does with a lost engine when it does not try again."""
    assert relay.error is not None
    if relay.exchange.started:
        relay.fail(b'data: {"error":{"code":"engine_lost"}}\n\n')
    else:
        relay.exchange.respond(*render(relay.exchange, relay.exchange.head, relay.error))


def address(engine: Engine) -> EngineAddress:
    return EngineAddress("127.0.0.1", engine.port)


class OddLoop:
    """The running loop, except that its connections begin only when they are let, and its clock may be ahead."""

    def __init__(self) -> None:
        self.let = asyncio.Event()
        self.is_asked = asyncio.Event()
        self.ahead_s = 0.0

    def time(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead_s

    async def create_connection(self, *args: Any, **options: Any) -> Any:
        self.is_asked.set()
        await self.let.wait()
        return await asyncio.get_running_loop().create_connection(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio.get_running_loop(), name)
