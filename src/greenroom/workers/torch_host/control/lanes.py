"""Things done one after the other for one slot, beside those of other slots.

Owns one thread per slot and the queue before it. What is done there is not known here.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Final

# A gateway asks for one move at a time; this many at once is a mistake somewhere.
WAITING_MAX: Final = 64


class Lane:
    """Runs what it is given in order. `cancelled` tells what runs now that nobody wants it any more."""

    def __init__(self, name: str) -> None:
        self.cancelled = threading.Event()
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"slot-{name}", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        """Do this when everything before it is done. Raises queue.Full."""
        if self._waiting.qsize() >= WAITING_MAX:
            raise queue.Full
        self._waiting.put(work)

    def end(self) -> None:
        """Stop after what is being done. To be called once, by the last piece of work or by whoever made the lane."""
        self.cancelled.set()
        self._waiting.put(None)

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            work()
