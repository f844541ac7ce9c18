"""A primary is lost and its replica takes over, with `min-replicas-to-write 1`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from greenroom.errors import LeaseDenied, StoreDown
from greenroom.leases.records import LeaseAsk
from greenroom.leases.shared.redis_store import RedisStore
from tests.leases.history.proxy import Proxy
from tests.redis_server import RedisServer, redis_server
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow

DEVICES = {"gpu0": 10_000}


@dataclass(frozen=True, slots=True)
class Pair:
    """The replica follows the primary through a link that can be cut with what is on its way."""

    primary: RedisServer
    replica: RedisServer
    link: Proxy


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    options = ("--min-replicas-to-write", "1", "--repl-diskless-sync-delay", "0")
    with redis_server(tmp_path / "primary", *options) as primary, redis_server(tmp_path / "replica") as replica:
        link = Proxy(primary.port)
        await link.start()
        replica.say("REPLICAOF", "127.0.0.1", str(link.port))
        yield Pair(primary, replica, link)
        await link.close()


def store_at(server: RedisServer) -> RedisStore:
    return RedisStore(server.url, "box", grace_s=0, offers=DEVICES)


async def granted(store: RedisStore, id: str, mib: int) -> int:
    """The token, as soon as the primary has its replica and may write."""
    return (await store.acquire(LeaseAsk(id, id, mib, wait_s=PATIENCE_S))).token


def knows(server: RedisServer, id: str) -> bool:
    return server.say("HEXISTS", "greenroom:{box}:leases", id) == ":1"


async def until_replicated(replica: RedisServer, id: str) -> None:
    await until(lambda: asyncio.to_thread(knows, replica, id), f"{id} reaches the replica")


async def test_after_a_failover_the_old_primary_grants_nothing_and_holders_go_on(pair: Pair) -> None:
    primary, replica = pair.primary, pair.replica
    before, after = store_at(primary), store_at(replica)
    token = await granted(before, "a", 6_000)
    await until_replicated(replica, "a")
    with pytest.raises(StoreDown, match="replica"):
        await after.acquire(LeaseAsk("too-early", "b", 1_000))
    replica.say("REPLICAOF", "NO", "ONE")

    # The old primary refuses its clients as soon as it knows that no replica follows it.
    async def is_never_so() -> bool:
        await before.renew("a", token)
        return False

    with pytest.raises(StoreDown, match="too few replicas"):
        await until(is_never_so)
    with pytest.raises(StoreDown, match="too few replicas"):
        await before.acquire(LeaseAsk("split-brain", "b", 1_000))
    # The new primary knows the lease: it is renewed there, and what it holds is not granted twice.
    assert (await after.renew("a", token)).token == token
    with pytest.raises(LeaseDenied):
        await after.acquire(LeaseAsk("b", "b", 6_000))
    assert await granted(after, "c", 4_000) > token
    await before.close()
    await after.close()


async def test_a_lease_that_never_reached_the_replica_is_told_to_it_by_its_holder(pair: Pair) -> None:
    primary, replica = pair.primary, pair.replica
    address = Proxy(primary.port)
    await address.start()
    store = RedisStore(address.url, "box", grace_s=0, offers=DEVICES)
    await granted(store, "known", 1_000)
    await until_replicated(replica, "known")
    pair.link.stall()
    token = await granted(store, "not-replicated", 6_000)
    primary.kill()
    pair.link.cut()
    replica.say("REPLICAOF", "NO", "ONE")
    assert knows(replica, "known")
    assert not knows(replica, "not-replicated")
    # The address moves to the new primary, as a name or a virtual address would.
    address.redis_port = replica.port
    address.cut()
    assert (await store.renew("not-replicated", token)).token == token
    with pytest.raises(LeaseDenied):
        await store.acquire(LeaseAsk("b", "b", 6_000))
    assert await granted(store, "c", 3_000) > token
    await store.close()
    await address.close()
