"""Residents: slots as policies and swappers see them, with what an eviction would free and cost.

Owns the translation from slots to residents, and where a model could be placed. Made anew for each decision, because
everything in it may change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import log

from greenroom.core.decide import green_room, placement
from greenroom.core.decide.placement import Places, Ways, way_to
from greenroom.core.model import Claim, DeviceId, ModelId, ModelSpec, MoveKind, Slot, SlotId, Tier
from greenroom.core.policy.swapper import PlaceRank, Resident
from greenroom.core.state import Claimant, Crowd, State


class Residents:
    """Residents and free memory at one moment. Valid only until the state changes."""

    def __init__(self, state: State, now: float, places: Places, may_keep: bool = False) -> None:
        self._state = state
        # True until it was asked whether devices should be kept. Once is enough: the first in rank is asked for first.
        self.may_keep = may_keep
        self._now = now
        self._places = places
        self._made: dict[bool, list[Resident]] = {}
        self._made_awake: dict[bool, list[Resident]] = {}
        self._untied_slots: tuple[list[Slot], list[Slot]] | None = None
        self._room_mib: dict[DeviceId, int] | None = None
        self._most_mib: dict[DeviceId, int] | None = None
        self._asleep_held_mib: Claim | None = None
        # True if a resident that would fall asleep was seen to wake more slowly than it loads.
        self.some_wake_slowly = False
        self._ways: dict[placement.Shape, Ways] = {}
        self._crowds: dict[DeviceId, Crowd] | None = None
        # Residents that would go cold. They are the same for every newcomer.
        self._cold: dict[SlotId, Resident] = {}
        self._fixed: dict[Resident, Resident] = {}

    def after_swap(self, newcomer: ModelSpec) -> Residents:
        """The residents after a swap was ordered at this moment. What the swap does not affect is reused."""
        after, slots = Residents(self._state, self._now, self._places, self.may_keep), self._state.slots
        after._cold = {
            slot: one
            for slot, one in self._cold.items()
            # A pinned sleeper that wakes could not leave before either, but counts as ready from now on.
            if one.cannot_leave is _is_tied(slots[slot]) and (one.counts_as_ready or slots[slot].planned is None)
        }
        if not newcomer.pinned:
            # Only pinned slots limit it, and these do not leave for others.
            after._most_mib = self._most_mib
        return after

    @property
    def room_mib(self) -> dict[DeviceId, int]:
        if self._room_mib is None:
            self._room_mib = self._state.ledger.room_mib()
        return self._room_mib

    @property
    def most_mib(self) -> dict[DeviceId, int]:
        if self._most_mib is None:
            self._most_mib = self._state.most_mib(None)
        return self._most_mib

    def ways(self, record: Claimant) -> Ways:
        """Every placement that could ever hold a cold model; none if it is too large. Shared by equal models."""
        shape = placement.shape(record.spec, record.need)
        ways = self._ways.get(shape)
        if ways is None:
            by_free = record.spec.can_split or record.spec.gpus > 1
            ways = self._ways[shape] = self._ways_now(record) if by_free else self._ways_known(record, shape)
        return ways

    def _ways_known(self, record: Claimant, shape: placement.Shape) -> Ways:
        """Placements that do not depend on free memory change rarely and are remembered."""
        known = self._places.ways(shape, self._state.ledger.devices, self.most_mib)
        if known is None:
            known = self._ways_now(record)
            self._places.remember(shape, known)
        return known

    def _ways_now(self, record: Claimant) -> Ways:
        return self.ways_within(record, self.most_mib)

    def ways_within(self, record: Claimant, most: Mapping[DeviceId, int]) -> Ways:
        """Every placement that could hold a cold model if this much were free."""
        state = self._state
        likely = state.likely_mib(most) if record.spec.can_split else most
        claims = placement.options(record.spec, record.need, state.devices, self.room_mib, most, likely)
        return Ways([way_to(claim, claim) for claim in claims])

    def rank(self, claim: Claim) -> PlaceRank:
        """How good a place is. Models that are busy on the same GPU slow each other down, so fewest come first."""
        if self._crowds is None:
            self._crowds = self._state.crowds()
        # Where a claim has a part on the host, each of its options has: there it makes no difference.
        crowds, room_mib = [self._crowds[device] for device in claim], self.room_mib
        return (
            sum([crowd.busy for crowd in crowds]),
            sum([crowd.requests for crowd in crowds]),
            sum([crowd.models for crowd in crowds]),
            sum([max(0, room_mib[device] - mib) for device, mib in claim.items()]),
            tuple(claim),
        )

    def those(self, may_sleep: bool, but: Slot | None) -> list[Resident]:
        """All residents except `but`, which is to wake: slots that hold or will hold memory and are not leaving."""
        made = self._made.get(may_sleep)
        if made is None:
            slots = [slot for slot in self._state.slots.values() if _stays(slot)]
            made = self._made[may_sleep] = [self._resident(slot, may_sleep, None) for slot in slots]
        others = made if but is None else [resident for resident in made if resident.slot != but.id]
        return self._beside(others, but) if may_sleep else others

    def awake(self, may_sleep: bool, but: Slot | None) -> list[Resident]:
        """The residents that are awake and could leave now; `but` sleeps and is to wake."""
        made = self._made_awake.get(may_sleep)
        if made is None:
            made = self._made_awake[may_sleep] = [self._resident(slot, may_sleep, None) for slot in self._untied[0]]
        return self._beside(made, but) if may_sleep else made

    def sleepers_for(self, options: Sequence[Claim], willing: Sequence[Resident], but: Slot | None) -> list[Resident]:
        """The sleepers except `but` that could leave now; none if that does not help beside the willing that are awake.

        In a large green room most models sleep, where no memory is missing.
        """
        if not self._sleepers_hold_missing(options, willing):
            return []
        return [self._resident(slot, False, None) for slot in self._untied[1] if slot is not but]

    def could_free(self, options: Sequence[Claim], willing: Sequence[Resident]) -> bool:
        """True if one of these claims may fit once the willing, who are awake, and all untied sleepers are gone."""
        room_mib, asleep_mib = self.room_mib, self._asleep_mib
        held = [self._state.ledger.held_by(one.slot) for one in willing]
        for claim in options:
            for device, mib in claim.items():
                lacking_mib = mib - room_mib[device] - asleep_mib.get(device, 0)
                if lacking_mib > 0 and lacking_mib > sum([held_mib.get(device, 0) for held_mib in held]):
                    break
            else:
                return True
        return False

    def _beside(self, made: list[Resident], wakes: Slot | None) -> list[Resident]:
        """These when `wakes` frees its place in the green room: one that had no place may have one then."""
        if wakes is None or self._state.limits.green_room_mib is None:
            return made
        if Tier.COLD not in [one.leaves_to for one in made]:
            return made
        return [self._beside_one(resident, wakes) for resident in made]

    def _beside_one(self, resident: Resident, wakes: Slot) -> Resident:
        slot = self._state.slots[resident.slot]
        if resident.leaves_to is Tier.ASLEEP or resident.cannot_leave or not _could_sleep(slot):
            return resident
        return self._resident(slot, True, wakes)

    def _sleepers_hold_missing(self, options: Sequence[Claim], willing: Sequence[Resident]) -> bool:
        """True if memory may be missing on a device where a sleeper holds some, should the willing fall asleep."""
        room_mib = self.room_mib
        for device in self._asleep_mib:
            taken_mib = sum([max(0, -one.gives_mib.get(device, 0)) for one in willing])
            for claim in options:
                if device in claim and claim[device] + taken_mib > room_mib[device]:
                    return True
        return False

    @property
    def _asleep_mib(self) -> Claim:
        """What sleepers that could leave now hold."""
        if self._asleep_held_mib is None:
            held_mib: dict[DeviceId, int] = {}
            for slot in self._untied[1]:
                for device, mib in self._state.ledger.held_by(slot.id).items():
                    held_mib[device] = held_mib.get(device, 0) + mib
            self._asleep_held_mib = held_mib
        return self._asleep_held_mib

    @property
    def _untied(self) -> tuple[list[Slot], list[Slot]]:
        """Slots that could leave now: those that are awake, and those that sleep."""
        if self._untied_slots is None:
            untied = [slot for slot in self._state.at_rest() if not slot.spec.pinned and _stays(slot)]
            awake = [slot for slot in untied if slot.tier is not Tier.ASLEEP]
            self._untied_slots = (awake, [slot for slot in untied if slot.tier is Tier.ASLEEP])
        return self._untied_slots

    def at(self, devices: Iterable[DeviceId], but: Slot | None) -> list[Resident]:
        """Residents except `but` with memory on one of these devices, as if all of them went cold."""
        ledger, slots = self._state.ledger, self._state.slots
        there = [slots[slot] for slot in {slot: None for device in devices for slot in ledger.slots_on(device)}]
        return [self._resident(slot, False, None) for slot in there if _stays(slot) and slot is not but]

    def apart(self, spec: ModelSpec) -> frozenset[ModelId]:
        """Other models with a slot that are never ready together with this one."""
        if not spec.exclusive:
            return frozenset()
        others = (slot.spec for slot in self._state.slots.values())
        return frozenset(other.id for other in others if other.exclusive == spec.exclusive and other.id != spec.id)

    def fixed(self, resident: Resident) -> Resident:
        """The same resident, marked as one that may not be asked to leave."""
        held = self._fixed.get(resident)
        if held is None:
            held = self._fixed[resident] = resident.fixed()
        return held

    def _resident(self, slot: Slot, may_sleep: bool, wakes: Slot | None) -> Resident:
        known = self._cold.get(slot.id)
        if known is not None and (known.cannot_leave or not (may_sleep and _could_sleep(slot))):
            return known
        made = _resident(self._state, slot, self._now, may_sleep and self._would_sleep(slot, wakes))
        if made.leaves_to is Tier.COLD:
            self._cold[slot.id] = made
        elif made.reload_s > self._state.claimants[made.model].move_s(MoveKind.LOAD):
            self.some_wake_slowly = True
        return made

    def _would_sleep(self, slot: Slot, wakes: Slot | None) -> bool:
        """True if it can leave to the green room: the memory for the move is free, and there is a place for it."""
        state = self._state
        if not _could_sleep(slot) or _is_tied(slot):
            return False
        fits = state.ledger.can_start(slot.id, slot.needs_for(MoveKind.SLEEP))
        return fits and green_room.has_place(state, slot, self._now, wakes)


def _stays(slot: Slot) -> bool:
    return slot.leaving_to is None and not slot.lost and not slot.spec.is_remote


def _could_sleep(slot: Slot) -> bool:
    return slot.can_sleep and slot.tier is Tier.READY


def _is_tied(slot: Slot) -> bool:
    """True if it cannot leave now: its leaving is never priced."""
    return slot.spec.pinned or slot.move is not None or slot.planned is not None


def drain_s(record: Claimant, answers: int) -> float:
    """Expected seconds until the last of this many answers has ended: it grows with the logarithm of their number."""
    return record.typical_s if answers <= 1 else record.typical_s * (1.0 + log(answers))


def _resident(state: State, slot: Slot, now: float, sleeps: bool) -> Resident:
    # Hot path: positional arguments and few calls.
    tier, spec, lease, in_flight = slot.tier, slot.spec, slot.lease, slot.in_flight
    model, held = spec.id, state.ledger.held_by(slot.id)
    # A lease is recalled; its answers are not waited for.
    is_busy = lease is None and bool(in_flight)
    is_ready = lease is None and (tier is Tier.READY or slot.is_arriving)
    if _is_tied(slot):
        # The cost of its leaving is never asked for. With many waiting models most residents are like this.
        return Resident(
            slot.id,
            model,
            held,
            Tier.COLD,
            slot.last_priority,
            slot.last_used,
            is_busy,
            True,
            True,
            is_ready,
            version_of=spec.version_of,
        )
    # Slots of a removed model are already leaving and are no residents.
    record = state.claimants[model]
    resident = Resident(
        slot.id,
        model,
        _given(held, slot.claim_asleep) if sleeps else held,
        Tier.ASLEEP if sleeps else Tier.COLD,
        slot.last_priority,
        slot.last_used,
        is_busy,
        False,
        False,
        is_ready,
        slot.owes,
        state.waitlist.queues.get(model),
        record.rate(state.limits.recency_s, now),
        record.move_s(MoveKind.WAKE if sleeps else MoveKind.LOAD),
        drain_s(record, len(in_flight)),
        tier is Tier.ASLEEP,
        record.service_s or 0.0,
        slot.concurrency,
        version_of=spec.version_of,
    )
    resident.loss = state.policy.loss(resident, now)
    return resident


def _given(held: Claim, kept: Claim) -> Claim:
    """What comes back per device; negative on the host if a sleeping copy is put there."""
    given = dict(held)
    for device, mib in kept.items():
        given[device] = given.get(device, 0) - mib
    return given
