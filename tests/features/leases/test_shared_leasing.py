"""Leases asked of a gateway that shares its store: handed over when the memory is there, if the caller hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from greenroom.core.model import Claim, DeviceId
from greenroom.errors import LeaseDenied, LeaseUnknown, StoreDown
from greenroom.features.leases.entry import LeasableMemory
from greenroom.features.leases.sharing import SharedLeasing, Sharing
from greenroom.leases.records import LeaseAsk
from tests.sim.shared.book import Book, BookStore

ASK = LeaseAsk("job", "train", 8_000)


@dataclass
class Rig:
    """`missing` is what is not really free; looking for it takes as long as `may_look` says."""

    missing: Claim = field(default_factory=dict)
    may_look: asyncio.Event = field(default_factory=asyncio.Event)
    looks: int = 0
    is_down: bool = False

    def __post_init__(self) -> None:
        self.may_look.set()
        book = Book(lambda: 1_000.0)
        self.store = BookStore(lambda: book, self._asks, grace_s=0, offers={"gpu0": 10_000})
        self.leasing = SharedLeasing(
            self.store,
            wait_max_s=60.0,
            memory=cast(LeasableMemory, SimpleNamespace(names=SimpleNamespace(id_of=DeviceId), watch=self)),
            sharing=cast(Sharing, SimpleNamespace(leases=[])),
        )

    async def _asks(self, question: Callable[[], bytes]) -> bytes:
        if self.is_down:
            raise StoreDown("it cannot be reached")
        return question()

    async def room_for(self, claim: Claim, timeout_s: float) -> Claim:
        self.looks += 1
        await self.may_look.wait()
        return self.missing

    async def held(self) -> list[str]:
        return [lease.id for lease in await self.store.leases()]

    async def looking(self, count: int) -> None:
        async with asyncio.timeout(30):
            while self.looks < count:  # noqa: ASYNC110
                await asyncio.sleep(0)


async def test_memory_that_another_process_still_uses_is_not_handed_over() -> None:
    rig = Rig(missing={DeviceId("gpu0"): 300})
    with pytest.raises(LeaseDenied, match="another process still uses: 300 MiB on gpu0"):
        await rig.leasing.acquire(ASK)
    assert await rig.held() == []


async def test_a_call_cancelled_before_it_is_told_holds_nothing() -> None:
    rig = Rig(may_look=asyncio.Event())
    rig.may_look.clear()
    asking = asyncio.ensure_future(rig.leasing.acquire(ASK))
    await rig.looking(1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert asking.cancelled() and await rig.held() == []


async def test_a_cancelled_call_does_not_end_the_lease_of_a_repeated_call() -> None:
    rig = Rig()
    rig.may_look.clear()
    leaves = asyncio.ensure_future(rig.leasing.acquire(ASK))
    stays = asyncio.ensure_future(rig.leasing.acquire(ASK))
    await rig.looking(2)
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    rig.may_look.set()
    lease = await asyncio.wait_for(stays, 30)
    assert (await rig.leasing.renew("job", lease.token)).state == "held"


async def test_an_unheard_call_gives_back_a_lease_that_only_it_was_told_of() -> None:
    rig = Rig()
    await rig.leasing.acquire(ASK, "first")
    await rig.leasing.unheard("job", "first")
    with pytest.raises(LeaseUnknown):
        await rig.leasing.find("job")
    for name in ("first", "again"):
        await rig.leasing.acquire(ASK, name)
    await rig.leasing.unheard("job", "first")
    assert (await rig.leasing.find("job")).state == "held"


async def test_a_store_that_is_down_does_not_hide_why_nothing_was_handed_over() -> None:
    rig = Rig(missing={DeviceId("gpu0"): 300})
    rig.may_look.clear()
    asking: asyncio.Future[Any] = asyncio.ensure_future(rig.leasing.acquire(ASK))
    await rig.looking(1)
    rig.is_down = True
    rig.may_look.set()
    with pytest.raises(LeaseDenied, match="another process still uses"):
        await asking
