"""HTTP of the workers: one clear request after another, and clients that leave, stall or send nonsense."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from greenroom.workers.serving import http
from greenroom.workers.serving.errors import ApiError
from greenroom.workers.serving.http import AnswerWriter, Handler, HttpServer
from greenroom.workers.serving.request_reader import BODY_BYTES_MAX, HEAD_BYTES_MAX, HEADERS_MAX, Request, RequestReader

WAIT_S = 30
GET = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"


@contextlib.asynccontextmanager
async def serving(handler: Handler, folder: Path, **limits: Any) -> AsyncIterator[Path]:
    server = HttpServer(handler, **limits)
    path = folder / "s"
    await server.open(path)
    try:
        yield path
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def talking(
    handler: Handler, folder: Path, sent: bytes = b"", **limits: Any
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to such a server, by which this was sent."""
    async with serving(handler, folder, **limits) as path:
        reader, writer = await connected(path)
        writer.write(sent)
        yield reader, writer
        writer.close()


async def connected(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_unix_connection(str(path))


async def read(reader: asyncio.StreamReader, until: bytes) -> bytes:
    async with asyncio.timeout(WAIT_S):
        return await reader.readuntil(until)


async def echo(request: Request, answer: AnswerWriter) -> None:
    answer.whole(200, request.body or request.path.encode())


async def test_a_connection_answers_one_request_after_another(socket_folder: Path) -> None:
    async with serving(echo, socket_folder) as path:
        reader, writer = await connected(path)
        for _ in range(3):
            writer.write(GET)
            assert (await read(reader, b"/x")).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.write(GET + GET)
        await read(reader, b"/x")
        await read(reader, b"/x")
        writer.close()


async def test_program_says_how_large_a_body_may_be(socket_folder: Path) -> None:
    async with serving(echo, socket_folder, body_bytes_max=8) as path:
        for size, status in ((8, b"200"), (9, b"413")):
            reader, writer = await connected(path)
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)
            assert (await read(reader, b"\r\n")).split()[1] == status
            writer.close()


async def test_only_this_user_may_connect_and_the_socket_goes_with_the_server(socket_folder: Path) -> None:
    async with serving(echo, socket_folder) as path:
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()


async def test_a_client_that_asks_to_close_is_closed(socket_folder: Path) -> None:
    async with talking(echo, socket_folder, b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n") as (reader, _):
        async with asyncio.timeout(WAIT_S):
            assert (await reader.read()).endswith(b"connection: close\r\n\r\n/x")


@pytest.mark.parametrize("raw", [b"\x16\x03\x01\x00\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nbad\r\n\r\n"])
async def test_malformed_input_is_answered_and_the_next_client_served(socket_folder: Path, raw: bytes) -> None:
    async with serving(echo, socket_folder) as path:
        reader, writer = await connected(path)
        writer.write(raw)
        async with asyncio.timeout(WAIT_S):
            said = await reader.read()
        assert said.startswith(b"HTTP/1.1 400 ") and b'"bad_framing"' in said
        writer.close()
        reader, writer = await connected(path)
        writer.write(GET)
        await read(reader, b"/x")
        writer.close()


async def test_a_bug_in_a_handler_is_500_and_says_nothing_of_it(socket_folder: Path) -> None:
    async def broken(request: Request, answer: AnswerWriter) -> None:
        raise KeyError("secret")

    async with talking(broken, socket_folder, GET) as (reader, _):
        said = await read(reader, b"}}")
        assert said.startswith(b"HTTP/1.1 500 ") and b"secret" not in said


async def test_an_error_in_a_stream_is_its_last_event(socket_folder: Path) -> None:
    async def fails_late(request: Request, answer: AnswerWriter) -> None:
        answer.begin_events()
        answer.event(b"one")
        raise ApiError("late", status=500)

    async with talking(fails_late, socket_folder, GET) as (reader, _):
        said = await read(reader, b"0\r\n\r\n")
        assert b"b\r\ndata: one\n\n\r\n" in said and b'"message": "late"' in said


@pytest.mark.parametrize("when", ["waiting", "streaming"])
@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_client_that_leaves_cancels_what_is_done_for_it(socket_folder: Path, when: str, how: str) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def endless(request: Request, answer: AnswerWriter) -> None:
        if when == "streaming":
            answer.begin_events()
            answer.event(b"one")
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with serving(endless, socket_folder) as path:
        _, writer = await connected(path)
        writer.write(GET)
        async with asyncio.timeout(WAIT_S):
            await begun.wait()
            writer.close() if how == "close" else writer.transport.abort()
            await cancelled.wait()


async def test_a_client_that_leaves_in_the_middle_of_its_request_is_forgotten(socket_folder: Path) -> None:
    async with serving(echo, socket_folder) as path:
        _, writer = await connected(path)
        writer.write(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf")
        await writer.drain()
        writer.close()
        reader, writer = await connected(path)
        writer.write(GET)
        await read(reader, b"/x")
        writer.close()


async def test_a_request_that_never_ends_is_given_up(socket_folder: Path) -> None:
    async with talking(
        echo, socket_folder, b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf", request_timeout_s=0.05
    ) as (reader, _):
        async with asyncio.timeout(WAIT_S):
            assert (await reader.read()).startswith(b"HTTP/1.1 408 ")


async def test_a_client_that_sends_much_ahead_of_the_answer_is_cut(socket_folder: Path) -> None:
    async def endless(request: Request, answer: AnswerWriter) -> None:
        await asyncio.Event().wait()

    async with talking(endless, socket_folder, GET + b"x" * (http.AHEAD_BYTES_MAX + 1)) as (reader, _):
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""


async def test_connections_are_bounded(socket_folder: Path) -> None:
    async with serving(echo, socket_folder, connections_max=1) as path:
        reader, writer = await connected(path)
        writer.write(GET)
        await read(reader, b"/x")
        second, other = await connected(path)
        async with asyncio.timeout(WAIT_S):
            assert (await second.read()).startswith(b"HTTP/1.1 503 ")
        other.close()
        writer.close()


async def test_a_client_that_waits_to_be_told_may_send_its_body(socket_folder: Path) -> None:
    async with talking(
        echo, socket_folder, b"POST /x HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n"
    ) as (reader, writer):
        assert await read(reader, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"body")
        await read(reader, b"\r\n\r\nbody")


async def test_an_answer_knows_when_its_client_does_not_keep_up(socket_folder: Path) -> None:
    relieved = asyncio.Event()

    async def flood(request: Request, answer: AnswerWriter) -> None:
        answer.begin_events()
        answer.on_relief = relieved.set
        while not answer.is_choked:
            answer.event(b"x" * 65_536)
        await relieved.wait()
        assert not answer.is_choked
        answer.end_events()

    async with talking(flood, socket_folder, GET) as (reader, _):
        async with asyncio.timeout(WAIT_S):
            while not (await reader.read(65_536)).endswith(b"0\r\n\r\n"):
                pass
        assert relieved.is_set()


async def test_closing_the_server_cancels_its_requests(socket_folder: Path) -> None:
    cancelled = asyncio.Event()
    begun = asyncio.Event()

    async def endless(request: Request, answer: AnswerWriter) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with serving(endless, socket_folder) as path:
        _, writer = await connected(path)
        writer.write(GET)
        async with asyncio.timeout(WAIT_S):
            await begun.wait()
    assert cancelled.is_set()
    writer.close()


SIZED = b"POST /a?b=c HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKED += b"2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nTrailer: t\r\n\r\n"


def parsed(*pieces: bytes) -> list[Request]:
    reader, found = RequestReader(), []
    for piece in pieces:
        reader.feed(piece)
        while (request := reader.next_request()) is not None:
            found.append(request)
    return found


@pytest.mark.parametrize("raw", [SIZED, CHUNKED], ids=["sized", "chunked"])
def test_a_request_is_the_same_wherever_its_bytes_are_cut(raw: bytes) -> None:
    for cut in range(len(raw) + 1):
        (request,) = parsed(raw[:cut], raw[cut:])
        assert (request.method, request.path, request.body) == ("POST", "/a", b"hello"), cut
        assert request.query == ("b=c" if raw is SIZED else "")
        assert request.keeps_alive
    assert parsed(*(raw[at : at + 1] for at in range(len(raw))))[0].body == b"hello"


def test_requests_sent_ahead_come_out_one_by_one() -> None:
    assert [request.body for request in parsed(SIZED + CHUNKED + b"\r\n" + SIZED)] == [b"hello"] * 3


def test_an_unfinished_request_is_known_as_one() -> None:
    reader = RequestReader()
    assert not reader.is_in_request
    reader.feed(SIZED[:-1])
    assert reader.next_request() is None
    assert reader.is_in_request


@pytest.mark.parametrize(
    ("head", "keeps"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Close\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\n\r\n", False),
        # h11 keeps no connection of an older client.
        (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", False),
    ],
)
def test_a_connection_is_kept_as_its_client_says(head: bytes, keeps: bool) -> None:
    assert parsed(head)[0].keeps_alive is keeps


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"\x00\xff\x16\x03\r\n\r\n",
        b"GET  / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\n folded: x\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\na: b\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\nHost: x\n\n",
        b"GET / HTTP/1.1\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\nHost: x\n\n\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\na: \x01\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\na : x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\na: \x00\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1e3\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 5000 + b"\r\n",
    ],
)
def test_what_is_not_one_clear_request_is_refused(raw: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        parsed(raw)
    assert refused.value.status == 400


def test_sizes_are_bounded() -> None:
    too_big = BODY_BYTES_MAX + 1
    cases = [
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % too_big, 413),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % too_big + b" " * too_big, 413),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 2 * HEAD_BYTES_MAX, 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\na: " + b"x" * HEAD_BYTES_MAX + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\na: " + b"x" * HEAD_BYTES_MAX, 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * (HEADERS_MAX + 1) + b"\r\n", 431),
    ]
    for raw, status in cases:
        with pytest.raises(ApiError) as refused:
            parsed(raw)
        assert refused.value.status == status


def test_a_body_of_nothing_but_chunk_extensions_is_refused() -> None:
    chunk = b"1;" + b"x" * 4000 + b"\r\na\r\n"
    with pytest.raises(ApiError, match="mostly"):
        parsed(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", chunk * 100)


def test_a_client_that_waits_to_be_told_is_told_once() -> None:
    reader = RequestReader()
    reader.feed(b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert reader.next_request() is None
    assert [reader.take_continue(), reader.take_continue()] == [True, False]
