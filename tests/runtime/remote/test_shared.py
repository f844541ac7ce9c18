"""The switch and the sums that gateways share, with a real Redis that is killed and loses its data."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis import Redis

from greenroom.config.part import GatewayState
from greenroom.config.schema import Config, Remote
from greenroom.config.sections.remotes import TokenCost
from greenroom.errors import ConfigNotKept, RemoteBudgetSpent, RemoteSpendingUnknown
from greenroom.runtime.remote.fallback import CloudFallback
from greenroom.runtime.remote.shared import PREFIX, SharedRemote
from greenroom.runtime.remote.spending import DAY_S, Bill, Spending
from tests.full_disk import full_disk
from tests.redis_server import RedisServer, redis_server
from tests.waiting import until

pytestmark = pytest.mark.asyncio

NOON = 20_000.5 * DAY_S
REMOTE = Remote(base_url="https://a", cost=TokenCost(input=0, output=1e6), budget_per_day=10)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as server:
        yield server


class Gateway:
    """What one gateway has of this. It asks the store as often as it can."""

    def __init__(self, folder: Path, url: str, name: str, environ: dict[str, str] | None = None) -> None:
        folder = folder / name
        folder.mkdir(exist_ok=True)
        self.now = NOON
        self.spending = Spending(folder, lambda: self.now)
        self.fallback = CloudFallback(folder, environ or {})
        state = GatewayState(Config(remotes={"acme": REMOTE}))
        self.shared = SharedRemote(url, name, self.spending, self.fallback, state, every_s=0.02)
        meter = self.spending.meter("acme", REMOTE, "large")
        assert meter is not None
        self.meter = meter

    async def enter(self, tokens: int) -> Bill:
        bill = self.meter.begin(self.meter.bill(json.dumps({"max_tokens": tokens}).encode()))
        await self.meter.confirm(bill)
        return bill

    async def may_enter(self, tokens: int) -> bool:
        """True if so much could be spent now; it is not."""
        try:
            (await self.enter(tokens)).drop()
        except RemoteBudgetSpent:
            return False
        return True

    async def is_cut_off(self) -> None:
        await until(lambda: self.spending.is_store_away, "the store is away")


@asynccontextmanager
async def opened(*made: Gateway) -> AsyncIterator[None]:
    for one in made:
        one.spending.open()
        one.fallback.open()
        await one.shared.open()
    try:
        yield
    finally:
        for one in made:
            await one.shared.close()
            await one.spending.close()


async def test_gateways_spend_one_budget_together(redis: RedisServer, tmp_path: Path) -> None:
    a, b = Gateway(tmp_path, redis.url, "a"), Gateway(tmp_path, redis.url, "b")
    async with opened(a, b):
        (await a.enter(6)).settle(0, 6)
        with pytest.raises(RemoteBudgetSpent, match="6 of today's budget of 10 are spent, and this request may cost 5"):
            await b.enter(5)
        assert b.spending.spent("acme") == 6.0
        (await b.enter(4)).settle(0, 3)
        await until(lambda: a.spending.spent("acme") == 9.0, "the first hears what the second spent")
        a.now = b.now = NOON + DAY_S
        assert await a.may_enter(10) and a.spending.spent("acme") == 0.0


async def test_requests_at_once_at_several_gateways_do_not_pass_it_together(redis: RedisServer, tmp_path: Path) -> None:
    made = [Gateway(tmp_path, redis.url, name) for name in "abc"]
    async with opened(*made):
        asked = [one.enter(2) for _ in range(4) for one in made]
        got = await asyncio.gather(*asked, return_exceptions=True)
        passed = [bill for bill in got if isinstance(bill, Bill)]
        assert all(isinstance(one, Bill | RemoteBudgetSpent) for one in got) and len(passed) <= 5
        # Those that were refused together took nothing.
        await until(lambda: made[0].spending.spent("acme") == 2.0 * len(passed), "the others are given up")


async def test_while_the_store_is_away_each_spends_its_share_of_what_was_left(
    redis: RedisServer, tmp_path: Path
) -> None:
    a, b = Gateway(tmp_path, redis.url, "a"), Gateway(tmp_path, redis.url, "b")
    async with opened(a, b):
        (await a.enter(4)).settle(0, 4)
        await until(lambda: b.spending.spent("acme") == 4.0, "both know it")
        redis.kill()
        await a.is_cut_off()
        await b.is_cut_off()
        assert [await a.may_enter(4), await b.may_enter(4)] == [False, False]
        for one in (a, b):
            (await one.enter(2)).settle(0, 2)
            (await one.enter(1)).settle(0, 1)
        assert [await a.may_enter(1), await b.may_enter(1)] == [False, False], "ten are spent"
        redis.start()
        await until(lambda: a.spending.spent("acme") == b.spending.spent("acme") == 10.0, "both tell it again")
        assert not await a.may_enter(1)


async def test_a_gateway_that_never_reached_the_store_spends_nothing(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server:
        url = server.url
    one = Gateway(tmp_path, url, "a")
    async with opened(one):
        with pytest.raises(RemoteBudgetSpent, match="does not answer"):
            await one.enter(1)


async def test_the_switch_is_one_for_all_gateways_and_holds_while_the_store_is_away(
    redis: RedisServer, tmp_path: Path
) -> None:
    a, b = Gateway(tmp_path, redis.url, "a"), Gateway(tmp_path, redis.url, "b")
    async with opened(a, b):
        await a.fallback.set(False)
        assert not a.fallback.is_allowed
        await until(lambda: not b.fallback.is_allowed, "the other hears it")
        redis.kill()
        await b.is_cut_off()
        with pytest.raises(ConfigNotKept, match="does not answer"):
            await b.fallback.set(True)
        assert not a.fallback.is_allowed and not b.fallback.is_allowed
    again = Gateway(tmp_path, redis.url, "b")
    async with opened(again):
        assert not again.fallback.is_allowed
        redis.start()
        new = Gateway(tmp_path, redis.url, "new", {"MODEL_BOSS_ALLOW_CLOUD_FALLBACK": "true"})
        await until(lambda: not again.spending.is_store_away, "it tells the store, which has lost it")
        async with opened(new):
            await until(lambda: not new.fallback.is_allowed, "a new gateway hears it")
            await new.fallback.set(True)
            await until(lambda: again.fallback.is_allowed, "it can be set again")


async def test_a_switch_that_cannot_be_read_is_that_of_the_store(redis: RedisServer, tmp_path: Path) -> None:
    a, b = Gateway(tmp_path, redis.url, "a"), Gateway(tmp_path, redis.url, "b")
    (tmp_path / "b" / "settings.json").write_text("{")
    async with opened(b):
        assert not b.fallback.is_allowed
        async with opened(a):
            assert a.fallback.is_allowed, "what is not known is not told to others"
            await a.fallback.set(True)
            await until(lambda: b.fallback.is_allowed, "it hears it")


async def test_what_was_spent_and_cannot_be_read_stays_counted_at_the_store(redis: RedisServer, tmp_path: Path) -> None:
    a, b = Gateway(tmp_path, redis.url, "a"), Gateway(tmp_path, redis.url, "b")
    async with opened(b):
        async with opened(a):
            (await a.enter(6)).settle(0, 6)
            await until(lambda: b.spending.spent("acme") == 6.0, "the other hears it")
        (tmp_path / "a" / "spending.json").write_text("{")
        async with opened(again := Gateway(tmp_path, redis.url, "a")):
            with pytest.raises(RemoteBudgetSpent):
                await again.enter(1)
            assert not await b.may_enter(5) and b.spending.spent("acme") == 6.0


@pytest.mark.parametrize("said", ["much", "nan", "-100", "inf"])
async def test_a_sum_that_is_no_amount_neither_opens_the_budget_nor_holds_requests(
    redis: RedisServer, tmp_path: Path, said: str
) -> None:
    store, field = Redis.from_url(redis.url), ("acme:other", said)
    async with opened(one := Gateway(tmp_path, redis.url, "a")):
        (await one.enter(4)).settle(0, 4)
        key = f"{PREFIX}spent:{int(NOON // DAY_S)}"
        store.hset(key, *field)
        await one.is_cut_off()
        assert not await asyncio.wait_for(one.may_enter(7), 30)
        assert await asyncio.wait_for(one.may_enter(6), 30)
        store.hdel(key, field[0])
        await until(lambda: not one.spending.is_store_away, "it goes on when that is mended")
    store.close()


async def test_what_an_earlier_run_told_the_store_counts_though_its_file_was_not_written(
    redis: RedisServer, tmp_path: Path
) -> None:
    async with opened(one := Gateway(tmp_path, redis.url, "a")):
        (await one.enter(3)).settle(0, 3)
        await until((tmp_path / "a" / "spending.json").exists, "it is written down")
        await one.spending.close()
        before = (tmp_path / "a" / "spending.json").read_text()
        (await one.enter(4)).settle(0, 4)
    # As if the gateway had been killed before it wrote the last one down.
    (tmp_path / "a" / "spending.json").write_text(before)
    async with opened(again := Gateway(tmp_path, redis.url, "a")):
        assert again.spending.spent("acme") == 7.0
        assert not await again.may_enter(4) and await again.may_enter(3)


async def test_nothing_of_a_budget_is_spent_while_the_sums_cannot_be_written(tmp_path: Path) -> None:
    spending = Spending(tmp_path, lambda: NOON)
    spending.open()
    meter = spending.meter("acme", REMOTE, "large")
    assert meter is not None
    meter.begin(meter.bill(b'{"max_tokens": 1}')).settle(0, 1)
    with full_disk():
        with pytest.raises(OSError, match="File too large"):
            await spending.close()
        with pytest.raises(RemoteSpendingUnknown, match=r"cannot be written down.*File too large"):
            meter.begin(meter.bill(b'{"max_tokens": 1}'))
    with pytest.raises(RemoteSpendingUnknown):
        meter.begin(meter.bill(b'{"max_tokens": 1}'))
    await spending.close()
    meter.begin(meter.bill(b'{"max_tokens": 1}')).settle(0, 1)
    await spending.close()
    assert spending.spent("acme") == 2.0


async def test_the_address_of_the_store_cannot_make_requests_wait(redis: RedisServer, tmp_path: Path) -> None:
    async with opened(one := Gateway(tmp_path, redis.url + "?socket_timeout=600", "a")):
        redis.pause()
        try:
            assert await asyncio.wait_for(one.may_enter(1), 60)
            assert one.spending.is_store_away
        finally:
            redis.go_on()
