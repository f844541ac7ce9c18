"""Policies to compare with: strict first-come, and two that know what nobody can know.

Owns what is only a reference. None is of use in a gateway: the first thrashes, the others need tomorrow's arrivals or
the length of answers that have not begun. They show what such knowledge would gain; none of them is a bound.
`PolicyWorld` plays any of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from greenroom.core.events import Limits
from greenroom.core.model import ModelId
from greenroom.core.policy.base import Policies, Turn
from greenroom.core.policy.fifo import FirstCome
from greenroom.core.policy.registry import BUILT_IN
from greenroom.core.policy.swapper import Resident, Swapper
from greenroom.core.queue.waitlist import Queue
from greenroom.core.scheduler import Scheduler
from greenroom.sim.setting import SimConfig
from greenroom.sim.world import World

STRICT, CLAIRVOYANT, ORACLE = "strict", "clairvoyant", "oracle"

# What is never asked for again is as good as asked for in this many seconds.
NEVER_S = 1e9

# When each model will be asked for, in order of time.
Future = Mapping[str, Sequence[float]]


class Reference:
    """First-come but for what a reference does otherwise. It has one rather than being one, because a compiled class
    has no interpreted children."""

    def __init__(self, limits: Limits, swapper: Swapper) -> None:
        base = FirstCome(limits, swapper)
        self.swapper, self.standing, self.turn = base.swapper, base.standing, base.turn
        self._base = base

    def rank(self, queue: Queue, now: float) -> Turn:
        return self._base.rank(queue, now)

    def takes_at(self, queue: Queue, resident: Resident, now: float) -> float:
        return self._base.takes_at(queue, resident, now)

    def loss(self, resident: Resident, now: float) -> float:
        return self._base.loss(resident, now)


class StrictFirstCome(Reference):
    """Whoever comes first goes first, whatever it costs: a busy model takes no newer request while an older one waits.

    Only the model whose place is taken is barred; others that are ready go on, because a slot serves its own queue.
    """

    def takes_at(self, queue: Queue, resident: Resident, now: float) -> float:
        return now


class Clairvoyant(Reference):
    """Collating FIFO that sends away whoever is asked for again last."""

    def __init__(self, limits: Limits, swapper: Swapper, future: Future) -> None:
        super().__init__(limits, swapper)
        self._future = future

    def loss(self, resident: Resident, now: float) -> float:
        times = self._future.get(resident.model, ())
        place = bisect_right(times, now)
        until_s = times[place] - now if place < len(times) else NEVER_S
        return 1.0 / max(until_s, 1e-6)


class Oracle(Reference):
    """Collating FIFO that knows how long answers will be: the shortest visit for each who waits goes first."""

    def __init__(self, limits: Limits, swapper: Swapper, service_s: Callable[[str], float]) -> None:
        super().__init__(limits, swapper)
        self._service_s = service_s

    def rank(self, queue: Queue, now: float) -> Turn:
        services_s = [self._service_s(waiter.id) for waiter in queue]
        return ((queue.swap_s + max(services_s)) / len(services_s), queue.lift_at)


class PolicyWorld(World):
    """The simulated world under the built-in policies and those of this file; `future` is for the clairvoyant."""

    def __init__(self, config: SimConfig, seed: int, future: Future) -> None:
        self._policies: Policies = {
            **BUILT_IN,
            STRICT: StrictFirstCome,
            CLAIRVOYANT: lambda limits, swapper: Clairvoyant(limits, swapper, future),
            ORACLE: lambda limits, swapper: Oracle(limits, swapper, self._service_s),
        }
        super().__init__(config, seed)

    def _service_s(self, request: str) -> float:
        call = self.calls[request]
        return self.models[call.model].manners.service_s(call.prompt_len, call.output_len)

    def _configure(self) -> None:
        config = self.config
        self.scheduler = Scheduler(self, self._policies)
        limits = replace(config.limits, policy=config.policy)
        self.change_config(config.models, devices=config.devices, limits=limits, learned=config.learned())


def future_of(arrivals: Sequence[tuple[float, ModelId]]) -> dict[str, list[float]]:
    """When each model is asked for."""
    future: dict[str, list[float]] = {}
    for at, model in arrivals:
        future.setdefault(model, []).append(at)
    return future
