"""Moves: who carries them out, in processes of their own and in our workers, and what their failures mean to callers.

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
from greenroom.runtime.moves.admission import Cleanup
from greenroom.runtime.moves.hosted_moves import HostedMoves
from greenroom.runtime.moves.load_errors import HostedErrors, LoadErrors
from greenroom.runtime.moves.mover import Mover
from greenroom.runtime.rejections import Rejections
from greenroom.wiring.common import CommonParts
from greenroom.wiring.leases import LeaseParts
from greenroom.wiring.memory import MemoryParts

Roots = Callable[[], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class MoveParts:
    hosted: HostedMoves
    mover: Mover


def wire_moves(common: CommonParts, memory: MemoryParts, leases: LeaseParts, config: Config, roots: Roots) -> MoveParts:
    """`roots` are the folders below which files of models must lie, as they are configured now."""
    grants, remains = leases.grants, Cleanup()
    slots = common.state.slots
    failures = LoadErrors(common.state_dir, common.catalog, lambda slot: slot in slots and slots[slot].is_going)
    hosted_memory = HostedMemory(common.state, common.hosted_slots, memory.watch, common.clock)
    hosted = HostedMoves(
        common.hosted_slots,
        common.slots,
        common.state_dir,
        common.observer,
        memory.post_and_look,
        common.clock,
        hosted_memory,
        HostedErrors(hosted_memory, memory.slot_memory.shortage),
        grants,
        remains,
        failures,
        keeps_spare=config.memory.spare_worker,
        roots=roots,
    )
    mover = Mover(
        common.catalog,
        common.slots,
        common.state_dir,
        PortRange(config.ports.first, config.ports.last),
        common.observer,
        memory.post_and_look,
        common.clock,
        memory.slot_memory,
        grants,
        remains,
        hosted,
        failures,
        roots,
    )
    return MoveParts(hosted, mover)


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
    """Whether there are several GPUs and this model can be put on one of them only."""
    gpus = sum(device.kind is DeviceKind.GPU for device in state.ledger.devices.values())
    return gpus > 1 and model in state.models and not state.models[model].spec.can_split
