"""Cells of the grid: one workload on one machine under one policy with one seed.

A cell is plain data, so that other processes can run it. This file turns it into a simulated world. It is written as
`workload=arena27,slots=2,swap=5,stretch=4,sizes=equal`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import sqrt
from typing import Any

from benchmarks.scheduling.figures import Figures, figures_of
from benchmarks.scheduling.references import CLAIRVOYANT, Future, PolicyWorld, future_of
from benchmarks.scheduling.workloads import GENERATED, generated, recorded, trace_name
from greenroom.core.events import Limits
from greenroom.core.model import Device, DeviceId, DeviceKind, ModelId, ModelSpec, Need
from greenroom.sim.config import SimConfig, SimModel, Timings
from greenroom.sim.workloads import Agents, Bursty, Poisson, Recorded, Workload

# One slot's worth of memory; equal models take exactly one.
SLOT_MIB = 1_000
# Sizes of unequal models, in turn; a GPU of N slots then holds fewer or more than N of them.
MIXED_MIB = (500, 1_000, 1_500, 2_000)
JITTER, CONCURRENCY = 0.1, 16
# The search for the stretch that gives a wanted load goes between these.
STRETCH_MIN, STRETCH_MAX = 1.0, 64.0


@dataclass(frozen=True, slots=True)
class Cell:
    workload: str
    slots: int
    swap_s: float
    stretch: float = 1.0
    sizes: str = "equal"
    limits: str = ""  # of the scheduler, where they are not the defaults: `batch_swaps=3;deadlines_s=5/30/240`
    policy: str = "default"
    seed: int = 0
    trace: str = ""  # the file of a recorded workload

    @property
    def place(self) -> str:
        """All but policy and seed: equal for cells that are compared."""
        text = f"{self.workload},slots={self.slots},swap={self.swap_s:g},stretch={self.stretch:g}"
        text += f",sizes={self.sizes}" if self.sizes != "equal" else ""
        return text + (f",limits={self.limits}" if self.limits else "")


def cell_from(text: str, traces: Sequence[str]) -> Cell:
    """`workload=arena27,slots=2,swap=5,stretch=4`; `trace` is another key for the workload, which needs no key."""
    given = dict(_part(part) for part in text.split(","))
    name = given.pop("trace", None) or given.pop("workload", None) or "poisson"
    files = {trace_name(path): path for path in traces}
    if name not in files and name not in GENERATED:
        raise SystemExit(f"there is no workload {name}: {', '.join([*files, *GENERATED])}")
    slots, swap_s, stretch = int(given.pop("slots", 2)), float(given.pop("swap", 5)), float(given.pop("stretch", 4))
    sizes, limits = given.pop("sizes", "equal"), given.pop("limits", "")
    if given:
        raise SystemExit(f"a cell has no {', '.join(given)}: workload, slots, swap, stretch, sizes, limits")
    return Cell(name, slots, swap_s, stretch, sizes, limits, trace=files.get(name, ""))


def _part(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    return (name, value) if equals else ("workload", name)


def run_cell(cell: Cell) -> Figures:
    """Simulate until every request has ended."""
    began = time.perf_counter()
    workload, names = _workload(cell)
    config = SimConfig(_models(cell, names), (_gpu(cell),), limits_of(cell), cell.policy, JITTER)
    world = PolicyWorld(config, cell.seed, _future(cell, workload))
    workload.begin(world)
    world.run()
    if world.calls or any(call.code is not None for call in world.ended):
        raise SystemExit(f"{cell.place}, {cell.policy}, seed {cell.seed}: not every request was served")
    return figures_of(world, workload.seconds, time.perf_counter() - began)


def stretch_for(cell: Cell, occupied: float, steps: int) -> Cell:
    """The cell, stretched so that slots serve or swap for about this share of the time under collating FIFO."""
    low, high = STRETCH_MIN, STRETCH_MAX
    for _ in range(steps):
        middle = sqrt(low * high)
        found = run_cell(replace(cell, stretch=middle, policy="fifo", seed=0))
        low, high = (middle, high) if found.occupied > occupied else (low, middle)
    return replace(cell, stretch=float(f"{sqrt(low * high):.3g}"))


def limits_of(cell: Cell) -> Limits:
    """The scheduler's defaults, except for what the cell sets. Queues may be long: what is measured is waiting."""
    known = {one.name for one in fields(Limits)}
    given: dict[str, Any] = {}
    for part in filter(None, cell.limits.split(";")):
        name, _, value = part.partition("=")
        if name not in known:
            raise SystemExit(f"there is no limit {name}: {', '.join(sorted(known))}")
        numbers = [float(number) for number in value.split("/")]
        given[name] = tuple(numbers) if len(numbers) > 1 else type(getattr(Limits(), name))(numbers[0])
    return Limits(**{"queue_depth_max": 10**6, **given})


def _gpu(cell: Cell) -> Device:
    return Device(DeviceId("gpu0"), DeviceKind.GPU, cell.slots * SLOT_MIB)


def _models(cell: Cell, names: Sequence[str]) -> tuple[SimModel, ...]:
    """The models of a cell. A larger one takes longer to load."""
    models = []
    for number, name in enumerate(names):
        mib = _size_mib(cell, number)
        timings = Timings(load_s=cell.swap_s * mib / SLOT_MIB, unload_s=0.0, concurrency=CONCURRENCY)
        models.append(SimModel(ModelSpec(ModelId(name), need=Need(mib)), timings))
    return tuple(models)


def _size_mib(cell: Cell, number: int) -> int:
    if cell.sizes == "equal":
        return SLOT_MIB
    # The largest model must fit where there is a single slot, too.
    return MIXED_MIB[number % len(MIXED_MIB)] // (2 if cell.slots == 1 else 1)


def _workload(cell: Cell) -> tuple[Workload, tuple[str, ...]]:
    if cell.trace:
        return recorded(cell.trace, cell.stretch, cell.seed)
    return generated(cell.workload, cell.stretch, cell.seed)


def _future(cell: Cell, workload: Workload) -> Future:
    """What the clairvoyant knows. When agents ask depends on when they are answered, so they have no known future."""
    if cell.policy != CLAIRVOYANT or isinstance(workload, Agents):
        return {}
    assert isinstance(workload, Recorded | Poisson | Bursty)
    return future_of([(arrival.at, arrival.model) for arrival in workload.arrivals()])
