"""Cells: traffic on a machine under a policy with a seed. Plain data, so that other processes can run them."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from math import sqrt

from benchmarks.scheduling.grid.machines import Machine
from benchmarks.scheduling.grid.references import CHANCE, policies_for
from benchmarks.scheduling.grid.traffic import Named, Traffic
from benchmarks.scheduling.judging.figures import Figures, figures_of
from greenroom.sim.config import SimConfig
from greenroom.sim.world import World

# How much the times of moves vary; and what is added to the seed that they are drawn by where chance is looked at.
JITTER, OTHER_CHANCE = 0.1, 100
# The search for the stretch that gives a wanted load goes between these.
STRETCH_MIN, STRETCH_MAX = 1.0, 64.0


@dataclass(frozen=True, slots=True)
class Cell:
    family: str
    name: str
    machine: Machine
    traffic: Traffic
    policy: str = "default"
    seed: int = 0

    @property
    def place(self) -> str:
        """All but policy and seed, in words."""
        return f"{self.name}: {self.machine}; {self.traffic}"

    @property
    def swap_s(self) -> float:
        return self.machine.swap_s


def run_cell(cell: Cell) -> Figures:
    """Simulate until every request has ended."""
    began, machine, workload = time.perf_counter(), cell.machine, cell.traffic.workload(cell.seed)
    policies = policies_for(cell.policy, workload)
    config = SimConfig(
        machine.sim_models(), machine.devices(), machine.limits(), cell.policy, JITTER, policies=policies
    )
    world = World(config, cell.seed + (OTHER_CHANCE if cell.policy == CHANCE else 0))
    workload.begin(world)
    world.run()
    if world.calls or any(call.code is not None for call in world.ended):
        raise SystemExit(f"{cell.place}, {cell.policy}, seed {cell.seed}: not every request was served")
    return figures_of(world, workload.seconds, time.perf_counter() - began, whole=machine.compute is not None)


def stretch_for(cell: Cell, occupied: float, steps: int) -> Cell:
    """The cell, stretched so that slots serve or swap for about this share of the time under collating FIFO."""
    low, high = STRETCH_MIN, STRETCH_MAX
    for _ in range(steps):
        middle = sqrt(low * high)
        found = run_cell(replace(stretched(cell, middle), policy="fifo", seed=0))
        low, high = (middle, high) if found.occupied > occupied else (low, middle)
    return stretched(cell, float(f"{sqrt(low * high):.3g}"))


def stretched(cell: Cell, stretch: float) -> Cell:
    assert isinstance(cell.traffic, Named)
    return replace(cell, traffic=replace(cell.traffic, stretch=stretch))
