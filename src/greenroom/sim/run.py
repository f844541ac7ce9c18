"""One run from a setting and a workload to figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from greenroom.sim.setting import SimConfig
from greenroom.sim.stats import Stats, stats_of
from greenroom.sim.workloads import Workload
from greenroom.sim.world import Watcher, World

# How often those who watch hear how far it is.
PROGRESS_STEPS = 50


def simulate(
    config: SimConfig,
    workload: Workload,
    seed: int = 0,
    watchers: Sequence[Watcher] = (),
    on_progress: Callable[[float], None] | None = None,
) -> Stats:
    """Run until everything has drained. `on_progress` hears what share of the arrivals' time has passed."""
    world = World(config, seed, watchers=watchers)
    workload.begin(world)
    if on_progress is not None:
        for step in range(1, PROGRESS_STEPS + 1):
            world.run(until=workload.seconds * step / PROGRESS_STEPS)
            on_progress(step / PROGRESS_STEPS)
    world.run()
    return stats_of(world)
