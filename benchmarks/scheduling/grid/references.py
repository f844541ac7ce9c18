"""Policies that only serve as references, and policies named by their module.

None of the references is of use in a gateway: strict first-come thrashes, the clairvoyant needs tomorrow's arrivals,
and `chance` is first-come itself, with loads that take a little more or less time. They show what such rules would
gain, and what chance alone does; none is a bound.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from importlib import import_module

from greenroom.core.events import Limits
from greenroom.core.policy import BUILT_IN
from greenroom.core.policy.base import Policies, Turn
from greenroom.core.policy.fifo import FirstCome
from greenroom.core.policy.swapper import Resident, Swapper
from greenroom.core.queue.waitlist import Queue
from greenroom.sim.workloads import Recorded, Workload

STRICT, CLAIRVOYANT, CHANCE = "strict", "clairvoyant", "chance"
KNOWN = {*BUILT_IN, STRICT, CLAIRVOYANT, CHANCE}

# A model that is never requested again counts as requested after this many seconds.
NEVER_S = 1e9

# When each model will be requested, in order of time.
Future = Mapping[str, Sequence[float]]


class Reference:
    """First-come, except where a subclass differs. It wraps the policy, because a compiled class has no interpreted
    subclasses."""

    def __init__(self, limits: Limits, swapper: Swapper) -> None:
        base = FirstCome(limits, swapper)
        self.swapper, self.priority_class, self.turn = base.swapper, base.priority_class, base.turn
        self._base = base

    def rank(self, queue: Queue, now: float) -> Turn:
        return self._base.rank(queue, now)

    def takes_at(self, queue: Queue, resident: Resident, now: float) -> float:
        return self._base.takes_at(queue, resident, now)

    def loss(self, resident: Resident, now: float) -> float:
        return self._base.loss(resident, now)


class StrictFirstCome(Reference):
    """The oldest request goes first at any cost: a busy model takes no newer request while an older one waits.

    Only the model that must make room is barred; others that are ready go on, because a slot serves its own queue.
    """

    def takes_at(self, queue: Queue, resident: Resident, now: float) -> float:
        return now


class Clairvoyant(Reference):
    """Collating FIFO that evicts the model whose next request is furthest away."""

    def __init__(self, limits: Limits, swapper: Swapper, future: Future) -> None:
        super().__init__(limits, swapper)
        self._future = future

    def loss(self, resident: Resident, now: float) -> float:
        times = self._future.get(resident.model, ())
        place = bisect_right(times, now)
        until_s = times[place] - now if place < len(times) else NEVER_S
        return 1.0 / max(until_s, 1e-6)


def policies_for(name: str, workload: Workload) -> Policies:
    """The built-in policies, the references and, if the name is `module:class`, that policy."""
    known: dict[str, type] = {}
    if ":" in name:
        module, _, attribute = name.partition(":")
        known[name] = getattr(import_module(module), attribute)
    future = _future(workload) if name == CLAIRVOYANT else {}
    clairvoyant = {CLAIRVOYANT: lambda limits, swapper: Clairvoyant(limits, swapper, future)}
    return {**BUILT_IN, STRICT: StrictFirstCome, CHANCE: FirstCome, **clairvoyant, **known}


def _future(workload: Workload) -> dict[str, list[float]]:
    """When each model is requested. When agents ask depends on when they are answered: their future is unknown."""
    future: dict[str, list[float]] = {}
    for arrival in workload.arrivals() if isinstance(workload, Recorded) else ():
        future.setdefault(arrival.model, []).append(arrival.at)
    return future
