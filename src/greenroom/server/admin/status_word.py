"""The five words that clients of llama.cpp know, made from the scheduler's tables. Made here and nowhere else.

Everywhere else a model's place is its tier: ready, asleep or cold. Changes nothing.
"""

from __future__ import annotations

from enum import StrEnum

from greenroom.core.model import ModelId, MoveKind, Slot, Tier
from greenroom.core.view import ModelFacts, SchedulerView


class StatusWord(StrEnum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    SLEEPING = "sleeping"
    FAILED = "failed"


def status_word(state: SchedulerView, model: ModelId, now: float) -> StatusWord:
    slots = [slot for slot in state.slots_of(model) if not slot.lost]
    # 1. Takes requests.
    if any(slot.is_serving for slot in slots):
        return StatusWord.LOADED
    # 2. Will, without anyone asking again. An older revision may still be leaving meanwhile.
    if any(slot.is_arriving or _is_preparing(slot) for slot in slots):
        return StatusWord.LOADING
    # 3. Takes no more requests, but has its memory and may still be answering.
    if any(slot.tier is Tier.READY for slot in slots):
        return StatusWord.LOADED
    # 4. Waits in host memory.
    if any(slot.tier is Tier.ASLEEP for slot in slots):
        return StatusWord.SLEEPING
    # 5. Not there; asking for it now would be refused, or would load it.
    return StatusWord.FAILED if is_failing(state.models.get(model), now) else StatusWord.UNLOADED


def tier_of(slots: list[Slot]) -> Tier:
    """A model is where the nearest of its slots is."""
    tiers = {slot.tier for slot in slots if not slot.lost}
    return next((tier for tier in (Tier.READY, Tier.ASLEEP) if tier in tiers), Tier.COLD)


def is_failing(record: ModelFacts | None, now: float) -> bool:
    """Its last load failed and it is refused until the back-off ends."""
    return record is not None and record.failures > 0 and record.pausing is None and now < record.retry_at


def _is_preparing(slot: Slot) -> bool:
    under_way = slot.planned or (slot.move.kind if slot.move is not None else None)
    return under_way is MoveKind.PREPARE and slot.leaving_to is None
