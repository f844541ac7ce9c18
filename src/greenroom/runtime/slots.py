"""Live slots: the process of each, its connections and its log. The shell's half of the core's slots."""

from __future__ import annotations

import asyncio

from greenroom.core.model import ModelId, SlotId
from greenroom.http.upstream import Pool
from greenroom.process.logs import LogRing
from greenroom.process.spawn import Child
from greenroom.runtime.catalogue import Entry

# A broken connection is often the first sign of a dead process; its exit is seen within this time, or it lives.
EXIT_FOLLOWS_S = 0.5


class LiveSlot:
    __slots__ = ("child", "entry", "id", "pool", "ready_since", "socket")

    def __init__(
        self, slot: SlotId, entry: Entry, child: Child, pool: Pool, socket: str | None, ready_since: float
    ) -> None:
        self.id = slot
        self.entry = entry
        self.child = child
        self.pool = pool
        self.socket = socket
        self.ready_since = ready_since

    async def settle(self) -> None:
        """Wait a moment after a broken connection, so that the exit of a dead process is reported first."""
        try:
            async with asyncio.timeout(EXIT_FOLLOWS_S):
                await self.child.wait()
        except TimeoutError:
            return
        # Callbacks of the exit run in this turn of the loop; after the next turn they are done.
        await asyncio.sleep(0)


class LiveSlots:
    """Every live slot, and the log of every model, which outlives its slots."""

    def __init__(self) -> None:
        self.live: dict[SlotId, LiveSlot] = {}
        self._logs: dict[ModelId, LogRing] = {}

    def log(self, model: ModelId) -> LogRing:
        return self._logs.setdefault(model, LogRing())

    def forget_logs(self, known: frozenset[str]) -> None:
        """Drop the logs of models that are no longer configured; followers of these logs are told that they end."""
        for model in [model for model in self._logs if model not in known]:
            self._logs.pop(model).close()
