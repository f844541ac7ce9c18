"""Memory arithmetic per device: what is held, what is promised, what undeclared processes use.

free = usable − Σ max(claim, seen, promise) − foreign − leases of other gateways. Owns no policy and has no models:
it answers what fits. A device that has disappeared counts as having no memory, so that its slots can still leave.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from greenroom.core.model import NO_CLAIM, Claim, Device, DeviceId, DeviceKind, OtherLease, SlotId, larger


@dataclass(slots=True)
class Holding:
    """The memory of one slot: what it may use, and what it was last seen to use."""

    claim: Claim
    seen: Claim = field(default_factory=dict)

    def on(self, device: DeviceId) -> int:
        return max(self.claim.get(device, 0), self.seen.get(device, 0))


class Ledger:
    def __init__(self) -> None:
        self.devices: dict[DeviceId, Device] = {}
        self.host: DeviceId | None = None
        self.foreign: dict[DeviceId, int] = {}
        # Leases held through other gateways, and their sum per device.
        self.others: tuple[OtherLease, ...] = ()
        self._others_mib: dict[DeviceId, int] = {}
        # What slots may use per device: all but what undeclared processes and other gateways use.
        self._usable_mib: dict[DeviceId, int] = {}
        self.holdings: dict[SlotId, Holding] = {}
        # What slots that are leaving will still hold when they have left.
        self.leaving: dict[SlotId, Claim] = {}
        # What each slot takes, with its promise, and when those that are leaving have left; and the sums per device.
        # Kept because every decision reads them.
        self._held: dict[SlotId, Claim] = {}
        self._taken: dict[SlotId, Claim] = {}
        self._stays: dict[SlotId, Claim] = {}
        self._held_mib: dict[DeviceId, int] = {}
        self._taken_mib: dict[DeviceId, int] = {}
        self._stays_mib: dict[DeviceId, int] = {}
        # Slots that hold memory on each device.
        self._slots_on: dict[DeviceId, dict[SlotId, None]] = {}
        # Reservations: counted in plans, not yet in use. A sleeping slot that is to wake has a holding and a promise.
        self.promises: dict[SlotId, Claim] = {}

    def set_devices(self, devices: Iterable[Device]) -> None:
        self.devices = {device.id: device for device in sorted(devices, key=lambda device: device.id)}
        self.host = next((on for on, device in self.devices.items() if device.kind is DeviceKind.HOST), None)
        self._sum_usable()

    def set_foreign(self, foreign_mib: Mapping[DeviceId, int]) -> None:
        for device in sorted(foreign_mib):
            self.foreign[device] = foreign_mib[device]
        self._sum_usable()

    def set_others(self, leases: Iterable[OtherLease]) -> None:
        self.others = tuple(sorted(leases, key=lambda lease: lease.id))
        self._others_mib = {}
        for lease in self.others:
            for device, mib in lease.claim.items():
                self._others_mib[device] = self._others_mib.get(device, 0) + mib
        self._sum_usable()

    def _sum_usable(self) -> None:
        self._usable_mib = {on: there.usable_mib - self.outside_mib(on) for on, there in self.devices.items()}

    def promise(self, slot: SlotId, claim: Claim) -> None:
        self._uncount(slot)
        self.promises[slot] = claim
        self._count(slot)

    def unpromise(self, slot: SlotId) -> None:
        if slot in self.promises:
            self._uncount(slot)
            del self.promises[slot]
            self._count(slot)

    def hold(self, slot: SlotId, claim: Claim, seen: Claim = NO_CLAIM) -> None:
        """Set what this slot holds. Its promise ends."""
        self._uncount(slot)
        self.promises.pop(slot, None)
        self.holdings[slot] = Holding(claim, seen)
        self._count(slot)

    def observe(self, slot: SlotId, seen: Claim) -> None:
        if holding := self.holdings.get(slot):
            self._uncount(slot)
            holding.seen = seen
            self._count(slot)

    def leave(self, slot: SlotId, keeps: Claim) -> None:
        """This slot is leaving. Plans may use what it holds, but for what it keeps."""
        self._uncount(slot)
        self.leaving[slot] = keeps
        self._count(slot)

    def stay(self, slot: SlotId) -> None:
        """This slot is not leaving, or has arrived where it keeps what it holds."""
        self._uncount(slot)
        self.leaving.pop(slot, None)
        self._count(slot)

    def release(self, slot: SlotId) -> None:
        self._uncount(slot)
        self.promises.pop(slot, None)
        self.holdings.pop(slot, None)
        self.leaving.pop(slot, None)

    def _uncount(self, slot: SlotId) -> None:
        for device, mib in self._held.pop(slot, NO_CLAIM).items():
            self._held_mib[device] -= mib
            del self._slots_on[device][slot]
        for device, mib in self._taken.pop(slot, NO_CLAIM).items():
            self._taken_mib[device] -= mib
        for device, mib in self._stays.pop(slot, NO_CLAIM).items():
            self._stays_mib[device] -= mib

    def _count(self, slot: SlotId) -> None:
        holding, promised, held = self.holdings.get(slot), self.promises.get(slot), NO_CLAIM
        if holding is not None:
            held = self._held[slot] = larger(holding.claim, holding.seen) if holding.seen else holding.claim
        for device, mib in held.items():
            self._held_mib[device] = self._held_mib.get(device, 0) + mib
            self._slots_on.setdefault(device, {})[slot] = None
        taken = held if promised is None else larger(promised, held) if held else promised
        self._taken[slot] = taken
        for device, mib in taken.items():
            self._taken_mib[device] = self._taken_mib.get(device, 0) + mib
        stays = self._stays[slot] = self.leaving.get(slot, taken)
        for device, mib in stays.items():
            self._stays_mib[device] = self._stays_mib.get(device, 0) + mib

    def seen_of(self, slot: SlotId) -> Claim:
        holding = self.holdings.get(slot)
        return NO_CLAIM if holding is None else holding.seen

    def held_by(self, slot: SlotId) -> Claim:
        """What this slot takes now, per device, without its promise."""
        return self._held.get(slot, NO_CLAIM)

    def held_on(self, device: DeviceId) -> int:
        """What all slots take there now, without promises."""
        return self._held_mib.get(device, 0)

    def slots_on(self, device: DeviceId) -> Iterable[SlotId]:
        """Slots that hold memory there."""
        return self._slots_on.get(device, {}).keys()

    def usable_mib(self, device: DeviceId) -> int:
        return self._usable_mib.get(device, 0)

    def outside_mib(self, device: DeviceId) -> int:
        """MiB that no slot here can give back: undeclared processes and leases of other gateways."""
        return self.foreign.get(device, 0) + self._others_mib.get(device, 0)

    def free_mib(self, without: Collection[SlotId]) -> dict[DeviceId, int]:
        """MiB that plans may still use, per device: promises are deducted, and the slots in `without` count as gone."""
        free = dict(self._usable_mib)
        for device, mib in self._taken_mib.items():
            free[device] = free.get(device, 0) - mib
        for slot in without:
            for device, mib in self._taken.get(slot, NO_CLAIM).items():
                free[device] += mib
        return free

    def room_mib(self) -> dict[DeviceId, int]:
        """Free memory per device for plans: promises are deducted, and slots that are leaving count as gone."""
        room = dict(self._usable_mib)
        for device, mib in self._stays_mib.items():
            room[device] = room.get(device, 0) - mib
        return room

    def going_from(self) -> set[DeviceId]:
        """Devices on which slots that are leaving still hold memory."""
        leaving = self.leaving.keys()
        return {device for device, slots in self._slots_on.items() if not leaving.isdisjoint(slots)}

    def startable(self) -> list[SlotId]:
        """Slots whose promise fits beside all current holdings, each on its own, in the order of their promises."""
        held, usable, found = self._held_mib, self._usable_mib, []
        for slot, promised in self.promises.items():
            own = self._held.get(slot)
            for device, mib in promised.items():
                more_mib = mib - own.get(device, 0) if own else mib
                if more_mib > 0 and held.get(device, 0) + more_mib > usable.get(device, 0):
                    break
            else:
                found.append(slot)
        return found

    def can_start(self, slot: SlotId, claim: Claim) -> bool:
        """True if this claim fits beside all current holdings. What the slot already holds is not counted twice."""
        own, held = self.held_by(slot), self._held_mib
        for device, mib in claim.items():
            more_mib = mib - own.get(device, 0)
            if more_mib > 0 and held.get(device, 0) + more_mib > self.usable_mib(device):
                return False
        return True
