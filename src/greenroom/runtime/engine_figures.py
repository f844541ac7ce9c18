"""Asks engines that have figures of their own how full their KV cache is and how often a prefix was found.

Owns when they are asked and what becomes of bad answers: none of them disturbs anything. A slot whose engine does not
answer, or answers with nonsense, has no figures until it does better. Never asks a slot that is not ready, and never
twice at once.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from greenroom.base.repeated import Repeated
from greenroom.config.part import Part
from greenroom.core.model import SlotId
from greenroom.runtime.moves.hosted_moves import HostedMoves
from greenroom.runtime.shell import Shell
from greenroom.runtime.slots import LiveSlot
from greenroom.telemetry.logs import get_logger

_log = get_logger("figures")

# As often as Prometheus usually looks, or a little more.
ASK_EVERY_S: Final = 5.0
# An engine answers in milliseconds; one that is busy starting threads may take a second.
ANSWER_MAX_S: Final = 3.0


class EngineFigures(Part):
    """The figures are kept with the live slots."""

    def __init__(
        self,
        shell: Shell,
        hosted: HostedMoves,
        every_s: float = ASK_EVERY_S,
    ) -> None:
        self._slots = shell.slots
        self._loop = shell.loop
        self._hosted = hosted
        self._looking = Repeated(self._look, "asking engines for figures", lambda: every_s, _log.failed)
        self._asking: dict[SlotId, asyncio.Task[None]] = {}

    def begin(self) -> None:
        self._looking.start()

    async def close(self) -> None:
        await self._looking.cancel()
        for task in self._asking.values():
            task.cancel()
        if self._asking:
            await asyncio.wait(self._asking.values())

    async def _look(self) -> None:
        for live in list(self._slots.live.values()):
            if not self._tells(live) or live.id in self._asking:
                continue
            slot = self._loop.view.slots.get(live.id)
            if slot is None or not slot.is_serving or slot.move is not None:
                live.figures = None
                continue
            task = asyncio.get_running_loop().create_task(self._ask(live), name=f"figures of {live.id}")
            self._asking[live.id] = task
            task.add_done_callback(partial(self._asked, live.id))

    def _tells(self, live: LiveSlot) -> bool:
        engine = live.entry.engine
        return engine.metrics_path is not None or engine.hosted

    def _asked(self, slot: SlotId, task: asyncio.Task[None]) -> None:
        del self._asking[slot]

    async def _ask(self, live: LiveSlot) -> None:
        engine, figures = live.entry.engine, None
        try:
            async with asyncio.timeout(ANSWER_MAX_S):
                if live.call is not None and engine.metrics_path is not None:
                    status, text = await live.call("GET", engine.metrics_path)
                    figures = engine.cache_figures(text, live.entry.config) if status == 200 else None
                elif engine.hosted:
                    figures = await self._hosted.figures(live.id)
        except (OSError, ValueError):
            # A TimeoutError is an OSError, too.
            figures = None
        live.figures = figures
