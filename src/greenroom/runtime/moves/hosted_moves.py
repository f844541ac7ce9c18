"""Moves of slots that live in workers: a load fills an arena and wakes it, a sleep gives the GPU back, and so on.

Owns the order of steps, and what each failed step leaves: nothing, or the sleeping copy. A worker that ends takes no
weights with it: they lie in arenas that this process holds, and the next wake happens in another worker. Never decides
what moves: the scheduler did. See docs/adr/0009.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from greenroom.core.model import Claim, DeviceId, Move, SlotId, Tier
from greenroom.engines.base import CacheFigures, HostedEngine
from greenroom.errors import EngineFault, LoadFailed
from greenroom.process.proc import oom_kills
from greenroom.process.spawn import Exit
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.clocks import running_timeout
from greenroom.runtime.memory.slot_memory import HostedMemory
from greenroom.runtime.moves.admission import MemoryGrants
from greenroom.runtime.moves.load_errors import LAST_LINES, LoadErrors
from greenroom.runtime.moves.opening import SlotOpener, uninterrupted
from greenroom.runtime.shell import Shell
from greenroom.runtime.slots import LiveSlot
from greenroom.runtime.workers.control_link import Answer, OpFailed, WorkerLost, count, seconds
from greenroom.runtime.workers.hosted_slots import HostedSlot
from greenroom.runtime.workers.worker import STOP_S, Worker

FLUSH_MAX_S: Final = 10.0
# No slot has more devices than this.
DEVICES_MAX: Final = 16

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class SeenMove:
    """What a slot was seen to use after its move, and how long the move takes in all where copies still go on."""

    seen: Claim | None = None
    took_s: float | None = None


class HostedMoves:
    """`on_worker_lost` must be told of every worker that ended without being asked to."""

    def __init__(
        self,
        shell: Shell,
        opener: SlotOpener,
        memory: HostedMemory,
        admission: MemoryGrants,
        failures: LoadErrors,
    ) -> None:
        self.table = shell.hosted_slots
        self._slots = shell.slots
        self._opener = opener
        self._errors = opener.errors
        self._memory = memory
        self._admission = admission
        self._grants = admission.grants
        self._cleanup = admission.cleanup
        self._failures = failures
        self._observer = shell.observer
        self._loop = shell.loop

    # --- the moves --------------------------------------------------------------------------------------------------

    async def load(self, move: Move, entry: Entry, engine: HostedEngine) -> SeenMove:
        """Fill its arena and wake it. Raises LoadFailed, NoGrant or StoreDown, and leaves nothing behind."""
        await self._cleanup.finished(move.claim)
        async with self._admission.granted(move), self._new(move, entry, engine) as slot:
            # Checked before the long read too, which would be in vain without room.
            await self._admission.check_room(move)
            return await self._woken(move, slot)

    async def prepare(self, move: Move, entry: Entry, engine: HostedEngine) -> SeenMove:
        """Fill its arena. This takes no GPU memory, so it needs no grant. Raises LoadFailed."""
        async with self._new(move, entry, engine) as slot:
            await self._twice(move, slot, lambda: self._opener.open(move, slot))
        return SeenMove(slot.told)

    async def wake(self, move: Move) -> SeenMove:
        """Wake a sleeping slot, in another worker if its own has ended. A wake that fails leaves it asleep. Raises
        LoadFailed, NoGrant or StoreDown."""
        slot = self.table.there[move.slot]
        await self._cleanup.finished(move.claim)
        async with self._admission.granted(move):
            with _moving(slot):
                return await self._woken(move, slot)

    async def sleep(self, move: Move) -> SeenMove:
        """Give its GPU memory back. Raises LoadFailed if the worker cannot; the slot must be unloaded then."""
        async with self._leaving(move) as slot:
            await self._put_to_sleep(move, slot)
        return SeenMove(slot.told)

    async def unload(self, move: Move) -> None:
        """Close the slot and free its arena."""
        async with self._leaving(move) as slot:
            await self._forget(slot)

    def reconcile(self, slot: SlotId) -> None:
        """Called after each move: forget a slot which the scheduler dropped because its worker ended just then."""
        if slot in self.table.there and not self._memory.knows(slot):
            self._slots.live.pop(slot, None)
            stray = self.table.there[slot]
            stray.is_moving = True
            self._cleanup.start(self._forget(stray), stray.on_gpus, f"forget {slot}")

    async def flush(self, slot: SlotId, tenant: str | None, tag: str | None) -> tuple[int, int]:
        """Forget cached prefixes; a sleeping slot has none. Returns tokens removed and bytes freed. Raises EngineFault
        if the worker cannot."""
        there = self.table.there.get(slot)
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

    async def figures(self, slot: SlotId) -> CacheFigures | None:
        """What its worker tells of its KV cache; None if it has none or does not answer. Bounded by the caller."""
        there = self.table.there.get(slot)
        if there is None or there.worker is None or not there.is_ready:
            return None
        try:
            answer = await there.worker.ask("look")
        except (WorkerLost, OpFailed):
            return None
        slots = answer.get("slots")
        about = slots.get(slot) if isinstance(slots, dict) else None
        used, size = (about.get("kv_used"), about.get("kv_bytes")) if isinstance(about, dict) else (None, None)
        if not isinstance(used, int | float) or not 0 <= used <= 1:
            return None
        return CacheFigures(float(used), kv_bytes=size if isinstance(size, int) and size >= 0 else None)

    # --- what must hold around a move -------------------------------------------------------------------------------

    @asynccontextmanager
    async def _new(self, move: Move, entry: Entry, engine: HostedEngine) -> AsyncIterator[HostedSlot]:
        """A new slot, which is forgotten again if the block raises."""
        key = engine.host_key(move.slot, entry.config, self._memory.gpus_for(entry, move.slot))
        slot = self.table.there[move.slot] = HostedSlot(move.slot, entry, engine, key)
        with _moving(slot):
            try:
                yield slot
            except BaseException:
                await self._forget(slot)
                raise

    @asynccontextmanager
    async def _leaving(self, move: Move) -> AsyncIterator[HostedSlot]:
        """Wait, after the block, until what the slot held on its GPUs is really free, and give its grant back."""
        slot = self.table.there[move.slot]
        # The slot is untouched until it is certain that its memory will be used.
        await self._grants.make_way(move)
        with _moving(slot):
            self._slots.live.pop(slot.id, None)
            held = slot.on_gpus
            before = {gpu: await self._memory.glance(gpu) for gpu in held}
            yield slot
            for gpu, held_mib in held.items():
                await self._memory.back(slot.id, gpu, before[gpu], held_mib)
        await self._grants.leave(slot.id)

    # --- steps ------------------------------------------------------------------------------------------------------

    async def _twice(self, move: Move, slot: HostedSlot, step: Callable[[], Awaitable[_Result]]) -> _Result:
        """Run this step; once more in another worker if the first one ended, perhaps because of another slot."""
        kills_before = oom_kills()
        for is_last in (False, True):
            try:
                return await step()
            except WorkerLost:
                worker = slot.worker
                assert worker is not None, "only a worker that was asked can be lost"
                await self._lost_meanwhile(worker, slot)
                if is_last or not (slot.had_neighbours or slot.arena.is_filled):
                    raise self._errors.worker_ended(move, slot.entry, worker, kills_before) from None
            await self._cleanup.finished(move.claim)
        raise AssertionError("the second try ends it")

    async def _lost_meanwhile(self, worker: Worker, slot: HostedSlot) -> None:
        worker.end()
        await worker.gone.wait()
        self._opener.let_go(slot)

    async def _woken(self, move: Move, slot: HostedSlot) -> SeenMove:
        answer = await self._twice(move, slot, lambda: self._wake_once(move, slot))
        arrives_s = seconds(answer, "expected_s")
        return SeenMove(slot.told, self._loop.clock() - move.started + arrives_s)

    async def _wake_once(self, move: Move, slot: HostedSlot) -> Answer:
        if slot.worker is None:
            await self._opener.open(move, slot)
        await self._admission.check_room(move)
        await self._grants.confirm(move.slot)
        # A worker that ended during the check is still set here, and raises WorkerLost when asked.
        worker = slot.worker
        assert worker is not None and slot.pool is not None and slot.socket is not None
        began = self._loop.clock()
        answer = await self._wake_in(move, slot, worker)
        child, ready_since = worker.child, self._loop.clock()
        self._slots.live[slot.id] = LiveSlot(
            slot.id,
            slot.entry,
            child,
            slot.pool,
            slot.socket,
            ready_since,
            stop=lambda: child.stop(STOP_S),
            slots=self._slots,
        )
        took_s = self._loop.clock() - began + seconds(answer, "expected_s")
        self._observer.woke(slot.entry.id, count(answer, "bytes"), took_s)
        return answer

    async def _wake_in(self, move: Move, slot: HostedSlot, worker: Worker) -> Answer:
        with self.table.stirring(*slot.gpus):
            try:
                async with running_timeout(worker.timeouts.wake_s):
                    answer = await worker.ask("wake", slot=slot.id)
            except OpFailed as error:
                raise await self._errors.wake_error(move, slot.entry, error) from error
            except (TimeoutError, asyncio.CancelledError) as error:
                await uninterrupted(self._asleep_again(slot, worker))
                if isinstance(error, TimeoutError):
                    said = f"{slot.entry.id} did not wake within {worker.timeouts.wake_s:g} s."
                    raise LoadFailed(said, public=said) from error
                raise
            slot.device_bytes, slot.is_ready = _device_bytes(answer), True
        return answer

    async def _asleep_again(self, slot: HostedSlot, worker: Worker) -> None:
        """Undo a wake that was cancelled. A worker that cannot is ended; the weights are safe in the arena."""
        try:
            await self._sleep_in(slot, worker)
        except (OpFailed, WorkerLost, TimeoutError):
            await self._lost_meanwhile(worker, slot)

    async def _sleep_in(self, slot: HostedSlot, worker: Worker) -> None:
        times = worker.timeouts
        await worker.let_go_of(slot.id, "sleep", alone_s=times.sleep_s, shared_s=times.sleep_shared_s)

    async def _put_to_sleep(self, move: Move, slot: HostedSlot) -> None:
        worker = slot.worker
        if worker is None:
            # The worker ended a moment ago, and so did its use of the GPU.
            return
        try:
            with self.table.stirring(*slot.gpus):
                await self._sleep_in(slot, worker)
                slot.is_ready = False
        except WorkerLost:
            await self._lost_meanwhile(worker, slot)
            await self._cleanup.finished(move.claim)
        except (OpFailed, TimeoutError) as error:
            raise LoadFailed(f"{slot.entry.id} could not be put to sleep: {error or 'it did not answer'}") from error

    async def _forget(self, slot: HostedSlot) -> None:
        with self.table.stirring(*(slot.gpus if slot.is_ready else ())):
            await self._opener.shut(slot)
            slot.is_ready = False
        slot.arena.close()
        self.table.there.pop(slot.id, None)

    # --- a worker that ended ----------------------------------------------------------------------------------------

    def on_worker_lost(self, worker: Worker, exit: Exit) -> None:
        """Its ready slots are asleep now, which is posted in one event. A slot that is moving is left to its move."""
        there = [slot for slot in self.table.there.values() if slot.worker is worker]
        were_ready = [slot for slot in there if slot.is_ready]
        for slot in were_ready:
            self._slots.live.pop(slot.id, None)
            slot.is_ready = False
            self._observer.lost(slot.entry.id, slot.id, str(exit))
        gpus = frozenset(gpu for slot in there for gpu in slot.gpus)
        work = self._clean_up(worker, gpus, [slot.id for slot in were_ready])
        self._cleanup.start(work, gpus, f"remains {worker.id}")
        lost = [slot for slot in were_ready if not slot.is_moving]
        for slot in lost:
            self._failures.ended(slot.entry, slot.id, "worker", exit, worker.lines_of(slot.id, LAST_LINES))
        if lost:
            self._failures.post_lost([slot.id for slot in lost], Tier.ASLEEP, exit)
        for slot in there:
            if not slot.is_moving:
                self._opener.let_go(slot)
            elif slot.pool is not None:
                slot.pool.close()

    async def _clean_up(self, worker: Worker, gpus: frozenset[DeviceId], were_ready: list[SlotId]) -> None:
        await worker.stop()
        await self._memory.gone(worker.pid, gpus)
        for slot in were_ready:
            await self._grants.leave(slot)


def _device_bytes(answer: Answer) -> list[int]:
    """What a worker says that a slot holds on each of its devices."""
    each = answer.get("each_device_bytes")
    said = each if isinstance(each, list) and each else [answer.get("device_bytes")]
    return [count({"bytes": one}, "bytes") for one in said[:DEVICES_MAX]]


@contextmanager
def _moving(slot: HostedSlot) -> Iterator[None]:
    slot.is_moving = True
    try:
        yield
    finally:
        slot.is_moving = False
