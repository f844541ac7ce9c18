"""Slots that live: the process, the connections to it, and its last lines. The shell's half of the core's slots."""

from __future__ import annotations

import asyncio

from greenroom.core.model import ModelId, SlotId
from greenroom.http.upstream import Pool
from greenroom.process.logs import LogRing
from greenroom.process.spawn import Child
from greenroom.runtime.catalogue import Entry

# A connection that breaks is often the first sign of a dead process; its exit follows within this, or it lives.
EXIT_FOLLOWS_S = 0.5


class LiveSlot:
    __slots__ = ("child", "entry", "id", "pool", "socket")

    def __init__(self, slot: SlotId, entry: Entry, child: Child, pool: Pool, socket: str | None) -> None:
        self.id = slot
        self.entry = entry
        self.child = child
        self.pool = pool
        self.socket = socket

    async def settle(self) -> None:
        """Give a broken connection's process the moment it needs to be seen dead, so that its loss is told first."""
        try:
            async with asyncio.timeout(EXIT_FOLLOWS_S):
                await self.child.wait()
        except TimeoutError:
            return
        # The exit's callbacks run in this turn of the loop; after the next one they have been heard.
        await asyncio.sleep(0)


class LiveSlots:
    """Every live slot, and the log of every model, which outlives its slots."""

    def __init__(self) -> None:
        self.live: dict[SlotId, LiveSlot] = {}
        self._logs: dict[ModelId, LogRing] = {}

    def log(self, model: ModelId) -> LogRing:
        return self._logs.setdefault(model, LogRing())

    def forget_logs(self, known: frozenset[str]) -> None:
        """Models that are no longer configured keep no lines, and who follows them is told that there is no more."""
        for model in [model for model in self._logs if model not in known]:
            self._logs.pop(model).close()
