"""Host memory made known to the GPU's driver, in the background, after an arena is filled.

Owns the thread that does it and what has been registered. From registered memory a GPU copies by itself at the speed of
the wire; from other memory at an eighth of it. Never touches the content. A wake that comes before it is finished
waits: registering goes on at a third of the wire's speed at least, so waiting and then copying is the faster way.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ..failures import Failure
from .driver import Driver


class Registration:
    """Pieces of memory (address, bytes), registered as far as the system allows. No copy may be of two."""

    def __init__(self, driver: Driver, pieces: Sequence[tuple[int, int]]) -> None:
        self._driver, self._pieces = driver, pieces
        self._registered: list[int] = []
        self._stop = threading.Event()
        self.problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="register", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when all is registered, or as much as can be."""
        self._thread.join()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def undo(self) -> None:
        """Stop, and take back what was done. Nothing may be copying from the memory any more."""
        self._stop.set()
        self._thread.join()
        while self._registered:
            self._driver.unregister(self._registered.pop())

    def _run(self) -> None:
        for pointer, size in self._pieces:
            if self._stop.is_set():
                return
            try:
                self._driver.register(pointer, size)
            except Failure as reason:
                # Copies from the rest still work, slowly. Whoever looks at this worker is told.
                self.problem = str(reason)
                return
            self._registered.append(pointer)
