"""What a decision costs: the scheduler alone, at growing numbers of models, tenants and waiting requests.

Callers ask again as soon as they are answered, so that the number of waiting requests stays the same. Only the
scheduler's own time is counted, call by call: its effects are noted, and the simulated world plays them when the clock
has stopped. Two clocks run: the wall clock, and that of the thread, which other load on the machine changes little. Of
several rounds the best counts. The goal is judged by the wall clock where the machine was quiet and by the thread's
clock where it was not; the output says which. The garbage collector is set as in the gateway. Two known costs are
measured in the same run: a heap of as many entries, and the bare call of a handler that does nothing.

    python -m benchmarks.scheduling.cost [--events 20000] [--rounds 3] [--profile]

With `.venv-compiled/bin/python` (`make compiled`) the compiled build is measured.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from math import log
from random import Random
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from benchmarks.rig.gateways import build_of
from benchmarks.rig.result import Run, options_of
from greenroom.app import GC_THRESHOLDS
from greenroom.core.effects import Effects
from greenroom.core.events import Event, Limits, ServeDone
from greenroom.core.model import Device, DeviceId, DeviceKind, ModelId, ModelSpec, Need, RequestId, TenantId
from greenroom.core.scheduler import DefaultScheduler
from greenroom.sim.config import SimConfig, SimModel, Timings
from greenroom.sim.records import SimCall
from greenroom.sim.results.stats import quantile
from greenroom.sim.workloads import zipf
from greenroom.sim.world import World

# At 1, n events cost n².
GOALS = {"large_p99_us_max": 1_000.0, "growth_exponent_max": 0.9}
# On a quiet machine the wall clock runs at most this much longer than the thread's.
QUIET_RATIO = 1.05
CONCURRENCY = 16
MODEL_MIB, MODELS_PER_GPU = 1_000, 8
# Short answers keep the queues moving; their length does not matter to the scheduler.
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
# One GPU holds eight models. With hardly more than that nearly all events are requests that are served at once, with
# several times as many a tenth are moves, each with a decision: growth is judged from there on.
FEW = Size(10, 10, 100, 1)
GROWTH = tuple(Size(count, count, 10 * count, 1) for count in (30, 100, 300, 1_000))


@dataclass(frozen=True, slots=True)
class Took:
    """One call of `handle`: nanoseconds by the wall clock and by the thread's, and the kind of its event."""

    wall_ns: int
    cpu_ns: int
    event: str


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of one call of `handle` by one clock."""

    mean_us: float
    p50_us: float
    p99_us: float
    max_us: float


@dataclass(frozen=True, slots=True)
class Cost:
    wall: Times
    cpu: Times
    slowest: str  # the kind of event that took longest

    @property
    def is_quiet(self) -> bool:
        return self.wall.mean_us <= QUIET_RATIO * self.cpu.mean_us

    @property
    def judged(self) -> Times:
        return self.wall if self.is_quiet else self.cpu

    @property
    def per_s(self) -> float:
        return 1e6 / self.cpu.mean_us


class Noted:
    """Notes effects, to play them later."""

    def __init__(self, effects: Effects) -> None:
        self._effects = effects
        self._orders: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        order = getattr(self._effects, name)

        def note(*details: Any) -> None:
            self._orders.append((order, details))

        # From now on it is found without __getattr__.
        setattr(self, name, note)
        return note

    def play(self) -> None:
        orders, self._orders = self._orders, []
        for order, details in orders:
            order(*details)


class TimedWorld(World):
    """A world that times every event. It wraps the scheduler, so that a compiled one can be measured too."""

    def _configure(self) -> None:
        self.took: list[Took] = []
        self._noted = Noted(self)
        self.scheduler = DefaultScheduler(cast(Effects, self._noted))
        super()._configure()

    def post(self, event: Event) -> None:
        self.events_told += 1
        handle = self.scheduler.handle
        wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        handle(event)
        cpu_ns = time.thread_time_ns() - cpu_ns
        wall_ns = time.perf_counter_ns() - wall_ns
        self.took.append(Took(wall_ns, cpu_ns, type(event).__name__))
        self._noted.play()


class Callers:
    """So many callers, each of one tenant. Each asks for a random model again as soon as it is answered."""

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

    def _again(self, call: SimCall) -> None:
        self._world.after(0.0, lambda _: self._ask(call.tenant))


def world_of(size: Size) -> TimedWorld:
    timings = Timings(load_s=5.0, concurrency=CONCURRENCY)
    models = tuple(
        SimModel(ModelSpec(ModelId(f"m{number}"), need=Need(MODEL_MIB)), timings) for number in range(size.models)
    )
    gpu_mib = MODELS_PER_GPU * MODEL_MIB
    gpus = tuple(Device(DeviceId(f"gpu{number}"), DeviceKind.GPU, gpu_mib) for number in range(size.gpus))
    return TimedWorld(SimConfig(models, gpus, Limits(queue_depth_max=10**6)))


def cost_of(size: Size, events: int, profile: cProfile.Profile | None = None) -> Cost:
    """Let all callers arrive, then time this many events."""
    world = world_of(size)
    Callers(size, world).begin()
    # The first rounds of loads are over before anything counts.
    _run(world, events // 4)
    world.took.clear()
    # As in the gateway when it begins to serve: garbage is collected, and what is left is not looked at again.
    gc.collect()
    gc.freeze()
    if profile is not None:
        profile.enable()
    _run(world, events)
    if profile is not None:
        profile.disable()
    gc.unfreeze()
    waiting = len(world.waiting())
    if waiting < size.waiting // 2:
        raise SystemExit(f"{size}: only {waiting} requests wait, which is too few to measure")
    return _cost(world.took)


def best_of(size: Size, events: int, rounds: int) -> Cost:
    return min((cost_of(size, events) for _ in range(rounds)), key=lambda cost: cost.judged.p99_us)


def _run(world: World, events: int) -> None:
    until = world.events_told + events
    while world.events_told < until and world.clock.advance(float("inf")):
        pass


def _cost(took: list[Took]) -> Cost:
    wall, cpu = _times([one.wall_ns for one in took]), _times([one.cpu_ns for one in took])
    return Cost(wall, cpu, max(took, key=lambda one: one.cpu_ns).event)


def _times(took_ns: list[int]) -> Times:
    ordered = sorted(ns / 1e3 for ns in took_ns)
    return Times(sum(ordered) / len(ordered), quantile(ordered, 0.50), quantile(ordered, 0.99), ordered[-1])


# --- known costs to compare with ----------------------------------------------------------------------------------


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
    """An event is made, its handler is found, and it does nothing."""
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
    """The steepest growth of the mean cost between two sizes: 0 is flat; at 1, n events cost n²."""
    points = [(log(size.models), log(cost.cpu.mean_us)) for size, cost in costs.items()]
    return max((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairwise(points))


def table_of(costs: dict[Size, Cost]) -> Table:
    by_clock = ("mean µs", "p50 µs", "p99 µs", "max µs")
    table = Table("size", "a second", *(f"{name} {clock}" for clock in ("cpu", "wall") for name in by_clock), "slowest")
    for size, cost in costs.items():
        times = [each for of in (cost.cpu, cost.wall) for each in (of.mean_us, of.p50_us, of.p99_us, of.max_us)]
        table.add_row(str(size), *(f"{value:,.0f}" for value in (cost.per_s, *times)), cost.slowest)
    table.box = None
    return table


def figures_of(costs: dict[Size, Cost]) -> dict[str, Any]:
    usual, large, heap, bare = costs[USUAL], costs[LARGE], heap_us(LARGE.waiting), dispatch_us()
    return {
        "judged_by": "wall" if large.is_quiet else "cpu: the machine was not quiet",
        "usual_per_s": round(usual.per_s),
        "large_per_s": round(large.per_s),
        **{f"large_{name}": round(getattr(large.cpu, name), 1) for name in ("p50_us", "p99_us", "max_us")},
        **{f"large_wall_{name}": round(getattr(large.wall, name), 1) for name in ("p50_us", "p99_us", "max_us")},
        "mean_us_by_models": {size.models: round(costs[size].cpu.mean_us, 1) for size in (FEW, *GROWTH)},
        "growth_exponent": round(exponent({size: costs[size] for size in GROWTH}), 2),
        "heap_us": round(heap, 2),
        "dispatch_us": round(bare, 2),
        "usual_in_heap_operations": round(usual.cpu.mean_us / heap, 1),
        "large_in_heap_operations": round(large.cpu.mean_us / heap, 1),
        "usual_in_dispatches": round(usual.cpu.mean_us / bare, 1),
    }


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3, help="of which the best counts")
    parser.add_argument("--profile", action="store_true", help="where the time goes at the large size")
    options = parser.parse_args()
    gc.set_threshold(*GC_THRESHOLDS)
    run, build = Run("scheduler_cost", options), build_of(sys.executable)
    print(f"{build} build", flush=True)
    if options.profile:
        profile = cProfile.Profile()
        cost_of(LARGE, options.events, profile)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return
    costs = {size: best_of(size, options.events, options.rounds) for size in (USUAL, LARGE, FEW, *GROWTH)}
    Console(width=200).print(table_of(costs))
    figures = figures_of(costs)
    p99_us, growth = costs[LARGE].judged.p99_us, figures["growth_exponent"]
    met = p99_us <= GOALS["large_p99_us_max"] and growth <= GOALS["growth_exponent_max"]
    run.report({"build": build, **figures}, GOALS, met)


if __name__ == "__main__":
    main()
