"""Whether a planned move or a departure may start now, and whether waiting for memory still makes sense.

Owns the rule for engines that size themselves by free memory (`sizes_itself`): while one starts, nothing else starts or
leaves on its GPUs. It would take too much or too little; vLLM refuses to start if memory is freed while it measures.
Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

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


def must_stay(state: State, slot: Slot) -> bool:
    """True while an engine that sizes itself starts on a GPU where this slot holds memory."""
    measured = [other for other in state.moves.values() if other is not slot and _measures(other)]
    if not measured:
        return False
    held = _gpus_of(state, state.ledger.held_by(slot.id))
    return any(not held.isdisjoint(_gpus(state, other)) for other in measured)


def _must_wait_its_turn(state: State, slot: Slot) -> bool:
    """True while a move shares a GPU with it and one of the two engines sizes itself by free memory."""
    sees = slot.spec.sizes_itself
    for other in state.moves.values():
        if (sees or _measures(other)) and not _gpus(state, slot).isdisjoint(_gpus(state, other)):
            return True
    return False


def _measures(slot: Slot) -> bool:
    """True if it is starting and sizes itself by the free memory that it finds."""
    return slot.spec.sizes_itself and slot.move is not None and slot.move.kind in ARRIVING


def _gpus(state: State, slot: Slot) -> set[DeviceId]:
    """The GPUs that its moves change: those of its claim, or all that it may use if its need is not known."""
    if slot.spec.sizes_itself and not slot.claim:
        return _gpus_of(state, slot.spec.devices or state.ledger.devices)
    return _gpus_of(state, slot.claim)


def _gpus_of(state: State, devices: Iterable[DeviceId]) -> set[DeviceId]:
    known = state.ledger.devices
    return {device for device in devices if device in known and known[device].kind is DeviceKind.GPU}
