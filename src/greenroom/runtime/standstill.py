"""How long this process has stood still: suspended, stopped, or held by one long piece of work. What others sent
meanwhile is not read yet, so a deadline for hearing of them must not count that time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

# The loop is looked at this often. A turn longer than two of these is a standstill: a busy loop has none.
EVERY_S: Final = 0.25
TURN_MAX_S: Final = 2 * EVERY_S


class Standstill:
    def __init__(self) -> None:
        self._before_s = 0.0
        self._looked_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Look at the running loop from now on."""
        if self._timer is None:
            self._looked_at = asyncio.get_running_loop().time()
            self._look()

    @property
    def total_s(self) -> float:
        """All of it since `watch`, up to now."""
        return self._before_s + self._current_s()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _current_s(self) -> float:
        if self._timer is None:
            return 0.0
        turn_s = asyncio.get_running_loop().time() - self._looked_at
        return turn_s if turn_s > TURN_MAX_S else 0.0

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._before_s += self._current_s()
        self._looked_at = loop.time()
        self._timer = loop.call_later(EVERY_S, self._look)


@asynccontextmanager
async def running_timeout(seconds: float) -> AsyncIterator[None]:
    """As `asyncio.timeout`, but for answers of other processes: time in which this one stood still does not count."""
    loop, standstill = asyncio.get_running_loop(), Standstill()
    standstill.watch()
    began = loop.time()
    timer: asyncio.TimerHandle
    async with asyncio.timeout(None) as limit:

        def look() -> None:
            nonlocal timer
            left_s = seconds - (loop.time() - began - standstill.total_s)
            if left_s > 0:
                timer = loop.call_later(left_s, look)
            else:
                limit.reschedule(loop.time())

        timer = loop.call_later(seconds, look)
        try:
            yield
        finally:
            timer.cancel()
            standstill.close()
