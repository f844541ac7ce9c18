"""The figures of a run, small enough to be sent between processes, and medians over runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import chain
from statistics import fmean, median

from benchmarks.scheduling.grid.workloads import FLOODER
from greenroom.sim.results.stats import Waits, quantile, stats_of, waits_of
from greenroom.sim.world import World


@dataclass(frozen=True, slots=True)
class Waited:
    count: float
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """One run; of several runs, the median of each figure.

    Where models share the compute of a GPU, slow answers count too: waits of all and by model are until the answer has
    ended, not until it began.
    """

    waits: Waited
    by_class: Mapping[str, Waited]
    others: Waited  # all but the flooding tenant
    by_model: Mapping[str, Waited]
    # Answers that ended while requests still arrived, by model: what is served after that proves nothing.
    in_time: Mapping[str, float]
    arrivals_s: float  # for how long requests arrived
    swaps: float
    swaps_per_request: float
    jain: float
    busy: float  # share of memory and time spent serving
    moving: float  # and spent on moves
    service_mean_s: float
    service_p95_s: float
    service_max_s: float
    events: float
    took_s: float

    @property
    def served_per_s(self) -> float:
        """While requests arrived."""
        return sum(self.in_time.values()) / self.arrivals_s

    @property
    def worst_s(self) -> float:
        """The p95 wait of the model where it is the longest."""
        return max(waited.p95_s for waited in self.by_model.values())

    @property
    def occupied(self) -> float:
        return self.busy + self.moving


def figures_of(world: World, arrivals_end: float, took_s: float, *, whole: bool = False) -> Figures:
    """`whole`: waits are until the answer has ended."""
    stats = stats_of(world)
    waits, by_model = _whole(world) if whole else (stats.waits, stats.by_model)
    services = sorted(call.ended_at - call.granted_at for call in world.ended)
    return Figures(
        waits=_waited(waits),
        by_class={name: _waited(waits) for name, waits in stats.by_class.items()},
        others=_waited(waits_of(call.wait_s for call in world.ended if call.tenant != FLOODER)),
        by_model={name: _waited(waits) for name, waits in by_model.items()},
        in_time=Counter(str(call.model) for call in world.ended if call.ended_at <= arrivals_end),
        arrivals_s=arrivals_end,
        swaps=stats.swaps,
        swaps_per_request=stats.swaps_per_request,
        jain=stats.jain,
        busy=stats.busy,
        moving=fmean(use.moving for use in stats.devices.values()),
        service_mean_s=fmean(services),
        service_p95_s=quantile(services, 0.95),
        service_max_s=services[-1],
        events=stats.events,
        took_s=took_s,
    )


def _whole(world: World) -> tuple[Waits, dict[str, Waits]]:
    """From arrival to the end of the answer: over all requests, and by model."""
    by_model: dict[str, list[float]] = {}
    for call in world.ended:
        by_model.setdefault(str(call.model), []).append(call.ended_at - call.arrived)
    each = {name: waits_of(seconds) for name, seconds in sorted(by_model.items())}
    return waits_of(chain.from_iterable(by_model.values())), each


def _waited(waits: Waits) -> Waited:
    return Waited(waits.count, waits.mean_s, waits.p50_s, waits.p95_s, waits.p99_s, waits.max_s)


def medians(runs: list[Figures]) -> Figures:
    """The median of every figure over runs that differ only in their seed."""
    numbers = [one.name for one in fields(Figures) if one.type == "float"]
    return replace(
        runs[0],
        waits=_median_of([run.waits for run in runs]),
        by_class=_medians_by(run.by_class for run in runs),
        others=_median_of([run.others for run in runs]),
        by_model=_medians_by(run.by_model for run in runs),
        in_time={name: median(run.in_time.get(name, 0) for run in runs) for name in runs[0].by_model},
        **{name: median(getattr(run, name) for run in runs) for name in numbers},
    )


def _medians_by(splits: Iterable[Mapping[str, Waited]]) -> dict[str, Waited]:
    groups: dict[str, list[Waited]] = {}
    for split in splits:
        for name, waited in split.items():
            groups.setdefault(name, []).append(waited)
    return {name: _median_of(group) for name, group in groups.items()}


def _median_of(group: list[Waited]) -> Waited:
    return Waited(*(median(getattr(waited, one.name) for waited in group) for one in fields(Waited)))
