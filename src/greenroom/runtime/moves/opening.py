"""Opens slots in workers and closes them. Opening fills an arena or takes over a filled one.

Owns the steps into a worker and out of it. An open that fails leaves nothing in the worker. A worker that cannot close
a slot is ended. Never touches GPU memory: an open slot is asleep.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from greenroom.core.model import Move
from greenroom.errors import LoadFailed
from greenroom.http.upstream import EngineAddress, Pool
from greenroom.runtime.memory.slot_memory import HostedMemory
from greenroom.runtime.moves.admission import ModelRoots
from greenroom.runtime.moves.load_errors import HostedErrors
from greenroom.runtime.shell import Shell
from greenroom.runtime.workers.control_link import Answer, OpFailed, WorkerLost, count, seconds
from greenroom.runtime.workers.hosted_slots import HostedSlot
from greenroom.runtime.workers.pool import WorkerPool


class SlotOpener:
    def __init__(
        self,
        shell: Shell,
        pool: WorkerPool,
        memory: HostedMemory,
        errors: HostedErrors,
        roots: ModelRoots,
    ) -> None:
        self._slots = shell.slots
        self._state_dir = shell.state_dir
        self._pool = pool
        self._observer = shell.observer
        self._memory = memory
        self.errors = errors
        self._roots = roots

    async def open(self, move: Move, slot: HostedSlot) -> None:
        """Open this slot in a worker, where it is asleep then. A filled arena is taken over as it is. Raises
        LoadFailed, or WorkerLost."""
        limit_s, clock = slot.entry.config.load_timeout_s, asyncio.get_running_loop().time
        ends_at = clock() + limit_s
        try:
            async with asyncio.timeout(limit_s):
                await self._open_in_time(move, slot)
        except WorkerLost:
            raise
        except BaseException as error:
            await uninterrupted(self.shut(slot, opens_for_s=ends_at - clock()))
            if isinstance(error, OpFailed):
                raise self.errors.load_error(move, slot.entry, error) from error
            if isinstance(error, TimeoutError):
                said = f"{slot.entry.id} could not be loaded: it took more than {limit_s:g} s."
                raise LoadFailed(said, public=said) from error
            raise

    async def _open_in_time(self, move: Move, slot: HostedSlot) -> None:
        entry = slot.entry
        await self._roots.check(entry)
        options = self._options(slot)
        try:
            worker = await self._pool.let_in(slot.engine, slot.key, slot.id, self._slots.log(entry.id))
        except LoadFailed as error:
            why = error.message.rstrip(".")
            raise LoadFailed(
                f"{entry.id} could not be loaded: {why}.",
                public=f"{entry.id} could not be loaded: its worker could not be started.",
                details=error.details,
            ) from error
        slot.worker, slot.had_neighbours = worker, len(worker.slots) > 1
        slot.is_on_host = worker.device == "cpu"
        if not slot.arena.is_filled:
            slot.arena.empty()
        slot.socket = str(self._state_dir.run_dir / slot.socket_name())
        answer = await worker.ask(
            "open",
            fd=slot.arena.fd,
            on_progress=lambda share: setattr(slot, "progress", share),
            slot=slot.id,
            model=entry.public_id,
            path=entry.config.path,
            socket=slot.socket,
            filled=slot.arena.is_filled,
            gpus=slot.key.visible,
            options=options,
        )
        self._is_open(slot, answer)

    def _options(self, slot: HostedSlot) -> Mapping[str, object]:
        try:
            said = slot.engine.options(slot.entry.config, slot.key.gpus, self._memory.claim_of(slot.id))
        except LoadFailed as error:
            raise type(error)(f"{slot.entry.id} could not be loaded: {error.message}", details=error.details) from error
        memory = self._memory
        return {
            **said,
            "arena_max_bytes": memory.host_max_bytes,
            "host_free_bytes": memory.host_free_bytes,
            "checked": str(self._state_dir.path / "checked"),
        }

    def _is_open(self, slot: HostedSlot, answer: Answer) -> None:
        if not slot.arena.is_filled:
            self._observer.prepared(slot.entry.id, count(answer, "read_bytes"), seconds(answer, "seconds"))
        slot.arena.is_filled, slot.progress = True, None
        slot.arena_bytes = count(answer, "arena_bytes")
        slot.pool = Pool(EngineAddress(path=slot.socket or ""), name=f"The engine of {slot.entry.id}")
        self._pool.want_spare(slot.engine, slot.key)

    async def shut(self, slot: HostedSlot, *, opens_for_s: float = 0.0) -> None:
        """Close this slot in its worker. A worker that cannot is ended; its other slots go on elsewhere. A slot that is
        still being opened may be in a read by Transformers, which cannot be interrupted: it has `opens_for_s`, what is
        left of the time for opening."""
        worker = slot.worker
        if worker is not None:
            if slot.pool is not None:
                slot.pool.close()
            try:
                times = worker.timeouts
                shared_s = max(times.close_shared_s, opens_for_s)
                await worker.let_go_of(slot.id, "close", alone_s=times.close_s, shared_s=shared_s)
            except OpFailed as error:
                if error.kind != "unknown_slot":
                    worker.end()
            except (WorkerLost, TimeoutError):
                worker.end()
            if worker.is_lost:
                await worker.gone.wait()
        self.let_go(slot)

    def let_go(self, slot: HostedSlot) -> None:
        """Forget the worker of this slot, and its socket."""
        worker, slot.worker = slot.worker, None
        if slot.pool is not None:
            slot.pool.close()
        if slot.socket is not None:
            Path(slot.socket).unlink(missing_ok=True)
        slot.pool = slot.socket = slot.progress = None
        if worker is not None:
            self._pool.let_out(worker, slot.id)


async def uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Run this clean-up to its end. A cancel that comes meanwhile is raised after it."""
    clearing = asyncio.ensure_future(work)
    try:
        await asyncio.shield(clearing)
    except asyncio.CancelledError:
        await asyncio.wait((clearing,))
        raise
