"""What every lease store promises, wherever it is kept and decided."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from greenroom.errors import BadRequest, LeaseDenied, LeaseLost, LeaseTaken, LeaseUnknown
from greenroom.leases.records import Holder, Lease, LeaseAsk, LeaseStore, holder_of
from tests.contract.lease_stores import GPU_MIB, GPUS, SLOT_MIB, STORES, StoreRig
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow

SHORT_TTL_S = 1.0


@pytest.fixture(params=sorted(STORES))
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[StoreRig]:
    async with STORES[request.param](tmp_path) as rig:
        yield rig


@pytest.fixture
def store(rig: StoreRig) -> LeaseStore:
    return rig.client()


def ask(
    id: str,
    mib: int = 4_000,
    *,
    gpus: int = 1,
    devices: tuple[str, ...] = (),
    priority: int = 1,
    ttl_s: float = 30.0,
    wait_s: float = 0.0,
) -> LeaseAsk:
    return LeaseAsk(
        id, f"job-{id}", mib, gpus, devices, priority, ttl_s=ttl_s, wait_s=wait_s, holder=holder_of(os.getpid())
    )


async def states(store: LeaseStore) -> dict[str, str]:
    return {lease.id: lease.state for lease in await store.leases()}


async def until_states(store: LeaseStore, wanted: dict[str, str]) -> None:
    async def is_so() -> bool:
        return await states(store) == wanted

    await until(is_so, f"states {wanted}")


@contextlib.asynccontextmanager
async def waiting(store: LeaseStore, asked: LeaseAsk) -> AsyncIterator[asyncio.Task[Lease]]:
    """A waiter that is known to stand in the line when the block begins."""
    before = await states(store)
    task = asyncio.create_task(store.acquire(asked), name=f"wait-{asked.id}")
    try:
        await until_states(store, {**before, asked.id: "waiting"})
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_what_fits_is_granted_on_one_gpu(store: LeaseStore) -> None:
    lease = await store.acquire(ask("a", 6_000))
    assert lease.state == "held"
    assert lease.token > 0
    assert list(lease.claim.values()) == [6_000]
    assert set(lease.claim) <= set(GPUS)


async def test_what_does_not_fit_is_denied_with_the_numbers(store: LeaseStore) -> None:
    await store.acquire(ask("a", 6_000, devices=("gpu0",)))
    with pytest.raises(LeaseDenied, match="5,000") as refused:
        await store.acquire(ask("b", 5_000, devices=("gpu0",)))
    assert refused.value.retry_after_s is not None
    assert "b" not in await states(store)


async def test_more_than_a_gpu_has_is_denied(store: LeaseStore) -> None:
    with pytest.raises(LeaseDenied):
        await store.acquire(ask("a", GPU_MIB + 1))


async def test_released_memory_can_be_had_again(store: LeaseStore) -> None:
    first = await store.acquire(ask("a", GPU_MIB, devices=("gpu0",)))
    await store.release("a", first.token)
    second = await store.acquire(ask("b", GPU_MIB, devices=("gpu0",)))
    assert second.claim == {"gpu0": GPU_MIB}


async def test_several_gpus_are_had_together(store: LeaseStore) -> None:
    lease = await store.acquire(ask("a", 6_000, gpus=2))
    assert lease.claim == {"gpu0": 6_000, "gpu1": 6_000}


async def test_several_gpus_are_had_together_or_not_at_all(store: LeaseStore) -> None:
    await store.acquire(ask("a", 6_000, devices=("gpu1",)))
    with pytest.raises(LeaseDenied):
        await store.acquire(ask("b", 6_000, gpus=2))
    assert (await store.acquire(ask("c", GPU_MIB, devices=("gpu0",)))).claim == {"gpu0": GPU_MIB}


async def test_more_gpus_than_there_are_is_denied(store: LeaseStore) -> None:
    with pytest.raises(LeaseDenied):
        await store.acquire(ask("a", 10, gpus=3))


async def test_only_the_named_gpus_are_given(store: LeaseStore) -> None:
    for number in range(2):
        assert set((await store.acquire(ask(f"a{number}", 4_000, devices=("gpu1",)))).claim) == {"gpu1"}
    with pytest.raises(LeaseDenied):
        await store.acquire(ask("b", 4_000, devices=("gpu1",)))


async def test_asking_again_with_the_same_id_is_asking_once(rig: StoreRig) -> None:
    first = await rig.client().acquire(ask("a", 6_000, devices=("gpu0",)))
    again = await rig.client().acquire(ask("a", 6_000, devices=("gpu0",)))
    assert (again.token, again.claim) == (first.token, first.claim)
    assert len(await rig.client().leases()) == 1


# Programs that this machine cannot look at, and one that does not say which it is.
OTHERS = (Holder("elsewhere", 1, 1, 1), None)
# What another ask than `ask(id, 6_000, devices=("gpu0",))` may say.
OTHER_ASKS: dict[str, dict[str, Any]] = {
    "another holder": {"holder": OTHERS[0]},
    "no holder": {"holder": None},
    "more": {"mib": 6_001},
    "less": {"mib": 100},
    "more GPUs": {"gpus": 2, "devices": GPUS},
    "another GPU": {"devices": ("gpu1",)},
}


@pytest.mark.parametrize("wait_s", [0.0, PATIENCE_S])
@pytest.mark.parametrize("other", OTHER_ASKS)
async def test_a_held_lease_is_not_given_to_another_ask_of_its_id(rig: StoreRig, other: str, wait_s: float) -> None:
    mine, others = rig.client(), rig.client()
    asked = ask("a", 6_000, devices=("gpu0",))
    lease = await mine.acquire(asked)
    with pytest.raises(LeaseTaken, match=r"lease a .*choose another id") as refused:
        await others.acquire(replace(asked, wait_s=wait_s, **OTHER_ASKS[other]))
    assert refused.value.param == "id"
    assert (await mine.renew("a", lease.token)).claim == {"gpu0": 6_000}
    assert await states(others) == {"a": "held"}


@pytest.mark.parametrize("wait_s", [0.0, PATIENCE_S])
@pytest.mark.parametrize("other", OTHER_ASKS)
async def test_a_place_in_line_is_not_given_to_another_ask_of_its_id(rig: StoreRig, other: str, wait_s: float) -> None:
    mine, others = rig.client(), rig.client()
    first = await mine.acquire(ask("first", GPU_MIB, devices=("gpu0",)))
    asked = ask("a", 6_000, devices=("gpu0",), wait_s=PATIENCE_S)
    async with waiting(mine, asked) as waiter:
        with pytest.raises(LeaseTaken, match=r"lease a .*choose another id"):
            await others.acquire(replace(asked, wait_s=wait_s, **OTHER_ASKS[other]))
        assert await states(others) == {"first": "held", "a": "waiting"}
        await mine.release("first", first.token)
        lease = await asyncio.wait_for(waiter, PATIENCE_S)
    assert (lease.claim, lease.holder) == ({"gpu0": 6_000}, holder_of(os.getpid()))


async def test_a_holder_that_asks_again_may_name_the_gpus_it_was_given(rig: StoreRig) -> None:
    first = await rig.client().acquire(ask("a", 6_000))
    again = await rig.client().acquire(ask("a", 6_000, devices=tuple(first.claim)))
    assert (again.token, again.claim) == (first.token, first.claim)


async def test_a_released_id_is_free_for_any_holder(rig: StoreRig) -> None:
    mine, others = rig.client(), rig.client()
    first = await mine.acquire(ask("a", 6_000, devices=("gpu0",)))
    await mine.release("a", first.token)
    second = await others.acquire(replace(ask("a", 100, devices=("gpu1",)), holder=OTHERS[0]))
    assert second.token > first.token
    with pytest.raises(LeaseTaken):
        await mine.acquire(ask("a", 6_000, devices=("gpu0",)))
    with pytest.raises(LeaseLost):
        await mine.renew("a", first.token)
    await mine.release("a", first.token)
    assert (await others.renew("a", second.token)).claim == {"gpu1": 100}


async def test_a_holder_is_told_that_an_operator_released_its_lease(rig: StoreRig) -> None:
    store = rig.client()
    lease = await store.acquire(ask("a"))
    await store.release("a")
    # Not that it is unknown: then its holder would ask for it anew.
    with pytest.raises(LeaseLost) as lost:
        await store.renew("a", lease.token)
    assert not isinstance(lost.value, LeaseUnknown)


async def test_the_lease_of_a_model_is_neither_given_to_a_program_nor_renewed_nor_released(rig: StoreRig) -> None:
    store = rig.client()
    await rig.load()
    (slot,) = await store.leases()
    assert (slot.kind, sum(slot.claim.values())) == ("slot", SLOT_MIB)
    for holder in (slot.holder, *OTHERS):
        with pytest.raises((LeaseDenied, BadRequest)):
            await store.acquire(replace(ask(slot.id, SLOT_MIB, devices=tuple(slot.claim)), holder=holder))
    for token in (slot.token, 0):
        with pytest.raises(LeaseLost):
            await store.renew(slot.id, token)
        await store.release(slot.id, token)
    await store.release(slot.id)
    (still,) = await store.leases()
    assert (still.id, still.kind, still.token, still.claim) == (slot.id, "slot", slot.token, slot.claim)


@pytest.mark.parametrize("id", ["", "a/b", "a b", "a\n", "ä", "a\x00", "a?b", "a#b", "%2e", "x" * 161, "lease,a"])
async def test_an_id_of_odd_letters_or_length_is_refused(store: LeaseStore, id: str) -> None:
    with pytest.raises(BadRequest) as refused:
        await store.acquire(replace(ask(id), name="job"))
    assert refused.value.param == "id"
    with pytest.raises(LeaseUnknown):
        await store.renew(id, 1)
    await store.release(id)
    assert await states(store) == {}


@pytest.mark.parametrize("id", ["a", "..", ".", "-", "a:b@c+d-e_f.g", "lease:a", "renew", "x" * 128])
async def test_every_other_id_names_a_lease(store: LeaseStore, id: str) -> None:
    lease = await store.acquire(ask(id))
    assert (await store.renew(id, lease.token)).id == id
    with pytest.raises(LeaseTaken):
        await store.acquire(replace(ask(id), holder=OTHERS[0]))
    await store.release(id, lease.token)
    assert await states(store) == {}


async def test_tokens_grow_with_every_grant(rig: StoreRig) -> None:
    stores = (rig.client(), rig.client())
    tokens = []
    for number in range(10):
        lease = await stores[number % 2].acquire(ask(f"a{number}", 100))
        tokens.append(lease.token)
        await stores[number % 2].release(lease.id, lease.token)
    assert tokens == sorted(set(tokens))


async def test_releasing_twice_or_an_unknown_id_leaves_other_leases_alone(store: LeaseStore) -> None:
    lease = await store.acquire(ask("a", 6_000, devices=("gpu0",)))
    other = await store.acquire(ask("b", 4_000, devices=("gpu0",)))
    for _ in range(2):
        await store.release("a", lease.token)
    await store.release("never-was")
    assert await states(store) == {"b": "held"}
    with pytest.raises(LeaseDenied):
        await store.acquire(ask("c", GPU_MIB, devices=("gpu0",)))
    assert (await store.renew("b", other.token)).token == other.token


async def test_a_late_release_leaves_the_next_holder_of_the_id_alone(store: LeaseStore) -> None:
    first = await store.acquire(ask("a"))
    await store.release("a", first.token)
    second = await store.acquire(ask("a"))
    await store.release("a", first.token)
    assert (await store.renew("a", second.token)).state == "held"


async def test_a_renewed_lease_outlives_its_ttl(store: LeaseStore) -> None:
    """Tried with ever longer times: a busy machine may renew too late."""
    for ttl_s in (SHORT_TTL_S, 8 * SHORT_TTL_S, 64 * SHORT_TTL_S):
        if await outlives(store, ttl_s):
            return
    raise AssertionError("no renewal came in time")


async def outlives(store: LeaseStore, ttl_s: float) -> bool:
    """Renew a lease past its time. False if it was lost because a renewal came too late."""
    asked = time.monotonic()
    over_at = asked + 1.5 * ttl_s
    lease = await store.acquire(ask("a", ttl_s=ttl_s))
    while asked < over_at:
        await asyncio.sleep(ttl_s / 10)
        before, asked = asked, time.monotonic()
        try:
            renewed = await store.renew("a", lease.token)
        except LeaseLost:
            assert time.monotonic() - before >= ttl_s, "it was renewed in time"
            return False
        assert 0 < renewed.expires_in_s <= ttl_s
    is_held = await states(store) == {"a": "held"}
    assert is_held or time.monotonic() - asked >= ttl_s, "it was renewed just before"
    return is_held


async def test_a_lease_that_is_not_renewed_lapses_and_is_lost_to_its_holder(rig: StoreRig) -> None:
    lost, other = rig.client(), rig.client()
    lease = await lost.acquire(ask("a", GPU_MIB, devices=("gpu0",), ttl_s=SHORT_TTL_S))
    follower = await other.acquire(ask("b", GPU_MIB, devices=("gpu0",), wait_s=PATIENCE_S))
    assert follower.token > lease.token
    with pytest.raises(LeaseLost):
        await lost.renew("a", lease.token)


async def test_another_token_does_not_renew(store: LeaseStore) -> None:
    lease = await store.acquire(ask("a"))
    with pytest.raises(LeaseLost):
        await store.renew("a", lease.token - 1)
    with pytest.raises(LeaseLost):
        await store.renew("never-was", lease.token)


async def test_a_waiter_is_granted_what_another_releases(rig: StoreRig) -> None:
    holder, other = rig.client(), rig.client()
    first = await holder.acquire(ask("a", GPU_MIB, devices=("gpu0",)))
    async with waiting(other, ask("b", 8_000, devices=("gpu0",), wait_s=PATIENCE_S)) as waiter:
        assert not waiter.done()
        await holder.release("a", first.token)
        lease = await asyncio.wait_for(waiter, PATIENCE_S)
    assert lease.claim == {"gpu0": 8_000}
    assert lease.token > first.token


async def test_a_wait_that_is_over_ends_in_a_denial(store: LeaseStore) -> None:
    await store.acquire(ask("a", GPU_MIB, devices=("gpu0",)))
    began = time.monotonic()
    with pytest.raises(LeaseDenied):
        await store.acquire(ask("b", devices=("gpu0",), wait_s=0.5))
    assert time.monotonic() - began >= 0.5
    assert await states(store) == {"a": "held"}


async def test_waiters_are_served_by_priority_then_by_arrival(rig: StoreRig) -> None:
    holder = rig.client()
    granted: list[str] = []

    async def take_turn(id: str, priority: int) -> None:
        store = rig.client()
        lease = await store.acquire(ask(id, GPU_MIB, devices=("gpu0",), priority=priority, wait_s=PATIENCE_S))
        granted.append(id)
        await store.release(id, lease.token)

    first = await holder.acquire(ask("a", GPU_MIB, devices=("gpu0",)))
    tasks, expected = [], {"a": "held"}
    for id, priority in (("low", 2), ("normal-1", 1), ("normal-2", 1), ("high", 0)):
        tasks.append(asyncio.create_task(take_turn(id, priority), name=id))
        expected[id] = "waiting"
        await until_states(holder, expected)
    await holder.release("a", first.token)
    await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
    assert granted == ["high", "normal-1", "normal-2", "low"]


@pytest.mark.parametrize("priority", [1, 2])
async def test_a_waiter_is_not_overtaken_by_equal_or_lower_priority(rig: StoreRig, priority: int) -> None:
    store = rig.client()
    await store.acquire(ask("a", 6_000, devices=("gpu0",)))
    async with waiting(store, ask("b", 8_000, devices=("gpu0",), priority=1, wait_s=PATIENCE_S)):
        with pytest.raises(LeaseDenied):
            await store.acquire(ask("c", 1_000, devices=("gpu0",), priority=priority))
        assert (await store.acquire(ask("d", 1_000, devices=("gpu1",), priority=priority))).claim == {"gpu1": 1_000}


async def test_higher_priority_overtakes_a_waiter(rig: StoreRig) -> None:
    store = rig.client()
    await store.acquire(ask("a", 6_000, devices=("gpu0",)))
    async with waiting(store, ask("b", 8_000, devices=("gpu0",), priority=1, wait_s=PATIENCE_S)):
        assert (await store.acquire(ask("c", 1_000, devices=("gpu0",), priority=0))).claim == {"gpu0": 1_000}


async def test_a_waiter_that_leaves_is_not_in_the_way(rig: StoreRig) -> None:
    store = rig.client()
    await store.acquire(ask("a", 6_000, devices=("gpu0",)))
    async with waiting(store, ask("b", 8_000, devices=("gpu0",), wait_s=PATIENCE_S)):
        pass
    await until_states(store, {"a": "held"})
    assert (await store.acquire(ask("c", 4_000, devices=("gpu0",)))).claim == {"gpu0": 4_000}


async def test_a_cancelled_wait_does_not_end_the_lease_of_a_repeated_call(rig: StoreRig) -> None:
    store, again = rig.client(), rig.client()
    first = await store.acquire(LeaseAsk("first", "first", 8_000, devices=("gpu0",)))
    asked = LeaseAsk("job", "job", 8_000, devices=("gpu0",), wait_s=30)
    async with waiting(store, asked) as gives_up:
        got = asyncio.create_task(again.acquire(asked))
        await store.release("first", first.token)
        held = await asyncio.wait_for(got, 30)
        gives_up.cancel()
        await asyncio.gather(gives_up, return_exceptions=True)
        # Whatever it had to say has been said when this is answered.
        await store.leases()
        assert (await again.renew("job", held.token)).state == "held"


async def test_every_client_sees_each_lease_and_its_holder(rig: StoreRig) -> None:
    mine = holder_of(os.getpid())
    await rig.client().acquire(ask("a", 6_000, devices=("gpu0",), priority=2))
    (seen,) = await rig.client().leases()
    assert (seen.name, seen.state, seen.claim, seen.priority, seen.kind) == (
        "job-a",
        "held",
        {"gpu0": 6_000},
        2,
        "program",
    )
    assert seen.holder == mine
    assert seen.expires_in_s > 0


async def test_many_at_once_never_hold_more_than_there_is(rig: StoreRig) -> None:
    held: Counter[str] = Counter()
    worst: Counter[str] = Counter()

    async def work(number: int, store: LeaseStore) -> None:
        for turn in range(3):
            id = f"w{number}-{turn}"
            lease = await store.acquire(ask(id, 3_000, gpus=1 + number % 2, wait_s=PATIENCE_S))
            held.update(lease.claim)
            for device in lease.claim:
                worst[device] = max(worst[device], held[device])
            await asyncio.sleep(0)
            held.subtract(lease.claim)
            await store.release(id, lease.token)

    clients: list[Callable[[], LeaseStore]] = [rig.client] * 8
    await asyncio.wait_for(asyncio.gather(*(work(number, new()) for number, new in enumerate(clients))), 2 * PATIENCE_S)
    assert 0 < max(worst.values()) <= GPU_MIB
    assert await states(rig.client()) == {}
