"""The pool of connections to an engine, and how answers are framed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from greenroom.errors import EngineLost, RemoteFailed
from greenroom.http.body import Body, BodyBudget
from greenroom.http.engine_connection import Connection
from greenroom.http.headers import Headers
from greenroom.http.limits import EdgeLimits
from greenroom.http.remote import RemoteEndpoint, RemoteLimits, RemotePool
from greenroom.http.upstream import EngineAddress, Pool
from tests.waiting import PATIENCE_S, until, until_still

from .conftest import Engines
from .wires import Call, Engine, OddLoop, address, saying

HEAD = b"POST /x HTTP/1.1\r\nhost: e\r\ncontent-length: 3\r\n\r\n"
Pools = Callable[..., Pool]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Notes:
    """A sink that writes down what it hears, in order."""

    def __init__(self) -> None:
        self.upstream: Connection | None = None
        self.wanted = True
        self.told: list[str] = []
        self.status = 0
        self.headers: Headers = []
        self.data = b""
        self.error: EngineLost | None = None
        self.before_first_byte: bool | None = None
        self.on_head: Callable[[], None] = lambda: None

    @property
    def over(self) -> bool:
        return bool(self.told) and self.told[-1] in ("complete", "lost", "upgraded")

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        self.head(status, headers)
        if body:
            self.body(body)
        self.complete()

    def head(self, status: int, headers: Headers) -> None:
        self.told.append("head")
        self.status, self.headers = status, headers
        self.on_head()

    def body(self, data: bytes) -> None:
        assert data
        if self.told[-1] != "body":
            self.told.append("body")
        self.data += data

    def complete(self) -> None:
        self.told.append("complete")

    def upgraded(self, headers: Headers, rest: bytes) -> None:
        self.told.append("upgraded")
        self.headers, self.data = headers, rest

    def lost(self, error: EngineLost, before_first_byte: bool) -> None:
        self.told.append("lost")
        self.error, self.before_first_byte = error, before_first_byte


@pytest.fixture
async def pools(loop_errors: list[object]) -> AsyncIterator[Pools]:
    made: list[Pool] = []

    def make(engine: Engine, **options: float) -> Pool:
        made.append(Pool(address(engine), **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for pool in made:
        pool.close()
        await until(lambda pool=pool: pool.open_count == 0)  # type: ignore[misc]


async def ask(pool: Pool, head: bytes = HEAD, body: Body | bytes = b"abc") -> Notes:
    notes = Notes()
    await pool.send(head, body, notes)
    await until(lambda: notes.over, "the answer's end")
    return notes


def bytewise(answer: bytes) -> list[bytes]:
    return [bytes([byte]) for byte in answer]


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\nX-T: v\r\n\r\n"
FRAMINGS = {
    "content-length": (b"HTTP/1.1 201 Created\r\nContent-Length: 5\r\nX-A: b \r\n\r\nhello", 201, b"hello", True),
    "chunked": (CHUNKED, 200, b"hello", True),
    "empty": (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, b"", True),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
    "not modified": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", 304, b"", True),
    "interim": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\n" + OK, 200, b"ok", True),
    "asks to close": (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello", 200, b"hello", False),
    "old": (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", 200, b"hello", False),
}


@pytest.mark.parametrize("in_bytes", [False, True])
@pytest.mark.parametrize("name", FRAMINGS)
async def test_answer_is_told_whole(name: str, in_bytes: bool, engines: Engines, pools: Pools) -> None:
    answer, status, body, reusable = FRAMINGS[name]
    engine = await engines(saying(*(bytewise(answer) if in_bytes else [answer])))
    pool = pools(engine)
    for _ in range(2):
        notes = await ask(pool)
        assert (notes.status, notes.data) == (status, body)
        assert notes.told == (["head", "body", "complete"] if body else ["head", "complete"])
    assert engine.connections == (1 if reusable else 2)
    assert engine.calls[0].head == HEAD
    assert engine.calls[0].body == b"abc"
    if name == "content-length":
        assert (b"x-a", b"b") in notes.headers
    if name == "interim":
        assert notes.headers == [(b"content-length", b"2")]


async def test_answer_without_length_ends_with_the_connection(engines: Engines, pools: Pools) -> None:
    engine = await engines(saying(b"HTTP/1.1 200 OK\r\n\r\nhello", closes=True))
    pool = pools(engine)
    notes = await ask(pool)
    assert (notes.told, notes.data) == (["head", "body", "complete"], b"hello")
    await until(lambda: pool.open_count == 0)


async def test_answer_to_head_has_no_body_and_the_connection_stays(engines: Engines, pools: Pools) -> None:
    engine = await engines(saying(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n"))
    pool = pools(engine)
    for _ in range(3):
        notes = await ask(pool, b"HEAD /x HTTP/1.1\r\nhost: e\r\n\r\n", b"")
        assert notes.told == ["head", "complete"]
        assert (b"content-length", b"500") in notes.headers
    assert engine.connections == 1


async def test_body_sent_to_head_does_not_reach_the_next_request(engines: Engines, pools: Pools) -> None:
    engine = await engines(saying(OK))
    pool = pools(engine)
    for _ in range(2):
        notes = await ask(pool, b"HEAD /x HTTP/1.1\r\nhost: e\r\n\r\n", b"")
        assert notes.told[-1] == "complete"
    assert (await ask(pool)).data == b"ok"


MALFORMED = {
    "not http": b"SSH-2.0-OpenSSH_9.2\r\n",
    "bare lf": b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
    "two framings": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nokk",
    "unknown encoding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nxx",
    "bad chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "endless head": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000,
    "switches without saying to what": b"HTTP/1.1 101 Switching\r\n\r\n",
    "status 099": b"HTTP/1.1 099 Odd\r\nContent-Length: 2\r\n\r\nok",
    "status 000": b"HTTP/1.1 000 Odd\r\nContent-Length: 2\r\n\r\nok",
    "status 600": b"HTTP/1.1 600 Odd\r\nContent-Length: 2\r\n\r\nok",
    "status 999": b"HTTP/1.1 999 Odd\r\nContent-Length: 2\r\n\r\nok",
}
# Of these the client has seen a sound head before.
LATE = ("bad chunk",)


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_answer_is_a_lost_engine(name: str, engines: Engines, pools: Pools) -> None:
    engine = await engines(saying(MALFORMED[name]))
    pool = pools(engine)
    notes = await ask(pool)
    assert notes.told[-1] == "lost" and (notes.told[0] == "lost" or name in LATE)
    assert notes.before_first_byte is False
    await until(lambda: pool.open_count == 0)


async def test_the_first_of_two_content_types_counts(engines: Engines, pools: Pools) -> None:
    types = b"Content-Type: application/json\r\nContent-Type: text/html\r\n"
    engine = await engines(saying(b"HTTP/1.1 200 OK\r\n" + types + b"Content-Length: 2\r\n\r\nok"))
    notes = await ask(pools(engine))
    assert notes.headers == [(b"content-type", b"application/json"), (b"content-length", b"2")]


@pytest.mark.parametrize("surplus", [b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison", b"x", b"HTTP/1"])
async def test_surplus_bytes_never_reach_the_next_request(surplus: bytes, engines: Engines, pools: Pools) -> None:
    engine = await engines(saying(OK + surplus))
    pool = pools(engine)
    for _ in range(3):
        notes = await ask(pool)
        assert (notes.told[-1], notes.data) == ("complete", b"ok")
    assert engine.connections == 3


async def test_idle_connection_that_speaks_is_dropped(engines: Engines, pools: Pools) -> None:
    engine = await engines(saying(OK))
    pool = pools(engine)
    await ask(pool)
    assert pool.idle_count == 1
    await engine.calls[0].say(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison")
    await until(lambda: pool.idle_count == 0)
    assert (await ask(pool)).data == b"ok"
    assert engine.connections == 2


async def test_idle_connection_is_taken_without_waiting(engines: Engines, pools: Pools) -> None:
    engine = await engines(saying(OK))
    pool = pools(engine)
    assert not pool.send_now(HEAD, b"abc", Notes())
    await ask(pool)
    notes = Notes()
    # Driven by hand: a coroutine that waits would not be over after one step.
    with pytest.raises(StopIteration):
        pool.send(HEAD, b"abc", notes).send(None)
    assert notes.upstream is not None
    await until(lambda: notes.over)
    assert (pool.connects, pool.reuses) == (1, 1)


async def test_idle_connections_are_bounded_in_number_and_age(engines: Engines, pools: Pools) -> None:
    engine = await engines(saying(OK))
    loop = OddLoop()
    loop.let.set()
    pool = pools(engine, idle_max=2, idle_s=60.0, loop=loop)
    await asyncio.gather(*[ask(pool) for _ in range(5)])
    assert pool.idle_count <= 2
    await until(lambda: pool.open_count <= 2)
    loop.ahead_s = 61.0
    connects = pool.connects
    await ask(pool)
    assert pool.connects == connects + 1
    await until(lambda: pool.open_count == 1)


async def test_stale_connection_is_retried_once_and_silently(engines: Engines, pools: Pools) -> None:
    async def script(call: Call) -> None:
        # The second request on a connection meets one that is being closed.
        if sum(1 for other in engine.calls if other.connection == call.connection) == 2:
            call.writer.transport.abort()
            return
        await call.say(OK)

    engine = await engines(script)
    pool = pools(engine)
    assert (await ask(pool)).data == b"ok"
    notes = await ask(pool)
    assert notes.told == ["head", "body", "complete"]
    assert (engine.connections, pool.retries) == (2, 1)
    assert [call.body for call in engine.calls] == [b"abc"] * 3


async def test_fresh_connection_that_closes_is_not_retried(engines: Engines, pools: Pools) -> None:
    async def script(call: Call) -> None:
        call.writer.close()

    engine = await engines(script)
    pool = pools(engine)
    notes = await ask(pool)
    assert (notes.told, notes.before_first_byte) == (["lost"], True)
    assert (engine.connections, pool.retries) == (1, 0)


async def test_retry_that_fails_is_lost(engines: Engines, pools: Pools) -> None:
    engine = await engines(saying(OK))
    pool = pools(engine)
    await ask(pool)

    async def die(call: Call) -> None:
        await engine_gone()

    async def engine_gone() -> None:
        engine.stop_listening()
        for call in engine.calls:
            call.writer.transport.abort()

    engine.script = die
    notes = await ask(pool)
    assert (notes.told, notes.before_first_byte) == (["lost"], True)
    assert pool.retries == 1


async def test_unreachable_engine_is_lost_before_the_first_byte(engines: Engines, pools: Pools, tmp_path: Path) -> None:
    engine = await engines(saying(OK))
    await engine.stop()
    notes = await ask(pools(engine, name="The engine of alpha"))
    assert (notes.told, notes.before_first_byte) == (["lost"], True)
    # Callers know it by its model: where it was to listen is not told.
    assert notes.error is not None and notes.error.message.startswith("The engine of alpha cannot be reached")
    assert str(engine.port) not in notes.error.message
    notes = await ask(Pool(EngineAddress(path=str(tmp_path / "absent.sock"))))
    assert notes.told == ["lost"]


async def test_engine_that_has_closed_its_socket_refuses(engines: Engines, pools: Pools, tmp_path: Path) -> None:
    engine = await engines(saying(OK))
    pool = pools(engine)
    assert not await pool.refuses()
    await engine.stop()
    assert await pool.refuses()
    assert await Pool(EngineAddress(path=str(tmp_path / "absent.sock"))).refuses()
    # Of one that was let go of, nothing is asked any more.
    pool.close()
    assert not await pool.refuses()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
async def test_engine_whose_backlog_is_full_does_not_refuse(family: socket.AddressFamily, tmp_path: Path) -> None:
    path = str(tmp_path / "e.sock")
    with contextlib.ExitStack() as sockets:
        listening = sockets.enter_context(socket.socket(family))
        listening.bind(path if family == socket.AF_UNIX else ("127.0.0.1", 0))
        listening.listen(0)
        # More than wait there: the last one is told so, or hears nothing.
        for _ in range(4):
            waiting = sockets.enter_context(socket.socket(family))
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        address = EngineAddress(path=path)
        if family == socket.AF_INET:
            address = EngineAddress("127.0.0.1", listening.getsockname()[1])
        assert not await Pool(address).refuses()


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nContent-Le", OK[:-1], CHUNKED[:-3]])
async def test_engine_that_dies_is_lost_in_every_phase(said: bytes, engines: Engines, pools: Pools) -> None:
    async def script(call: Call) -> None:
        if said:
            await call.say(said)
            await asyncio.sleep(0.02)
        call.writer.close()

    notes = await ask(pools(await engines(script)))
    assert notes.told[-1] == "lost"
    assert notes.before_first_byte is (said == b"")


async def test_closing_the_pool_tells_busy_sinks_and_cuts_idle_ones(engines: Engines, pools: Pools) -> None:
    async def script(call: Call) -> None:
        if call.body == b"abc":
            await call.say(OK)
        else:
            await call.left()

    engine = await engines(script)
    pool = pools(engine)
    silent = Notes()
    await pool.send(HEAD, b"xyz", silent)
    await ask(pool)
    pool.close()
    assert (silent.told, silent.before_first_byte) == (["lost"], True)
    await until(lambda: pool.open_count == 0)
    late = await ask(pool)
    assert late.told == ["lost"]


@pytest.mark.parametrize("retried", [False, True])
async def test_pool_closed_while_connecting_tells_the_sink(retried: bool, engines: Engines, pools: Pools) -> None:
    engine = await engines(saying(OK))
    loop = OddLoop()
    pool = pools(engine, loop=loop)
    notes = Notes()
    if retried:
        pool.retry(HEAD, b"abc", notes)
        waiting = None
    else:
        waiting = asyncio.create_task(pool.send(HEAD, b"abc", notes))
    await loop.is_asked.wait()
    pool.close()
    loop.let.set()
    await until(lambda: notes.over)
    assert (notes.told, notes.before_first_byte) == (["lost"], True)
    if waiting is not None:
        await waiting
    await until(lambda: pool.open_count == 0)
    assert engine.calls == []


async def test_an_aborted_connection_reports_nothing_and_the_engine_notices(engines: Engines, pools: Pools) -> None:
    left = asyncio.Event()

    async def script(call: Call) -> None:
        await call.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        await call.left()
        left.set()

    pool = pools(await engines(script))
    notes = Notes()
    await pool.send(HEAD, b"abc", notes)
    await until(lambda: notes.data == b"a")
    assert notes.upstream is not None
    notes.upstream.abort()
    async with asyncio.timeout(PATIENCE_S):
        await left.wait()
    assert notes.told == ["head", "body"]


async def test_sink_that_leaves_at_the_head_hears_no_more(engines: Engines, pools: Pools) -> None:
    pool = pools(await engines(saying(*bytewise(OK))))
    notes = Notes()

    def leave() -> None:
        assert notes.upstream is not None
        notes.upstream.abort()

    notes.on_head = leave
    await pool.send(HEAD, b"abc", notes)
    await until(lambda: pool.open_count == 0 and bool(notes.told))
    assert notes.told == ["head"]


async def test_a_request_whose_sink_is_not_wanted_is_not_sent(engines: Engines, pools: Pools) -> None:
    engine = await engines(saying(OK))
    pool = pools(engine)
    notes = Notes()
    notes.wanted = False
    await pool.send(HEAD, b"abc", notes)
    assert (notes.told, pool.idle_count) == ([], 1)
    assert (await ask(pool)).data == b"ok"
    assert len(engine.calls) == 1


async def test_sink_that_fails_loses_its_answer_and_nothing_else(engines: Engines, pools: Pools) -> None:
    pool = pools(await engines(saying(*bytewise(OK))))
    notes = Notes()

    def fail() -> None:
        raise RuntimeError("broken")

    notes.on_head = fail
    await pool.send(HEAD, b"abc", notes)
    await until(lambda: notes.over)
    assert notes.told == ["head", "lost"]
    assert (await ask(pool)).data == b"ok"


async def test_large_bodies_arrive_whole(engines: Engines, pools: Pools) -> None:
    engine = await engines(saying(OK))
    pool = pools(engine)
    budget = BodyBudget(EdgeLimits(body_in_memory_max=1000))
    body = Body(budget)
    body.append(bytes(range(256)) * 20_000)
    assert body.is_spooled
    head = b"POST /x HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body)
    for sent in (body, body.read(), body):
        assert (await ask(pool, head, sent)).data == b"ok"
    assert {call.body for call in engine.calls} == {body.read()}
    assert engine.connections == 1
    body.close()


async def test_spooled_body_waits_for_an_engine_that_reads_slowly(engines: Engines, pools: Pools) -> None:
    reading = asyncio.Event()

    async def script(call: Call) -> None:
        await reading.wait()
        assert len(await call.reader.readexactly(30_000_000)) == 30_000_000
        await call.say(OK)

    engine = await engines(script)
    engine.reads_bodies = False
    body = Body(BodyBudget(EdgeLimits(body_in_memory_max=1000)))
    body.append(b"x" * 30_000_000)
    notes = Notes()
    await pools(engine).send(b"POST /x HTTP/1.1\r\ncontent-length: 30000000\r\n\r\n", body, notes)
    assert notes.upstream is not None
    await until_still(notes.upstream.transport.get_write_buffer_size, 0.1)
    assert notes.upstream.transport.get_write_buffer_size() < 1_000_000
    reading.set()
    await until(lambda: notes.over)
    assert notes.data == b"ok"
    body.close()


async def test_answer_before_the_body_was_taken_ends_the_connection(engines: Engines, pools: Pools) -> None:
    async def script(call: Call) -> None:
        await call.say(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        await asyncio.Event().wait()

    engine = await engines(script)
    engine.reads_bodies = False
    pool = pools(engine)
    body = Body(BodyBudget(EdgeLimits(body_in_memory_max=1000)))
    body.append(b"x" * 30_000_000)
    notes = await ask(pool, b"POST /x HTTP/1.1\r\ncontent-length: 30000000\r\n\r\n", body)
    assert (notes.status, notes.told[-1]) == (413, "complete")
    await until(lambda: pool.open_count == 0)
    body.close()


def test_addresses_are_spelt_as_usual() -> None:
    assert str(EngineAddress("127.0.0.1", 80)) == "127.0.0.1:80"
    assert str(EngineAddress("::1", 80)) == "[::1]:80"


# --- a provider: what was delivered is paid for, and is not sent a second time ----------------------------------------


class StillLoop(OddLoop):
    """The running loop, with a clock that stands still until it is set."""

    def time(self) -> float:
        return self.ahead_s


@pytest.mark.parametrize("worked_s", [0.0, 1.0])
async def test_a_reused_connection_is_replaced_only_if_it_ended_at_once(engines: Engines, worked_s: float) -> None:
    async def script(call: Call) -> None:
        if sum(1 for other in engine.calls if other.connection == call.connection) == 2:
            loop.ahead_s += worked_s
            call.writer.transport.abort()
            return
        await call.say(OK)

    engine, loop = await engines(script), StillLoop()
    loop.let.set()
    endpoint = RemoteEndpoint("127.0.0.1", engine.port, b"", None, None)
    pool = RemotePool(endpoint, RemoteLimits(retries_max=0), name="The model", loop=loop)  # type: ignore[arg-type]
    try:
        assert (await ask(pool)).data == b"ok"
        notes = await ask(pool)
        if worked_s:
            assert (notes.told, notes.before_first_byte) == (["lost"], False) and isinstance(notes.error, RemoteFailed)
            assert (len(engine.calls), engine.connections, pool.retries) == (2, 1, 0)
        else:
            assert notes.told[-1] == "complete" and (len(engine.calls), engine.connections, pool.retries) == (3, 2, 1)
    finally:
        pool.close()
