"""A model with `isolate_tenants: process` is an entry of its own for each tenant, with processes of its own.

Owns which tenant has which instance. To the scheduler an instance is a model like any other: it has its own need, is
loaded when it is asked for, and evicted or unloaded as others are. It can be asked for by its tenant only, under the
name of the model that it is an instance of. Callers without a tenant use that model itself.
"""

from __future__ import annotations

from typing import Final

from greenroom.core.model import ModelId
from greenroom.errors import TooManyModels
from greenroom.runtime.catalogue import Catalog, Entry
from greenroom.runtime.known_models import KnownModels
from greenroom.telemetry.logs import get_logger

_log = get_logger("models")

# Of all models together. Callers without keys make tenants up.
INSTANCES_MAX: Final = 256
RETRY_AFTER_S: Final = 5.0


class TenantModels:
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
