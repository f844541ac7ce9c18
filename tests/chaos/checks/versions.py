"""A name has a servable version from its first success on, and a flip leaves no moment without one."""

from __future__ import annotations

from greenroom.core import events as ev
from greenroom.core.model import ModelId
from greenroom.sim.records import Violation
from tests.chaos.checks.base import Check, state_of


class Servable(Check):
    def __init__(self) -> None:
        self.judged = 0
        self._names: set[ModelId] = set()
        # The slots that served as the coming version just before the flip, and the name that they took.
        self._flips: tuple[ModelId, frozenset[str]] | None = None

    def config_changed(self, event: ev.ConfigChanged) -> None:
        self._names -= set(event.removed)
        self._names |= {spec.id for spec in event.models if spec.version_of is None}

    def version_promoted(self, event: ev.VersionPromoted) -> None:
        self._names.add(event.spec.id)
        if self.world is not None and event.coming in state_of(self.world).models:
            serving = state_of(self.world).serving(event.coming)
            self._flips = (event.spec.id, frozenset(slot.id for slot in serving))

    def settled(self, event: ev.Event) -> None:
        if self.world is None:
            return
        state = state_of(self.world)
        if gone := self._names - state.models.keys():
            raise Violation(f"{sorted(gone)} cannot be asked for any more")
        if isinstance(event, ev.VersionPromoted) and self._flips is not None:
            self.judged += 1
            (name, before), self._flips = self._flips, None
            # Another model that waits may make it leave at once, as it may every idle one.
            if lost := before - {slot.id for slot in state.slots_of(name)}:
                raise Violation(f"{name} was to be served by {sorted(lost)}, which is gone")
            if any(slot.spec.revision != event.spec.revision for slot in state.serving(name)):
                raise Violation(f"{name} is served by two versions")
