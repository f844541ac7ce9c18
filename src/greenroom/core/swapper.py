"""Who has to leave so that a model can come. Pure and deterministic: the same question has the same answer.

A Swapper is asked far more often than a swap happens, so it is silent and changes nothing. ByMemory is the default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from greenroom.core.model import Claim, DeviceId, ModelId, SlotId, Tier


@dataclass(frozen=True, slots=True)
class Target:
    """What wants to come: the claims that would do, any one of them, and how urgent it is."""

    model: ModelId
    options: tuple[Claim, ...]
    priority: int


@dataclass(frozen=True, slots=True)
class Resident:
    """What is there, targets of moves in flight included. `gives_mib` is what its leaving would free per device."""

    slot: SlotId
    model: ModelId
    gives_mib: Claim
    leaves_to: Tier
    priority: int
    last_used: float
    is_busy: bool  # serving, or about to serve somebody who may go first
    is_fixed: bool  # pinned, arriving, or held by somebody who was not asked to leave


@dataclass(frozen=True, slots=True)
class Eviction:
    """The claim chosen and who leaves for it, in the order they should go. Busy ones have to be waited for."""

    claim: Claim
    victims: tuple[Resident, ...]

    @property
    def is_blocked(self) -> bool:
        return any(victim.is_busy for victim in self.victims)


class Swapper(Protocol):
    def eviction_for(
        self, target: Target, residents: Sequence[Resident], room_mib: Mapping[DeviceId, int]
    ) -> Eviction | None:
        """The best way to make room, or None if there is none even when everyone who may leave has left.

        `room_mib` is free memory per device with promises kept and with those already leaving gone.
        """
        ...


class ByMemory:
    """As few as possible, the least urgent first, then the least recently used."""

    def eviction_for(
        self, target: Target, residents: Sequence[Resident], room_mib: Mapping[DeviceId, int]
    ) -> Eviction | None:
        queue = sorted(
            (resident for resident in residents if not resident.is_fixed),
            key=lambda resident: (resident.is_busy, _rank(resident, target), resident.last_used, resident.slot),
        )
        found = [
            (self._cost(victims, target, claim, room_mib), Eviction(claim, victims))
            for claim in target.options
            if (victims := _victims(claim, queue, room_mib)) is not None
        ]
        return min(found, key=lambda pair: pair[0])[1] if found else None

    def _cost(
        self, victims: tuple[Resident, ...], target: Target, claim: Claim, room_mib: Mapping[DeviceId, int]
    ) -> tuple[bool, int, int, int, tuple[DeviceId, ...]]:
        """Waiting for a busy one is worst, then evicting the urgent, then evicting many, then leaving gaps behind."""
        gap = sum(max(0, room_mib[device] - mib) for device, mib in claim.items())
        return (
            any(victim.is_busy for victim in victims),
            max((_rank(victim, target) for victim in victims), default=0),
            len(victims),
            gap,
            tuple(claim),
        )


def _rank(resident: Resident, target: Target) -> int:
    """0 for residents less urgent than the newcomer, 1 for equals, 2 for more urgent ones."""
    if resident.priority > target.priority:
        return 0
    return 1 if resident.priority == target.priority else 2


def _victims(claim: Claim, queue: Sequence[Resident], room_mib: Mapping[DeviceId, int]) -> tuple[Resident, ...] | None:
    """Take residents in order until the claim fits, then spare those who turned out not to be needed."""
    lacking = {device: mib - room_mib[device] for device, mib in claim.items()}
    taken: list[Resident] = []
    for resident in queue:
        if all(mib <= 0 for mib in lacking.values()):
            break
        if any(lacking[device] > 0 and resident.gives_mib.get(device, 0) > 0 for device in lacking):
            taken.append(resident)
            _give(lacking, resident, +1)
    if any(mib > 0 for mib in lacking.values()):
        return None
    for resident in reversed(taken[:-1]):
        _give(lacking, resident, -1)
        if any(mib > 0 for mib in lacking.values()):
            _give(lacking, resident, +1)
        else:
            taken.remove(resident)
    return tuple(taken)


def _give(lacking: dict[DeviceId, int], resident: Resident, sign: int) -> None:
    for device in lacking:
        lacking[device] -= sign * resident.gives_mib.get(device, 0)
