"""An engine's answer on its way to a client, and what happens when either of them leaves."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

from greenroom.engines.usage import Usage
from greenroom.http.exchange import Exchange
from greenroom.http.relays.relay import BAD_BODY_BYTES_MAX, HELD_BYTES_MAX, TAIL_BYTES, Relay, RelayOutcome
from greenroom.serving.answer_facts import AnswerFacts
from tests.http.conftest import Asked, Behind, Connect, Engines, Facing
from tests.http.wires import Call, Engine, OddLoop, Proxy, get, post, saying
from tests.waiting import PATIENCE_S, until, until_still

SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
JSON = b"HTTP/1.1 200 OK\r\nServer: e\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def outcome_of(proxy: Proxy, number: int = 0) -> RelayOutcome:
    await until(lambda: len(proxy.relays) > number)
    async with asyncio.timeout(PATIENCE_S):
        return await proxy.relays[number].wait()


async def test_answer_comes_with_filtered_headers(engines: Engines, behind: Behind, connect: Connect) -> None:
    engine = await engines(saying(JSON))
    proxy = await behind(engine)
    client = await connect(proxy.server)
    for number in range(3):
        response = await client.ask(post(b'{"model":"m"}', "/v1/x", "Content-Type: application/json\r\nCookie: c\r\n"))
        assert (response.status, response.body, response.headers["content-length"]) == (200, b"{}", "2")
        assert response.headers["x-request-id"] == "r-1"
        assert "server" not in response.headers
        relay = proxy.relays[number]
        assert (await relay.wait(), relay.status, relay.tail(), relay.total_bytes) == (
            RelayOutcome.COMPLETE,
            200,
            b"{}",
            2,
        )
    assert b"cookie" not in engine.calls[0].head
    assert engine.calls[0].body == b'{"model":"m"}'
    assert engine.connections == 1


async def test_stream_is_passed_on_as_it_comes_and_counted(asked: Asked) -> None:
    more = asyncio.Event()

    async def script(call: Call) -> None:
        await call.say(SSE + chunk(b": hi\n\nda"))
        await more.wait()
        await call.say(chunk(b"ta: 1\n") + chunk(b"\ndata: 2\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    proxy, client = await asked(script)
    assert b"text/event-stream" in await client.reader.readuntil(b"\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        assert await client.reader.readuntil(b"da\r\n") == chunk(b": hi\n\nda")
    relay = proxy.relays[0]
    assert (relay.events, relay.first_data_at, relay.at_boundary) == (1, None, False)
    more.set()
    assert (await client.chunks(200, {})).body == b"ta: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
    assert await relay.wait() is RelayOutcome.COMPLETE
    assert relay.events == 4
    assert relay.first_data_at is not None
    assert relay.at_boundary
    assert relay.tail().endswith(b"data: [DONE]\n\n")


async def test_tail_is_the_last_8_kib(facing: Facing) -> None:
    data = b"".join(b"%07d\n" % number for number in range(20_000))

    async def script(call: Call) -> None:
        await call.say(SSE)
        for start in range(0, len(data), 1000):
            await call.say(chunk(data[start : start + 1000]))
            await asyncio.sleep(0)
        await call.say(b"0\r\n\r\n")

    proxy, client = await facing(script)
    assert (await client.ask(post(b"{}"))).body == data
    relay = proxy.relays[0]
    assert relay.tail() == data[-TAIL_BYTES:]
    assert relay.total_bytes == len(data)
    # What is kept beyond the tail shows nowhere else.
    assert len(relay._tail) + sum(map(len, relay._unread)) < 10 * TAIL_BYTES


async def test_whole_stream_in_one_read_is_counted_too(facing: Facing) -> None:
    proxy, client = await facing(saying(SSE + chunk(b"data: 1\n\ndata: 2\n\n") + b"0\r\n\r\n"))
    assert (await client.ask(post(b"{}"))).body == b"data: 1\n\ndata: 2\n\n"
    assert (proxy.relays[0].events, proxy.relays[0].at_boundary) == (2, True)


async def test_head_request_and_bodiless_answers_pass(facing: Facing) -> None:
    async def script(call: Call) -> None:
        if call.head.startswith(b"HEAD"):
            await call.say(b"HTTP/1.1 200 OK\r\nContent-Length: 77\r\n\r\n")
        else:
            await call.say(b"HTTP/1.1 204 No Content\r\n\r\n")

    _, client = await facing(script)
    await client.send(b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await client.response(head_only=True)).headers["content-length"] == "77"
    assert (await client.ask(get())).status == 204


# --- clients that leave ---------------------------------------------------------------------------------------------

PHASES = {
    "waiting for the first byte": b"",
    "in the middle of the head": SSE[:30],
    "after the head": SSE,
    "in the middle of the stream": SSE + chunk(b"data: 1\n\n"),
    "at the last byte": SSE + chunk(b"data: [DONE]\n\n") + b"0\r\n\r",
}
# Of these the client hears nothing.
SILENT = ("waiting for the first byte", "in the middle of the head")


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("phase", PHASES)
async def test_client_that_leaves_ends_the_engines_work_at_once(phase: str, how: str, asked: Asked) -> None:
    said, left = asyncio.Event(), asyncio.Event()

    async def script(call: Call) -> None:
        await call.say(PHASES[phase])
        said.set()
        await call.left()
        left.set()

    proxy, client = await asked(script)
    await said.wait()
    await until(lambda: proxy.relays[0].exchange.started is (phase not in SILENT))
    if how == "fin":
        client.writer.close()
    else:
        client.reset()
    assert await outcome_of(proxy) is RelayOutcome.CLIENT_GONE
    async with asyncio.timeout(PATIENCE_S):
        await left.wait()
    await until(lambda: proxy.pool.open_count == 0)


async def test_client_that_leaves_while_we_connect_is_not_sent(behind: Behind, connect: Connect) -> None:
    async def script(call: Call) -> None:
        raise AssertionError("a request that was not sent")

    engine = Engine(script)
    await engine.start()
    loop = OddLoop()
    proxy = await behind(engine, loop)
    client = await connect(proxy.server)
    await client.send(post(b"{}"))
    await until(lambda: len(proxy.relays) == 1)
    await client.close()
    assert await outcome_of(proxy) is RelayOutcome.CLIENT_GONE
    loop.let.set()
    await until(lambda: proxy.pool.idle_count == 1)
    assert engine.calls == []
    await engine.stop()


async def test_slow_client_slows_the_engine_in_bounded_memory(
    engines: Engines, behind: Behind, connect: Connect
) -> None:
    sent = 0

    async def script(call: Call) -> None:
        nonlocal sent
        await call.say(SSE)
        piece = chunk(b"data: " + b"x" * 60_000 + b"\n\n")
        for _ in range(2000):
            await call.say(piece)
            sent += len(piece)

    proxy = await behind(await engines(script), write_timeout_s=60)
    client = await connect(proxy.server)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await client.send(post(b"{}"))
    await until_still(lambda: sent)
    before = sent
    # 120 MB would have come; what did come is in the buffers of the two sockets and in one write buffer.
    assert 0 < sent < 40_000_000
    assert proxy.server.buffered() < 1_000_000
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]
    async with asyncio.timeout(20):
        await client.reader.readuntil(b"\r\n\r\n")
        while sent == before:
            assert await client.reader.read(1 << 20)
    client.reset()
    assert await outcome_of(proxy) is RelayOutcome.CLIENT_GONE


async def test_connection_of_a_slow_client_serves_the_next(engines: Engines, behind: Behind, connect: Connect) -> None:
    big = b"x" * 30_000_000

    async def script(call: Call) -> None:
        if call.body == b"big":
            await call.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(big) + big)
        else:
            await call.say(JSON)

    engine = await engines(script)
    proxy = await behind(engine)
    slow, quick = await connect(proxy.server), await connect(proxy.server)
    slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await slow.send(post(b"big"))
    await until(lambda: bool(proxy.relays) and proxy.relays[0].exchange.paused)
    slow.writer.transport.resume_reading()  # type: ignore[attr-defined]
    assert (await slow.response()).body == big
    for _ in range(3):
        assert (await quick.ask(post(b"{}"))).body == b"{}"
    assert engine.connections == 1


# --- engines that leave ---------------------------------------------------------------------------------------------


async def test_engine_lost_before_its_first_byte_leaves_the_answer_open(facing: Facing) -> None:
    proxy, client = await facing(saying(closes=True))
    assert (await client.ask(post(b"{}"))).status == 502
    relay = proxy.relays[0]
    assert (relay.outcome, relay.before_first_byte) == (RelayOutcome.ENGINE_LOST, True)
    assert (await client.ask(post(b"{}"))).status == 502


@pytest.mark.parametrize(
    ("said", "body"),
    [(SSE, b""), (SSE + chunk(b"data: 1\n\n"), b"data: 1\n\n"), (SSE + chunk(b"data: 1\r\n\r\n"), b"data: 1\r\n\r\n")],
)
async def test_engine_lost_between_events_is_told_as_one_more_event(said: bytes, body: bytes, facing: Facing) -> None:
    proxy, client = await facing(saying(said, pause_s=0.05, closes=True))
    response = await client.ask(post(b"{}"))
    assert response.body == body + b'data: {"error":{"code":"engine_lost"}}\n\n'
    assert response.whole
    relay = proxy.relays[0]
    assert (relay.outcome, relay.before_first_byte) == (RelayOutcome.ENGINE_LOST, False)


@pytest.mark.parametrize(
    "said", [SSE + chunk(b"data: 1"), SSE + chunk(b"data: 1\n"), JSON[:-1]], ids=["event", "line", "json"]
)
async def test_engine_lost_in_the_middle_cuts_the_answer(said: bytes, facing: Facing) -> None:
    _, client = await facing(saying(said, pause_s=0.05, closes=True))
    response = await client.ask(post(b"{}"))
    assert not response.whole
    assert b"error" not in response.body


async def test_engine_that_switches_protocols_unasked_is_lost(facing: Facing) -> None:
    _, client = await facing(saying(b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nhello"))
    assert (await client.ask(post(b"{}"))).status == 502


@pytest.mark.parametrize("pace_s", [0.0, 0.02])
async def test_header_of_ours_that_breaks_the_answer_ends_the_relay(pace_s: float, facing: Facing) -> None:
    proxy, client = await facing(
        saying(JSON[:-2], JSON[-2:], pause_s=pace_s), extra=[(b"x-model", b"a\r\nset-cookie: evil")]
    )
    assert (await client.ask(post(b"{}"))).status == 502
    assert proxy.relays[0].outcome is RelayOutcome.ENGINE_LOST
    assert not proxy.relays[0].before_first_byte


async def test_stopped_relay_ends_the_engines_work(asked: Asked) -> None:
    left = asyncio.Event()

    async def script(call: Call) -> None:
        await call.say(SSE + chunk(b"data: 1\n\n"))
        await call.left()
        left.set()

    proxy, client = await asked(script)
    await until(lambda: bool(proxy.relays) and proxy.relays[0].events == 1)
    waiting = asyncio.create_task(proxy.relays[0].wait())
    await asyncio.sleep(0)
    proxy.relays[0].fail(b"data: cut\n\n")
    assert (await client.response()).body == b"data: 1\n\ndata: cut\n\n"
    assert await waiting is RelayOutcome.STOPPED
    async with asyncio.timeout(PATIENCE_S):
        await left.wait()
    proxy.relays[0].stop()
    assert proxy.relays[0].outcome is RelayOutcome.STOPPED


async def test_waiter_that_is_cancelled_changes_nothing(asked: Asked) -> None:
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await go.wait()
        await call.say(JSON)

    proxy, client = await asked(script)
    await until(lambda: bool(proxy.relays))
    waiting = asyncio.create_task(proxy.relays[0].wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go.set()
    assert (await client.response()).body == b"{}"
    assert await proxy.relays[0].wait() is RelayOutcome.COMPLETE


async def test_client_already_gone_is_an_outcome_at_once(engines: Engines, behind: Behind, connect: Connect) -> None:
    proxy = await behind(await engines(lambda call: asyncio.sleep(0)))
    held: list[Exchange] = []
    proxy.server.handle = held.append
    client = await connect(proxy.server)
    await client.send(get())
    await until(lambda: bool(held))
    await client.close()
    await until(lambda: held[0].gone)
    relay = Relay(held[0])
    assert not relay.wanted
    assert await relay.wait() is RelayOutcome.CLIENT_GONE


# --- after heartbeats -----------------------------------------------------------------------------------------------


async def test_committed_stream_continues_with_the_engines_events(facing: Facing) -> None:
    proxy, client = await facing(saying(SSE + chunk(b"data: 1\n\n") + b"0\r\n\r\n"), committed=True)
    assert (await client.ask(post(b"{}"))).body == b": waiting\n\ndata: 1\n\n"
    assert proxy.relays[0].outcome is RelayOutcome.COMPLETE


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        (JSON, 200, b"{}"),
        (b"HTTP/1.1 500 Oh\r\nContent-Type: text/event-stream\r\nContent-Length: 3\r\n\r\nbad", 500, b"bad"),
        (b"HTTP/1.1 500 Oh\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nbad\r\n", 500, b"bad"),
        (
            b"HTTP/1.1 400 No\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"x" * 200_000),
            400,
            b"x" * BAD_BODY_BYTES_MAX,
        ),
    ],
    ids=["json", "error", "lost", "endless"],
)
async def test_committed_stream_makes_other_answers_errors(
    answer: bytes, status: int, body: bytes, facing: Facing
) -> None:
    proxy, client = await facing(
        saying(answer, pause_s=0.05, closes=True), committed=True, on_done=lambda relay: relay.fail(b"data: error\n\n")
    )
    response = await client.ask(post(b"{}"))
    assert (response.status, response.body) == (200, b": waiting\n\ndata: error\n\n")
    assert proxy.bad_heads == [(status, body)]
    assert proxy.relays[0].outcome is RelayOutcome.BAD_HEAD


async def test_committed_stream_whose_engine_is_lost_ends_with_an_event(facing: Facing) -> None:
    proxy, client = await facing(saying(closes=True), committed=True)
    assert (await client.ask(post(b"{}"))).body.endswith(b'data: {"error":{"code":"engine_lost"}}\n\n')
    assert proxy.relays[0].before_first_byte


# --- usage ----------------------------------------------------------------------------------------------------------


async def test_usage_event_is_kept_from_the_client_but_not_from_us(facing: Facing) -> None:
    usage = b"data: " + json.dumps({"choices": [], "usage": {"total_tokens": 9}}).encode() + b"\n\n"
    stream = b'data: {"choices":[{}]}\n\n' + usage + b"data: [DONE]\n\n"

    async def script(call: Call) -> None:
        await call.say(SSE)
        for start in range(0, len(stream), 7):
            await call.say(chunk(stream[start : start + 7]))
            await asyncio.sleep(0)
        await call.say(b"0\r\n\r\n")

    proxy, client = await facing(script, drop_usage_event=True)
    assert (await client.ask(post(b"{}"))).body == stream.replace(usage, b"")
    assert proxy.relays[0].tail() == stream
    assert proxy.relays[0].events == 3


async def test_engine_lost_while_an_event_is_held_back_leaves_whole_events(facing: Facing) -> None:
    _, client = await facing(
        saying(SSE + chunk(b"data: 1\n\ndata: unfin"), pause_s=0.05, closes=True), drop_usage_event=True
    )
    response = await client.ask(post(b"{}"))
    assert response.body == b'data: 1\n\ndata: {"error":{"code":"engine_lost"}}\n\n'


async def test_filter_leaves_answers_with_a_length_alone(facing: Facing) -> None:
    body = b'data: {"choices":[],"usage":{}}\n\n'

    _, client = await facing(
        saying(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(body),
            body,
            pause_s=0.02,
        ),
        drop_usage_event=True,
    )
    assert (await client.ask(post(b"{}"))).body == body


# --- what an answer tells of itself ---------------------------------------------------------------------------------


class CountingEngine:
    """Tells that as many tokens were reused as it was shown bytes."""

    def usage(self, tail: bytes, *, stream: bool) -> Usage:
        return Usage(0, 0, cached=len(tail))


def facts(*, is_stream: bool) -> AnswerFacts:
    """Of a JSON answer, or of a stream that ends with a comment."""
    return AnswerFacts(cast(Any, CountingEngine()), is_stream=is_stream, wait_ms=7 if is_stream else None)


def comment_of(size: int) -> bytes:
    return b": facts cache_hit=true cache_tokens_reused=%d queue_wait_ms=7\n\n" % size


def in_pieces(body: bytes, pieces: int, *, length: bool) -> list[bytes]:
    """A JSON answer as an engine may send it: its head, then so many pieces."""
    size = -(-len(body) // pieces)
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    if length:
        return [b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body), *parts]
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
    return [head, *map(chunk, parts), b"0\r\n\r\n"]


@pytest.mark.parametrize("length", [True, False])
@pytest.mark.parametrize(("size", "is_told"), [(100, True), (HELD_BYTES_MAX, True), (HELD_BYTES_MAX + 1, False)])
async def test_headers_come_from_the_body_of_a_short_answer(
    length: bool, size: int, is_told: bool, facing: Facing
) -> None:
    body = b'{"text":"%b"}' % (b"x" * (size - 11))

    async def script(call: Call) -> None:
        for part in in_pieces(body, 3, length=length):
            await call.say(part)
            await asyncio.sleep(0.01)

    proxy, client = await facing(script, facts=facts(is_stream=False))
    response = await client.ask(post(b"{}"))
    assert response.body == body
    assert response.headers.get("x-cache-tokens-reused") == (str(min(size, TAIL_BYTES)) if is_told else None)
    assert proxy.relays[0].total_bytes == size


async def test_held_answer_of_a_lost_engine_can_still_be_an_error(asked: Asked) -> None:
    proxy, client = await asked(
        saying(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
            pause_s=0.05,
            closes=True,
        ),
        facts=facts(is_stream=False),
    )
    assert await outcome_of(proxy) is RelayOutcome.ENGINE_LOST
    assert (await client.response()).status == 502 and not proxy.relays[0].before_first_byte


@pytest.mark.parametrize(
    "pieces",
    [
        [b"data: 1\n\ndata: [DONE]\n\n"],
        [b"data: 1\n\n", b"data: [DONE]\n\n"],
        [b'data: "', b'data: [DONE]"\n\n', b"data: [DONE]\n\n"],
        [b"data: 1\r\n\r\n", b"data: [DONE]\r\n\r\n"],
    ],
)
async def test_comment_stands_before_the_end_of_a_stream(pieces: list[bytes], asked: Asked) -> None:
    async def script(call: Call) -> None:
        await call.say(SSE)
        for piece in pieces:
            await call.say(chunk(piece))
            await asyncio.sleep(0.02)
        await call.say(b"0\r\n\r\n")

    _, client = await asked(script, facts=facts(is_stream=True))
    whole = b"".join(pieces)
    before = whole.rindex(b"data: [DONE]")
    assert (await client.response()).body == whole[:before] + comment_of(before) + whole[before:]


async def test_comment_follows_a_stream_without_a_mark_of_its_end(facing: Facing) -> None:
    _, client = await facing(saying(SSE + chunk(b"data: 1\n\n") + b"0\r\n\r\n"), facts=facts(is_stream=True))
    assert (await client.ask(post(b"{}"))).body == b"data: 1\n\n" + comment_of(9)
