"""A model with `isolate_tenants: process` is an entry of its own for each tenant, with processes of its own.

Owns which tenant has which instance. To the scheduler an instance is a model like any other: it has its own need, is
loaded when it is asked for, and evicted or unloaded as others are. It can be asked for by its tenant only, under the
name of the model that it is an instance of. Callers without a tenant use that model itself.
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(slots=True)
class _Instance:
    id: ModelId
    used: int = 0


class TenantModels:
    def __init__(
        self,
        catalog: Catalog,
        models: KnownModels,
        instances_max: int = INSTANCES_MAX,
    ) -> None:
        self._catalog = catalog
        self._models = models
        self._max = instances_max
        # By model and tenant. Numbers are never used again.
        self._known: dict[tuple[ModelId, str], _Instance] = {}
        self._numbers = self._uses = 0

    def of(self, base: Entry, tenant: str) -> Entry:
        """The instance of this model for this tenant. Raises TooManyModels if all that may be there are in use."""
        if not tenant:
            return base
        known = self._known.get((base.id, tenant))
        entry = None if known is None else self._catalog.find(known.id)
        if known is None or entry is None:
            known, entry = self._added(base, tenant)
        elif entry.spec.revision != base.spec.revision:
            # The model has other weights since.
            entry = self._put(base, known.id, tenant)
        self._uses += 1
        known.used = self._uses
        return entry

    def reloaded(self) -> None:
        """Forget instances of models that were removed, or have no instances any more."""
        for key, known in list(self._known.items()):
            if self._catalog.find(known.id) is None:
                self._forget(key)

    def _added(self, base: Entry, tenant: str) -> tuple[_Instance, Entry]:
        self._expect_room()
        model_id = None
        while model_id is None or self._catalog.is_known(model_id):
            self._numbers += 1
            model_id = ModelId(f"{base.id}+tenant-{self._numbers}")
        self._known[base.id, tenant] = known = _Instance(model_id)
        _log.info("instance for a tenant", model=base.id, instance=model_id, tenant=tenant)
        return known, self._put(base, model_id, tenant)

    def _put(self, base: Entry, model_id: ModelId, tenant: str) -> Entry:
        entry = self._catalog.add_instance(base, model_id, tenant)
        self._models.tell(entry)
        return entry

    def _expect_room(self) -> None:
        while len(self._known) >= self._max:
            idle = [(known.used, key) for key, known in self._known.items() if not self._models.is_busy(known.id)]
            if not idle:
                raise TooManyModels(
                    f"{self._max:,} tenants at once may have processes of their own (isolate_tenants).",
                    retry_after_s=RETRY_AFTER_S,
                )
            self._forget(min(idle)[1])

    def _forget(self, key: tuple[ModelId, str]) -> None:
        self._models.remove(self._known.pop(key).id)
