"""What a decision costs: the scheduler alone, at growing numbers of models, tenants and waiting requests.

Callers ask again as soon as they are answered, so that the number of waiting requests stays. Only the scheduler's own
time is counted, call by call, as processor time, which other load on the machine changes little; the simulated world
around it is not. In the same run stand two things everybody knows:
a heap of as many entries, and the bare call of a handler that does nothing.

    python benchmarks/scheduler_cost.py [--events 20000] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from math import log
from random import Random

from rich.console import Console
from rich.table import Table

import rig
from greenroom.core.effects import Effects
from greenroom.core.events import Event, Limits, ServeDone
from greenroom.core.model import Device, DeviceId, DeviceKind, ModelId, ModelSpec, Need, RequestId, TenantId
from greenroom.core.scheduler import Scheduler
from greenroom.sim.records import Call
from greenroom.sim.setting import Manners, SimConfig, SimModel
from greenroom.sim.stats import quantile
from greenroom.sim.workloads import zipf
from greenroom.sim.world import World

GOALS = {"large_p99_us_max": 1_000.0, "growth_exponent_max": 0.5}
CONCURRENCY = 16
MODEL_MIB, MODELS_PER_GPU = 1_000, 8
# Shorter answers than usual keep the queues moving; what they are does not matter to the scheduler.
PROMPT_LEN, OUTPUT_LEN = 300, 60


@dataclass(frozen=True, slots=True)
class Size:
    models: int
    tenants: int
    waiting: int
    gpus: int

    def __str__(self) -> str:
        return f"{self.models:,} models, {self.tenants:,} tenants, {self.waiting:,} waiting, {self.gpus} GPUs"


USUAL = Size(50, 20, 200, 2)
LARGE = Size(1_000, 1_000, 10_000, 8)
GROWTH = tuple(Size(count, count, 10 * count, 1) for count in (10, 30, 100, 300, 1_000))


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of one call of `handle`."""

    calls: int
    mean_us: float
    p50_us: float
    p99_us: float
    max_us: float
    slowest: str  # the kind of event that took longest

    @property
    def per_s(self) -> float:
        return 1e6 / self.mean_us


class Timed(Scheduler):
    """The scheduler with a stopwatch on every event."""

    def __init__(self, effects: Effects) -> None:
        super().__init__(effects)
        self.took: list[tuple[int, str]] = []

    def handle(self, event: Event) -> None:
        began = time.thread_time_ns()
        super().handle(event)
        self.took.append((time.thread_time_ns() - began, type(event).__name__))


class TimedWorld(World):
    def _configure(self) -> None:
        self.scheduler = self.timed = Timed(self)
        super()._configure()


class Callers:
    """So many callers, each of one tenant, who ask for a drawn model again as soon as they are answered."""

    def __init__(self, size: Size, world: World) -> None:
        self._random, self._world, self._size = Random(1), world, size
        weights = zipf([f"m{number}" for number in range(size.models)])
        self._models, self._sums = list(weights), list(accumulate(weights.values()))

    def begin(self) -> None:
        for number in range(self._size.waiting + CONCURRENCY):
            self._ask(TenantId(f"t{number % self._size.tenants}"))

    def _ask(self, tenant: TenantId) -> None:
        model = ModelId(self._random.choices(self._models, cum_weights=self._sums)[0])
        output_len = 1 + int(self._random.expovariate(1 / OUTPUT_LEN))
        self._world.arrive(model, PROMPT_LEN, output_len, tenant, self._random.randrange(3), on_end=self._again)

    def _again(self, call: Call) -> None:
        self._world.after(0.0, lambda _: self._ask(call.tenant))


def world_of(size: Size) -> TimedWorld:
    manners = Manners(load_s=5.0, concurrency=CONCURRENCY)
    models = tuple(
        SimModel(ModelSpec(ModelId(f"m{number}"), need=Need(MODEL_MIB)), manners) for number in range(size.models)
    )
    gpu_mib = MODELS_PER_GPU * MODEL_MIB
    gpus = tuple(Device(DeviceId(f"gpu{number}"), DeviceKind.GPU, gpu_mib) for number in range(size.gpus))
    return TimedWorld(SimConfig(models, gpus, Limits(queue_depth_max=10**6)))


def cost_of(size: Size, events: int, profile: cProfile.Profile | None = None) -> Cost:
    """Let everybody arrive, then time this many events."""
    world = world_of(size)
    Callers(size, world).begin()
    # The first rounds of loads are over before anything counts.
    _run(world, events // 4)
    world.timed.took.clear()
    if profile is not None:
        profile.enable()
    _run(world, events)
    if profile is not None:
        profile.disable()
    waiting = len(world.waiting())
    if waiting < size.waiting // 2:
        raise SystemExit(f"{size}: only {waiting} wait; this is not what was to be measured")
    return _cost(world.timed.took)


def _run(world: World, events: int) -> None:
    until = world.events_told + events
    while world.events_told < until and world.clock.advance(float("inf")):
        pass


def _cost(took: list[tuple[int, str]]) -> Cost:
    ordered = sorted(ns / 1e3 for ns, _ in took)
    p50, p99 = quantile(ordered, 0.50), quantile(ordered, 0.99)
    return Cost(len(ordered), sum(ordered) / len(ordered), p50, p99, ordered[-1], max(took)[1])


# --- beside something real ----------------------------------------------------------------------------------------


def heap_us(entries: int) -> float:
    """A push and a pop on a heap of so many entries."""
    random = Random(2)
    heap = [(random.random(), number) for number in range(entries)]
    heapify(heap)

    def push_and_pop() -> None:
        heappush(heap, (random.random(), 0))
        heappop(heap)

    return _each_us(push_and_pop)


def dispatch_us() -> float:
    """An event is made, its handler found, and nothing done."""
    handlers: dict[type[Event], Callable[[Event], None]] = {ServeDone: lambda _: None}
    request = RequestId("r1")

    def dispatch() -> None:
        event = ServeDone(1.0, request)
        handlers[type(event)](event)

    return _each_us(dispatch)


def _each_us(work: Callable[[], None], times: int = 100_000) -> float:
    began = time.thread_time()
    for _ in range(times):
        work()
    return (time.thread_time() - began) / times * 1e6


def exponent(costs: dict[Size, Cost]) -> float:
    """The steepest growth of the mean cost between two sizes: 0 is flat; at 1 doing n things would be quadratic."""
    points = [(log(size.models), log(cost.mean_us)) for size, cost in costs.items()]
    return max((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairwise(points))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--profile", action="store_true", help="where the time goes at the large size")
    options = parser.parse_args()
    print(rig.machine(), flush=True)
    if options.profile:
        profile = cProfile.Profile()
        cost_of(LARGE, options.events, profile)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return
    table = Table("size", "a second", "mean µs", "p50 µs", "p99 µs", "max µs", "slowest", box=None)
    costs: dict[Size, Cost] = {}
    for size in (USUAL, LARGE, *GROWTH):
        found = costs[size] = cost_of(size, options.events)
        numbers = (f"{value:,.0f}" for value in (found.per_s, found.mean_us, found.p50_us, found.p99_us, found.max_us))
        table.add_row(str(size), *numbers, found.slowest)
    Console(width=140).print(table)
    large, heap, bare = costs[LARGE], heap_us(LARGE.waiting), dispatch_us()
    growth = exponent({size: costs[size] for size in GROWTH})
    figures = {
        "machine": rig.machine(),
        "usual_per_s": round(costs[USUAL].per_s),
        "large_per_s": round(large.per_s),
        "large_p50_us": round(large.p50_us, 1),
        "large_p99_us": round(large.p99_us, 1),
        "large_max_us": round(large.max_us, 1),
        "mean_us_by_models": {size.models: round(costs[size].mean_us, 1) for size in GROWTH},
        "growth_exponent": round(growth, 2),
        "heap_us": round(heap, 2),
        "dispatch_us": round(bare, 2),
        "usual_in_heap_operations": round(costs[USUAL].mean_us / heap, 1),
        "large_in_heap_operations": round(large.mean_us / heap, 1),
        "usual_in_dispatches": round(costs[USUAL].mean_us / bare, 1),
    }
    met = large.p99_us <= GOALS["large_p99_us_max"] and growth <= GOALS["growth_exponent_max"]
    rig.report("scheduler_cost", figures, GOALS, met)


if __name__ == "__main__":
    main()
