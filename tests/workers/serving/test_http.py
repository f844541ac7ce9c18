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
from greenroom.workers.serving.request_reader import Request

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
