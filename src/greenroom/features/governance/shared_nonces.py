"""Used tokens in a Redis or Valkey that several gateways share: each nonce once over all of them.

Owns the keys `greenroom:governance:*` and the script, which decides in one step and by Redis' own clock. Nothing there
expires by itself: the script removes what is old, and refuses tokens as old as that by their time of issue, so that a
clock that jumps lets no token be used again. A Redis that has lost its data says so by the time since which it
remembers, and tokens from before are refused; one that does not answer lets none pass. Imported only if such a store is
configured.
"""

from __future__ import annotations

import secrets
from typing import Final

from redis.exceptions import RedisError

from greenroom.base import redis_link
from greenroom.errors import NoncesUnavailable, TokenExpired
from greenroom.features.governance.nonces import KEEP_S, NONCES_MAX, before_start, full, key_of, replayed

PREFIX: Final = "greenroom:governance:"
# By nonce, which call used it. The field AFTER is a time: tokens issued until then may have been used without being
# remembered. Both in one key, so that a Redis that drops keys for want of memory cannot lose one of them alone.
CALLS: Final = PREFIX + "calls"
AFTER: Final = "after"
# The same nonces by the time when their tokens were issued, to find those that are old.
USED: Final = PREFIX + "used"
# How many old nonces one call removes, so that it stays short.
REMOVED_MAX: Final = 100
# KEYS: CALLS, USED. ARGV: how long nonces are kept, the skew, how many there may be, how many are removed at once, when
# the token was issued (empty: only begin), the nonce, and which call asks: one that is repeated after a lost answer
# gets the same answer. Keys that do not fit each other are begun anew: one of them was dropped.
_SCRIPT: Final = """
local now, keep, skew = tonumber(redis.call('TIME')[1]), tonumber(ARGV[1]), tonumber(ARGV[2])
local after = tonumber(redis.call('HGET', KEYS[1], 'after'))
if not after or redis.call('HLEN', KEYS[1]) ~= redis.call('ZCARD', KEYS[2]) + 1 then
  after = math.max(after or 0, now + skew)
  redis.call('DEL', KEYS[1], KEYS[2])
  redis.call('HSET', KEYS[1], 'after', string.format('%.0f', after))
end
if ARGV[5] == '' then return 'begun' end
local issued = tonumber(ARGV[5])
local old = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - keep, 'WITHSCORES', 'LIMIT', 0, ARGV[4])
for at = 1, #old, 2 do
  after = math.max(after, tonumber(old[at + 1]))
  redis.call('HSET', KEYS[1], 'after', string.format('%.0f', after))
  redis.call('HDEL', KEYS[1], old[at])
  redis.call('ZREM', KEYS[2], old[at])
end
local call = redis.call('HGET', KEYS[1], ARGV[6])
if call == ARGV[7] then return 'used' end
if call then return 'again' end
if issued <= after then return 'before ' .. string.format('%.0f', after) end
if issued + keep < now then return 'old' end
if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[3]) then return 'full' end
redis.call('HSET', KEYS[1], ARGV[6], ARGV[7])
redis.call('ZADD', KEYS[2], issued, ARGV[6])
return 'used'
"""


class SharedNonces:
    def __init__(self, url: str, skew_s: float) -> None:
        """Connects at first use. Raises ConfigError for an address with unknown options."""
        self._where = redis_link.shown(url)
        self._client = redis_link.connected(url, "governance.store:")
        self._script = self._client.register_script(_SCRIPT)
        # Rounded up: a second longer is safe.
        self._bounds = (str(KEEP_S), str(int(skew_s + 1)), str(NONCES_MAX), str(REMOVED_MAX))

    async def open(self, now: float) -> None:
        """Let the store begin to remember. One that does not answer yet is asked again by the first token."""
        try:
            await self._ask("", "")
        except NoncesUnavailable:
            return

    async def consume(self, nonce: str, issued_at: int, now: float) -> None:
        said, _, after = (await self._ask(key_of(nonce), str(issued_at))).partition(" ")
        if said == "again":
            raise replayed()
        if said == "before":
            raise before_start(float(after))
        if said == "full":
            raise full()
        if said == "old":
            raise TokenExpired("The token is too old by the clock of the store of used tokens. Sign a new one.")

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(self, key: str, issued_at: str) -> str:
        try:
            args = (*self._bounds, issued_at, key, secrets.token_hex(16))
            answer = await self._script(keys=(CALLS, USED), args=args)
        except (RedisError, OSError) as error:
            raise NoncesUnavailable(
                f"The store of used tokens at {self._where} {redis_link.store_fault(error)}; no token is accepted "
                "meanwhile.",
                retry_after_s=1.0,
            ) from None
        return str(answer, "ascii") if isinstance(answer, bytes) else str(answer)
