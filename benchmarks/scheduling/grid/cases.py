"""Kept cases: traffic and machines on which a default policy was once much worse than first-come, or costly.

They are regression cases, rebuilt from a description of what was seen: figures are near those, not equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from statistics import median

from benchmarks.scheduling.grid.cells import Cell
from benchmarks.scheduling.grid.machines import GIB, Machine, gib, slots
from benchmarks.scheduling.grid.more import Pair, outcomes
from benchmarks.scheduling.grid.traffic import Requests, shares
from benchmarks.scheduling.judging.goals import Goal, not_worse_goal
from benchmarks.scheduling.judging.judge import Verdict, middle_of

CASES = "cases"
# What most requests may pay at p50 where one model has nearly all of them and the other one must not starve.
DOMINANT_P50_S = 10.0


def kept_cases() -> dict[str, Cell]:
    """By name."""
    # The disk cache holds all weights, so a swap takes hardly longer than an answer.
    users = Machine(1, 24 * GIB, gib(12, 20, 9, 9, 7, 5, 6, 6, 6, 6), 0, 1, start_s=1.0, mib_per_s=12_000.0)
    shared = Machine(4, 24 * GIB, gib(7, 9, 5, 10, 6, 10, 5, 16, 7, 12, 20), green_room_mib=64 * GIB)
    bursts = Machine(2, 80 * GIB, gib(5, 9, 16, 20, 28, 40, 5, 9, 16, 20))
    largest_28 = Requests("y", shares(11, first=0.28), 5.0, 3_000)
    traffic = {
        "users": (users, Requests("users", shares(10, 1.3), 0.27, 3_000, 400.0, tenants=5_000)),
        "share": (shared, largest_28),
        "share-no-green-room": (replace(shared, green_room_mib=0), largest_28),
        "bursts": (bursts, Requests("x", shares(10), 2.89, 4_000, 1_000.0, variation=4.0)),
        "bursts-longer": (bursts, Requests("x", shares(10), 2.6, 4_000, 1_500.0, variation=4.0)),
        "dominant": (slots(1, 5.0, 2), Requests("x", (0.97, 0.03), 3.55, 7_000, variation=0.7)),
    }
    return {name: Cell(CASES, name, machine, requests) for name, (machine, requests) in traffic.items()}


def case_goals(verdicts: Iterable[Verdict]) -> list[Goal]:
    """For all kept cases."""
    cases = {one.cell.name: one for one in verdicts}
    price = Goal("dominant_p50", "a model with 97 % of requests pays at most 10 s at p50 for the other one")
    p50_s = median(draw.own.waits.p50_s for draw in cases["dominant"].draws)
    price.add("dominant", f"p50 {p50_s:.1f} s", p50_s / DOMINANT_P50_S - 1)
    green = Goal("green_room_gains", "a green room makes p95 longer by no more than 5 % or a swap")
    without, having = cases["share-no-green-room"], cases["share"]
    grown = middle_of(outcomes(Pair(without.cell, having.cell), without.own, having.own), key=lambda one: one.rise)
    green.add("share", f"p95 {grown}, swap {grown.swap_s:.1f} s", grown.rise)
    return [not_worse_goal("cases_not_worse", cases.values()), price, green]
