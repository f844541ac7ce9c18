"""Workloads: random arrivals, recorded ones, and loops of agents that ask again after each answer. Owns arrivals only.
A workload has random numbers of its own, so that the same seed brings the same callers to every policy."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from typing import Protocol

from greenroom.core.model import NO_TENANT, ModelId, TenantId
from greenroom.sim.records import SimArrival, SimCall
from greenroom.sim.world import World

# Popularity of models falls like 1 / rank^s; public logs of many models look like 1.
ZIPF_EXPONENT = 1.0

# Bounds of a run: as many requests as a trace may have, within some thirty years.
ARRIVALS_MAX = 50_000_000
SPAN_MAX_S = 1e9
# Loops at once: each has random numbers of its own, some kilobytes.
AGENTS_MAX = 100_000


class Workload(Protocol):
    @property
    def seconds(self) -> float:
        """The time span of the arrivals."""
        ...

    def begin(self, world: World) -> None:
        """Schedule the arrivals in this world."""
        ...


class Draw:
    """Draws one of several things by weight."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._things = list(weights)
        self._sums = list(accumulate(weights.values()))
        self._last = len(self._things) - 1

    def one(self, random: Random) -> str:
        """The same as `random.choices` would draw, but faster for one."""
        return self._things[bisect(self._sums, random.random() * self._sums[-1], 0, self._last)]


def zipf(names: Sequence[str], exponent: float = ZIPF_EXPONENT) -> dict[str, float]:
    """Weights by rank: the first is the most popular."""
    return {name: 1.0 / rank**exponent for rank, name in enumerate(names, start=1)}


@dataclass(frozen=True, slots=True)
class Mix:
    """What requests are like: weights of models, tenants and priorities, and mean lengths in tokens."""

    models: Mapping[str, float]
    tenants: Mapping[str, float] = field(default_factory=lambda: {NO_TENANT: 1.0})
    priorities: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})
    # Priorities of models that have their own; for others they are drawn.
    priority_of: Mapping[str, int] = field(default_factory=dict)
    prompt_len: float = 300.0
    output_len: float = 200.0


class Drawing:
    """Draws requests from a mix. Lengths are exponential: many short ones, a few very long ones."""

    def __init__(self, mix: Mix, random: Random) -> None:
        self._mix = mix
        self._random = random
        self._models = Draw(mix.models)
        self._tenants = Draw(mix.tenants)
        self._priorities = Draw({str(priority): weight for priority, weight in mix.priorities.items()})

    def arrival(self, at: float) -> SimArrival:
        random = self._random
        model, drawn = self._models.one(random), int(self._priorities.one(random))
        return SimArrival(
            at,
            ModelId(model),
            1 + int(random.expovariate(1.0 / self._mix.prompt_len)),
            1 + int(random.expovariate(1.0 / self._mix.output_len)),
            TenantId(self._tenants.one(random)),
            self._mix.priority_of.get(model, drawn),
        )


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent callers: `rate` requests a second for `seconds`."""

    mix: Mix
    rate: float
    seconds: float
    seed: int = 0

    @property
    def expected(self) -> float:
        """About how many requests come; a time below a second counts as one second."""
        return self.rate * max(1.0, self.seconds)

    def begin(self, world: World) -> None:
        world.feed(self.arrivals())

    def arrivals(self) -> Iterator[SimArrival]:
        random = Random(f"{self.seed}:poisson")
        drawing, at = Drawing(self.mix, random), random.expovariate(self.rate)
        while at < self.seconds:
            yield drawing.arrival(at)
            at += random.expovariate(self.rate)


@dataclass(frozen=True, slots=True)
class Bursty(Poisson):
    """Bursts and silence in turn, of exponential lengths. `rate` is the mean over both."""

    burst_s: float = 10.0
    silence_s: float = 30.0

    def arrivals(self) -> Iterator[SimArrival]:
        random = Random(f"{self.seed}:bursty")
        drawing, at = Drawing(self.mix, random), 0.0
        rate_in_burst = self.rate * (self.burst_s + self.silence_s) / self.burst_s
        while at < self.seconds:
            ends = at + random.expovariate(1.0 / self.burst_s)
            at += random.expovariate(rate_in_burst)
            while at < min(ends, self.seconds):
                yield drawing.arrival(at)
                at += random.expovariate(rate_in_burst)
            at = ends + random.expovariate(1.0 / self.silence_s)


@dataclass(frozen=True, slots=True)
class Agents:
    """Loops that alternate models: a planner, a tool's model, the planner again; each step waits for the one before.
    Every agent has its own pair of models, drawn from the mix, and pauses between steps. After a refusal it pauses and
    asks again."""

    mix: Mix
    agents: int
    seconds: float
    think_s: float = 2.0
    seed: int = 0

    @property
    def expected(self) -> float:
        """About how many requests come if every answer takes no time; at least one per agent."""
        return self.agents * max(1.0, self.seconds / self.think_s)

    def begin(self, world: World) -> None:
        for number in range(self.agents):
            Agent(self, number, world).think()


class Agent:
    def __init__(self, loop: Agents, number: int, world: World) -> None:
        self._loop = loop
        self._world = world
        self._random = Random(f"{loop.seed}:agent:{number}")
        self._drawing = Drawing(loop.mix, self._random)
        drawn = self._drawing.arrival(0.0)
        self._tenant = drawn.tenant
        self._pair = (drawn.model, self._other_than(drawn.model))
        self._step = 0

    def _other_than(self, model: ModelId) -> ModelId:
        """Another model, if there is one."""
        others = {name: weight for name, weight in self._loop.mix.models.items() if name != model}
        return ModelId(Draw(others).one(self._random)) if others else model

    def think(self, _: SimCall | None = None) -> None:
        """Pause, then ask the next model, unless the time is over."""
        after_s = self._random.expovariate(1.0 / self._loop.think_s)
        if self._world.now + after_s < self._loop.seconds:
            self._world.after(after_s, self._ask)

    def _ask(self, world: World) -> None:
        drawn = self._drawing.arrival(world.now)
        model = self._pair[self._step % len(self._pair)]
        self._step += 1
        world.arrive(model, drawn.prompt_len, drawn.output_len, self._tenant, drawn.priority, on_end=self.think)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Known arrivals in order of time, such as those of a trace. `stretch` multiplies their times."""

    rows: Sequence[SimArrival]
    stretch: float = 1.0

    @property
    def seconds(self) -> float:
        return self.rows[-1].at * self.stretch if self.rows else 0.0

    def begin(self, world: World) -> None:
        world.feed(self.arrivals())

    def arrivals(self) -> Iterator[SimArrival]:
        for row in self.rows:
            yield row if self.stretch == 1.0 else row._replace(at=row.at * self.stretch)
