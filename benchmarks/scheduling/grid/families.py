"""Families of cells: machines and traffic drawn by a seeded generator, one shape of traffic in each family.

Every cell of a family has its number and is drawn from that alone, so a cell is the same however many others are drawn.
Machines, sizes, disks, green rooms, concurrency, tenants and load vary in all families. What a family is named after is
fixed or drawn from a range of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp, log
from random import Random

from benchmarks.scheduling.grid.cells import Cell
from benchmarks.scheduling.grid.machines import DISK_MIB_PER_S, GIB, START_S, Machine, gib, slots
from benchmarks.scheduling.grid.traffic import (
    PROMPT_LEN,
    AgentLoops,
    Named,
    Requests,
    Trace,
    Traffic,
    shares,
    trace_rows,
)
from benchmarks.scheduling.grid.workloads import GRID, MODELS
from greenroom.sim.config import DEFAULT_TIMINGS, ONE_PROCESS, OWN_PROCESSES, SpeedCurve

# What models weigh on GPUs of each size, in GiB.
SIZES_GIB = {24: (5, 7, 9, 12, 16, 20), 80: (5, 9, 16, 20, 28, 40, 60), 141: (9, 16, 28, 40, 60, 100)}
MODELS_MIN, MODELS_MAX = 3, 48
# Seconds to start an engine and MiB a second of weights: from a usual disk, and from a fast one or the page cache.
SLOW_LOAD, FAST_LOAD = (START_S, DISK_MIB_PER_S), (1.0, 6_000.0)
LOAD_MIN, LOAD_MAX = 0.05, 1.1
# A run is long enough that a starved model shows, where that is affordable.
SPAN_S, COUNT_MIN, COUNT_MAX = 1_500.0, 600, 5_000
THINK_S, AGENTS_MAX = 5.0, 30
STRETCH_MIN, STRETCH_MAX = 2.0, 32.0


# Models that are busy on the same GPU, in processes of their own or in one. Sharing matters most where all models fit.
CURVES, SOME_FIT = (OWN_PROCESSES, ONE_PROCESS), (0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class Shape:
    """The ranges a family draws from."""

    gpus: tuple[int, ...] = (1, 1, 2, 4, 8)
    concurrency: tuple[int, ...] = (1, 4, 16)
    tenants: tuple[int, ...] = (1, 1, 50, 5_000)
    first: tuple[float, ...] = ()  # the share of the first model; by Zipf's law if empty
    output_len: tuple[float, ...] = (100.0, 200.0, 400.0)
    variation: tuple[float, ...] = (1.0, 1.0, 2.0)
    waves: int = 0
    loads: tuple[tuple[float, float], ...] = (SLOW_LOAD, SLOW_LOAD, FAST_LOAD)
    over: tuple[float, ...] = (1.5, 2.0, 3.0, 5.0)  # how many times the memory there is all models need
    compute: tuple[SpeedCurve, ...] = ()  # how models slow each other down; not at all if empty


SHAPES = {
    "steady": Shape(),
    "bursty": Shape(variation=(2.0, 4.0, 8.0)),
    "long": Shape(output_len=(600.0, 1_500.0)),
    "dominant": Shape(first=(0.28, 0.6, 0.9, 0.97)),
    "agents": Shape(),
    "diurnal": Shape(waves=2),
    "users": Shape(tenants=(5_000,)),
    "single": Shape(gpus=(1,), concurrency=(1,)),
    "shared": Shape(over=SOME_FIT, compute=CURVES),
}
SLOTS = "slots"
FAMILIES = (*SHAPES, SLOTS)


def family_cells(family: str, count: int, traces: dict[str, str]) -> list[Cell]:
    """The first cells of a family, by its name or the name of a trace."""
    return [draw_cell(family, number, traces) for number in range(count)]


def draw_cell(family: str, number: int, traces: dict[str, str]) -> Cell:
    name = f"{family}#{number}"
    random = Random(name)
    if family == SLOTS:
        machine, traffic = _draw_slots(random)
    elif family in traces:
        machine, traffic = _draw_trace(random, traces[family])
    else:
        machine, traffic = _draw_shape(random, name, family)
    return Cell(family, name, machine, traffic)


def _draw_slots(random: Random) -> tuple[Machine, Traffic]:
    """Equal slots: models of one size, or of four that differ little, on one GPU."""
    machine = slots(
        random.choice((1, 2, 4, 8)), random.choice((0.4, 1.0, 5.0, 20.0)), MODELS, random.choice(("equal", "mixed"))
    )
    stretch = exp(random.uniform(log(STRETCH_MIN), log(STRETCH_MAX)))
    return machine, Named(random.choice(tuple(GRID)), float(f"{stretch:.3g}"))


def _draw_trace(random: Random, path: str) -> tuple[Machine, Traffic]:
    rows = trace_rows(path, 0)
    machine = draw_machine(random, SHAPES["steady"], len({row.model for row in rows}))
    output_len = sum(row.output_len for row in rows) / len(rows)
    return machine, Trace(path, draw_rate(random, machine, output_len), random.choice(SHAPES["steady"].tenants))


def _draw_shape(random: Random, name: str, family: str) -> tuple[Machine, Traffic]:
    shape = SHAPES[family]
    machine = draw_machine(random, shape)
    output_len = random.choice(shape.output_len)
    rate, tenants = draw_rate(random, machine, output_len), random.choice(shape.tenants)
    first = random.choice(shape.first) if shape.first else None
    popularity = shares(len(machine.models_mib), random.choice((0.7, 1.0, 1.3)), first)
    if family == "agents":
        return machine, _agents(name, popularity, rate, output_len, tenants)
    count = int(min(COUNT_MAX, max(COUNT_MIN, rate * SPAN_S)))
    variation = random.choice(shape.variation)
    return machine, Requests(name, popularity, rate, count, output_len, variation, tenants, shape.waves)


def _agents(name: str, popularity: tuple[float, ...], rate: float, output_len: float, tenants: int) -> Traffic:
    """As many agents as make about that rate if they never wait."""
    step_s = service_s(output_len) + THINK_S
    agents = min(AGENTS_MAX, max(2, round(rate * step_s)))
    seconds = min(COUNT_MAX * step_s / agents, SPAN_S)
    return AgentLoops(name, popularity, agents, seconds, THINK_S, output_len, tenants)


def draw_machine(random: Random, shape: Shape, models: int | None = None) -> Machine:
    """GPUs and the models that share them, as many as need the memory `over` times, unless their number is given."""
    gpus, gpu_gib = random.choice(shape.gpus), random.choice(tuple(SIZES_GIB))
    sizes, over = SIZES_GIB[gpu_gib], random.choice(shape.over)
    wanted = ceil(over * gpus * gpu_gib / (sum(sizes) / len(sizes)))
    count = models or min(MODELS_MAX, max(MODELS_MIN, wanted))
    return Machine(
        gpus,
        gpu_gib * GIB,
        gib(*(random.choice(sizes) for _ in range(count))),
        random.choice((0, 0, 64, 256)) * GIB,
        random.choice(shape.concurrency),
        *random.choice(shape.loads),
        compute=random.choice(shape.compute) if shape.compute else None,
    )


def draw_rate(random: Random, machine: Machine, output_len: float) -> float:
    """Requests a second for a load drawn as a share of what the machine can serve."""
    load = exp(random.uniform(log(LOAD_MIN), log(LOAD_MAX)))
    return load * machine.answers_at_once / service_s(output_len)


def service_s(output_len: float) -> float:
    return DEFAULT_TIMINGS.service_s(round(PROMPT_LEN), round(output_len))
