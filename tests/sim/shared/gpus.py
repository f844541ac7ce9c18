"""The real GPUs of a simulation: their memory, its use, and whether that use was allowed."""

from __future__ import annotations

from collections import Counter

from greenroom.core.model import Claim, DeviceId
from greenroom.runtime.memory.readings import GpuReading, HostReading, Reading

NO_HOST = HostReading(0, 0, 0, 0)


class Violation(AssertionError):
    """Something that must never happen did."""


class Gpus:
    def __init__(self, capacity_mib: dict[DeviceId, int]) -> None:
        self.capacity_mib = capacity_mib
        self._uses: dict[str, Claim] = {}
        self.peak: Counter[DeviceId] = Counter()

    def used_mib(self, device: DeviceId) -> int:
        return sum(claim.get(device, 0) for claim in self._uses.values())

    def of(self, owners: set[str], device: DeviceId) -> int:
        return sum(claim.get(device, 0) for owner, claim in self._uses.items() if owner in owners)

    def has_room(self, claim: Claim) -> bool:
        return all(self.used_mib(device) + mib <= self.capacity_mib[device] for device, mib in claim.items())

    def take(self, owner: str, claim: Claim) -> None:
        """Raises Violation if there is not so much."""
        if not self.has_room(claim):
            users = {name: dict(used) for name, used in self._uses.items()}
            raise Violation(f"{owner} takes {dict(claim)} of {self.capacity_mib}, where there is {users}")
        self._uses[owner] = claim
        for device in claim:
            self.peak[device] = max(self.peak[device], self.used_mib(device))

    def give_back(self, owner: str) -> None:
        self._uses.pop(owner, None)

    @property
    def users(self) -> list[str]:
        return list(self._uses)

    def reading(self) -> Reading:
        gpus = (
            GpuReading(str(device), index, "simulated", mib, self.used_mib(device), None)
            for index, (device, mib) in enumerate(self.capacity_mib.items())
        )
        return Reading(tuple(gpus), NO_HOST)
