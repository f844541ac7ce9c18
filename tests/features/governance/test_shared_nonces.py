"""Used tokens in a real Redis: they stay used when its clock jumps, and its room is bounded."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from greenroom.base.redis_link import HOLDS_SOMETHING_ELSE
from greenroom.errors import GreenroomError, NoncesUnavailable, TokenReplayed
from greenroom.features.governance.nonces import KEEP_S
from greenroom.features.governance.shared_nonces import AFTER, CALLS, USED, SharedNonces
from tests.redis_server import RedisServer, redis_server

DAY = 86_400


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis", has_own_clock=True) as server:
        server.say("HSET", CALLS, AFTER, "0")
        yield server


@pytest_asyncio.fixture
async def nonces(redis: RedisServer) -> AsyncIterator[SharedNonces]:
    found = SharedNonces(redis.url, 10)
    yield found
    await found.close()


@pytest.mark.parametrize("jump_s", [3_600, -3_600, 2 * DAY, 365 * DAY, -365 * DAY])
async def test_no_jump_of_its_clock_lets_a_token_be_used_again(
    redis: RedisServer, nonces: SharedNonces, jump_s: int
) -> None:
    now = int(time.time())
    await nonces.consume("once", now, now)
    redis.set_clock(jump_s)
    # Redis itself looks for what is over by its clock, and so does every call.
    redis.say("DBSIZE")
    for _ in range(2):
        try:
            await nonces.consume("other", now + jump_s, now + jump_s)
        except GreenroomError as error:
            assert error.code in ("token_replayed", "token_issued_before_start")
    redis.set_clock(0)
    with pytest.raises(GreenroomError) as refused:
        await nonces.consume("once", now, now)
    assert refused.value.code in ("token_replayed", "token_issued_before_start")


@pytest.mark.parametrize("key", [CALLS, USED])
async def test_a_key_of_another_program_is_said_plainly_and_lets_no_token_pass(
    redis: RedisServer, nonces: SharedNonces, key: str
) -> None:
    redis.say("DEL", key)
    redis.say("LPUSH", key, "theirs")
    now = int(time.time())
    with pytest.raises(NoncesUnavailable, match=HOLDS_SOMETHING_ELSE):
        await nonces.consume("once", now, now)


async def test_a_silent_jump_of_its_clock_does_the_same(redis: RedisServer, nonces: SharedNonces) -> None:
    """No token came while it was ahead; Redis had time to drop what it held to be over."""
    now = int(time.time())
    await nonces.consume("once", now, now)
    redis.set_clock(2 * DAY)
    for _ in range(50):
        redis.say("RANDOMKEY")
        time.sleep(0.02)
    redis.set_clock(0)
    with pytest.raises(TokenReplayed):
        await nonces.consume("once", now, now)


async def test_old_nonces_leave_and_are_refused_by_their_age(redis: RedisServer, nonces: SharedNonces) -> None:
    now = int(time.time())
    for number in range(5):
        await nonces.consume(f"n{number}", now, now)
    redis.set_clock(KEEP_S + 60)
    await nonces.consume("new", now + KEEP_S + 60, now)
    assert redis.say("ZCARD", USED) == ":1" and redis.say("HLEN", CALLS) == ":2"
    redis.set_clock(0)
    with pytest.raises(GreenroomError) as refused:
        await nonces.consume("n0", now, now)
    assert refused.value.code == "token_issued_before_start"


async def test_a_redis_without_room_permits_nothing(tmp_path: Path) -> None:
    with redis_server(tmp_path / "small", "--maxmemory-policy", "noeviction") as redis:
        nonces = SharedNonces(redis.url, 10)
        redis.say("HSET", CALLS, AFTER, "0")
        redis.say("CONFIG", "SET", "maxmemory", "1")
        now = int(time.time())
        with pytest.raises(NoncesUnavailable):
            await nonces.consume("once", now, now)
        await nonces.close()


@pytest.mark.parametrize("key", [CALLS, USED])
async def test_a_redis_that_drops_a_key_lets_no_token_be_used_again(
    redis: RedisServer, nonces: SharedNonces, key: str
) -> None:
    """As one does that evicts for want of memory."""
    now = int(time.time())
    await nonces.consume("once", now, now)
    assert redis.say("DEL", key) == ":1"
    for _ in range(2):
        with pytest.raises(GreenroomError) as refused:
            await nonces.consume("once", now, now)
        assert refused.value.code in ("token_replayed", "token_issued_before_start")
    # Tokens that are issued later are accepted again, each once.
    await nonces.consume("later", now + 60, now)
    with pytest.raises(TokenReplayed):
        await nonces.consume("later", now + 60, now)
