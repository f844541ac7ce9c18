"""A swapper with few rules: idle models leave, sleepers first, then the least urgent, the least recently used of them.

Nobody leaves who is pinned, busy, or more urgent than who comes; equals do. It asks for no costs, so that everybody can
foretell who goes. Who is more urgent and idle goes when its stay is over (`ttl_s`, `keep_alive`), not before: models
that never go by themselves can keep less urgent ones out for good. The stay of those who sleep is over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from greenroom.core.model import Claim, DeviceId
from greenroom.core.policy.swapper import ByMemory, Eviction, Resident, Target

# Compared from the left: the smaller goes first.
Turn = tuple[bool, int, float, str]


class Coordinator(ByMemory):
    """Shares with its base which rules about company there are, and nothing else."""

    def eviction_for(
        self, target: Target, residents: Sequence[Resident], room_mib: Mapping[DeviceId, int]
    ) -> Eviction | None:
        must = self._must_leave(target, residents)
        if must is None or not all(_may_go(one, target) for one in must):
            return None
        goers = sorted((one for one in residents if _may_go(one, target) and one not in must), key=_turn)
        found = [
            Eviction(claim, victims)
            for claim in target.options
            if (victims := _in_turn(claim, must, goers, room_mib)) is not None
        ]
        return min(found, key=lambda one: _order(one, room_mib)) if found else None


def _may_go(resident: Resident, target: Target) -> bool:
    is_urgent = resident.priority < target.priority and not resident.is_asleep
    return not resident.is_fixed and not resident.is_busy and not is_urgent


def _turn(resident: Resident) -> Turn:
    return (not resident.is_asleep, -resident.priority, resident.last_used, resident.slot)


def _order(eviction: Eviction, room_mib: Mapping[DeviceId, int]) -> tuple[int, list[Turn], int, tuple[DeviceId, ...]]:
    """Where fewer leave, then where those leave whose turn it is, then where the smaller gap is left."""
    gap_mib = sum(max(0, room_mib[device] - mib) for device, mib in eviction.claim.items())
    turns = [_turn(victim) for victim in eviction.victims]
    return (len(turns), turns, gap_mib, tuple(eviction.claim))


def _in_turn(
    claim: Claim, must: tuple[Resident, ...], goers: Sequence[Resident], room_mib: Mapping[DeviceId, int]
) -> tuple[Resident, ...] | None:
    """One after the other until there is room; None if there is none even then."""
    lacking = {device: mib - room_mib[device] for device, mib in claim.items()}
    for resident in must:
        _give(lacking, resident)
    victims = list(must)
    for resident in goers:
        # Whose leaving gives nothing where memory lacks is left alone.
        if any(mib > 0 and resident.gives_mib.get(device, 0) > 0 for device, mib in lacking.items()):
            _give(lacking, resident)
            victims.append(resident)
    if any(mib > 0 for mib in lacking.values()):
        return None
    return tuple(victims[: len(must)]) + _needed(lacking, victims[len(must) :])


def _needed(lacking: dict[DeviceId, int], victims: Sequence[Resident]) -> tuple[Resident, ...]:
    """Sleepers stay where those who leave the stage after them give enough without them."""
    needed: list[Resident] = []
    for resident in victims:
        if resident.is_asleep and all(mib + resident.gives_mib.get(device, 0) <= 0 for device, mib in lacking.items()):
            for device in lacking:
                lacking[device] += resident.gives_mib.get(device, 0)
        else:
            needed.append(resident)
    return tuple(needed)


def _give(lacking: dict[DeviceId, int], resident: Resident) -> None:
    for device in lacking:
        lacking[device] -= resident.gives_mib.get(device, 0)
