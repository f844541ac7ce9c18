"""Which residents leave so that a model can come. Pure and deterministic: the same question has the same answer.

A Swapper is asked far more often than a swap happens, so it logs nothing and changes nothing. ByMemory is the default;
coresidency rules (groups, matrix) are a constraint on top of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import inf
from typing import Final, Protocol

from greenroom.core.model import Claim, DeviceId, ModelId, SlotId, Tier
from greenroom.core.policy.coresidency import Coresidency
from greenroom.core.queue.waitlist import Queue

# Up to this many residents the cheapest set of victims is found exactly; beyond that greedily.
EXACT_MAX: Final = 12


# How good a place is: where fewer models are busy, then where models have fewer requests, then where fewer models are,
# then where less room stays unused. The smallest is the best.
PlaceRank = tuple[int, int, int, int, tuple[DeviceId, ...]]


def _first_named(claim: Claim) -> PlaceRank:
    return (0, 0, 0, 0, tuple(claim))


# One is created for every decision in a round, so it is not frozen: that takes several times as long. Never modified.
@dataclass(slots=True)
class Target:
    """A model or lease that needs memory: its possible claims, of which one is enough, and its urgency."""

    model: ModelId
    options: tuple[Claim, ...]
    priority: int
    will_be_ready: bool = True  # False for leases, remote models and those that come to sleep: no rules apply
    apart: frozenset[ModelId] = frozenset()  # residents that are other configurations of the same thing
    version_of: ModelId | None = None  # the model whose next version it is; its name in the coresidency rules
    rank: Callable[[Claim], PlaceRank] = _first_named  # decides between options for which the same has to leave


@dataclass(slots=True, eq=False)
class Resident:
    """A slot with memory, or with a move or plan that will have it. `gives_mib` is what its eviction frees per device.

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
    is_fixed: bool  # pinned, moving, planned, or not to be evicted yet
    cannot_leave: bool = False  # pinned, moving or planned
    counts_as_ready: bool = True  # a model that is ready or arriving; False for leases and sleepers
    owes: int = 0  # turns of those that waited when it became ready
    queue: Queue | None = None  # its own waiters
    rate: float = 0.0  # requests per second; older ones count less
    reload_s: float = 0.0  # seconds to bring it back from the tier it would leave to
    drain_s: float = 0.0  # seconds that its running answers may still take
    is_asleep: bool = False
    service_s: float = 0.0  # seconds that an answer takes
    at_once: int = 1  # how many it answers at once
    loss: float = 0.0  # the policy's cost of losing it
    version_of: ModelId | None = None  # the model whose next version it is; its name in the coresidency rules

    def fixed(self, is_fixed: bool = True) -> Resident:
        """A copy that may not be asked to leave, or that may."""
        return Resident(
            self.slot,
            self.model,
            self.gives_mib,
            self.leaves_to,
            self.priority,
            self.last_used,
            self.is_busy,
            is_fixed,
            self.cannot_leave,
            self.counts_as_ready,
            self.owes,
            self.queue,
            self.rate,
            self.reload_s,
            self.drain_s,
            self.is_asleep,
            self.service_s,
            self.at_once,
            self.loss,
            self.version_of,
        )


@dataclass(frozen=True, slots=True)
class Eviction:
    """The chosen claim and its victims, in the order in which they should leave. Busy victims are waited for."""

    claim: Claim
    victims: tuple[Resident, ...]

    @property
    def is_blocked(self) -> bool:
        return any(victim.is_busy for victim in self.victims)


class Swapper(Protocol):
    def eviction_for(
        self, target: Target, residents: Sequence[Resident], room_mib: Mapping[DeviceId, int]
    ) -> Eviction | None:
        """The best way to make room; None if even evicting every resident that may leave is not enough.

        `room_mib` is free memory per device: promises are deducted, and slots that are leaving count as gone.
        """
        ...


class ByMemory:
    """Idle residents before busy ones, less urgent before more urgent ones; among them the smallest loss."""

    def __init__(self, coresidency: Coresidency | None = None) -> None:
        self._coresidency = coresidency

    def eviction_for(
        self, target: Target, residents: Sequence[Resident], room_mib: Mapping[DeviceId, int]
    ) -> Eviction | None:
        must = self._must_leave(target, residents)
        if must is None:
            return None
        willing = [resident for resident in residents if not resident.is_fixed and resident not in must]
        # Most questions end here: nothing may leave yet.
        options = _within(target.options, _could_free(willing, must, room_mib))
        if not options:
            return None
        # Devices where a resident that falls asleep takes memory.
        sleeper_devices = {
            device
            for resident in residents
            if resident.leaves_to is Tier.ASLEEP
            for device, mib in resident.gives_mib.items()
            if mib < 0
        }
        found = [
            Eviction(claim, victims)
            for claim in options
            if (victims := _victims(target, claim, willing, sleeper_devices, must, room_mib)) is not None
        ]
        if len(found) < 2:
            return found[0] if found else None
        return min(found, key=lambda one: _badness(one, target))

    def _must_leave(self, target: Target, residents: Sequence[Resident]) -> tuple[Resident, ...] | None:
        """Residents that `target.apart` and the coresidency rules evict; None if one of them cannot leave."""
        apart, rules = target.apart, self._coresidency
        if (rules is None and not apart) or not target.will_be_ready:
            return ()
        ready = [resident for resident in residents if resident.counts_as_ready]
        if any(one.is_fixed and one.model in apart for one in ready):
            return None
        leavers = frozenset[ModelId]() if rules is None else _leavers(rules, target, ready)
        if leavers is None:
            return None
        return tuple(one for one in ready if (one.version_of or one.model) in leavers or one.model in apart)


def _leavers(rules: Coresidency, target: Target, ready: Sequence[Resident]) -> frozenset[ModelId] | None:
    """The names that must leave, where each version goes by the name of its model; None if one cannot leave."""
    newcomer = target.version_of or target.model
    others = [(one.version_of or one.model, one.is_fixed) for one in ready]
    present = sorted({name for name, _ in others} - {newcomer})
    return rules.leavers(newcomer, present, frozenset(name for name, is_fixed in others if is_fixed) - {newcomer})


def _level(resident: Resident, target: Target) -> tuple[bool, int]:
    """Eviction order: idle before busy; then less urgent (0), equally urgent (1), more urgent (2) than the target."""
    rank = 1 if resident.priority == target.priority else 0 if resident.priority > target.priority else 2
    return (resident.is_busy, rank)


def _badness(eviction: Eviction, target: Target) -> tuple[tuple[bool, int], float, int, PlaceRank]:
    """The worst victim's level, then the total loss, then the number of victims, then the place itself."""
    victims = eviction.victims
    worst = max((_level(victim, target) for victim in victims), default=(False, 0))
    return (worst, sum(victim.loss for victim in victims), len(victims), target.rank(eviction.claim))


def _victims(
    target: Target,
    claim: Claim,
    willing: Sequence[Resident],
    sleeper_devices: Set[DeviceId],
    must: tuple[Resident, ...],
    room_mib: Mapping[DeviceId, int],
) -> tuple[Resident, ...] | None:
    """The least bad set that makes room on these devices, `must` included; None if there is none."""
    lacking = {device: mib - room_mib[device] for device, mib in claim.items()}
    for resident in must:
        give(lacking, resident)
    if not any(mib > 0 for mib in lacking.values()):
        return must
    # Where memory is missing, or will be once a resident falls asleep there.
    short = [device for device, mib in lacking.items() if mib > 0 or device in sleeper_devices]
    useful = [one for one in willing if any(one.gives_mib.get(device, 0) > 0 for device in short)]
    if len(useful) == 1:
        # Most often: then there is nothing to choose.
        is_enough = all(mib <= useful[0].gives_mib.get(device, 0) for device, mib in lacking.items())
        return (*must, *useful) if is_enough else None
    for level in sorted({_level(resident, target) for resident in useful}):
        allowed = [resident for resident in useful if _level(resident, target) <= level]
        if (chosen := _cheapest(allowed, lacking)) is not None:
            return (*must, *sorted(chosen, key=lambda one: (_level(one, target), one.loss, one.last_used, one.slot)))
    return None


def _could_free(
    willing: Sequence[Resident], must: tuple[Resident, ...], room_mib: Mapping[DeviceId, int]
) -> Mapping[DeviceId, int]:
    """The most that could be free per device: no set of victims frees more."""
    if not willing and not must:
        return room_mib
    could_mib = dict(room_mib)
    for resident in must:
        for device, mib in resident.gives_mib.items():
            could_mib[device] = could_mib.get(device, 0) + mib
    for resident in willing:
        for device, mib in resident.gives_mib.items():
            if mib > 0:
                could_mib[device] = could_mib.get(device, 0) + mib
    return could_mib


def _within(options: tuple[Claim, ...], most_mib: Mapping[DeviceId, int]) -> list[Claim]:
    # Hot path: a loop is cheaper than a generator for each claim.
    found = []
    for claim in options:
        for device, mib in claim.items():
            if mib > most_mib[device]:
                break
        else:
            found.append(claim)
    return found


def give(lacking: dict[DeviceId, int], resident: Resident) -> None:
    """Its eviction makes this much less lack."""
    for device in lacking:
        lacking[device] -= resident.gives_mib.get(device, 0)


# --- the cheapest set ---------------------------------------------------------------------------------------------


def _cheapest(allowed: Sequence[Resident], lacking: Mapping[DeviceId, int]) -> tuple[Resident, ...] | None:
    """The set with the smallest loss that frees what is missing. Exact for few residents, greedy for many."""
    scarce = [device for device, mib in lacking.items() if mib > 0]
    queue = sorted(allowed, key=lambda one: (_price(one, scarce), one.last_used, one.slot))
    needs = list(lacking.values())
    gives = [[one.gives_mib.get(device, 0) for device in lacking] for one in queue]
    chosen = _greedy(gives, needs)
    if 1 < len(queue) <= EXACT_MAX and not _is_one_of_the_least(chosen, queue):
        # Also if greedy found nothing: a resident that falls asleep takes memory elsewhere, so fewer victims may free
        # more.
        chosen = _Search([one.loss for one in queue], gives).best(needs, chosen)
    return None if chosen is None else tuple(queue[index] for index in chosen)


def _is_one_of_the_least(chosen: list[int] | None, queue: Sequence[Resident]) -> bool:
    """True if one victim is enough and no resident has a smaller loss."""
    return chosen is not None and len(chosen) == 1 and 0.0 <= queue[chosen[0]].loss <= min(one.loss for one in queue)


def _price(resident: Resident, scarce: Sequence[DeviceId]) -> float:
    """Loss per MiB that it frees where memory is missing."""
    return resident.loss / max(1, sum(max(0, resident.gives_mib.get(device, 0)) for device in scarce))


def _greedy(gives: Sequence[Sequence[int]], needs: Sequence[int]) -> list[int] | None:
    """Take victims in order until there is enough, then spare those that turn out not to be needed."""
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
    """Branch and bound over sets of victims. Candidates are sorted by loss per MiB, so that good sets come early."""

    def __init__(self, losses: Sequence[float], gives: Sequence[Sequence[int]]) -> None:
        self._losses = losses
        self._gives = gives
        width = len(gives[0])
        # For each suffix of the candidates: what they could free in total, and the best price of a MiB.
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
        """The best set, starting from a first guess; None if there is none."""
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
        """Lower bound of the further loss, as if every candidate freed memory at the best remaining price."""
        return max(mib * price for mib, price in zip(needs, self._price[index], strict=True) if mib > 0)
