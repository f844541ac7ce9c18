"""A swapper with few rules: evicts idle models, sleepers first, then the least urgent, then the least recently used.

Never evicts a resident that is pinned, busy, or ready and more urgent than the newcomer; equally urgent ones may be
evicted. It uses no costs, so its choice is easy to predict. A more urgent idle model leaves only when its own time is
over (`ttl_s`, `keep_alive`): without such a limit it can keep less urgent models out for good. Its priority
does not protect a sleeper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from greenroom.core.model import Claim, DeviceId
from greenroom.core.policy.swapper import ByMemory, Eviction, PlaceRank, Resident, Target, give

# Compared from the left: the smaller leaves first.
Turn = tuple[bool, int, float, str]


class Coordinator(ByMemory):
    """Shares only the coresidency rules with its base."""

    def eviction_for(
        self, target: Target, residents: Sequence[Resident], room_mib: Mapping[DeviceId, int]
    ) -> Eviction | None:
        must = self._must_leave(target, residents)
        if must is None or not all(_may_go(one, target) for one in must):
            return None
        may_go = sorted((one for one in residents if _may_go(one, target) and one not in must), key=_turn)
        found = [
            Eviction(claim, victims)
            for claim in target.options
            if (victims := _in_turn(claim, must, may_go, room_mib)) is not None
        ]
        return min(found, key=lambda one: _order(one, target)) if found else None


def _may_go(resident: Resident, target: Target) -> bool:
    is_urgent = resident.priority < target.priority and not resident.is_asleep
    return not resident.is_fixed and not resident.is_busy and not is_urgent


def _turn(resident: Resident) -> Turn:
    return (not resident.is_asleep, -resident.priority, resident.last_used, resident.slot)


def _order(eviction: Eviction, target: Target) -> tuple[int, list[Turn], PlaceRank]:
    """Fewest victims first, then the victims that come first in turn, then the best place."""
    turns = [_turn(victim) for victim in eviction.victims]
    return (len(turns), turns, target.rank(eviction.claim))


def _in_turn(
    claim: Claim, must: tuple[Resident, ...], may_go: Sequence[Resident], room_mib: Mapping[DeviceId, int]
) -> tuple[Resident, ...] | None:
    """Take victims in turn until there is room; None if all of them are not enough."""
    lacking = {device: mib - room_mib[device] for device, mib in claim.items()}
    for resident in must:
        give(lacking, resident)
    victims = list(must)
    for resident in may_go:
        # A resident that frees nothing where memory is missing is left alone.
        if any(mib > 0 and resident.gives_mib.get(device, 0) > 0 for device, mib in lacking.items()):
            give(lacking, resident)
            victims.append(resident)
    if any(mib > 0 for mib in lacking.values()):
        return None
    return tuple(victims[: len(must)]) + _needed(lacking, victims[len(must) :])


def _needed(lacking: dict[DeviceId, int], victims: Sequence[Resident]) -> tuple[Resident, ...]:
    """Spare sleepers if the victims that are ready free enough without them."""
    needed: list[Resident] = []
    for resident in victims:
        if resident.is_asleep and all(mib + resident.gives_mib.get(device, 0) <= 0 for device, mib in lacking.items()):
            for device in lacking:
                lacking[device] += resident.gives_mib.get(device, 0)
        else:
            needed.append(resident)
    return tuple(needed)
