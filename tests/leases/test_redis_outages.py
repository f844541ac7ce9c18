"""Every way in which Redis says no, told plainly and without passwords."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from greenroom.base.redis_link import HOLDS_SOMETHING_ELSE
from greenroom.errors import ConfigError, StoreDown
from greenroom.leases.records import LeaseAsk
from greenroom.leases.shared import stored
from greenroom.leases.shared.redis_store import RedisStore
from tests.leases.redis_rig import DEVICES, Opener, ask, slot
from tests.redis_server import RedisServer, redis_server
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

SECRET = "hunter2-is-secret"


async def test_a_redis_that_is_not_there_is_said_without_the_password(client: Opener, server: RedisServer) -> None:
    server.kill()
    store = client(url=f"redis://me:{SECRET}@127.0.0.1:{server.port}/0?client_name={SECRET}")
    with pytest.raises(StoreDown, match="cannot be reached") as down:
        await store.acquire(ask("a", 1))
    assert SECRET not in f"{down.value.message}{down.value!r}{down.value.__cause__!r}"
    assert f"127.0.0.1:{server.port}" in down.value.message


async def test_a_redis_that_stands_still_is_given_up_soon(store: RedisStore, server: RedisServer) -> None:
    lease = await store.acquire(ask("a", 1))
    server.pause()
    try:
        with pytest.raises(StoreDown, match="in time"):
            await store.renew("a", lease.token)
    finally:
        server.go_on()
    assert (await store.renew("a", lease.token)).token == lease.token


@pytest.mark.parametrize("key", stored.keys("box"))
async def test_a_key_of_another_program_is_said_plainly_at_each_heartbeat(
    store: RedisStore, server: RedisServer, key: str
) -> None:
    await store.publish("g", DEVICES, {})
    await store.hold(slot("g/s", 1), gateway="g")
    server.say("DEL", key)
    server.say("LPUSH", key, "theirs")
    for _ in range(2):
        with pytest.raises(StoreDown, match=HOLDS_SOMETHING_ELSE):
            await store.publish("g", DEVICES, {})
    server.say("DEL", key)
    assert await store.publish("g", DEVICES, {})


async def test_what_no_gateway_wrote_is_said_as_a_store_that_cannot_be_used(
    store: RedisStore, server: RedisServer
) -> None:
    meta = next(key for key in stored.keys("box") if key.endswith(":meta"))
    server.say("HSET", meta, "wall", "theirs", "now", "x", "last", "y", "birth", "z")
    with pytest.raises(StoreDown, match="refused a script"):
        await store.publish("g", DEVICES, {})


async def test_a_wait_goes_on_while_redis_is_away(store: RedisStore, server: RedisServer) -> None:
    server.kill()
    turned_away = asyncio.Event()

    def turn_away(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        turned_away.set()

    async with await asyncio.start_server(turn_away, "127.0.0.1", server.port):
        waiter = asyncio.create_task(store.acquire(ask("a", 1, wait_s=PATIENCE_S)))
        await asyncio.wait_for(turned_away.wait(), PATIENCE_S)
    server.start()
    assert (await asyncio.wait_for(waiter, PATIENCE_S)).state == "held"


async def test_a_wrong_password_is_said_without_it(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", "--requirepass", "right") as server:
        for url in (f"redis://:{SECRET}@127.0.0.1:{server.port}", server.url):
            store = RedisStore(url, "box")
            with pytest.raises(StoreDown, match="password") as down:
                await store.leases()
            assert SECRET not in repr(down.value) + down.value.message
            await store.close()


async def test_a_user_with_no_more_than_is_documented_can_do_everything(client: Opener, server: RedisServer) -> None:
    page = Path(__file__).parents[2] / "docs" / "leases.md"
    allowed = "+@connection +@scripting +@read +@write +time"
    assert f"`{allowed}` on `~greenroom:*`" in page.read_text()
    assert server.say("ACL", "SETUSER", "lease", "on", f">{SECRET}", "~greenroom:*", *allowed.split()) == "+OK"
    store = client(url=f"redis://lease:{SECRET}@127.0.0.1:{server.port}/0")
    await store.publish("g", DEVICES, {"gpu0": 1.0})
    held = await store.hold(slot("s", 100), gateway="g")
    await store.pend(slot("n", 10_000), ["s"], gateway="g", pending_s=10)
    await store.renew_all([("s", held.token)])
    await store.recall("s")
    await store.release("s", held.token, kind="slot")
    await store.acquire(LeaseAsk("a", "a", 100))
    assert len(await store.leases()) == 2
    server.say("ACL", "SETUSER", "lease", "-@scripting")
    with pytest.raises(StoreDown, match="does not permit") as down:
        await store.leases()
    assert SECRET not in down.value.message


async def test_too_few_replicas_a_replica_and_full_memory_are_outages(store: RedisStore, server: RedisServer) -> None:
    await store.acquire(ask("a", 1))
    for setting, back, said in (
        (("min-replicas-to-write", "1"), ("min-replicas-to-write", "0"), "replicas"),
        (("maxmemory", "1"), ("maxmemory", "0"), "maxmemory"),
    ):
        server.say("CONFIG", "SET", *setting)
        with pytest.raises(StoreDown, match=said):
            await store.acquire(ask("b", 1))
        server.say("CONFIG", "SET", *back)
    server.say("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(StoreDown, match="replica"):
        await store.acquire(ask("b", 1))
    server.say("REPLICAOF", "NO", "ONE")
    assert (await store.acquire(ask("b", 1))).state == "held"


def test_an_address_that_is_none_is_a_matter_of_configuration() -> None:
    with pytest.raises(ConfigError, match="redis://") as refused:
        RedisStore(f"http://me:{SECRET}@localhost", "box")
    assert SECRET not in refused.value.message


async def test_a_cancel_is_heard_whenever_it_comes(store: RedisStore) -> None:
    """The library's way of limiting a send can hide one that comes in the moment in which it ends."""
    await store.leases()
    hidden = []
    for turns in range(60):
        asking = asyncio.create_task(store.leases())
        for _ in range(turns):
            await asyncio.sleep(0)
        was_cancelled = asking.cancel()
        await asyncio.wait((asking,))
        if was_cancelled and not asking.cancelled():
            hidden.append(turns)
    assert not hidden, f"not heard after these turns of the loop: {hidden}"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("redis://[::1", "IPv6"),
        (f"redis://me:{SECRET}@[::1", "IPv6"),
        ("redis://[nowhere]:1", "IPv6"),
        (f"redis://me:{SECRET}@box:99999", "port"),
        (f"redis://me:{SECRET}/{SECRET}@box:6379", "%2F"),
        (f"redis://me:{SECRET}@box?db=first", "option"),
        (f"redis://me:{SECRET}@box?foo=bar", "option"),
        (f"redis://me:{SECRET}@box?protocol=9", "option"),
    ],
)
def test_an_address_that_cannot_be_read_is_a_clear_refusal(url: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        RedisStore(url, "box")
    assert SECRET not in refused.value.message
    assert "rediss://" not in refused.value.message, "nothing is wrong with how it begins"
