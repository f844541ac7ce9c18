"""Questions and decisions change nothing: the whole state is compared before and after, in runs with faults."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import pytest

from greenroom.core import events as ev
from greenroom.core.decide.arrival import decide
from greenroom.core.decide.placement import Places
from greenroom.core.decide.residents import Residents
from greenroom.core.model import ModelId, RequestId, TenantId
from greenroom.core.scheduler import DefaultScheduler
from greenroom.sim.hooks import Watcher
from tests.chaos.checks.base import Checkers
from tests.chaos.play import Play
from tests.chaos.scenario import draw_scenario

ASKED_EVERY = 150
# A queue finds the first of its deadlines when they are asked for after a waiter has left; which one that is does not
# change. A policy is asked and not part of the state.
FOUND_WHEN_ASKED = {
    "_deadline_at",
    "_oldest",
    "_aged_from",
    "_lift_at",
    "_is_stale",
    "_arrivals",
    "_ages_from",
    "_untimed",
}
NOT_STATE = {"policy", "class_of", "_class_of"}


def facts(value: Any) -> Any:
    """Everything in a value, however deep, as something that can be compared."""
    if isinstance(value, str | int | float | Enum | None):
        return value
    if isinstance(value, Mapping):
        return [(facts(key), facts(one)) for key, one in value.items()]
    if isinstance(value, list | tuple | deque):
        return [facts(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(facts(one) for one in value)
    left_out = FOUND_WHEN_ASKED | NOT_STATE
    return [
        type(value).__name__,
        *((name, facts(getattr(value, name))) for name in names(value) if name not in left_out),
    ]


def names(value: Any) -> list[str]:
    if is_dataclass(value):
        return [field.name for field in fields(value)]
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    found = sorted({*getattr(value, "__dict__", {}), *slots})
    assert found, f"nothing is known of {type(value)}"
    return found


class Asking(Watcher):
    """Asks everything that can be asked, and compares."""

    def __init__(self) -> None:
        self.scheduler: DefaultScheduler | None = None
        self.events = self.asked_of = 0

    def told(self, event: ev.Event) -> None:
        self.events += 1
        if self.scheduler is not None and self.events % ASKED_EVERY == 0:
            self._ask(self.scheduler, event.now)

    def hex(self) -> str:
        return ""

    def _ask(self, scheduler: DefaultScheduler, now: float) -> None:
        state = scheduler.state
        before = facts(state)
        for model in [*state.models, ModelId("nobody")]:
            arrival = ev.RequestArrived(now, RequestId("new"), (model,), 1, TenantId("new"), answer_by=now + 5.0)
            scheduler.view.explanation(arrival)
        assert facts(state) == before, "explaining changes the state"
        for waiter in state.waitlist:
            scheduler.view.outlook(RequestId(waiter.id), now)
            decide(state, waiter, now, Places())
        places = Places()
        residents = Residents(state, now, places)
        there = facts(residents.those(may_sleep=True, but=None))
        for waiter in state.waitlist:
            decide(state, waiter, now, places, residents)
        assert facts(residents.those(may_sleep=True, but=None)) == there, "deciding changes a resident"
        assert facts(state) == before, "deciding changes the state"
        self.asked_of += 1


@pytest.mark.untraced
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 5, 9, 13, 16))])
@pytest.mark.pure
def test_questions_and_decisions_change_nothing(seed: int) -> None:
    asking, one = Asking(), Play(draw_scenario(seed), hashed=True)
    one.checkers, one._hash = Checkers([]), asking  # type: ignore[assignment]
    begun = one._begun

    def watched() -> Any:
        world = begun()
        asking.scheduler = world.scheduler
        return world

    one._begun = watched  # type: ignore[method-assign]
    one.to_the_end()
    assert asking.asked_of > 10


@pytest.mark.pure
def test_the_comparison_sees_a_change_however_deep() -> None:
    scheduler = DefaultScheduler(effects=None)  # type: ignore[arg-type]
    before = facts(scheduler.state)
    scheduler.state.accounts.join(TenantId("t"))
    assert facts(scheduler.state) != before
