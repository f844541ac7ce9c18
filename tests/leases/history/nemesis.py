"""Everything that goes wrong: programs killed, stopped and busy, Redis stopped, slow and emptied, clocks moved.

Every kind comes once in each round, in an order that the seed decides. Each fault is over when the next begins.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

from tests.leases.history.client import BUSY, BUSY_TTLS
from tests.leases.history.events import Event, Log
from tests.leases.history.proxy import Proxy
from tests.redis_server import RedisServer

JUMPS_S = (3_600, -3_600, 86_400, -86_400, 365 * 86_400, 0)


class Program(Protocol):
    """One client process and its connection, as the nemesis handles it."""

    name: str
    proxy: Proxy

    def send_signal(self, number: int) -> None: ...

    def replace(self) -> None: ...


class Nemesis:
    def __init__(self, server: RedisServer, programs: list[Program], ttl_s: float, seed: int, log: Log) -> None:
        self._server = server
        self._programs = programs
        self._ttl_s = ttl_s
        self._random = random.Random(seed)
        self._log = log
        self._jumped_at = 0.0
        self.counts: dict[str, int] = {}

    async def rage(self, ends_at: float) -> None:
        for fault in self._rounds():
            if time.monotonic() > ends_at:
                return
            self._note(fault.__name__.strip("_"))
            await fault()
            await asyncio.sleep(self._random.uniform(0.1, 0.5) * self._ttl_s)

    def _rounds(self) -> Iterator[Callable[[], Awaitable[None]]]:
        faults = [self._kill, self._stop, self._busy, self._stop_redis, self._empty_redis, self._slow]
        faults += [self._cut, self._stall, self._jump]
        while True:
            self._random.shuffle(faults)
            yield from faults

    async def _kill(self) -> None:
        for program in self._some():
            program.send_signal(signal.SIGKILL)
            program.replace()

    async def _stop(self) -> None:
        """Some for less than their TTL, some for longer: those wake up believing what is no longer so."""
        stopped = self._some()
        for program in stopped:
            program.send_signal(signal.SIGSTOP)
        await asyncio.sleep(self._random.uniform(0.3, 2.0) * self._ttl_s)
        for program in stopped:
            program.send_signal(signal.SIGCONT)

    async def _busy(self) -> None:
        """Their loops run nothing else for longer than their leases last."""
        for program in self._some():
            program.send_signal(BUSY)
        await asyncio.sleep(BUSY_TTLS * self._ttl_s)

    async def _stop_redis(self) -> None:
        self._server.pause()
        await asyncio.sleep(self._random.uniform(0.2, 1.5) * self._ttl_s)
        self._server.go_on()

    async def _empty_redis(self) -> None:
        self._server.kill()
        await asyncio.sleep(self._random.uniform(0, 0.5) * self._ttl_s)
        await asyncio.to_thread(self._server.start)

    async def _cut(self) -> None:
        await self._interrupt(lambda proxy: (setattr(proxy, "refuses", True), proxy.cut()))

    async def _stall(self) -> None:
        await self._interrupt(lambda proxy: proxy.stall())

    async def _slow(self) -> None:
        await self._interrupt(lambda proxy: setattr(proxy, "delay_s", self._random.uniform(0.1, 0.8)))

    async def _interrupt(self, how: Callable[[Proxy], object]) -> None:
        cut_off = self._some()
        for program in cut_off:
            how(program.proxy)
        await asyncio.sleep(self._random.uniform(0.1, 1.5) * self._ttl_s)
        for program in cut_off:
            program.proxy.flow()

    async def _jump(self) -> None:
        """The promise is for one jump in a TTL, so there are never two."""
        await asyncio.sleep(max(0.0, self._jumped_at + 2 * self._ttl_s - time.monotonic()))
        self._server.set_clock(self._random.choice(JUMPS_S))
        self._jumped_at = time.monotonic()

    def _some(self) -> list[Program]:
        return self._random.sample(self._programs, self._random.randint(1, max(1, len(self._programs) // 2)))

    def _note(self, kind: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self._log.note(Event(time.monotonic(), "nemesis", "fault", "ok", text=kind))
