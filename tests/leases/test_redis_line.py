"""Programs that wait, and the gateways and holders that make room for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from greenroom.errors import LeaseDenied
from greenroom.leases.records import Lease, LeaseAsk
from greenroom.leases.shared.redis_store import RedisStore
from tests.leases.redis_rig import DEVICES, Opener, ask, claims, slot, until_claims
from tests.sim.shared.book import Book, BookStore, at_once
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow


async def _waiting(
    store: RedisStore, watcher: RedisStore, asked: LeaseAsk, kind: str = "program"
) -> asyncio.Task[Lease]:
    before = await claims(watcher)
    task = asyncio.create_task(store.acquire(asked, kind=kind))
    await until_claims(watcher, {**before, asked.id: ("waiting", 0)})
    return task


async def test_the_cheapest_gateway_makes_room_and_then_the_next(client: Opener, store: RedisStore) -> None:
    held = {}
    for name, price in (("dear", 9.0), ("cheap", 1.0), ("dead", 0.1)):
        await store.publish(name, DEVICES, {"gpu0": price, "gpu1": 0.0})
        held[name] = await store.hold(slot(f"of-{name}", 3_000), gateway=name)
    await asyncio.sleep(3.1)  # The third gateway is not heard of any more.
    named: list[str] = []

    async def beat() -> None:
        for name, price in (("dear", 9.0), ("cheap", 1.0)):
            orders = await store.publish(name, DEVICES, {"gpu0": price, "gpu1": 0.0})
            if orders.make_room and (not named or named[-1] != name):
                assert [asked.id for asked in orders.make_room] == ["trainer"]
                assert orders.make_room[0].devices == ("gpu0",)
                named.append(name)

    await beat()
    waiter = await _waiting(client(), store, ask("trainer", 7_000, wait_s=PATIENCE_S))

    async def are_named() -> bool:
        await beat()
        return len(named) == 2

    await until(are_named, lambda: named, every_s=0.2)
    assert named == ["cheap", "dear"]
    # Each releases what it can into the waiting lease; no other lease can have that meanwhile.
    await store.release("of-cheap", held["cheap"].token, into="trainer", kind="slot")
    with pytest.raises(LeaseDenied):
        await store.hold(slot("thief", 3_000), gateway="cheap")
    await store.release("of-dear", held["dear"].token, into="trainer", kind="slot")
    assert (await asyncio.wait_for(waiter, PATIENCE_S)).claim == {"gpu0": 7_000}
    assert not (await store.publish("dear", DEVICES, {})).make_room


async def test_a_gateway_with_nothing_to_give_is_not_named(client: Opener, store: RedisStore) -> None:
    await store.publish("g", DEVICES, {})
    await store.hold(slot("s", 9_000), gateway="g")
    waiter = await _waiting(client(), store, ask("trainer", 7_000, wait_s=PATIENCE_S))
    assert not (await store.publish("g", DEVICES, {})).make_room
    assert not (await store.publish("g", DEVICES, {"gpu1": 1.0})).make_room
    assert (await store.publish("g", DEVICES, {"gpu0": 1.0})).make_room
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)


async def test_room_is_made_on_a_device_without_an_earlier_waiter(client: Opener, store: RedisStore) -> None:
    await store.publish("g", DEVICES, {})
    for gpu in DEVICES:
        await store.hold(slot(f"on-{gpu}", 9_000, device=gpu), gateway="g")
    tasks = [await _waiting(client(), store, ask("on-gpu0-only", 5_000, wait_s=PATIENCE_S))]
    tasks.append(await _waiting(client(), store, LeaseAsk("anywhere", "anywhere", 5_000, wait_s=PATIENCE_S)))
    tasks.append(await _waiting(client(), store, LeaseAsk("both", "both", 5_000, gpus=2, wait_s=PATIENCE_S)))
    orders = await store.publish("g", DEVICES, dict.fromkeys(DEVICES, 1.0))
    assert {asked.id: asked.devices for asked in orders.make_room} == {"on-gpu0-only": ("gpu0",), "anywhere": ("gpu1",)}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_gateway_may_pend_what_its_model_stands_in_line_for(client: Opener, store: RedisStore) -> None:
    await store.publish("g", DEVICES, {"gpu0": 1.0})
    victim = await store.hold(slot("victim", 6_000), gateway="g")
    waiter = await _waiting(client(), store, ask("g/line1", 9_000, wait_s=PATIENCE_S), "slot")
    await store.pend(slot("g/line1", 9_000), ["victim"], gateway="g", pending_s=10)
    with pytest.raises(LeaseDenied):
        await store.hold(slot("thief", 1_001), gateway="g")
    await store.release("victim", victim.token, kind="slot")
    lease = await asyncio.wait_for(waiter, PATIENCE_S)
    assert (lease.claim, lease.kind) == ({"gpu0": 9_000}, "slot")


async def test_higher_priority_takes_memory_kept_for_a_waiter_behind_it(client: Opener, store: RedisStore) -> None:
    await store.publish("g", DEVICES, {"gpu0": 1.0})
    held = [await store.hold(slot(id, 5_000), gateway="g") for id in ("one", "two")]
    low = await _waiting(client(), store, ask("low", 9_000, priority=2, wait_s=PATIENCE_S))
    await store.release("one", held[0].token, into="low", kind="slot")
    assert (await claims(store))["low"] == ("waiting", 5_000)
    assert (await client().acquire(ask("high", 4_000, priority=0))).state == "held"
    assert (await claims(store))["low"] == ("waiting", 1_000)
    low.cancel()
    await asyncio.gather(low, return_exceptions=True)


async def test_preemptible_leases_of_lower_priority_are_recalled_when_no_gateway_can_make_room(client: Opener) -> None:
    holder, store = client(), client()
    firm = await holder.acquire(ask("firm", 2_000, priority=2))
    soft = await holder.acquire(ask("soft", 6_000, priority=2, preemptible=True))
    equal = await holder.acquire(ask("equal", 2_000, priority=1, preemptible=True))
    waiter = await _waiting(store, holder, ask("trainer", 5_000, priority=1, wait_s=PATIENCE_S))

    async def is_recalled() -> bool:
        recall_in_s = (await holder.renew("soft", soft.token)).recall_in_s
        assert recall_in_s is None or 0 < recall_in_s <= 30
        return recall_in_s is not None

    await until(is_recalled)
    assert (await holder.renew("firm", firm.token)).recall_in_s is None
    assert (await holder.renew("equal", equal.token)).recall_in_s is None
    await holder.release("soft", soft.token)
    assert (await asyncio.wait_for(waiter, PATIENCE_S)).state == "held"


async def test_a_recall_is_a_change_that_every_gateway_hears_of(client: Opener) -> None:
    holder, store = client(), client()
    soft = await holder.acquire(ask("soft", 100, preemptible=True))
    await holder.acquire(ask("firm", 100))
    before = (await store.publish("g", DEVICES, {})).version
    for id in ("firm", "never-was"):
        await store.recall(id)
    assert (await store.publish("g", DEVICES, {})).version == before
    await store.recall("soft")
    assert (await store.publish("g", DEVICES, {})).version > before
    recalled = {lease.id: lease.recall_in_s for lease in await store.leases()}
    assert recalled["firm"] is None and recalled["soft"] is not None
    # Renewing does not take it back, nor does asking twice give more time.
    await store.recall("soft")
    renewed = (await holder.renew("soft", soft.token)).recall_in_s
    assert renewed is not None and renewed <= recalled["soft"]


async def test_the_version_tells_when_something_changed(store: RedisStore) -> None:
    seen = [(await store.publish("g", DEVICES, {})).version for _ in range(2)]
    assert seen[0] == seen[1]
    lease = await store.acquire(ask("a", 100))
    seen.append((await store.publish("g", DEVICES, {})).version)
    await store.renew("a", lease.token)
    assert (await store.publish("g", DEVICES, {})).version == seen[-1]
    await store.release("a", lease.token)
    seen.append((await store.publish("g", DEVICES, {})).version)
    seen.append((await store.publish("g", {**DEVICES, "gpu1": 1}, {})).version)
    assert seen[1:] == sorted(set(seen[1:]))


async def test_a_cancelled_second_ask_for_an_id_leaves_the_first_its_place_in_line() -> None:
    book, is_asking = Book(time.time), asyncio.Event()

    async def slowly(question: Callable[[], bytes]) -> bytes:
        is_asking.set()
        await asyncio.sleep(0)
        return question()

    store, other = (BookStore(lambda: book, asks, grace_s=0, offers=DEVICES) for asks in (at_once, slowly))
    await store.acquire(ask("first", 10_000))
    waiter = asyncio.create_task(store.acquire(ask("a", 8_000, wait_s=PATIENCE_S)))
    await until_claims(store, {"first": ("held", 10_000), "a": ("waiting", 0)})
    (place,) = (record["arrival"] for record in book.records() if record["id"] == "a")
    gives_up = asyncio.create_task(other.acquire(ask("a", 1_000, wait_s=PATIENCE_S)))
    await is_asking.wait()
    gives_up.cancel()
    await asyncio.gather(gives_up, return_exceptions=True)
    assert gives_up.cancelled()
    assert [(one["id"], one["arrival"]) for one in book.records() if one["state"] == "waiting"] == [("a", place)]
    waiter.cancel()
