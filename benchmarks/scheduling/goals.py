"""The goals of the default policy, each computed from runs: what was wanted, what was found, and where it was worst.

A goal is met if its worst case is; every case is kept, so that the worst can be shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from benchmarks.scheduling.cells import JITTER, Cell, limits_of
from benchmarks.scheduling.figures import Figures
from benchmarks.scheduling.references import ORACLE
from benchmarks.scheduling.runs import Results
from benchmarks.scheduling.workloads import COLD_MODEL

P95_WORSE_SHARE = 0.05
MEAN_BETTER_SHARE = 0.10
BUSY_FROM, BUSY_TO = 0.70, 0.90
FEW_SLOTS = (1, 2)
HIGH_SHARE_OF_NORMAL = 1 / 3
THROUGHPUT_COST = 0.10
NORMAL = 1


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

    def add(self, cell: Cell, found: str, excess: float) -> None:
        self.cases.append(Case(cell.place, found, excess))


def p95_goal(results: Results, cells: Iterable[Cell]) -> Goal:
    """(a) Nowhere worse than collating FIFO at p95."""
    goal = Goal("p95_not_worse", "p95 wait no more than 5 % or one swap above collating FIFO's, in every cell")
    for cell in cells:
        own, fifo = results.median(cell, "default").waits.p95_s, results.median(cell, "fifo").waits.p95_s
        allowed = max(fifo * (1 + P95_WORSE_SHARE), fifo + cell.swap_s)
        goal.add(cell, f"p95 {own:.2f} s, fifo {fifo:.2f} s, allowed {allowed:.2f} s", own / allowed - 1)
    return goal


def mean_goal(results: Results, cells: Iterable[Cell]) -> Goal:
    """(b) Clearly better on average where slots serve or swap most of the time under FIFO."""
    goal = Goal("mean_better", "mean wait at least 10 % below collating FIFO's where 1 or 2 slots are 70 to 90 % busy")
    for cell in cells:
        own, fifo = results.median(cell, "default"), results.median(cell, "fifo")
        if cell.slots not in FEW_SLOTS or not BUSY_FROM <= fifo.occupied <= BUSY_TO:
            continue
        better = 1 - own.waits.mean_s / fifo.waits.mean_s
        busy = f"{fifo.busy:.0%} serving and {fifo.moving:.0%} swapping under fifo"
        found = f"mean {own.waits.mean_s:.2f} s, fifo {fifo.waits.mean_s:.2f} s: {better:+.1%}; {busy}"
        if ORACLE in results.policies_at(cell):
            oracle = results.median(cell, ORACLE).waits.mean_s
            found += f"; knowing all lengths {1 - oracle / fifo.waits.mean_s:+.1%}"
        goal.add(cell, found, (1 - better) / (1 - MEAN_BETTER_SHARE) - 1)
    return goal


# --- one model keeps the other out ------------------------------------------------------------------------------


def bound_s(cell: Cell, service_max_s: float) -> float:
    """How long a normal request may wait behind one other model that always has requests.

    When it arrives, the other model may just have been chosen: the answers of its own model end, the other model is
    loaded and stays for its minimum residency. Then, or at the request's deadline if that is later, the answers of the
    other model end and its own model is loaded. A reached deadline ends a batch. An answer takes at most the longest
    service time of the run; the times of moves vary by JITTER.
    """
    limits, swap_s = limits_of(cell), cell.swap_s * (1 + JITTER)
    held_s = service_max_s + swap_s + limits.residency_swaps * swap_s
    return max(limits.deadlines_s[NORMAL], held_s) + service_max_s + swap_s


def starved_goals(results: Results, cells: Iterable[Cell]) -> list[Goal]:
    """(c) A model that collating FIFO starves is served in time, at a bounded cost."""
    in_time = Goal(
        "starved_served", "a model that collating FIFO starves for the whole run waits no longer than the bound"
    )
    cost = Goal("starved_cost", "which costs at most 10 % of the throughput, or two swaps per bound")
    for cell in cells:
        own, fifo = results.median(cell, "default"), results.median(cell, "fifo")
        if fifo.in_time.get(COLD_MODEL, 0):
            raise SystemExit(f"{cell.place}: collating FIFO does not starve {COLD_MODEL}; the workload must be heavier")
        bound, longest = bound_s(cell, own.service_max_s), own.by_model[COLD_MODEL].max_s
        in_time.add(cell, _starved(own, fifo, bound), longest / bound - 1)
        lost = 1 - own.served_per_s / fifo.served_per_s
        allowed = max(THROUGHPUT_COST, 2 * cell.swap_s / bound)
        found = f"{own.served_per_s:.2f} a second, fifo {fifo.served_per_s:.2f}: {lost:.1%} less, allowed {allowed:.1%}"
        cost.add(cell, found, lost / allowed - 1)
    return [in_time, cost]


def _starved(own: Figures, fifo: Figures, bound: float) -> str:
    waits, fifo_s = own.by_model[COLD_MODEL], fifo.by_model[COLD_MODEL].max_s
    served = f"{own.in_time.get(COLD_MODEL, 0):.0f} of {waits.count:.0f} before the end"
    return f"p95 {waits.p95_s:.0f} s, max {waits.max_s:.0f} s, bound {bound:.0f} s, {served}; fifo {fifo_s:.0f} s"


# --- classes and tenants ------------------------------------------------------------------------------------------


def class_goal(results: Results, cells: Iterable[Cell]) -> Goal:
    """(d) Urgent requests are served clearly sooner under load."""
    goal = Goal("high_sooner", "p95 of high-priority requests at most a third of normal ones' under load")
    for cell in cells:
        own, fifo = results.median(cell, "default"), results.median(cell, "fifo")
        high, normal = own.by_class["high"].p95_s, own.by_class["normal"].p95_s
        before = f"fifo {fifo.by_class['high'].p95_s:.1f} and {fifo.by_class['normal'].p95_s:.1f} s"
        found = f"high {high:.1f} s, normal {normal:.1f} s ({high / normal:.2f}); {before}; {own.occupied:.0%} busy"
        goal.add(cell, found, high / normal / HIGH_SHARE_OF_NORMAL - 1)
    return goal


def flood_goal(results: Results, cells: Iterable[Cell]) -> Goal:
    """(e) A tenant with 99 % of traffic adds to others' p95 a service time, a swap and, if cold, a batch at most."""
    wanted = (
        "99 % of traffic by one tenant adds to others' p95 no more than a service and a swap; if not ready, a batch"
    )
    goal = Goal("flood_bounded", wanted)
    for cell in cells:
        flooded = results.median(cell, "default")
        calm_cell = replace(cell, workload=cell.workload.replace("flood", "calm"))
        calm = results.median(calm_cell, "default").others.p95_s
        added = flooded.others.p95_s - calm
        batch_s = limits_of(cell).batch_swaps * cell.swap_s if cell.workload == "flood-cold" else 0.0
        allowed = flooded.service_p95_s + cell.swap_s + batch_s
        fifo = results.median(cell, "fifo").others.p95_s
        service = f"service mean {flooded.service_mean_s:.1f}, p95 {flooded.service_p95_s:.1f}"
        goal.add(
            cell,
            f"adds {added:.2f} s to {calm:.2f} s, allowed {allowed:.2f} s ({service}); fifo {fifo:.0f} s",
            added / allowed - 1,
        )
    return goal
