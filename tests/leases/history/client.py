"""One program of the history test: leases memory again and again, and writes down what it did and what it was told.

Run as a process of its own, so that it can be killed and stopped. Several leases at a time; each is renewed, released
or simply left, as chance has it.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import random
import signal
import time
from pathlib import Path

from greenroom.errors import LeaseDenied, LeaseLost, StoreDown
from greenroom.leases.records import Lease, LeaseAsk
from greenroom.leases.shared.redis_store import RedisStore
from tests.leases.history.events import DEVICES, GPU_MIB, HOST, Event, Log

HANDS = 2
# Sent to a program, it holds its interpreter for so many TTLs in one call of C: neither its loop nor a thread runs.
BUSY = signal.SIGUSR1
BUSY_TTLS = 1.5
RELEASE_TRIES = 20


class Client:
    def __init__(self, name: str, url: str, ttl_s: float, ends_at: float, seed: int, log: Log) -> None:
        self._name = name
        self._ttl_s = ttl_s
        self._ends_at = ends_at
        self._random = random.Random(seed)
        self._log = log
        self._store = RedisStore(url, HOST, ttl_s=ttl_s, offers=DEVICES)
        self._count = 0

    async def run(self) -> None:
        await asyncio.gather(*(self._work() for _ in range(HANDS)))
        await self._store.close()

    async def _work(self) -> None:
        while time.monotonic() < self._ends_at:
            self._count += 1
            lease = await self._acquired(f"{self._name}-{self._count}")
            if lease is not None:
                await self._held(lease)
            await asyncio.sleep(self._random.uniform(0, 0.1))

    async def _acquired(self, id: str) -> Lease | None:
        ask = LeaseAsk(
            id,
            self._name,
            self._random.choice((GPU_MIB // 8, GPU_MIB // 8, GPU_MIB // 4, GPU_MIB // 4, GPU_MIB // 2, GPU_MIB)),
            gpus=self._random.choice((1, 1, 1, 1, 1, 2)),
            priority=self._random.randrange(3),
            ttl_s=self._ttl_s,
            wait_s=self._random.choice((0.0, 0.5, 2.0)),
        )
        self._note("acquire", "invoke", id)
        try:
            lease = await self._store.acquire(ask)
        except LeaseDenied:
            self._note("acquire", "refused", id)
            return None
        except StoreDown as error:
            self._note("acquire", "unknown", id, text=error.message)
            return None
        self._note("acquire", "ok", id, lease)
        return lease

    async def _held(self, lease: Lease) -> None:
        """Hold it for a while, as a program would: no longer than it may believe by its own clock."""
        leave_at = time.monotonic() + self._ttl_s * self._random.choice((0.0, 0.1, 0.2, 0.4, 2.0))
        while await self._renewed(lease):
            if time.monotonic() >= leave_at:
                break
            await asyncio.sleep(self._ttl_s * self._random.uniform(0.05, 0.3))
        # One in ten is simply left, as by a program that forgets.
        if self._random.random() > 0.1:
            await self._released(lease)

    async def _renewed(self, lease: Lease) -> bool:
        self._note("renew", "invoke", lease.id, lease)
        try:
            self._note("renew", "ok", lease.id, await self._store.renew(lease.id, lease.token))
        except LeaseLost:
            self._note("renew", "refused", lease.id, lease)
            return False
        except StoreDown as error:
            self._note("renew", "unknown", lease.id, lease, text=error.message)
        return True

    async def _released(self, lease: Lease) -> None:
        for _ in range(RELEASE_TRIES):
            self._note("release", "invoke", lease.id, lease)
            try:
                await self._store.release(lease.id, lease.token)
            except StoreDown as error:
                self._note("release", "unknown", lease.id, lease, text=error.message)
                await asyncio.sleep(0.1)
            else:
                self._note("release", "ok", lease.id, lease)
                return

    def _note(self, op: str, phase: str, id: str, lease: Lease | None = None, text: str = "") -> None:
        now = time.monotonic()
        if lease is None:
            self._log.note(Event(now, self._name, op, phase, id, text=text))
        else:
            claim = dict(lease.claim)
            self._log.note(Event(now, self._name, op, phase, id, lease.token, lease.ttl_s, claim, text))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--ttl-s", type=float, required=True)
    parser.add_argument("--ends-at", type=float, required=True, help="by the machine's monotonic clock")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    given = parser.parse_args()
    signal.signal(BUSY, lambda number, frame: ctypes.PyDLL(None).usleep(int(BUSY_TTLS * given.ttl_s * 1e6)))
    client = Client(given.name, given.url, given.ttl_s, given.ends_at, given.seed, Log(given.log))
    asyncio.run(client.run())


if __name__ == "__main__":
    main()
