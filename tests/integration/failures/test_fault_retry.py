"""A request on its way to a second connection when the engine is gone for good: it must hear of it, and not wait."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from greenroom.errors import EngineLost
from greenroom.http.upstream import EngineAddress, Pool
from tests.http.wires import OddLoop
from tests.waiting import until

pytestmark = pytest.mark.slow


class Listener:
    """A sink that only wants to know whether it was told."""

    def __init__(self) -> None:
        self.upstream: Any = None
        self.losses: list[EngineLost] = []

    @property
    def wanted(self) -> bool:
        return not self.losses

    def lost(self, error: EngineLost, before_first_byte: bool) -> None:
        assert before_first_byte
        self.losses.append(error)

    def answer(self, status: int, headers: Any, body: bytes) -> None: ...
    def head(self, status: int, headers: Any) -> None: ...
    def body(self, data: bytes) -> None: ...
    def complete(self) -> None: ...
    def upgraded(self, headers: Any, rest: bytes) -> None: ...


async def told_once(sink: Listener) -> None:
    await until(lambda: sink.losses)
    # Every task that could tell it again has ended.
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
    assert len(sink.losses) == 1


async def test_retry_that_has_not_begun_when_the_pool_closes_is_told_once() -> None:
    """The broken connection and the engine's end are heard in one turn of the loop: the retry never gets its first."""
    pool, sink = Pool(EngineAddress(path="/no/such/socket")), Listener()
    pool.retry(b"POST / HTTP/1.1\r\n\r\n", b"", sink)
    pool.close()
    await told_once(sink)


async def test_retry_that_is_connecting_when_the_pool_closes_is_told_once() -> None:
    loop, sink = OddLoop(), Listener()
    pool = Pool(EngineAddress(host="127.0.0.1", port=9), loop=cast(asyncio.AbstractEventLoop, loop))
    pool.retry(b"POST / HTTP/1.1\r\n\r\n", b"", sink)
    await loop.is_asked.wait()
    pool.close()
    await told_once(sink)
