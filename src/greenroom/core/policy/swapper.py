"""Who has to leave so that a model can come. Pure and deterministic: the same question has the same answer.

A Swapper is asked far more often than a swap happens, so it is silent and changes nothing. ByMemory is the default;
rules about company (groups, matrix) are a constraint on top of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from math import inf
from typing import Protocol

from greenroom.core.model import Claim, DeviceId, ModelId, SlotId, Tier
from greenroom.core.policy.coresidency import Coresidency
from greenroom.core.queue.waitlist import Queue

# Up to this many residents the cheapest set of victims is found exactly; more are taken greedily.
EXACT_MAX = 12


@dataclass(frozen=True, slots=True)
class Target:
    """What wants to come: the claims that would do, any one of them, and how urgent it is."""

    model: ModelId
    options: tuple[Claim, ...]
    priority: int
    on_stage: bool = True  # False for those whom rules about company do not concern: leases, and who comes to sleep


@dataclass(slots=True, eq=False)
class Resident:
    """What is there, targets of moves in flight included. `gives_mib` is what its leaving would free per device.

    Made anew for each round of decisions and never changed. `is_fixed` is the answer for one newcomer: for another the
    same resident may be asked to leave.
    """

    slot: SlotId
    model: ModelId
    gives_mib: Claim
    leaves_to: Tier
    priority: int
    last_used: float
    is_busy: bool  # answering
    is_fixed: bool  # pinned, arriving, held by somebody who was not asked to leave, or not yet to be disturbed
    cannot_leave: bool = False  # pinned or arriving
    on_stage: bool = True  # False for leases and for who is asleep
    ready_since: float = 0.0
    stays_until: float = 0.0  # its minimum residency
    batch_until: float = 0.0  # the end of its batch, while others wait
    queue: Queue | None = None  # those who wait for it
    rate: float = 0.0  # requests a second, those of long ago counting less
    reload_s: float = 0.0  # what bringing it back would take from the tier it would leave to
    drain_s: float = 0.0  # what its running answers may still take
    passed_since: float = -inf  # the time since which it was granted as often as others may be overtaken
    is_asleep: bool = False
    loss: float = 0.0  # how bad the policy finds losing it

    def fixed(self) -> Resident:
        """A copy that may not be asked to leave."""
        return Resident(
            self.slot,
            self.model,
            self.gives_mib,
            self.leaves_to,
            self.priority,
            self.last_used,
            self.is_busy,
            True,
            self.cannot_leave,
            self.on_stage,
            self.ready_since,
            self.stays_until,
            self.batch_until,
            self.queue,
            self.rate,
            self.reload_s,
            self.drain_s,
            self.passed_since,
            self.is_asleep,
            self.loss,
        )


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
    """Idle ones before busy ones, the less urgent before the more urgent; among them the smallest loss."""

    def __init__(self, company: Coresidency | None = None) -> None:
        self._company = company

    def eviction_for(
        self, target: Target, residents: Sequence[Resident], room_mib: Mapping[DeviceId, int]
    ) -> Eviction | None:
        must = self._must_leave(target, residents)
        if must is None:
            return None
        willing = [resident for resident in residents if not resident.is_fixed and resident not in must]
        # Where somebody who falls asleep would take memory.
        beds = {
            device
            for resident in residents
            if resident.leaves_to is Tier.ASLEEP
            for device, mib in resident.gives_mib.items()
            if mib < 0
        }
        found = [
            (_badness(victims, target, claim, room_mib), Eviction(claim, victims))
            for claim in target.options
            if (victims := _victims(target, claim, willing, beds, must, room_mib)) is not None
        ]
        return min(found, key=lambda pair: pair[0])[1] if found else None

    def _must_leave(self, target: Target, residents: Sequence[Resident]) -> tuple[Resident, ...] | None:
        """Those whom the rules about company send away; None if one of them cannot leave."""
        if self._company is None or not target.on_stage:
            return ()
        on_stage = [resident for resident in residents if resident.on_stage]
        present = sorted({resident.model for resident in on_stage} - {target.model})
        staying = frozenset(resident.model for resident in on_stage if resident.is_fixed)
        leavers = self._company.leavers(target.model, present, staying)
        return None if leavers is None else tuple(one for one in on_stage if one.model in leavers)


def _level(resident: Resident, target: Target) -> tuple[bool, int]:
    """Whom to disturb rather late than early: busy ones last; then by 0 for less urgent, 1 for equal, 2 for more so."""
    rank = 1 if resident.priority == target.priority else 0 if resident.priority > target.priority else 2
    return (resident.is_busy, rank)


def _badness(
    victims: tuple[Resident, ...], target: Target, claim: Claim, room_mib: Mapping[DeviceId, int]
) -> tuple[tuple[bool, int], float, int, int, tuple[DeviceId, ...]]:
    """The worst victim's level, then the loss, then how many, then the gaps left behind."""
    gap = sum(max(0, room_mib[device] - mib) for device, mib in claim.items())
    worst = max((_level(victim, target) for victim in victims), default=(False, 0))
    return (worst, sum(victim.loss for victim in victims), len(victims), gap, tuple(claim))


def _victims(
    target: Target,
    claim: Claim,
    willing: Sequence[Resident],
    beds: Set[DeviceId],
    must: tuple[Resident, ...],
    room_mib: Mapping[DeviceId, int],
) -> tuple[Resident, ...] | None:
    """The least bad set that makes room on these devices, those who must leave included; None if there is none."""
    lacking = {device: mib - room_mib[device] for device, mib in claim.items()}
    for resident in must:
        _give(lacking, resident)
    if not any(mib > 0 for mib in lacking.values()):
        return must
    if not willing:
        return None
    # Where memory lacks, or will when somebody falls asleep there.
    short = [device for device, mib in lacking.items() if mib > 0 or device in beds]
    useful = [one for one in willing if any(one.gives_mib.get(device, 0) > 0 for device in short)]
    for level in sorted({_level(resident, target) for resident in useful}):
        allowed = [resident for resident in useful if _level(resident, target) <= level]
        if (chosen := _cheapest(allowed, lacking)) is not None:
            return (*must, *sorted(chosen, key=lambda one: (_level(one, target), one.loss, one.last_used, one.slot)))
    return None


def _give(lacking: dict[DeviceId, int], resident: Resident) -> None:
    for device in lacking:
        lacking[device] -= resident.gives_mib.get(device, 0)


# --- the cheapest set ---------------------------------------------------------------------------------------------


def _cheapest(allowed: Sequence[Resident], lacking: Mapping[DeviceId, int]) -> tuple[Resident, ...] | None:
    """The set with the smallest loss that gives what is lacking. Exact for few residents, greedy for many."""
    scarce = [device for device, mib in lacking.items() if mib > 0]
    queue = sorted(allowed, key=lambda one: (_price(one, scarce), one.last_used, one.slot))
    needs = list(lacking.values())
    gives = [[one.gives_mib.get(device, 0) for device in lacking] for one in queue]
    chosen = _greedy(gives, needs)
    if 1 < len(queue) <= EXACT_MAX and not _is_one_of_the_least(chosen, queue):
        # Also where greed finds none: who falls asleep takes memory elsewhere, so that fewer may give more.
        chosen = _Search([one.loss for one in queue], gives).best(needs, chosen)
    return None if chosen is None else tuple(queue[index] for index in chosen)


def _is_one_of_the_least(chosen: list[int] | None, queue: Sequence[Resident]) -> bool:
    """Whether a single one is enough that nobody undercuts, alone or together with others."""
    return chosen is not None and len(chosen) == 1 and 0.0 <= queue[chosen[0]].loss <= min(one.loss for one in queue)


def _price(resident: Resident, scarce: Sequence[DeviceId]) -> float:
    """Loss for every MiB it gives where memory lacks."""
    return resident.loss / max(1, sum(max(0, resident.gives_mib.get(device, 0)) for device in scarce))


def _greedy(gives: Sequence[Sequence[int]], needs: Sequence[int]) -> list[int] | None:
    """Take them in order until it is enough, then spare those who turned out not to be needed."""
    left, taken = list(needs), []
    for index, given in enumerate(gives):
        if all(mib <= 0 for mib in left):
            break
        taken.append(index)
        left = [mib - more for mib, more in zip(left, given, strict=True)]
    if any(mib > 0 for mib in left):
        return None
    for index in taken[:-1][::-1]:
        without = [mib + less for mib, less in zip(left, gives[index], strict=True)]
        if all(mib <= 0 for mib in without):
            taken.remove(index)
            left = without
    return taken


class _Search:
    """Branch and bound over who leaves. Candidates are in order of loss for a MiB, so that good sets come early."""

    def __init__(self, losses: Sequence[float], gives: Sequence[Sequence[int]]) -> None:
        self._losses = losses
        self._gives = gives
        width = len(gives[0])
        # From each candidate on: what all of them could give together, and the best price of a MiB among them.
        self._rest = [[0] * width]
        self._price = [[inf] * width]
        for loss, given in zip(reversed(losses), reversed(gives), strict=True):
            self._rest.append([max(0, mib) + rest for mib, rest in zip(given, self._rest[-1], strict=True)])
            prices = [loss / mib if mib > 0 else inf for mib in given]
            self._price.append([min(pair) for pair in zip(prices, self._price[-1], strict=True)])
        self._rest.reverse()
        self._price.reverse()
        self._best: tuple[float, int, list[int] | None] = (inf, 0, None)

    def best(self, needs: Sequence[int], start: list[int] | None) -> list[int] | None:
        """The best set, found from a first guess; None if there is none at all."""
        if start is not None:
            self._best = (sum(self._losses[index] for index in start), len(start), start)
        self._branch(0, list(needs), 0.0, [])
        return self._best[2]

    def _branch(self, index: int, needs: list[int], loss: float, taken: list[int]) -> None:
        if all(mib <= 0 for mib in needs):
            if (loss, len(taken)) < self._best[:2]:
                self._best = (loss, len(taken), taken)
            return
        if any(mib > rest for mib, rest in zip(needs, self._rest[index], strict=True)):
            return
        if loss + self._bound(index, needs) >= self._best[0]:
            return
        with_it = [mib - more for mib, more in zip(needs, self._gives[index], strict=True)]
        self._branch(index + 1, with_it, loss + self._losses[index], [*taken, index])
        self._branch(index + 1, needs, loss, taken)

    def _bound(self, index: int, needs: Sequence[int]) -> float:
        """No less than this must still be lost, even if everybody gave memory at the best price there is."""
        return max(mib * price for mib, price in zip(needs, self._price[index], strict=True) if mib > 0)
