"""Moves of slots that live in workers: a load fills an arena and wakes it, a sleep gives the GPU back, and so on.

Owns the order of steps and what is left after each that goes wrong: nothing, or the sleeping copy. A worker that ends
takes no weights with it: they lie in arenas that this process holds, and the next wake happens in another worker. Never
decides: what moves was decided by the scheduler. See docs/adr/0009.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from greenroom.core.events import Event, SlotsLost
from greenroom.core.model import Claim, DeviceId, Move, SlotId, Tier
from greenroom.engines.base import HostedEngine
from greenroom.errors import EngineFault, LoadFailed
from greenroom.process.spawn import Exit
from greenroom.process.state_dir import StateDir
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.memory.hosted_memory import HostedMemory
from greenroom.runtime.moves.admission import Cleanup, Grants, NoGrant
from greenroom.runtime.moves.load_errors import LAST_LINES, Evidence, HostedErrors, LoadErrors
from greenroom.runtime.moves.opening import SlotOpener, whole
from greenroom.runtime.observer import Observer
from greenroom.runtime.slots import LiveSlot, LiveSlots
from greenroom.runtime.workers.control_link import Answer, OpFailed, WorkerLost, count, seconds
from greenroom.runtime.workers.hosted_slots import HostedSlot, HostedSlots
from greenroom.runtime.workers.pool import WorkerPool
from greenroom.runtime.workers.worker import Worker

# A wake maps memory and begins to copy; it may have to wait for host memory that is still being registered.
WAKE_MAX_S: Final = 120.0
# A sleep waits for the step under way and unmaps. A worker that needs longer for its only slot is ended.
SLEEP_MAX_S: Final = 30.0
# One that serves others has longer than it waits for its own threads: a step on a slow CPU may take a minute.
SLEEP_SHARED_MAX_S: Final = 150.0
FLUSH_MAX_S: Final = 10.0

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class MoveResult:
    """What a slot was seen to use when it had arrived, and what the move takes in all if that is not over yet."""

    seen: Claim | None = None
    took_s: float | None = None


class HostedMoves:
    """`keeps_spare` and `roots` are what the configuration says."""

    def __init__(
        self,
        table: HostedSlots,
        slots: LiveSlots,
        state_dir: StateDir,
        observer: Observer,
        post: Callable[[Event], None],
        clock: Callable[[], float],
        memory: HostedMemory,
        mishaps: HostedErrors,
        grants: Grants,
        remains: Cleanup,
        failures: LoadErrors,
        *,
        keeps_spare: bool,
        roots: Callable[[], tuple[str, ...]],
    ) -> None:
        self._table = table
        self._slots = slots
        self._observer = observer
        self._post = post
        self._clock = clock
        self._memory = memory
        self._mishaps = mishaps
        self._grants = grants
        self._remains = remains
        self._failures = failures
        self._hosts = WorkerPool(state_dir, observer, self._on_lost, keeps_spare=keeps_spare)
        self._opener = SlotOpener(slots, state_dir, self._hosts, observer, memory, mishaps, roots)
        table.workers = self._hosts.workers

    def has(self, slot: SlotId) -> bool:
        return slot in self._table.there

    async def close(self) -> None:
        """The last of all: workers that are left, spares above all."""
        await self._hosts.close()

    # --- the moves --------------------------------------------------------------------------------------------------

    async def load(self, move: Move, entry: Entry, engine: HostedEngine) -> MoveResult:
        """Fill its arena and wake it. Raises LoadFailed, NoGrant or StoreDown, and leaves nothing."""
        await self._remains.cleared_up(move.claim)
        async with self._granted(move), self._new(move, entry, engine) as slot:
            # Looked for before a long read too: it would be in vain.
            await self._check_room(move)
            return await self._woken(move, slot)

    async def prepare(self, move: Move, entry: Entry, engine: HostedEngine) -> MoveResult:
        """Fill its arena. Nothing of a GPU is taken, so that nobody need be asked."""
        async with self._new(move, entry, engine) as slot:
            await self._twice(move, slot, lambda: self._opener.open(move, slot))
        return MoveResult(slot.told)

    async def wake(self, move: Move) -> MoveResult:
        """Bring a sleeping slot on stage, in another worker if its own has ended. Failing, it is asleep again."""
        slot = self._table.there[move.slot]
        await self._remains.cleared_up(move.claim)
        async with self._granted(move):
            with _moving(slot):
                return await self._woken(move, slot)

    async def sleep(self, move: Move) -> MoveResult:
        """Give its GPU back. Raises LoadFailed when the worker cannot; it is to be unloaded then."""
        slot = self._table.there[move.slot]
        # Untouched until it is certain that somebody will have its place.
        await self._grants.make_way(move)
        with _moving(slot):
            self._slots.live.pop(slot.id, None)
            async with self._giving_back(slot):
                await self._put_to_sleep(move, slot)
        await self._grants.leave(slot.id)
        return MoveResult(slot.told)

    async def unload(self, move: Move) -> None:
        """Let go of everything."""
        slot = self._table.there[move.slot]
        await self._grants.make_way(move)
        with _moving(slot):
            self._slots.live.pop(slot.id, None)
            async with self._giving_back(slot):
                await self._forget(slot)
        await self._grants.leave(slot.id)

    def reconcile(self, slot: SlotId) -> None:
        """A move has ended. One whose worker ended in that very moment is not known to the scheduler any more."""
        if slot in self._table.there and not self._memory.knows(slot):
            self._slots.live.pop(slot, None)
            stray = self._table.there[slot]
            stray.is_moving = True
            self._remains.clear_up(self._forget(stray), stray.on_gpu, f"forget {slot}")

    async def flush(self, slot: SlotId, tenant: str | None, tag: str | None) -> tuple[int, int]:
        """Forget cached prefixes; one that is asleep has none. Returns entries removed and bytes freed."""
        there = self._table.there.get(slot)
        if there is None or there.worker is None or not there.is_ready:
            return 0, 0
        try:
            async with asyncio.timeout(FLUSH_MAX_S):
                answer = await there.worker.ask("flush", slot=slot, tenant=tenant, tag=tag)
        except WorkerLost:
            return 0, 0
        except (OpFailed, TimeoutError) as error:
            raise EngineFault(
                f"The cache of {there.entry.id} could not be flushed.", details=str(error) or "it did not answer"
            ) from error
        return count(answer, "entries"), count(answer, "bytes")

    # --- what must hold around a move -------------------------------------------------------------------------------

    @asynccontextmanager
    async def _granted(self, move: Move) -> AsyncIterator[None]:
        try:
            await self._grants.enter(move)
            yield
        except BaseException:
            await self._grants.leave(move.slot)
            raise

    @asynccontextmanager
    async def _new(self, move: Move, entry: Entry, engine: HostedEngine) -> AsyncIterator[HostedSlot]:
        """A slot that is forgotten again if it does not arrive."""
        key = engine.host_key(move.slot, entry.config, self._memory.gpus_for(entry, move.slot))
        slot = self._table.there[move.slot] = HostedSlot(move.slot, entry, engine, key)
        with _moving(slot):
            try:
                yield slot
            except BaseException:
                await self._forget(slot)
                raise

    @asynccontextmanager
    async def _giving_back(self, slot: HostedSlot) -> AsyncIterator[None]:
        """What it holds on a GPU is really free at the end."""
        gpu, held_mib = slot.gpu, sum(slot.on_gpu.values())
        before = await self._memory.glance(gpu) if held_mib else None
        yield
        await self._memory.back(slot.id, gpu, before, held_mib)

    # --- steps ------------------------------------------------------------------------------------------------------

    async def _twice(self, move: Move, slot: HostedSlot, step: Callable[[], Awaitable[_Result]]) -> _Result:
        """A worker that ends may have ended for another's sake: then it is tried again in another worker, once."""
        evidence = Evidence()
        for is_last in (False, True):
            try:
                return await step()
            except WorkerLost:
                worker = slot.worker
                assert worker is not None, "only a worker that was spoken to can be lost"
                await self._lost_meanwhile(worker, slot)
                if is_last or not (slot.had_company or slot.arena.is_filled):
                    raise self._mishaps.worker_ended(move, slot.entry, worker, evidence) from None
            await self._remains.cleared_up(move.claim)
        raise AssertionError("the second try ends it")

    async def _lost_meanwhile(self, worker: Worker, slot: HostedSlot) -> None:
        worker.end()
        await worker.gone.wait()
        self._opener.let_go(slot)

    async def _woken(self, move: Move, slot: HostedSlot) -> MoveResult:
        answer = await self._twice(move, slot, lambda: self._wake_once(move, slot))
        arrives_s = seconds(answer, "expected_s")
        return MoveResult(slot.told, self._clock() - move.started + arrives_s)

    async def _wake_once(self, move: Move, slot: HostedSlot) -> Answer:
        if slot.worker is None:
            await self._opener.open(move, slot)
        await self._check_room(move)
        await self._grants.confirm(move.slot)
        # One that ended while room was looked for is still named, and does not answer.
        worker = slot.worker
        assert worker is not None and slot.pool is not None and slot.socket is not None
        began = self._clock()
        answer = await self._wake_in(move, slot, worker)
        self._slots.live[slot.id] = LiveSlot(slot.id, slot.entry, worker.child, slot.pool, slot.socket)
        took_s = self._clock() - began + seconds(answer, "expected_s")
        self._observer.woke(slot.entry.id, count(answer, "bytes"), took_s)
        return answer

    async def _wake_in(self, move: Move, slot: HostedSlot, worker: Worker) -> Answer:
        with self._table.stirring(slot.gpu):
            try:
                async with asyncio.timeout(WAKE_MAX_S):
                    answer = await worker.ask("wake", slot=slot.id)
            except OpFailed as error:
                raise await self._mishaps.no_wake(move, slot.entry, error) from error
            except (TimeoutError, asyncio.CancelledError) as error:
                await whole(self._asleep_again(slot, worker))
                if isinstance(error, TimeoutError):
                    said = f"{slot.entry.id} did not wake within {WAKE_MAX_S:g} s."
                    raise LoadFailed(said, public=said) from error
                raise
            slot.device_bytes, slot.is_ready = count(answer, "device_bytes"), True
        return answer

    async def _asleep_again(self, slot: HostedSlot, worker: Worker) -> None:
        """After a wake that was called off. A worker that cannot even do this is ended; the weights are safe."""
        try:
            await self._sleep_in(slot, worker)
        except (OpFailed, WorkerLost, TimeoutError):
            await self._lost_meanwhile(worker, slot)

    async def _sleep_in(self, slot: HostedSlot, worker: Worker) -> None:
        await worker.let_go_of(slot.id, "sleep", alone_s=SLEEP_MAX_S, shared_s=SLEEP_SHARED_MAX_S)

    async def _put_to_sleep(self, move: Move, slot: HostedSlot) -> None:
        worker = slot.worker
        if worker is None:
            # It ended a moment ago, and what it held with it.
            return
        try:
            with self._table.stirring(slot.gpu):
                await self._sleep_in(slot, worker)
                slot.is_ready = False
        except WorkerLost:
            await self._lost_meanwhile(worker, slot)
            await self._remains.cleared_up(move.claim)
        except (OpFailed, TimeoutError) as error:
            raise LoadFailed(f"{slot.entry.id} could not be put to sleep: {error or 'it did not answer'}") from error

    async def _check_room(self, move: Move) -> None:
        """Who lost this memory, or gave it back on paper, may still use it."""
        if missing := await self._memory.lacks(move.claim):
            said = " ".join(f"{device}={mib}" for device, mib in missing.items())
            raise NoGrant(f"memory is free on paper only, missing_mib: {said}")

    async def _forget(self, slot: HostedSlot) -> None:
        with self._table.stirring(slot.gpu if slot.is_ready else None):
            await self._opener.shut(slot)
            slot.is_ready = False
        slot.arena.close()
        self._table.there.pop(slot.id, None)

    # --- a worker that ended ----------------------------------------------------------------------------------------

    def _on_lost(self, worker: Worker, exit: Exit) -> None:
        """Those who were on stage there are asleep now, all told in one event. Who moves sees to itself."""
        there = [slot for slot in self._table.there.values() if slot.worker is worker]
        on_stage = [slot for slot in there if slot.is_ready]
        for slot in on_stage:
            self._slots.live.pop(slot.id, None)
            slot.is_ready = False
            self._observer.lost(slot.entry.id, slot.id, str(exit))
        gpus = frozenset(slot.gpu for slot in there if slot.gpu is not None)
        work = self._end_remains(worker, gpus, [slot.id for slot in on_stage])
        self._remains.clear_up(work, gpus, f"remains {worker.id}")
        lost = [slot for slot in on_stage if not slot.is_moving]
        for slot in lost:
            self._failures.ended(slot.entry, slot.id, "worker", exit, worker.lines_of(slot.id, LAST_LINES))
        if lost:
            self._post(SlotsLost(self._clock(), tuple(slot.id for slot in lost), Tier.ASLEEP, str(exit)))
        for slot in there:
            if not slot.is_moving:
                self._opener.let_go(slot)
            elif slot.pool is not None:
                slot.pool.close()

    async def _end_remains(self, worker: Worker, gpus: frozenset[DeviceId], on_stage: list[SlotId]) -> None:
        await worker.stop()
        await self._memory.gone(worker.pid, gpus)
        for slot in on_stage:
            await self._grants.leave(slot)


@contextmanager
def _moving(slot: HostedSlot) -> Iterator[None]:
    slot.is_moving = True
    try:
        yield
    finally:
        slot.is_moving = False
