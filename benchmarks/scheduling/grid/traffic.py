"""Traffic of the grid: requests drawn by published shapes, agents, and rows of a trace.

Owns arrivals. Pauses between requests are gamma distributed: a variation (standard deviation to mean) of 1 is Poisson,
public logs of language models have 1 to 4 over minutes, and more in bursts. Answers are lognormal: a median well below
the mean and a long tail, as in those logs. Popularity of models and tenants follows Zipf's law. Traffic is plain data
and has a random stream of its own, so every policy and every machine gets the same requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from math import log, pi, sin
from pathlib import Path
from random import Random
from typing import Protocol

from benchmarks.scheduling.grid.machines import model_names
from benchmarks.scheduling.grid.workloads import generated
from greenroom.core.model import NO_TENANT, ModelId, TenantId
from greenroom.sim.records import SimArrival
from greenroom.sim.traces.traces import Known, read_trace
from greenroom.sim.workloads import Agents, Draw, Mix, Recorded, Workload, zipf

PROMPT_LEN = 300.0
# Standard deviation of the logarithm of an answer's length, and the longest answer in means.
OUTPUT_SIGMA, OUTPUT_MAX = 1.0, 8.0
# How far the rate of a wave swings around its mean, as a share of it.
WAVE_DEPTH = 0.9
# Of a trace that names no models: over how many its rows are spread; and the most rows that are played of any trace.
SPREAD_MODELS, TRACE_ROWS = 16, 1_500


class Traffic(Protocol):
    @property
    def expected(self) -> float:
        """About how many requests come."""
        ...

    def workload(self, seed: int) -> Workload: ...


@dataclass(frozen=True, slots=True)
class Requests:
    """Independent requests. `shares` are the weights of m0, m1, …; `waves` are days within the span, if any."""

    stream: str  # requests of the same stream, seed and shape are the same
    shares: tuple[float, ...]
    rate: float
    count: int
    output_len: float = 200.0
    variation: float = 1.0
    tenants: int = 1
    waves: int = 0

    def __str__(self) -> str:
        about = (
            f"{self.rate:.3g}/s, largest share {max(self.shares) / sum(self.shares):.0%}, {self.output_len:g} tokens"
        )
        return f"{about}, variation {self.variation:g}, {self.tenants} tenants"

    @property
    def expected(self) -> float:
        return self.count

    def workload(self, seed: int) -> Workload:
        random = Random(f"{self.stream}:{seed}")
        models = Draw(dict(zip(model_names(len(self.shares)), self.shares, strict=True)))
        tenants = Draw(tenant_shares(self.tenants))
        return Recorded([self._request(random, at, models, tenants) for at in self._times(random)])

    def _request(self, random: Random, at: float, models: Draw, tenants: Draw) -> SimArrival:
        # The mean of a lognormal is above its median by half of sigma squared.
        drawn = random.lognormvariate(log(self.output_len) - OUTPUT_SIGMA**2 / 2, OUTPUT_SIGMA)
        return SimArrival(
            at,
            ModelId(models.one(random)),
            1 + int(random.expovariate(1 / PROMPT_LEN)),
            1 + int(min(OUTPUT_MAX * self.output_len, drawn)),
            TenantId(tenants.one(random)),
        )

    def _times(self, random: Random) -> Iterator[float]:
        shape, span_s, at = 1 / self.variation**2, self.count / self.rate, 0.0
        for _ in range(self.count):
            at += random.gammavariate(shape, 1 / (shape * self.rate))
            yield self._in_waves(at, span_s) if self.waves else at

    def _in_waves(self, at: float, span_s: float) -> float:
        """Time squeezed where the rate is high and stretched where it is low. The order of requests stays."""
        turn = 2 * pi * self.waves / span_s
        return at + WAVE_DEPTH / turn * sin(turn * at)


def shares(models: int, exponent: float = 1.0, first: float | None = None) -> tuple[float, ...]:
    """Popularity by Zipf's law, of all models or, with a share for the first, of the others."""
    if first is None:
        return tuple(zipf(model_names(models), exponent).values())
    others = shares(models - 1, exponent)
    return (first, *((1 - first) * share / sum(others) for share in others))


def tenant_shares(count: int) -> dict[str, float]:
    return zipf([f"u{number}" for number in range(count)]) if count > 1 else {NO_TENANT: 1.0}


@dataclass(frozen=True, slots=True)
class AgentLoops:
    """Agents that alternate between two models each; every step waits for the one before."""

    stream: str
    shares: tuple[float, ...]
    agents: int
    seconds: float
    think_s: float
    output_len: float = 200.0
    tenants: int = 1

    def __str__(self) -> str:
        return f"{self.agents} agents, {self.think_s:g} s between steps, {self.output_len:g} tokens"

    @property
    def expected(self) -> float:
        return self.agents * self.seconds / self.think_s

    def workload(self, seed: int) -> Workload:
        models = dict(zip(model_names(len(self.shares)), self.shares, strict=True))
        mix = Mix(models, tenant_shares(self.tenants), prompt_len=PROMPT_LEN, output_len=self.output_len)
        drawn = Random(f"{self.stream}:{seed}").randrange(2**32)
        return Agents(mix, self.agents, self.seconds, self.think_s, drawn)


@dataclass(frozen=True, slots=True)
class Trace:
    """The first rows of a trace at another mean rate. Its models become m0, m1, …; unnamed tenants are drawn."""

    path: str
    rate: float
    tenants: int = 1

    def __str__(self) -> str:
        return f"{trace_name(self.path)} at {self.rate:.3g}/s, {self.tenants} tenants"

    @property
    def expected(self) -> float:
        return len(trace_rows(self.path, 0))

    def workload(self, seed: int) -> Workload:
        rows = trace_rows(self.path, seed)
        stretch = len(rows) / max(rows[-1].at, 1e-9) / self.rate
        names = {model: ModelId(f"m{number}") for number, model in enumerate(sorted({row.model for row in rows}))}
        random, tenants = Random(f"{self.path}:{seed}"), Draw(tenant_shares(self.tenants))
        return Recorded(
            [row._replace(model=names[row.model], tenant=row.tenant or TenantId(tenants.one(random))) for row in rows],
            stretch,
        )


def trace_name(path: str) -> str:
    return Path(path).stem.removesuffix("_trace")


@lru_cache(maxsize=16)
def trace_rows(path: str, seed: int) -> tuple[SimArrival, ...]:
    """The first rows of a trace. Those of one that names no models are spread over some, differently with each seed."""
    known = None if _names_models(path) else Known(model_names(SPREAD_MODELS))
    rows = read_trace(path, known, seed) if known else read_trace(path)
    return tuple(islice(rows, TRACE_ROWS))


def _names_models(path: str) -> bool:
    try:
        with open(path, encoding="utf-8-sig") as file:
            return "model" in (title.strip().lower() for title in file.readline().split(","))
    except (OSError, UnicodeDecodeError):
        # read_trace tells what is wrong with it.
        return True


@dataclass(frozen=True, slots=True)
class Named:
    """A workload of `workloads.py`, with the time between its arrivals stretched."""

    name: str
    stretch: float = 1.0

    def __str__(self) -> str:
        return f"{self.name}, stretched {self.stretch:g}"

    @property
    def expected(self) -> float:
        return 600.0

    def workload(self, seed: int) -> Workload:
        return generated(self.name, self.stretch, seed)[0]
