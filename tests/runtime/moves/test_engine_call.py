"""Calls to an engine's own address: what comes back, however the engine ends its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from greenroom.http.upstream import EngineAddress
from greenroom.runtime.moves import process_moves
from greenroom.runtime.moves.process_moves import EngineCall


@asynccontextmanager
async def engine(
    folder: Path, answer: bytes, *, closes: bool = True
) -> AsyncIterator[tuple[EngineAddress, list[bytes]]]:
    asked: list[bytes] = []
    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        if not closes:
            await done.wait()
        writer.close()

    async with await asyncio.start_unix_server(serve, folder / "e.sock"):
        yield EngineAddress(path=str(folder / "e.sock")), asked
        done.set()


@pytest.mark.parametrize("closes", [True, False])
async def test_an_answer_ends_with_its_length(tmp_path: Path, closes: bool) -> None:
    raw = b'HTTP/1.1 202 Accepted\r\ncontent-length: 4\r\n\r\ntrue{"beyond": 1}'
    async with engine(tmp_path, raw, closes=closes) as (address, asked):
        assert await EngineCall(address)("POST", "/sleep?level=1", b"") == (202, b"true")
    assert asked[0].startswith(b"POST /sleep?level=1 HTTP/1.0\r\nHost: localhost\r\n")


async def test_an_answer_without_a_length_ends_with_the_connection(tmp_path: Path) -> None:
    async with engine(tmp_path, b"HTTP/1.0 200 OK\r\n\r\nall of it") as (address, _):
        assert await EngineCall(address)("GET", "/is_sleeping") == (200, b"all of it")


@pytest.mark.parametrize(
    ("raw", "why"),
    [(b"", "without an answer"), (b"hello\r\n\r\n", "like an HTTP server"), (b"x" * 200, "more than 100")],
)
async def test_garbage_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bytes, why: str) -> None:
    monkeypatch.setattr(process_moves, "ANSWER_MAX_BYTES", 100)
    async with engine(tmp_path, raw) as (address, _):
        with pytest.raises(ValueError, match=why):
            await EngineCall(address)("GET", "/")


async def test_an_engine_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        await EngineCall(EngineAddress(path=str(tmp_path / "gone.sock")))("GET", "/")
