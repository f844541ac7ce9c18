"""Live slots: the process of each, its connections and its log. The shell's half of the core's slots."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from greenroom.core.model import ModelId, SlotId
from greenroom.engines.base import CacheFigures, CallEngine
from greenroom.http.headers import Headers, build_request
from greenroom.http.remote import RemoteEndpoint
from greenroom.http.request import Head
from greenroom.http.upstream import Pool
from greenroom.process.logs import LogRing
from greenroom.process.spawn import Child
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.moves.admission import Starting
from greenroom.runtime.prompt_slots import PromptCacheSlots
from greenroom.runtime.remote.spending import SpendingMeter
from greenroom.telemetry.logs import get_logger

# A broken connection is often the first sign of a dead process; its exit is seen within this time, or it lives.
EXIT_FOLLOWS_S: Final = 0.5
# An engine that has closed its socket is most often about to end, which takes seconds where it frees much memory. It
# may also listen again, or give the answers that run before it ends. One that does nothing of this is ended after so
# many refusals in a row: about 5 s. Refusals count only while no answer runs.
REFUSALS_MAX: Final = 20
REFUSED_EVERY_S: Final = 0.25
# An erase waits for the answer that its prompt slot is busy with.
ERASE_MAX_S: Final = 2.0
# 503 says that an engine has no room, or loads something. After so long of nothing else it is broken.
UNAVAILABLE_MAX_S: Final = 60.0


_log: Final = get_logger("runtime")


class _Erased(msgspec.Struct):
    n_erased: int


class LiveSlot:
    __slots__ = (
        "_check",
        "_slots",
        "_stop",
        "call",
        "child",
        "entry",
        "figures",
        "id",
        "meter",
        "pool",
        "prompts",
        "ready_since",
        "remote",
        "socket",
        "unavailable_at",
        "unavailable_since",
    )

    def __init__(
        self,
        slot: SlotId,
        entry: Entry,
        child: Child | None,
        pool: Pool,
        socket: str | None,
        ready_since: float,
        call: CallEngine | None = None,
        remote: RemoteEndpoint | None = None,
        meter: SpendingMeter | None = None,
        stop: Callable[[], Awaitable[object]] | None = None,
        slots: LiveSlots | None = None,
    ) -> None:
        self.id = slot
        self.entry = entry
        # None for a remote model, which `remote` says how to call.
        self.child = child
        self.remote = remote
        # Ends its process, which is then reported as lost; None if it has none.
        self._stop = stop
        # Of these, others may share its process; None if it has one of its own.
        self._slots = slots
        # Counts what it costs; None if nothing is known of that.
        self.meter = meter
        self.pool = pool
        self.socket = socket
        self.ready_since = ready_since
        # Calls to the process itself; None if a worker is asked instead.
        self.call = call
        # Whose prompts it holds; None if requests cannot name its slots.
        count = entry.facts.prompt_slots
        self.prompts = PromptCacheSlots(count) if count else None
        # What its engine last told of its cache; None if it tells nothing.
        self.figures: CacheFigures | None = None
        # Since when its engine has answered nothing but 503, and when it last did; None if it has answered otherwise.
        self.unavailable_since: float | None = None
        self.unavailable_at = 0.0
        self._check: asyncio.Task[None] | None = None

    def answered(self, status: int, now: float, *, is_at_work: bool) -> None:
        """Note the status of an answer. `is_at_work`: the engine works on other answers."""
        if status != 503 or is_at_work:
            self.unavailable_since = None
            return
        if self.unavailable_since is None or now - self.unavailable_at > UNAVAILABLE_MAX_S:
            self.unavailable_since = now
        self.unavailable_at = now

    def is_unavailable(self, now: float) -> bool:
        """True if its engine has answered nothing but 503 for so long that it is not only busy. It must have been asked
        all the while: after a longer pause nothing is known of it."""
        was_asked = now - self.unavailable_at <= UNAVAILABLE_MAX_S
        return self.unavailable_since is not None and was_asked and now - self.unavailable_since > UNAVAILABLE_MAX_S

    @property
    def is_remote(self) -> bool:
        return self.remote is not None

    def head(
        self,
        asked: Head,
        target: bytes,
        length: int,
        request_id: bytes,
        allowed: frozenset[bytes],
        ours: Headers | None,
    ) -> bytes:
        """The head of a request like this one for its engine, with those headers that are allowed; or its provider."""
        if self.remote is not None:
            return self.remote.head(asked.method, target, asked.headers, length, request_id)
        return build_request(
            asked.method,
            target,
            asked.headers,
            host=b"localhost",
            length=length,
            request_id=request_id,
            allowed=allowed,
            upgrade=asked.upgrade,
            ours=ours,
        )

    @property
    def process(self) -> Child:
        """The process of a slot that has one."""
        assert self.child is not None, "a remote model has no process"
        return self.child

    async def erase(self, indexes: Sequence[int]) -> int | None:
        """Erase the prompts in these of its prompt slots. Returns their tokens; None if not all were erased."""
        try:
            async with asyncio.timeout(ERASE_MAX_S):
                return sum([await self._erase(index) for index in indexes])
        except (OSError, ValueError, TimeoutError, msgspec.MsgspecError):
            # It is older, or sees pictures, or answers just now.
            return None

    async def _erase(self, index: int) -> int:
        assert self.call is not None, "only a process of its own has slots that can be named"
        status, body = await self.call("POST", f"/slots/{index}?action=erase", b"{}")
        if status != 200:
            raise ValueError(f"it answered {status}")
        return msgspec.json.decode(body, type=_Erased).n_erased

    def check(self) -> asyncio.Task[None] | None:
        """Find out, after a broken connection, whether its process lives. None for a remote model.

        Ends when the process has ended and its slots are reported as lost, or when it accepts connections. One that
        does neither is ended, but not while it or another slot of its process answers. Until then the scheduler counts
        its memory as held.
        """
        if self.child is not None and self._stop is not None and (self._check is None or self._check.done()):
            work = self._check_process(self.child, self._stop)
            self._check = asyncio.get_running_loop().create_task(work, name=f"check {self.id}")
        return self._check

    async def _check_process(self, child: Child, stop: Callable[[], Awaitable[object]]) -> None:
        wait_s, refusals = EXIT_FOLLOWS_S, 0
        while not await _has_ended(child, wait_s):
            if not await self.pool.refuses():
                return
            answers = self.pool.busy_count or (self._slots is not None and self._slots.answers(child))
            refusals = 0 if answers else refusals + 1
            if refusals == REFUSALS_MAX:
                _log.warning("an engine accepts no connections and is ended", model=self.entry.id, slot=self.id)
                await stop()
            wait_s = REFUSED_EVERY_S
        # Callbacks of the exit run in this turn of the loop; after the next turn they are done.
        await asyncio.sleep(0)


async def _has_ended(child: Child, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await child.wait()
    except TimeoutError:
        return False
    return True


class LiveSlots:
    """Every live slot, and the log of every model, which outlives its slots."""

    def __init__(self) -> None:
        self.live: dict[SlotId, LiveSlot] = {}
        # Engines that start, until they are live.
        self.starting: dict[SlotId, Starting] = {}
        self._logs: dict[ModelId, LogRing] = {}
        # Coming versions write into the logs of their models.
        self._versions: dict[ModelId, ModelId] = {}

    def log(self, model: ModelId) -> LogRing:
        return self._logs.setdefault(self._versions.get(model, model), LogRing())

    def coming(self, version: ModelId, model: ModelId) -> None:
        """This version writes into the log of its model."""
        self._versions[version] = model

    def answers(self, child: Child) -> bool:
        """True while a slot of this process answers."""
        return any(live.pool.busy_count for live in self.live.values() if live.child is child)

    def promoted(self, entry: Entry, version: ModelId) -> None:
        """The slots of this version are the model's from now on."""
        for live in self.live.values():
            if live.entry.id == version:
                live.entry = entry

    def ended(self, version: ModelId) -> None:
        """It was promoted or given up."""
        self._versions.pop(version, None)

    def forget_logs(self, known: frozenset[str]) -> None:
        """Drop the logs of models that are no longer configured; followers of these logs are told that they end."""
        for model in [model for model in self._logs if model not in known]:
            self._logs.pop(model).close()
