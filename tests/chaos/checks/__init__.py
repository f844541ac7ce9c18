"""One small class for each property that must hold, and which of them watch which scene."""

from __future__ import annotations

from tests.chaos.checks.dues import IdleGo, Patience
from tests.chaos.checks.ends import Ends, Operators
from tests.chaos.checks.fairness import FairShares
from tests.chaos.checks.in_flight import BusyStay, InFlight
from tests.chaos.checks.memory import CoordinatorRules, GreenRoom, LeasesWhole, Needs
from tests.chaos.checks.order import Order
from tests.chaos.checks.reasons import Reasons
from tests.chaos.checks.slots import Memory, NoReturn, OneMove, PinnedStay, Revisions
from tests.chaos.checks.tables import AtRest, Invariants, Timers
from tests.chaos.checks.waiting import Overtakes, WaitingBound
from tests.chaos.panel import Check
from tests.chaos.scene import Kind, Scene


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
