"""Models that come and go while the gateway runs: the catalogue and the scheduler learn of them in one step. Owns what
is dropped when a model has left: its logs and its last error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

from greenroom.config.kinds import id_problem
from greenroom.config.part import GatewayState
from greenroom.config.schema import Model, Remote
from greenroom.core.events import ConfigChanged, Learned
from greenroom.core.model import ModelId, ModelSpec
from greenroom.errors import BadRequest, GreenroomError, NotAllowed, TooManyModels
from greenroom.runtime.catalogue import Catalog, Entry
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.runtime.slots import LiveSlots
from greenroom.telemetry.logs import get_logger

_log = get_logger("models")

RETRY_AFTER_S: Final = 5.0


class Asker(Protocol):
    """The caller that a model is looked up for. Hashable."""

    @property
    def tenant(self) -> str | None: ...

    @property
    def may_ask_remote(self) -> bool:
        """True if it may ask a provider for models that no configuration names, which costs money."""
        ...

    def sees(self, model: str) -> bool:
        """False if this model must look as if it did not exist; by its id, for ad-hoc models that of the library."""
        ...


@dataclass(frozen=True, slots=True)
class _Operator:
    tenant: str | None = None
    may_ask_remote: bool = True

    def sees(self, model: str) -> bool:
        return True


OPERATOR: Final[Asker] = _Operator()


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

# Of all models together. Callers without keys make tenants up.
INSTANCES_MAX: Final = 256


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


# --- names of remote models -------------------------------------------------------------------------------------------


# Callers make names up; a provider has some dozens.
REMOTE_NAMES_MAX: Final = 256


class RemoteNames:
    """Which models of providers are remembered that requests name and no configuration has: claude:sonnet is the model
    `sonnet` of the provider `claude`. Each is a model of its own, so that it has its limits, its usage and its place in
    the scheduler. They take no memory; those that were not used for longest leave.
    """

    def __init__(
        self,
        catalog: Catalog,
        gateway: GatewayState,
        models: KnownModels,
        names_max: int = REMOTE_NAMES_MAX,
    ) -> None:
        self._catalog = catalog
        self._gateway = gateway
        self._models = models
        self._max = names_max
        # The one used last is at the end.
        self._known: dict[ModelId, Remote] = {}

    def find(self, name: str, asker: Asker) -> Entry | None:
        """The model of this name; None if its prefix is no provider's, or the asker does not see it. Raises NotAllowed,
        BadRequest for what cannot be a name, and TooManyModels."""
        prefix, colon, rest = name.partition(":")
        remote = self._gateway.config.remotes.get(prefix) if colon else None
        if remote is None or not asker.sees(name):
            return None
        if not asker.may_ask_remote:
            raise NotAllowed(
                f"This key may not ask {prefix} for models by name: its `verbs` do not have `remote`.", param="model"
            )
        if not rest:
            raise BadRequest(f"{prefix}: is followed by the name of a model.", param="model")
        if (why := id_problem(name)) is not None:
            raise BadRequest(f"There is no such model: {why}.", param="model")
        model_id = ModelId(name)
        known, entry = self._known.pop(model_id, None), self._catalog.find(name)
        if known is None or entry is None:
            return self._added(model_id, prefix, rest, remote)
        self._known[model_id] = known
        return entry

    def reloaded(self) -> None:
        """Forget models of providers that were removed or changed, and those that a configuration has taken over."""
        remotes = self._gateway.config.remotes
        for model, known in list(self._known.items()):
            entry = self._catalog.find(model)
            if entry is None or not entry.is_adhoc:
                del self._known[model]
            elif remotes.get(model.partition(":")[0]) != known:
                self._forget(model)

    def _added(self, model_id: ModelId, prefix: str, rest: str, remote: Remote) -> Entry:
        self._expect_room()
        model = Model(
            engine="remote",
            remote=prefix,
            use_model_name=remote.name_of(rest),
            concurrency=remote.concurrency,
            unlisted=True,
            # Translations of other dialects add it; OpenAI refuses fields that it does not know.
            strip_params=("top_k",),
        )
        entry = self._catalog.adhoc_entry(model_id, model, model_id)
        self._known[model_id] = remote
        self._models.add(entry)
        _log.info("remote model named", model=model_id, name_there=model.use_model_name)
        return entry

    def _expect_room(self) -> None:
        while len(self._known) >= self._max:
            idle = next((model for model in self._known if not self._models.is_busy(model)), None)
            if idle is None:
                raise TooManyModels(
                    f"{self._max:,} remote models may be asked for by name at once.", retry_after_s=RETRY_AFTER_S
                )
            self._forget(idle)

    def _forget(self, model: ModelId) -> None:
        del self._known[model]
        self._models.remove(model)
