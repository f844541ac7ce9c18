"""A lease that is kept: acquired, renewed in time, given back.

Owns the heartbeat and the judgement whether the lease is still one's own. Works on one event loop with any store; what
it knows may be read from every thread. Times are by this process's own clock and counted from before a call was sent,
so that the holder never believes in its lease for longer than the store does.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from greenroom.errors import GreenroomError, LeaseDenied, LeaseLost, LeaseUnknown
from greenroom.leases.records import Lease, LeaseAsk, LeaseStore

# A store that does not answer is asked again after this; one that is back is heard of at once.
RETRY_S: Final = 1.0
PAUSE_MIN_S: Final = 0.1
# Giving back is a courtesy: a store that cannot be told finds out by itself.
RELEASE_MAX_S: Final = 10.0


class Keeping:
    def __init__(self, store: LeaseStore, ask: LeaseAsk, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._ask = ask
        self._clock = clock
        self._lease: Lease | None = None
        self._lasts_until = 0.0
        self._recall_at: float | None = None
        # Said by the store: it is over.
        self.verdict: LeaseLost | None = None

    @property
    def lease(self) -> Lease:
        if self._lease is None:
            raise LeaseUnknown("The lease was not acquired yet.")
        return self._lease

    @property
    def is_lost(self) -> bool:
        """Not certain to be one's own: the store said so, or could not be asked for as long as it waits for us."""
        return self.verdict is not None or self._clock() >= self._lasts_until

    @property
    def recall_in_s(self) -> float | None:
        return None if self._recall_at is None else self._recall_at - self._clock()

    def raise_if_lost(self) -> None:
        """Raises LeaseLost unless it is certainly one's own."""
        if self.verdict is not None:
            raise self.verdict
        if self.is_lost:
            raise LeaseLost(f"The lease {self._ask.name} could not be renewed for {self.lease.ttl_s:g} s.")

    async def acquire(self) -> None:
        """Wait for it up to `wait_s`. Raises LeaseDenied, LeaseLost, StoreDown or BadRequest."""
        sent = self._clock()
        self._take(await self._store.acquire(self._ask), sent)
        if self._clock() - sent > self._pause_s():
            # How long ago the store began to count is not known after a long wait.
            await self._renew()
            if self.verdict is not None:
                raise self.verdict

    async def keep(self) -> None:
        """Renew it until it is lost."""
        was_heard = True
        while self.verdict is None:
            await asyncio.sleep(self._pause_s() if was_heard else min(RETRY_S, self._pause_s()))
            was_heard = await self._renew()

    async def release(self) -> None:
        """Give it back, if there is one; a store that is down finds out by itself."""
        with contextlib.suppress(GreenroomError, TimeoutError):
            async with asyncio.timeout(RELEASE_MAX_S):
                if self._lease is not None and self.verdict is None:
                    await self._store.release(self._ask.id, self._lease.token)
        await self._store.close()

    def _pause_s(self) -> float:
        """Often enough to miss a beat or two, and to hear of a recall while there is time to act."""
        pause_s = self.lease.ttl_s / 3
        if self._ask.preemptible:
            pause_s = min(pause_s, self._ask.grace_s / 3)
        return max(PAUSE_MIN_S, pause_s)

    async def _renew(self) -> bool:
        """Once. False if the store could not be asked."""
        sent = self._clock()
        try:
            async with asyncio.timeout(max(1.0, self.lease.ttl_s / 3)):
                self._take(await self._renewed(), sent)
        except LeaseLost as lost:
            self.verdict = lost
        except LeaseDenied as denied:
            self.verdict = LeaseLost(f"The lease {self._ask.name} cannot be had again: {denied.message}")
        except (GreenroomError, TimeoutError):
            # Not asked rather than answered: a store that is away, a gateway that is crowded, a key that was changed.
            return False
        return True

    async def _renewed(self) -> Lease:
        lease = self.lease
        try:
            return await self._store.renew(lease.id, lease.token)
        except LeaseUnknown:
            # A store that came back with nothing is told again, unless somebody else has the memory by now.
            ask = replace(self._ask, devices=tuple(sorted(lease.claim)), wait_s=0.0)
            return await self._store.acquire(ask)

    def _take(self, lease: Lease, sent: float) -> None:
        self._lease = lease
        self._lasts_until = sent + lease.ttl_s
        self._recall_at = None if lease.recall_in_s is None else sent + lease.recall_in_s
