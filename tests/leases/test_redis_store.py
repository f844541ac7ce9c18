"""What is Redis' own: a store that is new, has lost its data, or whose clock jumps; and what it knows of GPUs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from greenroom.errors import LeaseDenied, LeaseLost, LeaseTaken, LeaseUnknown
from greenroom.leases.records import Lease, LeaseAsk
from greenroom.leases.shared import stored
from greenroom.leases.shared.redis_store import RedisStore
from greenroom.leases.shared.stored import SlotAsk
from tests.leases.redis_rig import DEVICES, GRACE_S, Opener, ask, claims, slot, until_claims
from tests.redis_server import RedisServer, redis_server
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


async def test_a_new_store_grants_nothing_during_its_grace(client: Opener) -> None:
    store = client(grace_s=1.0)
    with pytest.raises(LeaseDenied, match="come first"):
        await store.acquire(ask("early", 100))
    with pytest.raises(LeaseDenied, match="come first"):
        await store.hold(slot("early-slot", 100), gateway="g")
    began = time.monotonic()
    assert (await store.acquire(ask("a", 100, wait_s=PATIENCE_S))).state == "held"
    assert time.monotonic() - began > 0.3


async def test_holders_come_back_first_after_an_empty_restart(server: RedisServer, client: Opener) -> None:
    holder, other = client(grace_s=GRACE_S), client(grace_s=GRACE_S)
    held = await holder.acquire(ask("a", 8_000, wait_s=PATIENCE_S))
    server.restart_empty()
    waiter = asyncio.create_task(other.acquire(ask("b", 8_000, wait_s=PATIENCE_S)))
    await until_claims(other, {"b": ("waiting", 0)})
    assert (await holder.renew("a", held.token)).token == held.token
    with pytest.raises(LeaseDenied):
        await other.acquire(ask("c", 1_000))
    await until_claims(other, {"a": ("held", 8_000), "b": ("waiting", 0)})
    # The grace is over when a new client is granted what is left; the waiter still waits for what the holder has.
    assert (await other.acquire(ask("d", 1_000, priority=0, wait_s=PATIENCE_S))).token > held.token
    assert not waiter.done()
    await holder.release("a", held.token)
    assert (await asyncio.wait_for(waiter, PATIENCE_S)).claim == {"gpu0": 8_000}


async def test_holders_come_back_also_where_others_wait_under_their_ids(server: RedisServer, client: Opener) -> None:
    holder, other = client(grace_s=GRACE_S), client(grace_s=GRACE_S)
    held = await holder.acquire(ask("a", 4_000, wait_s=PATIENCE_S))
    of_slot = await holder.hold(slot("s", 4_000), gateway="g")
    server.restart_empty()
    thieves = [asyncio.create_task(other.acquire(ask(id, 9_000, wait_s=PATIENCE_S))) for id in ("a", "s")]
    await until_claims(other, {"a": ("waiting", 0), "s": ("waiting", 0)})
    assert (await holder.renew("a", held.token)).token == held.token
    assert await holder.renew_all([("s", of_slot.token)]) == {"s": True}
    for thief in thieves:
        with pytest.raises(LeaseTaken):
            await asyncio.wait_for(thief, PATIENCE_S)
    assert await claims(other) == {"a": ("held", 4_000), "s": ("held", 4_000)}


async def test_a_lease_that_another_was_granted_after_an_empty_restart_is_lost_to_its_first_holder(
    server: RedisServer, client: Opener
) -> None:
    holder, other = client(), client()
    held = await holder.acquire(ask("a", 4_000))
    server.restart_empty()
    taken = await other.acquire(ask("a", 1_000))
    with pytest.raises(LeaseLost):
        await holder.renew("a", held.token)
    await holder.release("a", held.token)
    assert await claims(other) == {"a": ("held", 1_000)} and taken.token > held.token


async def test_waiters_keep_their_places_when_the_store_restarts_empty(server: RedisServer, client: Opener) -> None:
    holder = client(grace_s=GRACE_S)
    held = await holder.acquire(ask("a", 10_000, wait_s=PATIENCE_S))
    granted: list[str] = []

    async def take_turn(id: str, store: RedisStore) -> None:
        lease = await store.acquire(ask(id, 10_000, wait_s=PATIENCE_S))
        granted.append(id)
        await store.release(id, lease.token)

    tasks, expected = [], {"a": ("held", 10_000)}
    for id in ("first", "second", "third", "fourth"):
        tasks.append(asyncio.create_task(take_turn(id, client(grace_s=GRACE_S)), name=id))
        expected[id] = ("waiting", 0)
        await until_claims(holder, expected)
    server.restart_empty()
    await holder.renew("a", held.token)
    await until_claims(holder, expected)
    await holder.release("a", held.token)
    await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
    assert granted == ["first", "second", "third", "fourth"]


async def test_slots_come_back_together_after_an_empty_restart(server: RedisServer, client: Opener) -> None:
    store = client(grace_s=GRACE_S)
    await asyncio.wait_for(_granted(store, ask("warm-up", 1)), PATIENCE_S)
    held = [await store.hold(slot(f"s{number}", 4_000), gateway="g") for number in range(2)]
    server.restart_empty()
    renewed = await store.renew_all((lease.id, lease.token) for lease in held)
    assert renewed == {"s0": True, "s1": True}
    assert await claims(store) == {"s0": ("held", 4_000), "s1": ("held", 4_000)}


async def _granted(store: RedisStore, asked: LeaseAsk) -> Lease:
    lease = await store.acquire(LeaseAsk(asked.id, asked.name, asked.mib, wait_s=PATIENCE_S))
    await store.release(lease.id, lease.token)
    return lease


async def test_tokens_grow_over_an_empty_restart_also_when_redis_clock_went_back(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", has_own_clock=True) as server:
        store = RedisStore(server.url, "box", grace_s=0, offers=DEVICES)
        other = RedisStore(server.url, "box", grace_s=0, offers=DEVICES)
        before = await store.acquire(ask("a", 100))
        server.set_clock(-86_400)
        server.restart_empty()
        # Its holder tells the store its old token, and this client has seen it: no new one is lower.
        assert (await store.renew("a", before.token)).token == before.token
        assert (await other.acquire(ask("b", 100))).token > before.token
        await store.close()
        await other.close()


async def test_a_client_that_saw_a_token_never_gets_a_lower_one(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", has_own_clock=True) as server:
        store = RedisStore(server.url, "box", grace_s=0, offers=DEVICES)
        before = await store.acquire(ask("a", 100))
        server.set_clock(-86_400)
        server.restart_empty()
        assert (await store.acquire(ask("b", 100))).token > before.token
        await store.close()


@pytest.mark.parametrize("jump_s", [3_600, 365 * 86_400, -3_600])
async def test_a_clock_that_jumps_neither_ends_leases_nor_keeps_them_for_ever(tmp_path: Path, jump_s: int) -> None:
    with redis_server(tmp_path / "redis", has_own_clock=True) as server:
        store = RedisStore(server.url, "box", ttl_s=3.0, grace_s=0, offers=DEVICES)
        lease = await store.acquire(ask("a", 100))
        server.set_clock(jump_s)
        assert (await store.renew("a", lease.token)).token == lease.token
        # It is not renewed any more.
        await until_claims(store, {})
        assert (await store.acquire(ask("b", 100))).token > lease.token
        await store.close()


async def test_a_holder_later_than_the_grace_is_taken_back_while_its_memory_is_free(
    server: RedisServer, client: Opener, store: RedisStore
) -> None:
    late, too_late = await store.acquire(ask("late", 4_000)), await store.acquire(ask("too-late", 4_000))
    server.restart_empty()
    await client().acquire(ask("new", 5_000))
    assert (await store.renew("late", late.token)).claim == {"gpu0": 4_000}
    with pytest.raises(LeaseLost):
        await store.renew("too-late", too_late.token)


async def test_a_lapsed_lease_is_not_taken_back_even_if_its_memory_is_free(store: RedisStore) -> None:
    lease = await store.acquire(LeaseAsk("a", "a", 100, ttl_s=0.3))
    await until_claims(store, {})
    with pytest.raises(LeaseLost):
        await store.renew("a", lease.token)
    with pytest.raises(LeaseUnknown):
        await store.renew("a", lease.token)


async def test_no_lease_lasts_longer_than_a_new_store_would_wait_for_its_holder(client: Opener) -> None:
    assert (await client(ttl_s=5.0).acquire(LeaseAsk("a", "a", 100, ttl_s=600.0))).ttl_s == 5.0


async def test_a_redis_that_stood_still_takes_no_lease_away(server: RedisServer, client: Opener) -> None:
    store = client(ttl_s=1.5)
    lease = await store.acquire(ask("a", 100))
    server.pause()
    await asyncio.sleep(2.5)
    server.go_on()
    assert (await store.renew("a", lease.token)).token == lease.token


async def test_an_unheard_call_gives_back_a_lease_that_only_it_was_told_of(client: Opener) -> None:
    one, other = client(), client()
    await one.acquire(ask("a", 8_000), "first")
    await other.unheard("a", "somebody else")
    assert await claims(one) == {"a": ("held", 8_000)}
    await one.unheard("a", "first")
    assert await claims(one) == {}


async def test_a_lease_told_to_several_calls_is_given_back_when_all_were_unheard(client: Opener) -> None:
    one, other = client(), client()
    calls = ("first", "again", "third")
    held = [await store.acquire(ask("a", 8_000), name) for store, name in zip((one, other, one), calls, strict=True)]
    # The answer to a call, or to its leaving, may be lost, and then it is repeated.
    await other.acquire(ask("a", 8_000), "again")
    for name in ("first", "first", "third", "irst", "aga", ""):
        await one.unheard("a", name)
        assert (await other.renew("a", held[1].token)).state == "held"
    await other.unheard("a", "again")
    assert await claims(one) == {}


async def test_calls_too_many_to_be_written_down_leave_the_lease_to_its_holder(store: RedisStore) -> None:
    calls = [f"call-{number:04}" for number in range(100)]
    for name in calls:
        await store.acquire(ask("a", 8_000), name)
    for name in (*calls, ""):
        await store.unheard("a", name)
    assert await claims(store) == {"a": ("held", 8_000)}, "it lapses if it is not renewed"


async def test_what_a_gateway_published_is_what_counts(client: Opener) -> None:
    program, gateway = client(), client(offers=False)
    await gateway.publish("g", {"gpu0": 3_000}, {})
    with pytest.raises(LeaseDenied, match=r"gpu0 3,000 of 3,000 MiB"):
        await program.acquire(ask("a", 4_000))


async def test_host_memory_is_never_given_to_a_lease_for_gpus(client: Opener) -> None:
    store = client(offers=False)
    await store.publish("g", {"host": 64_000, "gpu0": 1_000}, {})
    with pytest.raises(LeaseDenied):
        await store.acquire(LeaseAsk("a", "a", 2_000))
    assert (await store.hold(SlotAsk("s", "s", {"host": 2_000, "gpu0": 500}), gateway="g")).state == "held"


async def test_a_lease_larger_than_its_devices_is_told_that_waiting_does_not_help(store: RedisStore) -> None:
    with pytest.raises(LeaseDenied, match="Waiting does not help: without any other lease there would be 10,000 MiB"):
        await store.acquire(ask("large", 10_001))
    with pytest.raises(LeaseDenied, match="Waiting does not help: without any other lease there would be 0 MiB"):
        await store.acquire(LeaseAsk("many", "many", 1, gpus=3))
    await store.acquire(ask("holds", 6_000))
    with pytest.raises(LeaseDenied) as denied:
        await store.acquire(ask("later", 6_000))
    assert "Waiting" not in denied.value.message


async def test_a_store_that_knows_no_gpus_says_so(client: Opener) -> None:
    with pytest.raises(LeaseDenied, match="No GPUs are known"):
        await client(offers=False).acquire(LeaseAsk("a", "a", 1))


async def test_hosts_do_not_see_each_other(server: RedisServer, client: Opener) -> None:
    here, there = client(), RedisStore(server.url, "elsewhere", grace_s=0, offers=DEVICES)
    await here.acquire(ask("a", 10_000))
    assert (await there.acquire(ask("a", 10_000))).state == "held"
    await there.close()


def test_all_keys_of_a_host_lie_in_one_slot() -> None:
    assert {key.partition("{")[2].partition("}")[0] for key in stored.keys("box")} == {"box"}
