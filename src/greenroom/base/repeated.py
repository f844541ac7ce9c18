"""Work that is done again and again for as long as a gateway lives: writing what waits, looking at what may change.

Owns the pause between two runs, and what an error means: nothing. It is told once, and the next run may fare better.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

# What failed in one run is tried again after so long, where nothing else is due before.
AGAIN_S = 5.0


class Repeated:
    """Runs `work` after a pause of `pause_s()` seconds (None: without end), and sooner when woken.

    `tell` hears of the first error of a row of failed runs, and no more until a run has succeeded.
    """

    def __init__(
        self,
        work: Callable[[], Awaitable[object]],
        name: str,
        pause_s: Callable[[], float | None],
        tell: Callable[[str, Exception], None],
    ) -> None:
        self._work = work
        self._name = name
        self._pause_s = pause_s
        self._tell = tell
        self._woken = asyncio.Event()
        self._is_failing = False
        self._is_stopped = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin with a pause. May be called again."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name=self._name)

    def wake(self) -> None:
        """Run now, or once more after the run that is under way."""
        self._woken.set()

    async def stop(self) -> None:
        """Run no more, until it is started again. What runs is waited for: a thread that writes cannot be stopped."""
        if self._task is not None:
            self._is_stopped = True
            self.wake()
            await asyncio.wait((self._task,))
            self._is_stopped, self._task = False, None

    async def cancel(self) -> None:
        """The same, but what runs is cancelled. Work that ends in spite of that is not repeated either."""
        if self._task is not None:
            self._task.cancel()
            await self.stop()

    async def _run(self) -> None:
        while True:
            try:
                # The pause needs memory, too: where there is none, others have their turn all the same.
                await asyncio.sleep(0)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s()):
                        await self._woken.wait()
                self._woken.clear()
                if self._is_stopped:
                    return
                await self._work()
                self._is_failing = False
            except Exception as error:
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        if not self._is_failing:
            self._is_failing = True
            # Where memory is short, an error may not even be told.
            with contextlib.suppress(MemoryError):
                self._tell(f"{self._name} failed and is tried again", error)
