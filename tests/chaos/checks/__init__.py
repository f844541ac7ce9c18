"""One small class for each property that must hold, and which of them watch which scenario."""

from __future__ import annotations

from greenroom.core.plain import PlainScheduler
from tests.chaos.checks.base import Check
from tests.chaos.checks.dues import IdleGo, Patience
from tests.chaos.checks.ends import Ends, Operators
from tests.chaos.checks.fairness import FairShares
from tests.chaos.checks.in_flight import BusyStay, InFlight
from tests.chaos.checks.memory import CoordinatorRules, GreenRoom, LeasesWhole, Needs
from tests.chaos.checks.order import Order
from tests.chaos.checks.reasons import Reasons
from tests.chaos.checks.slots import Apart, Memory, NoReturn, OneMove, PinnedStay, Revisions
from tests.chaos.checks.tables import AtRest, Invariants, Timers
from tests.chaos.checks.tasks import LastResort
from tests.chaos.checks.versions import Servable
from tests.chaos.checks.waiting import WaitingBound
from tests.chaos.scenario import Kind, Scenario


def checks_for(scenario: Scenario) -> list[Check]:
    return [*_everywhere(scenario), *_of_this_kind(scenario)]


def checks_with_versions() -> list[Check]:
    """Those that do not remember the model of a slot, which changes when a version takes a name."""
    return [
        InFlight(),
        BusyStay(),
        Ends(),
        Operators(),
        OneMove(),
        Memory(),
        LeasesWhole(),
        Timers(),
        Invariants(),
        AtRest(),
        Servable(),
    ]


def _everywhere(scenario: Scenario) -> list[Check]:
    return [
        InFlight(),
        BusyStay(),
        Ends(),
        Operators(),
        Order(by_arrival=scenario.config.scheduler is not None),
        OneMove(),
        Apart(),
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
        LastResort(is_equal=scenario.config.scheduler is PlainScheduler),
        Timers(),
        Invariants(),
        AtRest(),
    ]


def _of_this_kind(scenario: Scenario) -> list[Check]:
    """Promises of the default scheduler that are judged where nothing goes wrong."""
    if scenario.config.scheduler is not None:
        return []
    concurrency = scenario.config.models[0].timings.concurrency
    if scenario.kind is Kind.DUEL:
        return [FairShares(tuple(scenario.traffic.tenants), concurrency)]
    if scenario.kind is not Kind.CALM:
        return []
    return [WaitingBound(scenario)]
