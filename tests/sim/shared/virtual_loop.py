"""An event loop whose clock jumps to whatever comes next: hours of waiting in no time, the same at every run."""

from __future__ import annotations

import asyncio
import heapq
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """Only for programs that wait for nothing outside themselves."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        """One turn. If nothing is ready, time jumps to the next timer."""
        inside: Any = self
        scheduled = inside._scheduled
        while scheduled and scheduled[0]._cancelled:
            inside._timer_cancelled_count -= 1
            heapq.heappop(scheduled)._scheduled = False
        if not inside._ready and not inside._stopping:
            assert scheduled, "deadlock: all tasks wait, and no timer is set"
            self._now = max(self._now, scheduled[0]._when)
        super()._run_once()  # type: ignore[misc]
