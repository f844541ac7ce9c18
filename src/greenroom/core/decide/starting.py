"""Whether a planned move may start now, and whether waiting for its memory still makes sense. Changes nothing.

Owns the rule for engines that size themselves by free memory (`sizes_itself`): one starts only while no other move is
under way on its GPUs, and until it is ready nothing else starts there. Departures are not held back.
"""

from __future__ import annotations

from greenroom.core.decide import green_room
from greenroom.core.model import ARRIVING, DeviceId, DeviceKind, MoveKind, Slot
from greenroom.core.state import State


def may_start(state: State, slot: Slot, kind: MoveKind) -> bool:
    """True if the memory for this move is free now, and no other move is in its way."""
    if kind is MoveKind.PREPARE and not green_room.can_take(state, slot.claim_asleep):
        return False
    return state.ledger.can_start(slot.id, slot.needs_for(kind)) and not _must_wait_its_turn(state, slot)


def is_room_coming(state: State, slot: Slot, kind: MoveKind) -> bool:
    """True if the end of another move will free memory for this one, or let it start."""
    wanted, ledger = slot.needs_for(kind), state.ledger
    return _must_wait_its_turn(state, slot) or any(
        other.is_going and any(device in wanted for device in ledger.held_by(other.id))
        for other in state.slots.values()
    )


def _must_wait_its_turn(state: State, slot: Slot) -> bool:
    """True while a move shares a GPU with it and one of the two engines sizes itself by free memory."""
    sees = slot.spec.sizes_itself
    for other in state.moves.values():
        sees_it = sees or (other.spec.sizes_itself and other.move is not None and other.move.kind in ARRIVING)
        if sees_it and not _gpus(state, slot).isdisjoint(_gpus(state, other)):
            return True
    return False


def _gpus(state: State, slot: Slot) -> set[DeviceId]:
    devices = state.ledger.devices
    return {device for device in slot.claim if device in devices and devices[device].kind is DeviceKind.GPU}
