"""Swaps of several gateways on the same GPUs: entered before a victim is touched, finished by their own gateway."""

from __future__ import annotations

import asyncio

import pytest

from greenroom.errors import LeaseDenied, LeaseLost, LeaseTaken
from greenroom.leases.shared.redis_store import RedisStore
from tests.leases.redis_rig import DEVICES, Opener, ask, claims, slot, until_claims
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


@pytest.fixture
async def store(store: RedisStore) -> RedisStore:
    """One to which a gateway has told its devices."""
    await store.publish("g", DEVICES, {})
    return store


async def test_a_swap_gets_what_is_free_and_then_what_its_victims_release(client: Opener) -> None:
    store = client(offers=False)
    await store.publish("g", DEVICES, {})
    victim = await store.hold(slot("victim", 6_000), gateway="g")
    await store.pend(slot("new", 9_000), ["victim"], gateway="g", pending_s=10)
    assert await claims(store) == {"victim": ("held", 6_000), "new": ("pending", 4_000)}
    with pytest.raises(LeaseDenied, match="9,000"):
        await store.hold(slot("new", 9_000), gateway="g")
    await store.release("victim", victim.token, kind="slot")
    # Memory that is not needed is free again; what was released for the newcomer no other can have.
    assert await claims(store) == {"new": ("pending", 9_000)}
    with pytest.raises(LeaseDenied):
        await store.acquire(ask("thief", 1_001))
    held = await store.hold(slot("new", 9_000), gateway="g")
    assert (held.state, held.claim, held.kind, held.gateway) == ("held", {"gpu0": 9_000}, "slot", "g")
    assert held.token > victim.token


async def test_a_swap_that_its_own_victims_cannot_finish_is_not_begun(store: RedisStore) -> None:
    await store.hold(slot("mine", 4_000), gateway="g")
    await store.hold(slot("theirs", 4_000), gateway="h")
    with pytest.raises(LeaseDenied, match="9,000 MiB on gpu0"):
        await store.pend(slot("new", 9_000), ["mine", "theirs"], gateway="g", pending_s=10)
    assert await claims(store) == {"mine": ("held", 4_000), "theirs": ("held", 4_000)}


async def test_a_victim_leaves_for_one_newcomer_only(store: RedisStore) -> None:
    await store.hold(slot("victim", 10_000), gateway="g")
    await store.pend(slot("one", 8_000), ["victim"], gateway="g", pending_s=10)
    with pytest.raises(LeaseDenied):
        await store.pend(slot("two", 8_000), ["victim"], gateway="g", pending_s=10)
    await store.release("one", kind="slot")
    await store.pend(slot("two", 8_000), ["victim"], gateway="g", pending_s=10)


async def test_two_gateways_that_want_the_same_memory_do_not_block_each_other(store: RedisStore) -> None:
    held = [await store.hold(slot(f"of-{name}", 5_000), gateway=name) for name in "gh"]
    admitted = []
    for name in "gh":
        try:
            await store.pend(slot(f"new-{name}", 5_000), [f"of-{name}"], gateway=name, pending_s=10)
            admitted.append(name)
        except LeaseDenied:
            continue
    # Each needs only what its own victim holds, so both are admitted, and both can finish in any order.
    assert admitted == ["g", "h"]
    for lease in reversed(held):
        await store.release(lease.id, lease.token, kind="slot")
    for name in "gh":
        assert (await store.hold(slot(f"new-{name}", 5_000), gateway=name)).state == "held"


async def test_a_swap_that_is_not_finished_in_time_gives_back_what_it_got(store: RedisStore) -> None:
    await store.pend(slot("new", 9_000), [], gateway="g", pending_s=0.3)
    assert (await store.acquire(ask("a", 9_000, wait_s=PATIENCE_S))).state == "held"
    assert await claims(store) == {"a": ("held", 9_000)}


async def test_a_sleeper_whose_wake_is_not_finished_in_time_keeps_its_smaller_claim(store: RedisStore) -> None:
    asleep = await store.hold(slot("s", 500), gateway="g")
    await store.pend(slot("s", 9_000), [], gateway="g", pending_s=0.3)
    assert await claims(store) == {"s": ("pending", 9_000)}
    await until_claims(store, {"s": ("held", 500)})
    assert await store.renew_all([("s", asleep.token)]) == {"s": True}


async def test_a_plan_for_less_frees_nothing_until_it_is_carried_out(store: RedisStore) -> None:
    await store.hold(slot("s", 9_000), gateway="g")
    await store.pend(slot("s", 500), [], gateway="g", pending_s=0.3)
    with pytest.raises(LeaseDenied):
        await store.hold(slot("other", 5_000), gateway="g")
    await until_claims(store, {"s": ("held", 9_000)})


async def test_a_woken_slot_keeps_its_token(store: RedisStore) -> None:
    asleep = await store.hold(slot("s", 500), gateway="g")
    await store.pend(slot("s", 9_000), [], gateway="g", pending_s=10)
    assert (await store.hold(slot("s", 9_000), gateway="g")).token == asleep.token


async def test_a_slot_that_falls_asleep_gives_the_rest_to_the_newcomer(store: RedisStore) -> None:
    ready = await store.hold(slot("s", 9_000), gateway="g")
    await store.pend(slot("new", 9_000), ["s"], gateway="g", pending_s=10)
    asleep = await store.hold(slot("s", 500), gateway="g")
    assert (asleep.token, asleep.claim) == (ready.token, {"gpu0": 500})
    assert await claims(store) == {"s": ("held", 500), "new": ("pending", 9_000)}


async def test_a_claim_that_would_not_fit_does_not_grow(store: RedisStore) -> None:
    await store.hold(slot("s", 5_000), gateway="g")
    await store.hold(slot("other", 4_000), gateway="g")
    with pytest.raises(LeaseDenied, match="6,001 MiB on gpu0"):
        await store.hold(slot("s", 6_001), gateway="g")
    assert (await store.hold(slot("s", 6_000), gateway="g")).claim == {"gpu0": 6_000}


async def test_neither_a_program_nor_another_gateway_has_the_lease_of_a_slot(store: RedisStore) -> None:
    held = await store.hold(slot("held", 3_000), gateway="g")
    await store.pend(slot("pending", 3_000), [], gateway="g", pending_s=30)
    before = await claims(store)
    for id, token in (("held", held.token), ("pending", 0)):
        for wait_s in (0.0, PATIENCE_S):
            with pytest.raises(LeaseTaken, match=f"lease {id} is another holder's.*choose another id"):
                await store.acquire(ask(id, 3_000, wait_s=wait_s))
        with pytest.raises(LeaseTaken, match=f"lease {id} is a program's or another gateway's"):
            await store.hold(slot(id, 3_000), gateway="h")
        with pytest.raises(LeaseTaken):
            await store.pend(slot(id, 5_000), [], gateway="h", pending_s=30)
        with pytest.raises(LeaseLost):
            await store.renew(id, token)
        await store.release(id)
        await store.release(id, token)
    assert await claims(store) == before
    assert await store.renew_all([("held", held.token)]) == {"held": True}
    assert (await store.hold(slot("pending", 3_000), gateway="g")).state == "held"


async def test_a_gateway_does_not_have_the_lease_of_a_program(store: RedisStore) -> None:
    held = await store.acquire(ask("job", 3_000))
    waiting = asyncio.create_task(store.acquire(ask("waits", 8_000, wait_s=PATIENCE_S)))
    await until_claims(store, {"job": ("held", 3_000), "waits": ("waiting", 0)})
    for id in ("job", "waits"):
        with pytest.raises(LeaseTaken):
            await store.hold(slot(id, 3_000), gateway="g")
        with pytest.raises(LeaseTaken):
            await store.pend(slot(id, 3_000), [], gateway="g", pending_s=30)
        await store.release(id, kind="slot")
    assert await store.renew_all([("job", held.token)]) == {"job": False}
    await store.release("job", held.token)
    assert (await asyncio.wait_for(waiting, PATIENCE_S)).claim == {"gpu0": 8_000}
