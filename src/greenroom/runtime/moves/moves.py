"""What carries moves out, by the kind of engine: processes, slots in workers, and remote models."""

from __future__ import annotations

from greenroom.process.proc import PortRange
from greenroom.runtime.memory.memory import Memory
from greenroom.runtime.memory.slot_memory import HostedMemory
from greenroom.runtime.moves.admission import Cleanup, Grants, MemoryGrants, ModelRoots
from greenroom.runtime.moves.hosted_moves import HostedMoves
from greenroom.runtime.moves.load_errors import HostedErrors, LoadErrors, LostSlots
from greenroom.runtime.moves.mover import Mover, RemoteMoves
from greenroom.runtime.moves.opening import SlotOpener
from greenroom.runtime.moves.process_moves import ProcessMoves
from greenroom.runtime.remote.spending import Spending
from greenroom.runtime.shell import Shell
from greenroom.runtime.workers.pool import WorkerPool


class Moves:
    """`grants` are asked before memory is taken."""

    def __init__(self, shell: Shell, memory: Memory, grants: Grants, spending: Spending) -> None:
        config, times, slot_memory = shell.config, shell.timeouts, memory.slot_memory
        cleanup, roots, errors = (
            Cleanup(),
            ModelRoots(shell.live),
            LoadErrors(shell.state_dir, shell.catalog, shell.loop),
        )
        lost = LostSlots(errors, shell, memory.watch)
        hosted_memory = HostedMemory(shell.loop, shell.hosted_slots, memory.watch, timeouts=times.memory)
        self.workers = WorkerPool(
            shell.state_dir,
            shell.observer,
            lambda worker, exit: self.hosted.on_worker_lost(worker, exit),
            keeps_spare=config.memory.spare_worker,
            timeouts=times.workers,
        )
        shell.hosted_slots.workers = self.workers.workers
        opener = SlotOpener(shell, self.workers, hosted_memory, HostedErrors(hosted_memory, slot_memory), roots)
        self.hosted = HostedMoves(shell, opener, hosted_memory, MemoryGrants(grants, cleanup, hosted_memory), lost)
        ports = PortRange(config.ports.first, config.ports.last)
        processes = ProcessMoves(shell, ports, slot_memory, MemoryGrants(grants, cleanup, slot_memory), lost, roots)
        remote = RemoteMoves(shell.slots, shell.live, spending)
        self.mover = Mover(shell, processes, self.hosted, remote, memory, errors)

    async def finished(self) -> None:
        """Wait until nothing is left of engines that crashed, then end the workers."""
        await self.mover.cleaned_up()
        await self.workers.close()
