"""Memory arithmetic per device: who holds what, what is promised, what strangers use.

free = usable − Σ max(claim, seen, promise) − foreign. Owns no policy and knows no models: it answers what fits. A
device that is no longer there has no memory, so that what was placed on it can still leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from greenroom.core.model import NO_CLAIM, Claim, Device, DeviceId, SlotId, larger


@dataclass(slots=True)
class Holding:
    """One claimant's memory: what it may use and what it was last seen to use."""

    claim: Claim
    seen: Claim = field(default_factory=dict)

    def on(self, device: DeviceId) -> int:
        return max(self.claim.get(device, 0), self.seen.get(device, 0))


class Ledger:
    def __init__(self) -> None:
        self.devices: dict[DeviceId, Device] = {}
        self.foreign: dict[DeviceId, int] = {}
        self.holdings: dict[SlotId, Holding] = {}
        # Reservations: counted in plans, not yet in use. A sleeping slot that is to wake holds and is promised memory.
        self.promises: dict[SlotId, Claim] = {}

    def set_devices(self, devices: Iterable[Device]) -> None:
        self.devices = {device.id: device for device in sorted(devices, key=lambda device: device.id)}

    def set_foreign(self, foreign_mib: Mapping[DeviceId, int]) -> None:
        for device in sorted(foreign_mib):
            self.foreign[device] = foreign_mib[device]

    def promise(self, slot: SlotId, claim: Claim) -> None:
        self.promises[slot] = claim

    def unpromise(self, slot: SlotId) -> None:
        self.promises.pop(slot, None)

    def hold(self, slot: SlotId, claim: Claim, seen: Claim = NO_CLAIM) -> None:
        """This slot now holds that, and is promised nothing any more."""
        self.unpromise(slot)
        self.holdings[slot] = Holding(claim, seen)

    def observe(self, slot: SlotId, seen: Claim) -> None:
        if holding := self.holdings.get(slot):
            holding.seen = seen

    def release(self, slot: SlotId) -> None:
        self.unpromise(slot)
        self.holdings.pop(slot, None)

    def held_by(self, slot: SlotId) -> Claim:
        """What this slot really takes now, promises left out."""
        holding = self.holdings.get(slot)
        if holding is None:
            return NO_CLAIM
        return larger(holding.claim, holding.seen) if holding.seen else holding.claim

    def usable_mib(self, device: DeviceId) -> int:
        there = self.devices.get(device)
        return 0 if there is None else there.usable_mib - self.foreign.get(device, 0)

    def free_mib(self, without: frozenset[SlotId]) -> dict[DeviceId, int]:
        """What plans may still use per device, promises kept, as if the slots in `without` had left."""
        free = {device: self.usable_mib(device) for device in self.devices}
        taken = {slot: self.held_by(slot) for slot in self.holdings}
        for slot, promised in self.promises.items():
            taken[slot] = larger(taken.get(slot, NO_CLAIM), promised)
        for slot, claim in taken.items():
            if slot not in without:
                for device, mib in claim.items():
                    free[device] = free.get(device, 0) - mib
        return free

    def can_start(self, slot: SlotId, claim: Claim) -> bool:
        """Whether this claim fits beside what is really held now. What the slot holds already is not asked for."""
        own = self.held_by(slot)
        return all(
            mib <= own.get(device, 0) or self._held_mib(device) - own.get(device, 0) + mib <= self.usable_mib(device)
            for device, mib in claim.items()
        )

    def _held_mib(self, device: DeviceId) -> int:
        return sum(holding.on(device) for holding in self.holdings.values())
