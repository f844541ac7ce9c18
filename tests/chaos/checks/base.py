"""What all checks share, and the watcher that hands each event and effect to the checks that need it.

A checker is a small class that keeps its own truth about one property and raises Violation when it is broken. It names
the methods it needs after events (`serve_done`) and effects (`grant`); `tell` is called before every event, `settled`
after it, `at_rest` when everything should have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from greenroom.core import events as ev
from greenroom.core.invariants import Tabled
from greenroom.core.state import State
from greenroom.sim.hooks import Watcher
from greenroom.sim.world import World

EVENTS: dict[type[Any], str] = {
    ev.ConfigChanged: "config_changed",
    ev.VersionPromoted: "version_promoted",
    ev.RequestArrived: "request_arrived",
    ev.RequestGone: "request_gone",
    ev.ServeDone: "serve_done",
    ev.MoveAsked: "move_asked",
    ev.MoveDone: "move_done",
    ev.SlotsLost: "slots_lost",
    ev.MemoryChanged: "memory_changed",
    ev.LeaseAsked: "lease_asked",
    ev.LeaseGone: "lease_gone",
    ev.TimerFired: "timer_fired",
    ev.ShutdownAsked: "shutdown_asked",
}
EFFECTS = ("grant", "reject", "cut", "move", "abort", "answer", "recall", "set_timer")


def tabled(world: World) -> Tabled:
    """Its scheduler as one whose tables can be looked into, as those that Greenroom comes with can."""
    return cast(Tabled, world.scheduler)


def state_of(world: World) -> State:
    return tabled(world).state


class Check:
    """What all checkers share."""

    # Set before the first event that matters; the very first one, the configuration, comes before it.
    world: World | None = None


Heard = Callable[..., None]


def _those_with(checks: Sequence[Check], name: str) -> tuple[Heard, ...]:
    return tuple(getattr(check, name) for check in checks if hasattr(check, name))


class Checkers(Watcher):
    """A watcher made of checkers."""

    def __init__(self, checks: Sequence[Check]) -> None:
        self.checks = tuple(checks)
        self._told = {event: _those_with(checks, "tell") + _those_with(checks, name) for event, name in EVENTS.items()}
        self._asked = {effect: _those_with(checks, effect) for effect in EFFECTS}
        self._settled = _those_with(checks, "settled")
        self._at_rest = _those_with(checks, "at_rest")

    def attach(self, world: World) -> None:
        for check in self.checks:
            check.world = world

    def told(self, event: ev.Event) -> None:
        for hear in self._told[type(event)]:
            hear(event)

    def asked(self, effect: str, *details: object) -> None:
        for hear in self._asked[effect]:
            hear(*details)

    def settled(self, event: ev.Event) -> None:
        for hear in self._settled:
            hear(event)

    def at_rest(self) -> None:
        """Everything has ended: what must be empty now?"""
        for hear in self._at_rest:
            hear()
