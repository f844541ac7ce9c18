"""The scheduler's tables: they agree, timers are those that were asked for, and at rest all is empty."""

from __future__ import annotations

from greenroom.core import events as ev
from greenroom.core.effects import Reason
from greenroom.core.invariants import check
from greenroom.sim.records import Violation
from tests.chaos.checks.base import Check, state_of, tabled

# Looking at everything costs as much as some hundred events, so it is not done after each.
EVERY = 101


class Invariants(Check):
    def __init__(self, every: int = EVERY) -> None:
        self.judged = 0
        self._every = every
        self._until_next = every

    def settled(self, event: ev.Event) -> None:
        self._until_next -= 1
        if not self._until_next and self.world is not None:
            self._until_next = self._every
            self.judged += 1
            check(tabled(self.world), event.now)

    def at_rest(self) -> None:
        if self.world is not None:
            check(tabled(self.world), self.world.clock.told)


class Timers(Check):
    """Timers that were set and neither fired nor were forgotten are those the scheduler knows."""

    def __init__(self) -> None:
        self._set: dict[ev.Timer, float] = {}

    def set_timer(self, timer: ev.Timer, at: float | None, reason: Reason) -> None:
        if at is None:
            self._set.pop(timer, None)
        else:
            self._set[timer] = at

    def timer_fired(self, event: ev.TimerFired) -> None:
        self._set.pop(event.timer, None)

    def settled(self, event: ev.Event) -> None:
        if self.world is not None and len(self._set) != len(state_of(self.world).timers):
            raise Violation(f"timers set {sorted(map(str, self._set))}, others are known")

    def at_rest(self) -> None:
        if self._set:
            raise Violation(f"{list(self._set)} are still set")


class AtRest(Check):
    """When all has ended nothing is left anywhere."""

    def at_rest(self) -> None:
        if self.world is None:
            return
        state, truth = state_of(self.world), self.world.truth
        tables: dict[str, object] = {
            "slots": state.slots,
            "slots by model": state.slots_by_model,
            "moves": state.moves,
            "grants": state.grants,
            "queues": state.waitlist.queues,
            "choosy": state.waitlist.with_choice,
            "kept": state.kept,
            "leaving operators": state.leaving_ops,
            "timers": state.timers,
            "holdings": state.ledger.holdings,
            "promises": state.ledger.promises,
            "leaving": state.ledger.leaving,
            "active tenants": state.accounts._active,
            "places": truth.places,
            "memory": {device: mib for device, mib in truth.held_mib.items() if mib},
        }
        for name, table in tables.items():
            if table:
                raise Violation(f"at rest there are still {name}: {table}")
