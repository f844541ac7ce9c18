"""Models that come and go while the gateway runs: the catalogue and the scheduler learn of them in one step. Owns what
is dropped when a model has left: its logs and its last error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from greenroom.core.events import ConfigChanged, Learned
from greenroom.core.model import ModelId, ModelSpec
from greenroom.errors import GreenroomError, TooManyModels
from greenroom.runtime.catalogue import Catalog, Entry
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.runtime.slots import LiveSlots
from greenroom.telemetry.logs import get_logger


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


# --- instances for tenants --------------------------------------------------------------------------------------------


_log = get_logger("models")

# Of all models together. Callers without keys make tenants up.
INSTANCES_MAX: Final = 256
RETRY_AFTER_S: Final = 5.0


class TenantModels:
    """A model with `isolate_tenants: process` is an entry of its own for each tenant, with processes of its own.

    To the scheduler an instance is a model like any other. It can be asked for by its tenant only, under the name of
    the model that it is an instance of. Callers without a tenant use that model itself.
    """

    def __init__(self, catalog: Catalog, models: KnownModels, instances_max: int = INSTANCES_MAX) -> None:
        self._catalog = catalog
        self._models = models
        self._max = instances_max
        # By model and tenant, the one used last at the end. Numbers are never used again.
        self._known: dict[tuple[ModelId, str], ModelId] = {}
        self._numbers = 0

    def of(self, base: Entry, tenant: str) -> Entry:
        """The instance of this model for this tenant. Raises TooManyModels if all that may be there are in use."""
        if not tenant:
            return base
        known = self._known.pop((base.id, tenant), None)
        entry = None if known is None else self._catalog.find(known)
        if known is None or entry is None:
            return self._added(base, tenant)
        self._known[base.id, tenant] = known
        # The model may have other weights since.
        return entry if entry.spec.revision == base.spec.revision else self._put(base, known, tenant)

    def reloaded(self) -> None:
        """Forget instances of models that were removed, or have no instances any more."""
        for key, known in list(self._known.items()):
            if self._catalog.find(known) is None:
                self._forget(key)

    def _added(self, base: Entry, tenant: str) -> Entry:
        self._expect_room()
        model_id = None
        while model_id is None or self._catalog.is_known(model_id):
            self._numbers += 1
            model_id = ModelId(f"{base.id}+tenant-{self._numbers}")
        self._known[base.id, tenant] = model_id
        _log.info("instance for a tenant", model=base.id, instance=model_id, tenant=tenant)
        return self._put(base, model_id, tenant)

    def _put(self, base: Entry, model_id: ModelId, tenant: str) -> Entry:
        entry = self._catalog.add_instance(base, model_id, tenant)
        self._models.tell(entry)
        return entry

    def _expect_room(self) -> None:
        while len(self._known) >= self._max:
            idle = next((key for key, known in self._known.items() if not self._models.is_busy(known)), None)
            if idle is None:
                raise TooManyModels(
                    f"{self._max:,} tenants at once may have processes of their own (isolate_tenants).",
                    retry_after_s=RETRY_AFTER_S,
                )
            self._forget(idle)

    def _forget(self, key: tuple[ModelId, str]) -> None:
        self._models.remove(self._known.pop(key))
