"""The contract of a scheduler: events in, effects out, and a view that answers questions.

Greenroom comes with two: `scheduler.py` and, small and easy to foresee, `plain.py`. An entry point in the group
`greenroom.schedulers` names another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from greenroom.core.effects import Effects
from greenroom.core.events import Event
from greenroom.core.view import SchedulerView


class Scheduler(Protocol):
    """Decides what is where and who is served. Pure: no clock, I/O, task, log or random number.

    - Each arrival ends in one of served, rejected, gone. A grant is in flight until `ServeDone` or `RequestGone`.
    - A move starts only where its memory is free by all that was told. Nothing busy moves; one move per slot at a time.
    - Every effect carries its reason. Results come back as events, never while `handle` runs.
    - Unknown and repeated ids are ignored. The same events ask for the same effects.
    """

    @property
    def view(self) -> SchedulerView:
        """The same object throughout. What it shows is up to date whenever no event is being handled."""
        ...

    def handle(self, event: Event) -> None:
        """Decide, and call effects, before it returns. The first event is a `ConfigChanged` with everything."""
        ...


SchedulerFactory = Callable[[Effects], Scheduler]
