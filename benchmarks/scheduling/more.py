"""More never hurts: pairs of small cells, the second with one more GPU, larger GPUs or more green room.

The traffic of a pair is the same. Scheduling has anomalies, so a few pairs may get somewhat worse; the worst are shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random

from benchmarks.scheduling.cells import Cell
from benchmarks.scheduling.families import Shape, draw_machine, draw_rate
from benchmarks.scheduling.goals import Goal
from benchmarks.scheduling.judge import allowed_s
from benchmarks.scheduling.machines import GIB, Machine
from benchmarks.scheduling.runs import Results
from benchmarks.scheduling.traffic import Requests, shares

MORE = "more"
PAIRS = 2_000
RISES_SHARE, RISES_FAR = 0.01, 0.25
SHAPE = Shape(gpus=(1, 1, 2, 3), tenants=(1, 1, 50), variation=(1.0, 1.0, 2.0, 4.0))
MODELS_MAX, COUNT_MIN, COUNT_MAX = 16, 150, 300
# How much larger the GPUs of the second cell are.
GPU_TIMES = 1.5
GREEN_ROOM_STEP_MIB = 64 * GIB


@dataclass(frozen=True, slots=True)
class Pair:
    less: Cell
    more: Cell


def draw_pairs(count: int) -> list[Pair]:
    return [draw_pair(number) for number in range(count)]


def draw_pair(number: int) -> Pair:
    name = f"{MORE}#{number}"
    random = Random(name)
    drawn = draw_machine(random, SHAPE)
    machine = replace(drawn, models_mib=drawn.models_mib[:MODELS_MAX])
    output_len = random.choice(SHAPE.output_len)
    traffic = Requests(
        name,
        shares(len(machine.models_mib), random.choice((0.7, 1.0, 1.3)), random.choice((None, None, 0.6, 0.9))),
        draw_rate(random, machine, output_len),
        random.randint(COUNT_MIN, COUNT_MAX),
        output_len,
        random.choice(SHAPE.variation),
        random.choice(SHAPE.tenants),
    )
    more, what = _more_of(random, machine)
    return Pair(Cell(MORE, name, machine, traffic), Cell(MORE, f"{name}+{what}", more, traffic))


def _more_of(random: Random, machine: Machine) -> tuple[Machine, str]:
    what = random.choice(("gpu", "memory", "green"))
    if what == "gpu":
        return replace(machine, gpus=machine.gpus + 1), what
    if what == "memory":
        return replace(machine, gpu_mib=round(machine.gpu_mib * GPU_TIMES)), what
    return replace(machine, green_room_mib=machine.green_room_mib + GREEN_ROOM_STEP_MIB), what


def far_s(less_s: float, swap_s: float) -> float:
    """From here on p95 has risen by more than 25 %, and by more than a swap."""
    return max(less_s * (1 + RISES_FAR), less_s + swap_s)


def more_goals(results: Results, pairs: Iterable[Pair], policy: str) -> list[Goal]:
    rare = Goal("more_rarely_worse", "with more of something p95 rises by 5 % or a swap in at most 1 % of pairs")
    far = Goal("more_never_far_worse", "and by 25 % in none")
    found = [(pair, results.median(pair.less, policy), results.median(pair.more, policy)) for pair in pairs]
    risen = sum(more.waits.p95_s > allowed_s(less.waits.p95_s, pair.less.swap_s) for pair, less, more in found)
    rare.add("all pairs", f"{risen} of {len(found)} rise", risen / len(found) / RISES_SHARE - 1)
    for pair, less, more in found:
        before_s, after_s = less.waits.p95_s, more.waits.p95_s
        what = f"{pair.more.name}: {pair.less.machine}; {pair.less.traffic}"
        far.add(
            what,
            f"p95 {before_s:.1f} -> {after_s:.1f} s, swap {pair.less.swap_s:.1f} s",
            after_s / far_s(before_s, pair.less.swap_s) - 1,
        )
    return [rare, far]
