"""Moves: what carries them out, in processes of their own and in workers, and what their failures mean to callers.

Owns how these are made and joined.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from greenroom.config.schema import Config
from greenroom.core.model import DeviceKind, ModelId
from greenroom.core.view import SchedulerView
from greenroom.process.ports import PortRange
from greenroom.runtime.memory.hosted_memory import HostedMemory
from greenroom.runtime.moves.admission import Admission, Cleanup
from greenroom.runtime.moves.hosted_moves import HostedMoves
from greenroom.runtime.moves.load_errors import HostedErrors, LoadErrors, LostSlots
from greenroom.runtime.moves.mover import Mover
from greenroom.runtime.moves.opening import SlotOpener
from greenroom.runtime.moves.process_moves import ProcessMoves
from greenroom.runtime.rejections import Rejections
from greenroom.runtime.workers.pool import WorkerPool
from greenroom.wiring.common import CommonParts
from greenroom.wiring.leases import LeaseParts
from greenroom.wiring.memory import MemoryParts

Roots = Callable[[], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class MoveParts:
    workers: WorkerPool
    hosted: HostedMoves
    mover: Mover


def wire_moves(common: CommonParts, memory: MemoryParts, leases: LeaseParts, config: Config, roots: Roots) -> MoveParts:
    """`roots` are the folders below which files of models must lie, as they are configured now."""
    slots, cleanup = common.state.slots, Cleanup()
    errors = LoadErrors(common.state_dir, common.catalog, lambda slot: slot in slots and slots[slot].is_going)
    lost = LostSlots(errors, common.observer, memory.watch.post_and_look, common.clock)
    workers, hosted = _hosted(common, memory, leases, cleanup, lost, config, roots)
    processes = ProcessMoves(
        common.catalog,
        common.slots,
        common.state_dir,
        PortRange(config.ports.first, config.ports.last),
        memory.slot_memory,
        Admission(leases.grants, cleanup, memory.slot_memory),
        lost,
        roots,
    )
    mover = Mover(
        common.catalog,
        processes,
        hosted,
        memory.slot_memory,
        errors,
        common.observer,
        memory.watch.post_and_look,
        common.clock,
    )
    return MoveParts(workers, hosted, mover)


def _hosted(
    common: CommonParts,
    memory: MemoryParts,
    leases: LeaseParts,
    cleanup: Cleanup,
    lost: LostSlots,
    config: Config,
    roots: Roots,
) -> tuple[WorkerPool, HostedMoves]:
    hosted_memory = HostedMemory(common.state, common.hosted_slots, memory.watch, common.clock)
    workers = WorkerPool(
        common.state_dir,
        common.observer,
        lambda worker, exit: hosted.on_worker_lost(worker, exit),
        keeps_spare=config.memory.spare_worker,
    )
    common.hosted_slots.workers = workers.workers
    opener = SlotOpener(
        common.slots,
        common.state_dir,
        workers,
        common.observer,
        hosted_memory,
        HostedErrors(hosted_memory, memory.slot_memory.shortage),
        roots,
    )
    hosted = HostedMoves(
        common.hosted_slots,
        common.slots,
        opener,
        hosted_memory,
        Admission(leases.grants, cleanup, hosted_memory),
        lost,
        common.observer,
        common.clock,
    )
    return workers, hosted


def wire_rejections(common: CommonParts, moves: MoveParts, is_draining: Callable[[], bool]) -> Rejections:
    return Rejections(
        moves.mover.failures,
        is_draining,
        lambda model: _is_ready(common.state, model),
        lambda model: _is_whole(common.state, model),
        common.hosted_slots.progress_of,
    )


def _is_ready(state: SchedulerView, model: ModelId) -> bool:
    return any(slot.is_serving for slot in state.slots_of(model))


def _is_whole(state: SchedulerView, model: ModelId) -> bool:
    """Whether there are several GPUs and this model can use only one of them."""
    gpus = sum(device.kind is DeviceKind.GPU for device in state.ledger.devices.values())
    return gpus > 1 and model in state.models and not state.models[model].spec.can_split
