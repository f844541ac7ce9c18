"""Limits that gateways share, with a real Redis and minutes of two seconds."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis import Redis
from redis import asyncio as aioredis

from greenroom.access.limits import Limiter
from greenroom.access.shared_limits import SharedLimits
from greenroom.access.shared_window import SharedWindow
from greenroom.base.redis_link import HOLDS_SOMETHING_ELSE
from greenroom.config.schema import Config, TenantLimits
from greenroom.errors import ConfigError
from tests.redis_server import RedisServer, redis_server
from tests.waiting import until

PERIOD_S = 2.0
# As long as nothing has to wait for the end of a minute.
LONG_S = 60.0
HOUR_S = 3_600
LIMIT = 80
# A minute in which this machine did nothing for us for so long tells nothing of what could have been used in it.
STALL_S = PERIOD_S / 8


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def early(tmp_path: Path) -> Iterator[RedisServer]:
    """By its clock a minute has just begun: none ends while a test runs."""
    with redis_server(tmp_path / "redis", has_own_clock=True) as server:
        server.set_clock(-int(time.time() % LONG_S))
        yield server


def test_an_address_with_an_option_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^limits\.store: redis://box/1 has an option"):
        SharedLimits("redis://me:secret@box/1?foo=bar", "a")


class Store(SharedLimits):
    """Notes what it would log, and in which minute."""

    def __init__(self, url: str, gateway: str, *, wall: Callable[[], float], period_s: float) -> None:
        super().__init__(url, gateway, wall=wall, period_s=period_s)
        self.now = wall
        self.told: list[tuple[str | None, int]] = []

    def tell(self, why: str | None) -> None:
        self.told.append((why, self.minute(self.now())))


class Gateway:
    """Takes permits as fast as it gets them, and notes the minute of each."""

    def __init__(self, url: str, name: str, *, limit: int = LIMIT, period_s: float = PERIOD_S) -> None:
        self.clock: Callable[[], float] = time.time
        self.store = Store(url, name, wall=lambda: self.clock(), period_s=period_s)
        self.window: SharedWindow = self.store.window("rate_limit:lab", limit)
        self.used: Counter[int] = Counter()
        # Minutes in whose second half it asked: by then its share is no longer held back by what it used before.
        self.asked_late: set[int] = set()

    @property
    def minute(self) -> int:
        return self.store.minute(self.clock())

    def ask(self, amount: int = 1) -> bool:
        now = self.clock()
        if self.store.passed(now) > 0.5:
            self.asked_late.add(self.store.minute(now))
        if not self.window.has(amount, now):
            return False
        self.used[self.window.take(amount, now)] += amount
        return True

    async def press(self, seconds: float, every_s: float = 0.002) -> None:
        """Ask all the time. The pauses are those of the event loop, never of Redis."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            self.ask()
            await asyncio.sleep(every_s)


class Pace:
    """Notes the longest time in each minute in which neither this process nor Redis got a turn."""

    def __init__(self, url: str, gateway: Gateway) -> None:
        self.longest_s: dict[int, float] = {}
        self.is_over = False
        self._client = aioredis.Redis.from_url(url)
        self._gateway = gateway

    async def run(self) -> None:
        try:
            # Not cancelled: the client may take a cancel for the end of a call, and go on.
            while not self.is_over:
                began, minute = time.monotonic(), self._gateway.minute
                await self._client.ping()
                await asyncio.sleep(0.005)
                for one in range(minute, self._gateway.minute + 1):
                    self.longest_s[one] = max(self.longest_s.get(one, 0.0), time.monotonic() - began)
        finally:
            await self._client.aclose()

    def quiet(self) -> dict[int, int]:
        """The whole minutes in which there was time for nearly everything; and what a pause at their end can cost."""
        whole = sorted(self.longest_s)[1:-1]
        pauses_s = {minute: self.longest_s[minute] for minute in whole if self.longest_s[minute] < STALL_S}
        return {minute: math.ceil(2 * LIMIT * pause_s / PERIOD_S) for minute, pause_s in pauses_s.items()}


async def press_in_quiet(redis: RedisServer, made: list[Gateway], pressing: list[Gateway]) -> dict[int, int]:
    """Have these gateways ask all the time, until there were two quiet minutes. Returns the least used in each."""
    pace = Pace(redis.url, made[0])
    tasks, pacing = [asyncio.create_task(one.press(math.inf)) for one in pressing], asyncio.create_task(pace.run())
    try:
        await until(lambda: len(pace.quiet()) >= 2, "the machine has time for two minutes")
        return {minute: LIMIT - 2 * made[0].window.block - cost for minute, cost in pace.quiet().items()}
    finally:
        for task in tasks:
            task.cancel()
        pace.is_over = True
        await pacing


@asynccontextmanager
async def gateways(redis: RedisServer, count: int, **options: float) -> AsyncIterator[list[Gateway]]:
    made = [Gateway(redis.url, f"g{number}", **options) for number in range(count)]  # type: ignore[arg-type]
    try:
        for one in made:
            await one.store.open()
        yield made
    finally:
        for one in made:
            await one.store.close()


def per_minute(made: list[Gateway]) -> Counter[int]:
    """What all of them used in each minute."""
    return sum((one.used for one in made), Counter[int]())


def expect_no_excess(made: list[Gateway], lost_in: Iterable[int] = ()) -> None:
    """Never above the limit; in a minute in which the store goes each may use its half though the other used more."""
    noticed = {minute for one in made for why, minute in one.store.told if why is not None}
    gone = {*lost_in, *noticed, *(minute - 1 for minute in noticed)}
    for minute, count in per_minute(made).items():
        assert count <= (1.5 * LIMIT if minute in gone else LIMIT), (per_minute(made), gone)


async def test_two_gateways_never_exceed_the_limit_and_leave_at_most_a_block_each(redis: RedisServer) -> None:
    async with gateways(redis, 2) as made:
        whole = await press_in_quiet(redis, made, made)
        used = per_minute(made)
        expect_no_excess(made)
        assert all(used[minute] >= least for minute, least in whole.items()), (used, whole)
        assert all(sum(one.used.values()) for one in made)


@pytest.mark.slow
async def test_a_gateway_alone_uses_what_an_idle_one_leaves(redis: RedisServer) -> None:
    async with gateways(redis, 2) as made:
        busy, idle = made
        whole = await press_in_quiet(redis, made, [busy])
        expect_no_excess(made)
        # The idle one has a block in hand; what both take ahead is less than another.
        assert all(busy.used[minute] >= least for minute, least in whole.items()), (busy.used, whole)
        await until(idle.ask, "it has a block of its own")


async def test_permits_asked_for_as_a_minute_ends_never_count_for_the_minute_after_the_next(early: RedisServer) -> None:
    """In the store the minute is over, for the gateway it is not: what it wants ahead is what it gets at once."""
    async with gateways(early, 1, period_s=LONG_S) as (one,):
        minute, block = one.minute, one.window.block
        late = time.time() + (0.95 - one.store.passed(time.time())) * LONG_S
        early.set_clock(early.clock_s + int(LONG_S))
        one.clock = lambda: late
        assert one.ask(block), "and asks for more"
        await until(lambda: one.minute == minute + 1, "it heard from the store")
        with Redis.from_url(early.url, decode_responses=True) as client:
            counted = [client.get(f"rate_limit:lab:{minute + later}") for later in (1, 2)]
        assert (counted, one.window.in_hand) == ([str(block), None], block)


async def test_a_gateway_whose_clock_is_wrong_takes_nothing_ahead_at_its_start(early: RedisServer) -> None:
    """By its own clock the minute ends, by the store's it has begun: what is taken ahead would be missing in it."""
    one = Gateway(early.url, "g0", period_s=LONG_S)
    one.clock = lambda: (time.time() // LONG_S + 0.95) * LONG_S
    try:
        await one.store.open()
        assert (one.window.in_hand, one.window.ahead) == (one.window.block, 0)
    finally:
        await one.store.close()


async def test_a_gateway_whose_clock_is_set_back_by_an_hour_goes_on(redis: RedisServer) -> None:
    async with gateways(redis, 1) as made:
        (one,) = made
        await until(lambda: one.ask() and sum(one.used.values()) >= LIMIT, "it used all of a minute")
        one.clock = lambda: time.time() - HOUR_S
        before = set(one.used)
        await until(lambda: one.ask() and len(set(one.used) - before) > 1, "it asks in two more minutes")
        expect_no_excess(made)


async def test_a_store_whose_clock_is_set_back_by_an_hour_gives_permits(early: RedisServer) -> None:
    async with gateways(early, 1, period_s=LONG_S) as (one,):
        await until(lambda: one.ask() and sum(one.used.values()) == LIMIT, "it used all of a minute")
        early.set_clock(early.clock_s - HOUR_S)
        await until(one.ask, "it has permits of another minute")


@pytest.mark.parametrize("key", ["rate_limit_epoch", "rate_limit_gateways"])
async def test_a_key_of_another_program_is_told_once_and_the_share_is_held(early: RedisServer, key: str) -> None:
    early.say("LPUSH", key, "theirs")
    async with gateways(early, 1, period_s=LONG_S) as (one,):
        for _ in range(5):
            assert one.ask()
            await asyncio.sleep(2 * one.store.tick_s)
        assert [why for why, _ in one.store.told] == [HOLDS_SOMETHING_ELSE]
        early.say("DEL", key)
        await until(lambda: [why for why, _ in one.store.told] == [HOLDS_SOMETHING_ELSE, None], "it is used again")


@pytest.mark.slow
async def test_store_killed_and_back_stays_within_the_stated_excess(redis: RedisServer) -> None:
    async with gateways(redis, 2) as made:
        pressing = [asyncio.create_task(one.press(math.inf)) for one in made]
        await until(lambda: len(per_minute(made)) > 1, "a minute has passed")
        redis.kill()
        lost_in = made[0].minute
        await until(lambda: all(one.store.is_down for one in made), "the loss is noticed")
        gone = made[0].minute
        await until(
            lambda: any(gone < minute < made[0].minute for minute in made[0].asked_late),
            "a minute without the store has passed",
        )
        redis.start()
        await until(lambda: not any(one.store.is_down for one in made), "the store is back")
        back = made[0].minute
        await until(lambda: made[0].minute > back + 1, "a minute with the store has passed")
        for task in pressing:
            task.cancel()
        expect_no_excess(made, (lost_in,))
        used = per_minute(made)
        # The start of the store, or a busy machine, may have let no gateway ask for a whole minute.
        asked = {minute for one in made for minute in one.asked_late}
        assert all(used[minute] > 0 for minute in range(gone + 1, back) if minute in asked), "each holds its share"
        assert [why is not None for why, _ in made[0].store.told][:2] == [True, False]


@pytest.mark.slow
async def test_store_that_lost_its_data_unnoticed_gives_nothing_twice(redis: RedisServer) -> None:
    async with gateways(redis, 2) as made:
        pressing = [asyncio.create_task(one.press(3 * PERIOD_S)) for one in made]
        await asyncio.sleep(0.8 * PERIOD_S)
        redis.kill()
        redis.start()
        await asyncio.gather(*pressing)
        assert max(per_minute(made).values()) <= 1.5 * LIMIT


async def test_without_the_store_a_gateway_starts_and_holds_one_block(early: RedisServer) -> None:
    early.kill()
    async with gateways(early, 1, period_s=LONG_S) as (one,):
        assert one.store.is_down
        assert sum(one.ask() for _ in range(LIMIT)) == one.window.block


async def test_callers_are_told_what_is_left_of_the_share_while_the_store_is_away(early: RedisServer) -> None:
    async with gateways(early, 2, period_s=LONG_S) as (one, _):
        await until(lambda: one.store.others == 1, "it knows of the other")
        early.kill()
        await until(lambda: one.store.is_down, "the loss is noticed")
        told = [one.window.take_one(time.time()) for _ in range(LIMIT // 2)]
        assert told == list(range(LIMIT // 2 - 1, -1, -1)), "as many as are admitted"
        assert one.window.take_one(time.time()) == -1


async def test_callers_are_never_told_more_than_the_limit(early: RedisServer) -> None:
    async with gateways(early, 1, period_s=LONG_S) as (one,):
        # Half of the next minute has passed before the store tells of it again.
        assert one.window.remaining(time.time() + 1.5 * LONG_S) <= LIMIT


async def test_tokens_used_beyond_what_is_in_hand_are_counted_for_all(early: RedisServer) -> None:
    async with gateways(early, 2, period_s=LONG_S) as (heavy, other):
        minute = heavy.window.take(2 * LIMIT, time.time())
        await until(lambda: other.window.remaining(time.time()) <= other.window.block, "the other hears of it")
        await other.press(0.2)
        assert sum(other.used.values()) <= 2 * other.window.block
        heavy.window.give_back(2 * LIMIT, minute, time.time())
        await until(lambda: other.window.remaining(time.time()) > other.window.block, "and that they were not used")


async def test_a_limit_that_is_new_to_a_running_gateway_begins_with_a_block(early: RedisServer) -> None:
    async with gateways(early, 1, period_s=LONG_S) as made:
        fresh = made[0].store.window("rate_limit:new", LIMIT)
        assert fresh.left(time.time()) == fresh.block
        assert fresh.wait_s(1, time.time()) > 0


async def test_a_limit_that_is_gone_asks_for_no_more_permits(redis: RedisServer) -> None:
    async with gateways(redis, 1) as (one,):
        limiter = Limiter(one.store.window)
        limits = Config(tenants={"gone": TenantLimits(requests_per_minute=LIMIT)})
        with Redis.from_url(redis.url) as client:

            def is_asked_for(name: str) -> bool:
                return bool(client.exists(f"rate_limit:{name}:{one.minute}"))

            limiter.configure(limits)
            await until(lambda: is_asked_for("gone"), "a limit is asked for")
            for config in (Config(), limits, Config(), Config()):
                limiter.configure(config)
            begun = one.minute
            # Permits of the next minute may have been taken already.
            await until(lambda: one.minute > begun + 1 and is_asked_for("lab"), "what is limited still is")
            assert not is_asked_for("gone")


async def test_a_limit_by_the_day_is_counted_by_days(early: RedisServer) -> None:
    async with gateways(early, 1, period_s=LONG_S) as (one,):
        now, day_s = time.time(), 24 * 60 * LONG_S
        window = one.store.window("token_limit:lab", LIMIT, day_s)
        window.take(1, now)
        with Redis.from_url(early.url, decode_responses=True) as client:
            key = f"token_limit:lab:{int(one.store.by_its_clock(now) // day_s)}"
            await until(lambda: client.get(key) == str(window.block), lambda: f"{key} is {client.get(key)}")
        assert window.wait_s(LIMIT, now) > LONG_S


# --- requests above a block -------------------------------------------------------------------------------------------


async def test_a_request_above_a_block_gets_what_it_needs_when_it_comes_again(early: RedisServer) -> None:
    async with gateways(early, 2, period_s=LONG_S) as made:
        one, other = made
        large = 5 * one.window.block
        assert not one.ask(large)
        assert one.window.wait_s(large, time.time()) <= 1.0
        await until(lambda: one.ask(large), "the store has given it")
        assert not other.ask(large)
        await asyncio.sleep(4 * other.store.tick_s)
        assert not other.ask(large), "only 3 blocks are left, two of them in hand"
        assert sum(per_minute(made).values()) == large


async def test_requests_above_a_block_go_on_while_the_limit_has_room(early: RedisServer) -> None:
    async with gateways(early, 1, period_s=LONG_S, limit=80_000) as (one,):
        large, refused = one.window.block + 1, 0
        for _ in range(7):
            refused += not one.ask(large)
            await until(lambda: one.window.in_hand >= large, "it is ready for the next")
        assert refused == 1
        assert sum(one.used.values()) == 6 * large


async def test_a_burst_above_a_block_each_is_served_when_it_comes_again(early: RedisServer) -> None:
    async with gateways(early, 1, period_s=LONG_S) as (one,):
        large = 2 * one.window.block
        assert [one.ask(large) for _ in range(3)] == [False] * 3
        await until(lambda: one.window.in_hand >= 3 * large, "the store has given it for all")
        await asyncio.sleep(3 * one.store.tick_s)
        assert [one.ask(large) for _ in range(3)] == [True] * 3


async def test_a_request_for_the_whole_limit_reserves_what_the_others_leave(early: RedisServer) -> None:
    async with gateways(early, 2, period_s=LONG_S) as (one, _):
        await until(lambda: one.store.others == 1, "it knows of the other")
        most = one.window.reservable(time.time())
        assert most == LIMIT - one.window.block
        await until(lambda: one.ask(most), "it gets all that the other does not hold")


async def test_a_large_request_at_the_end_of_a_minute_is_told_to_come_in_the_next(early: RedisServer) -> None:
    """What both took ahead counts in this minute, too, so that there is no room for it."""
    async with gateways(early, 2, period_s=LONG_S) as (one, _):
        await until(lambda: one.store.others == 1, "it knows of the other")
        now = one.clock()
        late, most = now + (0.95 - one.store.passed(now)) * LONG_S, one.window.reservable(now)
        assert one.window.wait_s(most, late) == pytest.approx(0.05 * LONG_S + 2 * one.store.tick_s)
        assert one.window.wait_s(LIMIT // 2, late) == one.store.tick_s, "for this there is"


async def test_what_a_large_request_did_not_come_back_for_is_given_to_others(redis: RedisServer) -> None:
    async with gateways(redis, 2, period_s=2 * PERIOD_S) as (one, other):
        large = 6 * one.window.block
        # Asked for again and again, and never taken: at the end of a minute there is no room for it.
        await until(lambda: one.window.has(large, one.clock()), "the store has given it")
        await until(lambda: one.window.in_hand <= one.window.block, "it is given back")
        await until(lambda: other.ask(large), "others can have it")


async def test_a_clock_that_is_set_back_keeps_nothing_from_others_for_a_large_request(redis: RedisServer) -> None:
    async with gateways(redis, 2, period_s=2 * PERIOD_S) as (one, other):
        large = 6 * one.window.block
        await until(lambda: one.window.has(large, one.clock()), "the store has given it")
        one.clock = lambda: time.time() - HOUR_S
        await until(lambda: other.ask(large), "others can have it")


async def test_what_was_not_used_is_taken_off_the_minute_for_which_it_was_counted(early: RedisServer) -> None:
    async with gateways(early, 1, period_s=LONG_S) as (one,):
        await until(lambda: one.ask(6 * one.window.block), "it has its tokens")
        (minute,) = one.used
        early.set_clock(early.clock_s + int(LONG_S))
        await until(lambda: one.minute > minute, "the next minute has begun")
        one.window.give_back(6 * one.window.block, minute, time.time())
        with Redis.from_url(early.url, decode_responses=True) as client:
            key = f"rate_limit:lab:{minute}"
            await until(lambda: client.get(key) == "0", lambda: f"{key} is {client.get(key)}")


async def test_a_store_with_a_text_that_cannot_be_read_is_told_once_and_asked_again(redis: RedisServer) -> None:
    """The client reports that by an error that is none of Redis."""
    client = aioredis.Redis.from_url(redis.url)
    await client.set("rate_limit_epoch", b"\xff\xfe")
    async with gateways(redis, 1) as (one,):
        await asyncio.sleep(5 * one.store.tick_s)
        assert one.store.is_down
        await client.delete("rate_limit_epoch")
        await until(lambda: not one.store.is_down, "it is used again")
        assert [why is None for why, _ in one.store.told] == [False, True]
    await client.aclose()
