"""The goals of a policy, each computed from runs: what was wanted, what was found, and where it was worst.

A goal is met if its worst case is; every case is kept, so that the worst can be shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import log

from benchmarks.scheduling.grid.cells import JITTER, Cell
from benchmarks.scheduling.grid.runs import Results
from benchmarks.scheduling.grid.traffic import Named
from benchmarks.scheduling.grid.workloads import COLD_MODEL
from benchmarks.scheduling.judging.figures import Figures
from benchmarks.scheduling.judging.judge import FAR_SHARE, FamilyVerdict, Verdict, allowed_s, by_family

WORSE_CELLS_SHARE = 0.02
HIGH_SHARE_OF_NORMAL = 1 / 3
THROUGHPUT_COST = 0.10
# What a model that keeps another one out may have at most: a stay, and a batch, in swaps; and the deadline of normal
# requests.
BATCH_SWAPS, DEADLINE_S, AWAY_SHARE = 5.0, 240.0, 0.1


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison. `excess` is how far beyond what is allowed, as a share of it: above 0 is a miss."""

    place: str
    found: str
    excess: float


@dataclass(frozen=True, slots=True)
class Goal:
    name: str
    wanted: str
    cases: list[Case] = field(default_factory=list)

    @property
    def is_met(self) -> bool:
        """A goal without cases is not met."""
        return bool(self.cases) and all(case.excess <= 0 for case in self.cases)

    @property
    def misses(self) -> int:
        return sum(case.excess > 0 for case in self.cases)

    def worst(self, count: int) -> list[Case]:
        return sorted(self.cases, key=lambda case: -case.excess)[:count]

    def add(self, place: str, found: str, excess: float) -> None:
        self.cases.append(Case(place, found, excess))


# --- the grid -----------------------------------------------------------------------------------------------------


def grid_goals(verdicts: Sequence[Verdict]) -> list[Goal]:
    """Nowhere clearly worse than collating FIFO, and on average no worse at all."""
    rare = Goal("grid_worse", "in each family at most 2 % of cells worse than FIFO by more than 5 % or a swap")
    for family in by_family(verdicts):
        found = f"{family.worse} of {len(family.verdicts)} cells worse"
        rare.add(family.family, found, family.worse_share / WORSE_CELLS_SHARE - 1)
    far = Goal("grid_far", "no cell beyond that by more than a further 25 %")
    for one in verdicts:
        far.add(one.cell.place, beside_fifo(one), one.excess - FAR_SHARE)
    everything = FamilyVerdict("all", verdicts)
    mean, of_all = everything.judged_ratio, everything.p95_ratio
    average = Goal("grid_mean", "p95 on average at most FIFO's; where FIFO starves a model, the worst model's p95")
    average.add("all cells", f"{mean:.3f} times FIFO's ({of_all:.3f} if starving is ignored)", mean - 1)
    return [rare, far, average]


def not_worse_goal(name: str, verdicts: Iterable[Verdict]) -> Goal:
    """For cells that are looked at one by one."""
    goal = Goal(name, "no cell worse than FIFO by more than 5 % or a swap")
    for one in verdicts:
        goal.add(one.cell.place, beside_fifo(one), one.excess)
    return goal


def beside_fifo(one: Verdict) -> str:
    own, fifo = one.middle.own, one.middle.fifo
    waits = (
        f"p95 {own.waits.p95_s:.1f} / {fifo.waits.p95_s:.1f} s, p99 {own.waits.p99_s:.1f} / {fifo.waits.p99_s:.1f} s"
    )
    starved = ", which FIFO starves" if one.starved else ""
    return f"{waits}, worst model {own.worst_s:.0f} / {fifo.worst_s:.0f} s{starved}, swap {one.cell.swap_s:.1f} s"


# --- one model keeps the other out ----------------------------------------------------------------------------------


def bound_s(cell: Cell, service_max_s: float) -> float:
    """How long a normal request may wait behind one other model that always has requests: docs/design/waiting-bound.md.

    The other model is closed when the request is due, or later, when it has served those that waited when it came: that
    many came during its last absence, and it answers them while others come. Then its answers end, it leaves, and
    the request's own model is loaded. An answer takes at most the longest service time of the run; the times of moves
    vary by JITTER.
    """
    swap_s = cell.swap_s * (1 + JITTER)
    away_s = 2 * (service_max_s + swap_s)
    return max(DEADLINE_S, away_s / AWAY_SHARE) + 2 * away_s


def starved_goals(results: Results, cells: Iterable[Cell], policy: str) -> list[Goal]:
    """A model that collating FIFO starves is served in time, at a bounded cost."""
    in_time = Goal(
        "starved_served", "a model that collating FIFO starves for the whole run waits no longer than the bound"
    )
    cost = Goal("starved_cost", "which costs at most 10 % of the throughput, or two swaps per bound")
    for cell in cells:
        own, fifo = results.median(cell, policy), results.median(cell, "fifo")
        if fifo.in_time.get(COLD_MODEL, 0):
            raise SystemExit(f"{cell.place}: collating FIFO does not starve {COLD_MODEL}; the workload must be heavier")
        bound, longest = bound_s(cell, own.service_max_s), own.by_model[COLD_MODEL].max_s
        in_time.add(cell.name, _starved(own, fifo, bound), longest / bound - 1)
        lost = 1 - own.served_per_s / fifo.served_per_s
        allowed = max(THROUGHPUT_COST, 2 * cell.swap_s / bound)
        found = f"{own.served_per_s:.2f} a second, fifo {fifo.served_per_s:.2f}: {lost:.1%} less, allowed {allowed:.1%}"
        cost.add(cell.name, found, lost / allowed - 1)
    return [in_time, cost]


def _starved(own: Figures, fifo: Figures, bound: float) -> str:
    waits, fifo_s = own.by_model[COLD_MODEL], fifo.by_model[COLD_MODEL].max_s
    served = f"{own.in_time.get(COLD_MODEL, 0):.0f} of {waits.count:.0f} before the end"
    return f"p95 {waits.p95_s:.0f} s, max {waits.max_s:.0f} s, bound {bound:.0f} s, {served}; fifo {fifo_s:.0f} s"


# --- classes and tenants ------------------------------------------------------------------------------------------


def class_goal(results: Results, cells: Iterable[Cell], policy: str) -> Goal:
    """Urgent requests are served clearly sooner under load.

    FIFO serves all of them before any other. Where that is more than a third of what normal ones wait, many of them
    find their model not ready, and no policy that cuts no answers can serve them sooner.
    """
    wanted = "p95 of high-priority requests under load at most a third of normal ones', or not worse than FIFO's"
    goal = Goal("high_sooner", wanted)
    for cell in cells:
        own, fifo = results.median(cell, policy), results.median(cell, "fifo")
        high, normal = own.by_class["high"].p95_s, own.by_class["normal"].p95_s
        before = f"fifo {fifo.by_class['high'].p95_s:.1f} and {fifo.by_class['normal'].p95_s:.1f} s"
        found = f"high {high:.1f} s, normal {normal:.1f} s ({high / normal:.2f}); {before}; {own.occupied:.0%} busy"
        allowed = max(normal * HIGH_SHARE_OF_NORMAL, allowed_s(fifo.by_class["high"].p95_s, cell.swap_s))
        goal.add(cell.name, found, high / allowed - 1)
    return goal


def flood_goal(results: Results, cells: Iterable[Cell], policy: str) -> Goal:
    """A tenant with 99 % of traffic adds to others' p95 a service time and a swap; if cold, a batch and a drain, too.

    No answer is cut, so others wait until the last of those that run has ended.
    """
    wanted = (
        "99 % of traffic by one tenant adds to others' p95 no more than a service and a swap; "
        "if not ready, also a batch and a drain"
    )
    goal = Goal("flood_bounded", wanted)
    for cell in cells:
        flooded = results.median(cell, policy)
        calm = results.median(calm_of(cell), policy).others.p95_s
        added = flooded.others.p95_s - calm
        assert isinstance(cell.traffic, Named)
        is_cold = cell.traffic.name == "flood-cold"
        # The longest of so many answers of random length takes this long or less in 95 of 100 cases.
        drain_s = flooded.service_mean_s * log(cell.machine.concurrency / 0.05)
        allowed = flooded.service_p95_s + cell.swap_s + (BATCH_SWAPS * cell.swap_s + drain_s if is_cold else 0.0)
        fifo = results.median(cell, "fifo").others.p95_s
        service = f"service mean {flooded.service_mean_s:.1f}, p95 {flooded.service_p95_s:.1f}"
        goal.add(
            cell.name,
            f"adds {added:.2f} s to {calm:.2f} s, allowed {allowed:.2f} s ({service}); fifo {fifo:.0f} s",
            added / allowed - 1,
        )
    return goal


def calm_of(flooded: Cell) -> Cell:
    """The same cell without the flood."""
    assert isinstance(flooded.traffic, Named)
    workload = flooded.traffic.name.replace("flood", "calm")
    return replace(flooded, name=flooded.name.replace("flood", "calm"), traffic=Named(workload))
