"""Every lease store there is, as the contract suite wants it: two GPUs of 10,000 MiB, nothing held, no grace.

To add a store: write an async context manager that gives a `StoreRig`, and name it in STORES.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from greenroom.app import App
from greenroom.cli.address import parse
from greenroom.cli.client import Client
from greenroom.leases.http_store import HttpStore
from greenroom.leases.records import LeaseStore
from greenroom.leases.shared.redis_store import RedisStore
from greenroom.leases.shared.stored import SharedStore, SlotAsk
from tests.harness import fake, gateway, url
from tests.integration.sharing_rig import HOST, grown_up
from tests.redis_server import redis_server
from tests.sim.shared.book import Book, BookStore, at_once

GPU_MIB = 10_000
GPUS = ("gpu0", "gpu1")
SLOT_MIB = 6_000


@dataclass(frozen=True, slots=True)
class StoreRig:
    """`client()` is one more program that uses the same store; the rig closes them all. `load()` makes a model hold
    SLOT_MIB on gpu0."""

    client: Callable[[], LeaseStore]
    load: Callable[[], Awaitable[None]]


@contextlib.asynccontextmanager
async def redis_store(folder: Path) -> AsyncIterator[StoreRig]:
    clients: list[RedisStore] = []
    with redis_server(folder / "redis") as server:

        def client() -> RedisStore:
            clients.append(RedisStore(server.url, "box", grace_s=0, offers=dict.fromkeys(GPUS, GPU_MIB)))
            return clients[-1]

        try:
            yield StoreRig(client, lambda: _hold_slot(client()))
        finally:
            for one in clients:
                await one.close()


async def _hold_slot(store: SharedStore) -> None:
    await store.publish("g", dict.fromkeys(GPUS, GPU_MIB), {})
    await store.hold(SlotAsk("g/m@1", "m", {"gpu0": SLOT_MIB}), gateway="g")


@contextlib.asynccontextmanager
async def gateway_store(folder: Path) -> AsyncIterator[StoreRig]:
    """The store that a gateway keeps itself, as other programs see it: over HTTP."""
    async with gateway(folder, _MODELS, gpus=_GPUS) as app:
        yield _over_http(app)


@contextlib.asynccontextmanager
async def shared_store(folder: Path) -> AsyncIterator[StoreRig]:
    """A gateway whose leases are in Redis, as other programs see it: over HTTP."""
    with redis_server(folder / "redis") as server:
        leases = {"store": grown_up(server).url, "host": HOST}
        async with gateway(folder, _MODELS, gpus=_GPUS, leases=leases) as app:
            yield _over_http(app)


_GPUS = [{"memory_mib": GPU_MIB, "margin_mib": 0}] * len(GPUS)
_MODELS = {"m": fake("m", memory_mib=SLOT_MIB, ttl_s=0)}


def _over_http(app: App) -> StoreRig:
    async def load() -> None:
        await asyncio.to_thread(Client(parse(url(app))).post, "/api/v1/models/m/load")

    return StoreRig(lambda: HttpStore(url(app)), load)


@contextlib.asynccontextmanager
async def book_store(folder: Path) -> AsyncIterator[StoreRig]:
    """The scripts without Redis, as simulations use them."""
    book = Book(time.time)

    def client() -> BookStore:
        return BookStore(lambda: book, at_once, grace_s=0, offers=dict.fromkeys(GPUS, GPU_MIB))

    yield StoreRig(client, lambda: _hold_slot(client()))


STORES: dict[str, Callable[[Path], AbstractAsyncContextManager[StoreRig]]] = {
    "book": book_store,
    "gateway": gateway_store,
    "redis": redis_store,
    "shared": shared_store,
}
