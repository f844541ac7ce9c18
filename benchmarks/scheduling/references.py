"""What the default policy is compared with: policies that only serve as references, and swaps counted offline.

No policy here is of use in a gateway: strict first-come thrashes, the others need tomorrow's arrivals or the length of
answers that have not begun. They show what such knowledge would gain; none of them is a bound. `PolicyWorld` plays any
of them. The offline figures are counts only: service takes no time, nothing waits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from greenroom.core.events import Limits
from greenroom.core.model import ModelId
from greenroom.core.policy import BUILT_IN
from greenroom.core.policy.base import Policies, Turn
from greenroom.core.policy.fifo import FirstCome
from greenroom.core.policy.swapper import Resident, Swapper
from greenroom.core.queue.waitlist import Queue
from greenroom.core.scheduler import Scheduler
from greenroom.sim.config import SimConfig
from greenroom.sim.world import World

STRICT, CLAIRVOYANT, ORACLE = "strict", "clairvoyant", "oracle"

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


class Oracle(Reference):
    """Collating FIFO that knows how long answers will be: first the queue with the least time per waiting request."""

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
        return self.models[call.model].timings.service_s(call.prompt_len, call.output_len)

    def _configure(self) -> None:
        config = self.config
        self.scheduler = Scheduler(self, self._policies)
        limits = replace(config.limits, policy=config.policy)
        self.change_config(config.models, devices=config.devices, limits=limits, learned=config.learned())


def future_of(arrivals: Sequence[tuple[float, ModelId]]) -> dict[str, list[float]]:
    """When each model is requested."""
    future: dict[str, list[float]] = {}
    for at, model in arrivals:
        future.setdefault(model, []).append(at)
    return future


# --- offline --------------------------------------------------------------------------------------------------------

Asked = Sequence[tuple[float, str]]


def lru(models: Sequence[str], slots: int) -> int:
    """Loads when the least recently used model is evicted. The last key of a dict is the newest."""
    ready: dict[str, None] = {}
    loads = 0
    for model in models:
        loads += model not in ready
        ready.pop(model, None)
        ready[model] = None
        if len(ready) > slots:
            del ready[next(iter(ready))]
    return loads


def belady(models: Sequence[str], slots: int) -> int:
    """Loads when the model whose next request is furthest away is evicted: the fewest without reordering requests."""
    again = _asked_again(models)
    ready: dict[str, int] = {}
    loads = 0
    for place, model in enumerate(models):
        if model not in ready:
            loads += 1
            if len(ready) >= slots:
                del ready[max(ready, key=lambda one: ready[one])]
        ready[model] = again[place]
    return loads


def _asked_again(models: Sequence[str]) -> list[int]:
    """For each request, the index of the next one for the same model."""
    following: dict[str, int] = {}
    again = [0] * len(models)
    for place in range(len(models) - 1, -1, -1):
        again[place] = following.get(models[place], len(models))
        following[models[place]] = place
    return again


def regrouped(asked: Asked, window_s: float) -> list[str]:
    """The requests with those of each window grouped by model, the most recently used model first."""
    ordered: list[str] = []
    used: dict[str, int] = {}
    for _, window in groupby(asked, key=lambda one: int(one[0] // window_s)):
        ordered += sorted((model for _, model in window), key=lambda model: (-used.get(model, -1), model))
        used |= {model: place for place, model in enumerate(ordered)}
    return ordered


def swaps_per_request(asked: Asked, slots: int) -> dict[str, float]:
    models = [model for _, model in asked]
    counts = {"lru": lru(models, slots), "belady": belady(models, slots)}
    for window_s in (10.0, 30.0):
        counts[f"regroup {window_s:g} s"] = lru(regrouped(asked, window_s), slots)
    return {name: count / len(models) for name, count in counts.items()}
