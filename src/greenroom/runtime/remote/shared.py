"""What gateways with one Redis or Valkey share of remote models: the switch for fallbacks, and what was spent today.

Owns the keys `greenroom:{remote}:*` and the task that talks to the store: every few seconds, and before each request
to a provider that has a budget. A gateway writes its own sums, whole, under its own name, and adds up what the others
wrote: a call that is lost or repeated counts nothing twice, and a store that lost its data is told all of it again.
Imported only where such a store is configured.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Any, Final

from redis.exceptions import RedisError

from greenroom.base.redis_link import ANSWER_MAX_S, connected, store_fault
from greenroom.base.repeated import Repeated
from greenroom.config.part import GatewayState
from greenroom.runtime.remote.fallback import CloudFallback
from greenroom.runtime.remote.spending import SharedSpending, Spending
from greenroom.telemetry.logs import get_logger

_log = get_logger("remote")

# The part in braces keeps the keys together on a cluster.
PREFIX: Final = "greenroom:{remote}:"
# How often the store is asked at least: so long a change of the switch takes to reach the other gateways.
EVERY_S: Final = 5.0
# A gateway that was not heard of for this long no longer has a share of the budgets.
GONE_S: Final = 60
KEPT_S: Final = 3 * 86_400

# KEYS: the sums of the day, the gateways, the switch. ARGV: the gateway, after how long it counts as gone, how long
# sums are kept, the switch, whether that replaces another one, then providers and this gateway's sums in turn.
_EXCHANGE: Final = """
local now = tonumber(redis.call('TIME')[1])
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - tonumber(ARGV[2]))
for at = 6, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[at] .. ':' .. ARGV[1], ARGV[at + 1])
  redis.call('EXPIRE', KEYS[1], ARGV[3])
end
if ARGV[4] ~= '' and (ARGV[5] == '1' or redis.call('EXISTS', KEYS[3]) == 0) then redis.call('SET', KEYS[3], ARGV[4]) end
return {redis.call('ZCARD', KEYS[2]), redis.call('GET', KEYS[3]) or '', redis.call('HGETALL', KEYS[1])}
"""


class SharedRemote:
    """Call `open` when the files of both parts were read."""

    def __init__(
        self,
        url: str,
        gateway: str,
        spending: Spending,
        fallback: CloudFallback,
        state: GatewayState,
        *,
        every_s: float = EVERY_S,
    ) -> None:
        """The store is not asked while there are no remote models. Raises ConfigError for an address with unknown
        options."""
        self._gateway = gateway
        self._spending = spending
        self._fallback = fallback
        self._state = state
        self._client = connected(url, "limits.store:", repeats=0, decode_responses=True)
        # What the URL says of these must not let requests wait longer for a store that is away.
        for name in ("socket_timeout", "socket_connect_timeout"):
            self._client.connection_pool.connection_kwargs[name] = ANSWER_MAX_S
        self._exchange = self._client.register_script(_EXCHANGE)
        self._wanted: bool | None = None
        self._waiting: list[asyncio.Future[bool]] = []
        self._asking = Repeated(
            self._ask_again,
            "shared remote models",
            lambda: every_s,
            lambda what, error: _log.bug("talking to the store of what remote models cost failed", error),
        )
        self._is_open = self._is_closed = False
        spending.shared = fallback.shared = self

    async def open(self) -> None:
        """Ask the store once, and go on asking."""
        if self._state.config.remotes:
            await self._talk()
        self._is_open = True
        self._asking.start()

    async def close(self) -> None:
        self._is_closed = True
        if self._is_open:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(3 * ANSWER_MAX_S):
                    await self._asking.stop()
            if self._waiting or (self._state.config.remotes and not self._spending.is_store_away):
                # What the last answers have cost.
                await self._ask_again()
            with contextlib.suppress(RedisError, OSError):
                await self._client.zrem(PREFIX + "gateways", self._gateway)
        await self._client.aclose()

    async def ask(self) -> bool:
        """Tell the store what was spent, and hear what others spent. False if it does not answer."""
        if self._is_closed:
            return False
        answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(answered)
        self._asking.wake()
        return await answered

    def wake(self) -> None:
        """Ask the store soon, without waiting for it."""
        self._asking.wake()

    async def set(self, is_allowed: bool) -> bool:
        """Set the switch for all gateways. False if the store does not answer: it may have heard it all the same."""
        self._wanted = is_allowed
        return await self.ask()

    async def _ask_again(self) -> None:
        # Those that ask from here on wait for the next call: this one may not have what they tell.
        waiting, self._waiting = self._waiting, []
        is_heard = False
        try:
            is_heard = bool(self._state.config.remotes or waiting) and await self._talk()
        except Exception:
            self._spending.is_store_away = True
            raise
        finally:
            for one in waiting:
                if not one.done():
                    one.set_result(is_heard)

    async def _talk(self) -> bool:
        """Tell and hear. False if the store does not answer, or not as it should."""
        try:
            await self._recall()
            return await self._exchanged()
        except (RedisError, OSError, ValueError, TypeError) as error:
            self._lost(store_fault(error))
            return False

    async def _recall(self) -> None:
        """Once a run: hear what this gateway told in an earlier run, which may not have come to its file."""
        if self._spending.is_recalled or self._spending.problem is not None:
            return
        day, _ = self._spending.own()
        pairs: Any = await self._client.hgetall(f"{PREFIX}spent:{day}")
        told = [(*field.partition(":"), _amount(cost)) for field, cost in pairs.items()]
        self._spending.recall(day, {name: cost for name, _, whose, cost in told if whose == self._gateway})

    async def _exchanged(self) -> bool:
        day, own = self._spending.own()
        wanted, self._wanted = self._wanted, None
        switch = self._fallback.known if wanted is None else wanted
        keys = (f"{PREFIX}spent:{day}", PREFIX + "gateways", PREFIX + "allow_cloud_fallback")
        args: list[Any] = [self._gateway, GONE_S, KEPT_S, "" if switch is None else str(switch).lower()]
        args.append("" if wanted is None else "1")
        for name, cost in own.items():
            args += [name, repr(cost)]
        gateways, said, pairs = await self._exchange(keys=keys, args=args)
        heard = SharedSpending(day, own, _others(pairs, self._gateway), max(1, int(gateways)))
        if self._spending.is_store_away:
            _log.info("the store of what remote models cost is reached")
        self._spending.hear(heard)
        if said in ("true", "false"):
            await self._fallback.hear(said == "true")
        return True

    def _lost(self, why: str) -> None:
        if not self._spending.is_store_away:
            _log.error(
                "the store of what remote models cost cannot be used; this gateway spends its share", why=f"it {why}"
            )
        self._spending.is_store_away = True


def _others(pairs: list[str], gateway: str) -> dict[str, float]:
    """By provider, what all other gateways have spent."""
    sums: dict[str, float] = {}
    for field, cost in zip(pairs[::2], pairs[1::2], strict=True):
        name, _, whose = field.partition(":")
        if whose != gateway:
            sums[name] = sums.get(name, 0.0) + _amount(cost)
    return sums


def _amount(said: str) -> float:
    """Raises ValueError for what is none: it would open the budget, or close it."""
    amount = float(said)
    if not 0.0 <= amount < math.inf:
        raise ValueError(f"{said!r} in the store is no amount")
    return amount
