"""Limits that several gateways share through Redis or Valkey. Imported only where such a store is configured.

Owns the counts in the store, one per limit and minute (`rate_limit:{tenant}:{minute}`), and how they are taken from it:
in blocks and ahead of need, by one task, so that no request ever waits for Redis. A permit is counted in the minute for
which it was taken and lapses with it: over all gateways no more than the limit is used in a minute, and at most one
block per gateway is left unused. Permits that lapse unused are given back to the count of their minute. What a gateway
asks for is decided in `shared_window.py`.

While the store is away, or has lost its data, and for the rest of that minute, a gateway uses per minute what the store
had given it or its share of the limit (limit / gateways), whichever is more. With N gateways that is at most
(N - 1) / N of the limit too much in the minute in which the store goes, and nothing in those that follow. A limit that
is new to a running gateway begins with one block on credit.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from redis.exceptions import RedisError

from greenroom.access.budgets import MINUTE_S
from greenroom.access.shared_window import Asked, SharedWindow
from greenroom.base.redis_link import ANSWER_MAX_S, connected, store_fault
from greenroom.base.repeated import Repeated
from greenroom.config.part import Part
from greenroom.telemetry.logs import get_logger

_log = get_logger("server")

# Of a minute: how often the store is asked at least.
_TICK: Final = 1 / 120
# Limits that are asked about in one call.
_AT_ONCE_MAX: Final = 200

# One atomic step by Redis' own clock. Per limit: the fields of `Asked`. Gives nothing to a gateway that names another
# epoch: the counts were lost meanwhile.
_TAKE: Final = """
local shown_s, gateway, known, asked = tonumber(ARGV[1]), ARGV[2], ARGV[3], cjson.decode(ARGV[4])
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local epoch = redis.call('GET', 'rate_limit_epoch')
if not epoch then
  epoch = time[1] .. '.' .. time[2]
  redis.call('SET', 'rate_limit_epoch', epoch)
end
redis.call('ZADD', 'rate_limit_gateways', now, gateway)
redis.call('ZREMRANGEBYSCORE', 'rate_limit_gateways', '-inf', now - shown_s)
local reply = {string.format('%.6f', now), epoch, redis.call('ZCARD', 'rate_limit_gateways')}
if known ~= '' and known ~= epoch then return reply end
local function counted(name, which)
  return math.max(0, tonumber(redis.call('GET', name .. ':' .. string.format('%d', which)) or '0'))
end
local function count(name, which, amount, period)
  if amount ~= 0 then
    local key, sum = name .. ':' .. string.format('%d', which), counted(name, which) + amount
    redis.call('SET', key, string.format('%d', math.max(0, sum)), 'PX', math.ceil(period * 3000))
  end
end
for _, one in ipairs(asked) do
  local name, limit, period, wanted, least, plain, ahead, used, unused, its_minute = unpack(one)
  local minute = math.floor(now / period)
  local passed = now / period - minute
  -- For a gateway this minute has not begun: what it wants ahead is what it is given at once.
  if its_minute < minute then ahead = 0 end
  count(name, minute, used, period)
  if its_minute >= minute then count(name, its_minute - 1, -unused, period) end
  local before, current, later = counted(name, minute - 1), counted(name, minute), counted(name, minute + 1)
  local free = math.floor(limit - math.max(before * (1 - passed), later)) - current
  local given = math.max(0, math.min(free >= least and wanted or plain, free))
  count(name, minute, given, period)
  current = current + given
  local given_ahead = math.max(0, math.min(ahead, limit - current - later))
  count(name, minute + 1, given_ahead, period)
  for _, number in ipairs({given, given_ahead, current, before}) do reply[#reply + 1] = number end
end
return reply
"""


class SharedLimits(Part):
    """The store, and the task that takes permits from it."""

    name = "the store of limits"

    def __init__(
        self, url: str, gateway: str, *, wall: Callable[[], float] = time.time, period_s: float = MINUTE_S
    ) -> None:
        """Raises ConfigError for an address with unknown options."""
        self.period_s = period_s
        self.tick_s = period_s * _TICK
        self.is_down = False
        self._gateway = gateway
        self._wall = wall
        # A call that is repeated would take twice.
        self._client = connected(url, "limits.store:", repeats=0, decode_responses=True)
        self._take = self._client.register_script(_TAKE)
        self._windows: set[SharedWindow] = set()
        self._hungry: set[SharedWindow] = set()
        self._asking = Repeated(
            self._ask_again, "shared limits", self._pause_s, lambda what, error: self.tell(store_fault(error))
        )
        self._is_open = False
        # When all are asked about again: by the loop's clock, as the wall clock may be set back.
        self._looks_at = 0.0
        self._epoch = ""
        self._gateways = 0
        # Redis' clock minus ours.
        self._offset_s = 0.0
        # Until the end of this minute the gateway holds its share.
        self._share_minute = -1

    def window(self, name: str, limit: int, period_s: float = MINUTE_S) -> SharedWindow:
        made = SharedWindow(self, name, limit, int(period_s // MINUTE_S))
        self._windows.add(made)
        if self._is_open:
            made.left(self._wall())
            made.lend(made.block)
        return made

    async def open(self) -> None:
        """Take the first permits, if the store answers, and go on taking them."""
        # The store's clock first: it says for which minute permits are taken.
        await self._ask(())
        await self._ask(list(self._windows))
        self._is_open = True
        self._asking.start()

    async def close(self) -> None:
        if self._is_open:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(3 * ANSWER_MAX_S):
                    await self._asking.stop()
            with contextlib.suppress(RedisError, OSError):
                await self._client.zrem("rate_limit_gateways", self._gateway)
        await self._client.aclose()

    def tell(self, why: str | None) -> None:
        """Log why the store cannot be used; None: that it can be again."""
        if why is not None:
            _log.warning("the store of limits cannot be used; this gateway holds its share", why=f"it {why}")
        else:
            _log.info("the store of limits is back")

    # --- what windows ask ---------------------------------------------------------------------------------------------

    def by_its_clock(self, now: float) -> float:
        return now + self._offset_s

    def minute(self, now: float) -> int:
        return int(self.by_its_clock(now) // self.period_s)

    def passed(self, now: float, minutes: int = 1) -> float:
        """Which part of the minute has passed, or of a period of so many minutes."""
        return self.by_its_clock(now) / (self.period_s * minutes) % 1.0

    def holds_share(self, now: float, minutes: int = 1) -> bool:
        return self.is_down or self.minute(now) // minutes <= self._share_minute // minutes

    def share(self, window: SharedWindow) -> int:
        """Its part of the limit; one block if the store was never reached."""
        return max(1, window.limit // self._gateways) if self._gateways else window.block

    @property
    def others(self) -> int:
        """How many other gateways share these limits."""
        return max(0, self._gateways - 1)

    def forget(self, window: SharedWindow) -> None:
        self._windows.discard(window)

    def wake(self, window: SharedWindow) -> None:
        self._hungry.add(window)
        if not self.is_down:
            self._asking.wake()

    # --- the task -----------------------------------------------------------------------------------------------------

    async def _ask_again(self) -> None:
        now = asyncio.get_running_loop().time()
        asked, self._hungry = self._hungry, set()
        if self.is_down or now >= self._looks_at:
            self._looks_at = now + self.tick_s
            asked = set(self._windows)
        if asked:
            await self._ask(asked)

    def _pause_s(self) -> float:
        return self.tick_s if self.is_down else max(0.0, self._looks_at - asyncio.get_running_loop().time())

    async def _ask(self, windows: Iterable[SharedWindow]) -> None:
        now = self._wall()
        asked = [(window, needs) for window in windows if (needs := window.needs(now)) is not None]
        if not self._windows:
            return
        for start in range(0, max(1, len(asked)), _AT_ONCE_MAX):
            part = asked[start : start + _AT_ONCE_MAX]
            try:
                reply = await self._take(
                    args=[self.period_s / 4, self._gateway, self._epoch, json.dumps([needs for _, needs in part])]
                )
                self._heard(part, reply)
            except Exception as error:
                # Not only those of Redis: what another program has written there may be no text.
                self._lost(part, store_fault(error))
                return

    def _lost(self, part: list[tuple[SharedWindow, Asked]], why: str) -> None:
        for window, asked in part:
            window.lost(asked)
        if not self.is_down:
            self.is_down = True
            self.tell(why)

    def _heard(self, part: list[tuple[SharedWindow, Asked]], reply: list[Any]) -> None:
        now = self._wall()
        its_now, epoch, gateways = float(reply[0]), str(reply[1]), int(reply[2])
        self._offset_s = its_now - now
        is_new, self._epoch = bool(self._epoch) and epoch != self._epoch, epoch
        if self.is_down or is_new:
            # Other gateways may have used permits that the store does not know of yet.
            self._share_minute = self.minute(now)
        if self.is_down:
            self.is_down = False
            self.tell(None)
        self._gateways = max(gateways, self._gateways) if self.holds_share(now) else gateways
        if is_new:
            for window in self._windows:
                window.forgotten(now)
            return
        numbers = [int(number) for number in reply[3:]]
        for position, (window, asked) in enumerate(part):
            given, ahead, current, before = numbers[4 * position : 4 * position + 4]
            window.given(asked, int(its_now // window.period_s), given, ahead, current, before, now)
