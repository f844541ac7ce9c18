"""One small class for each property that must hold, and which of them watch which scene."""

from __future__ import annotations

from greenroom.sim.chaos.checks.dues import IdleGo, Patience
from greenroom.sim.chaos.checks.ends import Ends, Operators
from greenroom.sim.chaos.checks.fairness import FairShares
from greenroom.sim.chaos.checks.in_flight import BusyStay, InFlight
from greenroom.sim.chaos.checks.memory import CoordinatorRules, GreenRoom, LeasesWhole, Needs
from greenroom.sim.chaos.checks.order import Order
from greenroom.sim.chaos.checks.reasons import Reasons
from greenroom.sim.chaos.checks.slots import Memory, NoReturn, OneMove, PinnedStay, Revisions
from greenroom.sim.chaos.checks.tables import AtRest, Invariants, Timers
from greenroom.sim.chaos.checks.waiting import Overtakes, WaitingBound
from greenroom.sim.chaos.panel import Check
from greenroom.sim.chaos.scene import Kind, Scene


def checks_for(scene: Scene) -> list[Check]:
    return [*_everywhere(scene), *_of_this_kind(scene)]


def _everywhere(scene: Scene) -> list[Check]:
    return [
        InFlight(),
        BusyStay(),
        Ends(),
        Operators(),
        Order(choosy_come=scene.crowd.choosy > 0),
        OneMove(),
        Memory(),
        Revisions(),
        NoReturn(),
        PinnedStay(),
        Patience(),
        IdleGo(),
        GreenRoom(),
        LeasesWhole(),
        Needs(),
        CoordinatorRules(),
        Reasons(),
        Timers(),
        Invariants(),
        AtRest(),
    ]


def _of_this_kind(scene: Scene) -> list[Check]:
    """Promises that are judged where nothing goes wrong."""
    concurrency = scene.config.models[0].manners.concurrency
    if scene.kind is Kind.DUEL:
        return [FairShares(tuple(scene.crowd.tenants), concurrency)]
    if scene.kind is not Kind.CALM:
        return []
    one_at_a_time = scene.config.devices[0].capacity_mib == scene.config.models[0].spec.need.gpu_mib
    return [WaitingBound(scene), *([Overtakes(scene)] if one_at_a_time else [])]
