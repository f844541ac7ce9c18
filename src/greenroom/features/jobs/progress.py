"""How far a running job is: what its engine reports, else an estimate.

Owns the question to the engine, `GET <progress_path>?request=ID` → `{"progress": 0..1}`. It is asked at most once a
second for each job, only while the job runs and a caller looks. What an engine says is never trusted: garbage counts as
no answer, and progress never goes backwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

import msgspec

from greenroom.runtime.moves.process_moves import EngineCall
from greenroom.runtime.slots import LiveSlot

ASK_EVERY_S: Final = 1.0
# An engine that computes may not answer at once. Callers wait for it no longer than this.
ANSWER_MAX_S: Final = 0.5
# Nothing that still runs is shown as done.
PROGRESS_MAX: Final = 0.99
# Before this much is done, what is left cannot be told from it.
_TELLING: Final = 0.02


class _Reported(msgspec.Struct):
    progress: float


_reported: Final = msgspec.json.Decoder(_Reported)


class JobProgress:
    """Of one job."""

    def __init__(self) -> None:
        self._slot: LiveSlot | None = None
        self._request_id = ""
        self._asked_at: float | None = None
        self._asking: asyncio.Task[None] | None = None
        self._shown: float | None = None
        self.reported: float | None = None
        """What its engine said last."""

    def begin(self, slot: LiveSlot, request_id: str) -> None:
        """The engine of this slot is sent the request now."""
        self._slot, self._request_id = slot, request_id

    @property
    def is_reported(self) -> bool:
        """True if its engine reports progress at all."""
        return self._slot is not None and self._slot.entry.engine.progress_path is not None

    async def look(self) -> None:
        """Ask the engine, if that is due, and wait a moment for its answer. Never raises."""
        if self._asking is None and self._is_due():
            self._asked_at = time.monotonic()
            self._asking = asyncio.get_running_loop().create_task(self._ask())
            self._asking.add_done_callback(self._asked)
        if self._asking is not None:
            # Several callers may wait for one answer.
            await asyncio.wait((self._asking,), timeout=ANSWER_MAX_S)

    def _is_due(self) -> bool:
        return self.is_reported and (self._asked_at is None or time.monotonic() - self._asked_at >= ASK_EVERY_S)

    async def _ask(self) -> None:
        slot = self._slot
        assert slot is not None
        with contextlib.suppress(OSError, ValueError, TimeoutError, msgspec.MsgspecError):
            async with asyncio.timeout(ASK_EVERY_S):
                target = f"{slot.entry.engine.progress_path}?request={self._request_id}"
                status, body = await EngineCall(slot.pool.address)("GET", target)
            said = _reported.decode(body).progress
            if status == 200 and 0.0 <= said <= 1.0:
                self.reported = max(self.reported or 0.0, min(said, PROGRESS_MAX))

    def _asked(self, task: asyncio.Task[None]) -> None:
        self._asking = None

    def close(self) -> None:
        """The job has ended; an answer that comes now is not wanted."""
        if self._asking is not None:
            self._asking.cancel()

    def shown(self, ran_s: float, usual_s: float | None) -> tuple[float | None, float | None]:
        """Progress and seconds left, after `ran_s`; `usual_s` is how long such requests take. None: not known."""
        done, left_s = self.reported, None if usual_s is None else max(0.0, usual_s - ran_s)
        if done is None and usual_s:
            done = min(ran_s / usual_s, PROGRESS_MAX)
        elif done is not None and done >= _TELLING:
            left_s = ran_s * (1.0 - done) / done
        if done is not None:
            self._shown = max(self._shown or 0.0, done)
        return self._shown, left_s
