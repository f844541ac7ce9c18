"""Who is on stage, as a policy and a swapper see it: residents with what leaving would give and cost.

Owns the translation from slots to residents. Made anew for each decision, because
everything in it may change.
"""

from __future__ import annotations

from math import exp, inf, log

from greenroom.core.model import Claim, DeviceId, MoveKind, Slot, Tier
from greenroom.core.state import ModelRecord, State
from greenroom.core.swapper import Resident


class Cast:
    """Residents and free memory at one moment. Only for as long as nothing changes."""

    def __init__(self, state: State, now: float) -> None:
        self._state = state
        self._now = now
        self._made: dict[bool, list[Resident]] = {}
        self._room_mib: dict[DeviceId, int] | None = None

    @property
    def room_mib(self) -> dict[DeviceId, int]:
        if self._room_mib is None:
            self._room_mib = self._state.room_mib()
        return self._room_mib

    def residents(self, may_sleep: bool, but: Slot | None) -> list[Resident]:
        """Everybody but one who holds memory, or will, and is not about to give it back."""
        if may_sleep not in self._made:
            stay = [slot for slot in self._state.slots.values() if not slot.is_going and not slot.lost]
            self._made[may_sleep] = [_resident(self._state, slot, self._now, may_sleep) for slot in stay]
        made = self._made[may_sleep]
        return made if but is None else [resident for resident in made if resident.slot != but.id]


def rate_of(record: ModelRecord, recency_s: float, now: float) -> float:
    """Requests a second, those of long ago counting less."""
    return record.heat * exp(min(0.0, record.heat_at - now) / recency_s) / recency_s


def drain_s(record: ModelRecord, answers: int) -> float:
    """How long until the last of so many answers may have ended: that of one, and a little more for each doubling."""
    return record.typical_s * (1.0 + log(max(1, answers)))


def _resident(state: State, slot: Slot, now: float, may_sleep: bool) -> Resident:
    # As it will be when it leaves: only where the green room has room for it.
    could_sleep = may_sleep and slot.tier is Tier.READY and slot.can_sleep
    sleeps = could_sleep and state.ledger.can_start(slot.id, slot.needs_for(MoveKind.SLEEP))
    held, record = state.ledger.held_by(slot.id), state.models.get(slot.model)
    stuck = slot.spec.pinned or slot.move is not None or slot.planned is not None
    resident = Resident(
        slot=slot.id,
        model=slot.model,
        gives_mib=_given(held, slot.claim_asleep) if sleeps else held,
        leaves_to=Tier.ASLEEP if sleeps else Tier.COLD,
        priority=slot.last_priority,
        last_used=slot.last_used,
        # The holder of a lease is asked rather than waited for.
        is_busy=slot.lease is None and not slot.is_idle,
        is_fixed=stuck,
        cannot_leave=stuck,
        on_stage=slot.lease is None and (slot.tier is Tier.READY or slot.is_arriving),
        ready_since=slot.ready_since,
        stays_until=slot.stays_until,
        batch_until=slot.batch_until,
        queue=state.waitlist.queues.get(slot.model),
        rate=0.0 if record is None else rate_of(record, state.limits.recency_s, now),
        reload_s=0.0 if record is None else record.move_s(MoveKind.WAKE if sleeps else MoveKind.LOAD),
        drain_s=0.0 if record is None else drain_s(record, len(slot.in_flight)),
        passed_since=_passed_since(slot),
    )
    resident.loss = state.policy.loss(resident, now)
    return resident


def _passed_since(slot: Slot) -> float:
    recent = slot.recent_grants
    if not recent.maxlen:
        return inf
    return recent[0] if len(recent) == recent.maxlen else -inf


def _given(held: Claim, kept: Claim) -> Claim:
    """What comes back per device; less than nothing on the host where a sleeping copy is put."""
    return {device: held.get(device, 0) - kept.get(device, 0) for device in sorted({*held, *kept})}
