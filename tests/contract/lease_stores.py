"""Every lease store there is, as the contract suite wants it: two GPUs of 10,000 MiB, nothing held, no grace.

To add a store: write an async context manager that gives a `Stage`, and name it in STAGES.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from greenroom.memory.leases.http_store import HttpStore
from greenroom.memory.leases.records import LeaseStore
from greenroom.memory.leases.redis_store import RedisStore
from tests.harness import gateway, url
from tests.redis_server import redis_server
from tests.sim.shared.book import Book, BookStore, at_once

GPU_MIB = 10_000
GPUS = ("gpu0", "gpu1")


@dataclass(frozen=True, slots=True)
class Stage:
    """`client()` is one more program that uses the same store; the stage closes them all."""

    client: Callable[[], LeaseStore]


@contextlib.asynccontextmanager
async def redis_stage(folder: Path) -> AsyncIterator[Stage]:
    clients: list[RedisStore] = []
    with redis_server(folder / "redis") as server:

        def client() -> RedisStore:
            clients.append(RedisStore(server.url, "box", grace_s=0, offers=dict.fromkeys(GPUS, GPU_MIB)))
            return clients[-1]

        try:
            yield Stage(client)
        finally:
            for one in clients:
                await one.close()


@contextlib.asynccontextmanager
async def gateway_stage(folder: Path) -> AsyncIterator[Stage]:
    """The store that a gateway keeps itself, as other programs see it: over HTTP."""
    gpus = [{"memory_mib": GPU_MIB, "margin_mib": 0}] * len(GPUS)
    async with gateway(folder, {}, gpus=gpus) as app:
        yield Stage(lambda: HttpStore(url(app)))


@contextlib.asynccontextmanager
async def book_stage(folder: Path) -> AsyncIterator[Stage]:
    """The scripts without Redis, as simulations use them."""
    book = Book(time.time)
    yield Stage(lambda: BookStore(lambda: book, at_once, grace_s=0, offers=dict.fromkeys(GPUS, GPU_MIB)))


STAGES: dict[str, Callable[[Path], AbstractAsyncContextManager[Stage]]] = {
    "book": book_stage,
    "gateway": gateway_stage,
    "redis": redis_stage,
}
