"""Models that come and go while the gateway runs: the catalogue and the scheduler learn of them in one step.

Owns what is dropped when a model has left: its logs and its last error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from greenroom.core.events import ConfigChanged, Learned
from greenroom.core.model import ModelId, ModelSpec
from greenroom.errors import GreenroomError
from greenroom.runtime.catalogue import Catalog, Entry
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.runtime.slots import LiveSlots


class KnownModels:
    def __init__(
        self, catalog: Catalog, loop: SchedulerLoop, slots: LiveSlots, failures: dict[ModelId, GreenroomError]
    ) -> None:
        self._catalog = catalog
        self._loop = loop
        self._slots = slots
        self._failures = failures

    def add(self, entry: Entry, learned: Mapping[ModelId, Learned] | None = None) -> None:
        """Enter this model, or what it is now."""
        self._catalog.add(entry)
        self.tell(entry, learned)

    def tell(self, entry: Entry, learned: Mapping[ModelId, Learned] | None = None) -> None:
        """Tell the scheduler of a model that is in the catalogue."""
        self._loop.post(ConfigChanged(self._loop.clock(), models=(entry.spec,), learned=learned or None))

    def remove(self, model: ModelId) -> None:
        self._catalog.remove(model)
        self._loop.post(ConfigChanged(self._loop.clock(), removed=(model,)))
        self.forget_removed()

    def forget_removed(self) -> None:
        """Drop the logs and errors of models that are no longer there."""
        known = frozenset(entry.id for entry in self._catalog)
        self._slots.forget_logs(known)
        for model in [model for model in self._failures if model not in known]:
            del self._failures[model]

    def still_held(self, spec: ModelSpec) -> ModelSpec:
        """What a reload makes of a model that is held: it stays so, unless it has other processes now."""
        record = self._loop.view.models.get(spec.id)
        is_held = record is not None and record.spec.held and record.spec.revision == spec.revision
        return replace(spec, held=True) if is_held else spec

    def is_in_memory(self, model: ModelId) -> bool:
        return bool(self._loop.view.slots_of(model))

    def is_busy(self, model: ModelId) -> bool:
        """True if requests wait for it, or a slot of it answers or moves."""
        view = self._loop.view
        return view.is_waited_for(model) or any(slot.in_flight or slot.move for slot in view.slots_of(model))
