"""Ad-hoc models, which no configuration names: what a request may say about one, and which are remembered.

Owns the configuration that is made of what a request says, the orders that stand, and the bound on how many are
remembered. A path that is asked for with other options is another model to the scheduler, and the same one to callers:
ids of its configurations stay in this process. `resolver.py` finds them on disk.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from pydantic import ValidationError

from greenroom.base.names import inner_id, public_name
from greenroom.config.kinds import id_problem
from greenroom.config.limits import ttl_s_of
from greenroom.config.part import GatewayState
from greenroom.config.schema import Model, Vllm
from greenroom.config.sections.engine_keys import WITH_PATH
from greenroom.core.model import DeviceId, ModelId
from greenroom.errors import BadRequest, TooManyModels
from greenroom.library.library import Library
from greenroom.library.records import ENGINE_OF_KIND, LibraryRecord
from greenroom.runtime.catalogue import Catalog, Entry
from greenroom.runtime.known_models import Asker, KnownModels
from greenroom.runtime.record.learned import LearnedTimes
from greenroom.telemetry.logs import get_logger

_log = get_logger("models")

# Names are remembered too, so that most requests need no look at the disk.
NAMES_PER_MODEL: Final = 16
RETRY_AFTER_S: Final = 5.0

# The share of a GPU for engines that take what they are given, where nothing says how much.
SHARE_OF_GPU: Final = 0.7
_SIZES_CACHE: Final = ("vllm", "sglang")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What a request says about an ad-hoc model. All but `ttl_s` make it another configuration."""

    backend: str | None = None
    device: str | None = None
    n_gpu_layers: int | None = None
    gpu_memory_utilization: float | None = None
    # Only loads that are ordered say these.
    quantization: str | None = None
    ctx_size: int | None = None
    budget_mib: int | None = None
    ttl_s: float | None = None
    # They stand for the name from now on, and nothing of the order before does.
    is_order: bool = False

    @property
    def as_order(self) -> ModelOptions:
        """An order that says nothing about the model is none: what stands for its name is loaded."""
        return self if self == NO_OPTIONS else replace(self, is_order=True)

    def over(self, order: ModelOptions) -> ModelOptions:
        """These, and where they say nothing those of the order."""
        return replace(order, **{name: value for name, value in asdict(self).items() if value is not None})


NO_OPTIONS: Final = ModelOptions()
BACKENDS: Final = f"{', '.join(WITH_PATH[:-1])} or {WITH_PATH[-1]}"


def check_backend(name: str) -> str:
    """Raises BadRequest for one that runs no models from disk."""
    # Names under which other servers know them.
    name = {"llama.cpp": "llamacpp", "faster-whisper": "whisper"}.get(name, name)
    if name not in WITH_PATH:
        raise BadRequest(f"Invalid backend: must be {BACKENDS}.", param="backend")
    return name


def model_of(
    record: LibraryRecord,
    options: ModelOptions,
    dtype: str | None,
    *,
    usable_mib: Mapping[DeviceId, int],
    exclusive: bool,
    vllm: Vllm,
) -> Model:
    """Its configuration. Raises BadRequest, which names the field."""
    engine = options.backend or ENGINE_OF_KIND[record.kind]
    said: dict[str, Any] = {"engine": engine, "path": record.path, "exclusive": exclusive}
    if engine == "llamacpp" and record.projector is not None:
        said["mmproj"] = record.projector
    if options.device == "cpu":
        said["device"] = "cpu"
    elif options.device is not None and not usable_mib:
        raise BadRequest("device is cuda, but this machine has no GPU. Send cpu, or leave it out.", param="device")
    if options.n_gpu_layers is not None:
        said["n_gpu_layers"] = options.n_gpu_layers
    if engine == "vllm":
        said |= vllm.model_dump(exclude_none=True, exclude={"gpu_memory_utilization"})
    said |= {} if options.ctx_size is None else {"ctx_size": options.ctx_size}
    said |= {} if dtype is None else {"dtype": dtype}
    if options.ttl_s is not None:
        said["ttl_s"] = options.ttl_s
    if said.get("device") != "cpu":
        said |= _memory(engine, options, usable_mib, vllm)
    try:
        return Model.model_validate(said)
    except ValidationError as error:
        raise _not_taken(error, engine) from None


def _memory(engine: str, options: ModelOptions, usable_mib: Mapping[DeviceId, int], vllm: Vllm) -> dict[str, int]:
    """A share of the largest GPU: what engines take that fill what they are given; a limit for others."""
    key = "memory_mib" if engine in _SIZES_CACHE else "gpu_memory_budget_mib"
    if options.budget_mib is not None:
        return {key: options.budget_mib}
    share = options.gpu_memory_utilization
    largest = max(usable_mib.values(), default=0)
    if not largest:
        return {}
    if share is None and engine in _SIZES_CACHE:
        share = vllm.gpu_memory_utilization or SHARE_OF_GPU
    return {} if share is None else {key: max(1, int(share * largest))}


def _not_taken(error: ValidationError, engine: str) -> BadRequest:
    first = error.errors(include_url=False)[0]
    problems = first.get("ctx", {}).get("problems") or ()
    said = "; ".join(str(problem.message) for problem in problems) or first["msg"]
    where = problems[0].where if problems else first["loc"]
    param = str(where[0]) if where else None
    return BadRequest(f"{engine} does not take what was asked for: {said}.", param=param)


# --- which of them are remembered -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Meant:
    """What a name with some options means: a configuration, and the path that the name alone leads to."""

    model: ModelId
    home: str


@dataclass(frozen=True, slots=True)
class Order:
    """What a name means until the model is unloaded, or ordered otherwise."""

    name: str
    options: ModelOptions
    model: ModelId
    base_id: str
    home: str


@dataclass(slots=True)
class _Adhoc:
    record: LibraryRecord
    tenant: str | None
    """Of the last request for it."""


class AdhocModels:
    """Which ad-hoc models are remembered, under which names, and which of them leaves for a newcomer."""

    def __init__(
        self,
        catalog: Catalog,
        library: Library,
        gateway: GatewayState,
        models: KnownModels,
        learned: LearnedTimes,
    ) -> None:
        self._catalog = catalog
        self._library = library
        self._gateway = gateway
        self._models = models
        self._learned = learned
        # The one used last is at the end.
        self._known: dict[ModelId, _Adhoc] = {}
        # Also by whether an order completed the options: not every caller sees what was ordered.
        self._names: dict[tuple[str, ModelOptions, bool], _Meant] = {}
        # By the path that their names lead to: every name of a model means the same.
        self._orders: dict[str, Order] = {}

    def named(self, name: str, options: ModelOptions, asker: Asker) -> Entry | None:
        """The model that was found by this name and with these options; None if it is not remembered."""
        for is_completed in (True, False):
            meant = self._names.get((name, replace(options, ttl_s=None), is_completed))
            if meant and (self.order_for(name, meant.home, options, asker) is not None) is is_completed:
                return self._catalog.find(meant.model)
        return None

    def find(self, model: ModelId) -> Entry | None:
        """The ad-hoc model of this id, if its files are still what they were."""
        entry = self._catalog.find(model)
        return entry if entry is not None and entry.is_adhoc and self.is_current(entry) else None

    def add(self, entry: Entry, record: LibraryRecord, tenant: str | None) -> Entry:
        """Returns it with the name of the order that stands for it. Raises TooManyModels."""
        self._expect_room(entry.id, tenant)
        if orders := self.orders_of([entry.id]):
            entry = replace(entry, asked_as=orders[0].name)
        self._known[entry.id] = _Adhoc(record, tenant)
        self._models.add(entry, self._learned.recall((entry.id,)))
        _log.info("model found", model=entry.public_id, path=record.path, engine=entry.engine.name)
        return entry

    def is_current(self, entry: Entry) -> bool:
        """False if its files are not what they were when its memory was estimated, or its id now means others."""
        known = self._known.get(entry.id)
        if known is None:
            return False
        record, seen = known.record, self._library.find(known.record.path)
        if not record.files:
            # The library did not know it.
            return seen is None
        named = self._library.find(record.id)
        if seen is None and named is None:
            # Its root or its files are gone. What is in memory serves on.
            return self._models.is_in_memory(entry.id)
        return seen is not None and seen.files == record.files and named is not None and named.path == record.path

    def used(self, entry: Entry, name: str, options: ModelOptions, tenant: str | None) -> Entry:
        """A request of this tenant asks for it by this name. Returns it with the `ttl_s` that the request says."""
        self._known[entry.id] = known = self._known.pop(entry.id)
        if not options.is_order:
            self._catalog.mean(entry, name)
        known.tenant = tenant
        self._library.used(known.record)
        if options.ttl_s is None or entry.config.ttl_s == options.ttl_s:
            return entry
        # The last request that says it counts. The running process stays.
        model = entry.config.model_copy(update={"ttl_s": options.ttl_s})
        spec = replace(entry.spec, ttl_s=ttl_s_of(model, self._gateway.config.stay_warm))
        entry = replace(entry, config=model, spec=spec)
        self._models.add(entry)
        return entry

    def remember(self, name: str, options: ModelOptions, model: ModelId, home: str, *, is_completed: bool) -> None:
        key = (name, replace(options, ttl_s=None), is_completed)
        self._names.pop(key, None)
        self._names[key] = _Meant(model, home)
        while len(self._names) > NAMES_PER_MODEL * self._gateway.config.library.adhoc_models_max:
            del self._names[next(iter(self._names))]

    # --- orders -------------------------------------------------------------------------------------------------------

    def order_at(self, home: str) -> Order | None:
        return self._orders.get(home)

    def order_for(self, name: str, home: str, options: ModelOptions, asker: Asker) -> Order | None:
        """The order that completes these options for a caller that sees these models. One that chose another file holds
        for its own name only: other names say which file they mean."""
        order = self._orders.get(home)
        if order is None or options.is_order or not asker.sees(order.base_id):
            return None
        chosen = self._library.find(order.base_id)
        is_here = order.options.quantization is None or (chosen is not None and chosen.path == home)
        is_named = chosen is not None and name.casefold() == order.name.casefold()
        return order if is_here or is_named else None

    def orders_of(self, models: Collection[ModelId]) -> list[Order]:
        return [order for order in self._orders.values() if order.model in models]

    def order_of(self, name: str, options: ModelOptions, asker: Asker) -> Order | None:
        """The order that a load gives by this name, which was looked up; None if it says nothing or is configured. It
        does not stand instead of one that its caller does not see."""
        meant = self._names.get((name, replace(options, ttl_s=None), False))
        before = None if meant is None else self._orders.get(meant.home)
        if meant is None or not options.is_order or (before is not None and not asker.sees(before.base_id)):
            return None
        entry = self._catalog.find(meant.model)
        return Order(name, options, meant.model, name if entry is None else entry.base_id, meant.home)

    def stands(self, order: Order) -> Order | None:
        """It stands from now on. Returns what it replaces."""
        if (before := self._orders.get(order.home)) is not None:
            self.end([before])
        self._orders[order.home] = order
        self._told_of(order.home, order.model, order.name)
        while len(self._orders) > self._gateway.config.library.adhoc_models_max:
            self.end([next(iter(self._orders.values()))])
        return before

    def end(self, ended: Collection[Order]) -> None:
        """Their names mean the models without options again. Orders that were given since stand."""
        for home, order in list(self._orders.items()):
            if any(order is one for one in ended):
                del self._orders[home]
                self._told_of(home, order.model, "")

    def _told_of(self, home: str, model: ModelId, asked_as: str) -> None:
        self._names = {key: meant for key, meant in self._names.items() if meant.home != home}
        if (entry := self._catalog.find(model)) is not None:
            self._catalog.add(entry := replace(entry, asked_as=asked_as))
            self._catalog.mean(entry, asked_as)

    def _expect_room(self, coming: ModelId, tenant: str | None) -> None:
        """One model makes room for one more. Raises TooManyModels if those that could are all in use."""
        most = self._gateway.config.library.adhoc_models_max
        while len(self._known) >= most and coming not in self._known:
            leaving = self._least_missed(tenant)
            if leaving is None:
                count = "One model" if most == 1 else f"{most:,} models"
                raise TooManyModels(
                    f"{count} outside of the configuration may be in use at once (library.adhoc_models_max).",
                    retry_after_s=RETRY_AFTER_S,
                )
            self._forget(leaving)

    def _least_missed(self, tenant: str | None) -> ModelId | None:
        """Of the tenant that has most, the newcomer's counted with it, the idle model that was not used for longest. No
        tenant's models leave for one that has more than it."""
        counts = Counter(known.tenant for known in self._known.values())
        counts[tenant] += 1
        idle = [
            model
            for model, known in self._known.items()
            if counts[known.tenant] >= counts[tenant] and not self._models.is_busy(model)
        ]
        return max(idle, key=lambda model: counts[self._known[model].tenant], default=None)

    def _forget(self, model: ModelId) -> None:
        del self._known[model]
        self._names = {key: meant for key, meant in self._names.items() if meant.model != model}
        entry = self._catalog.find(model)
        if entry is not None and entry.is_adhoc:
            self._models.remove(model)

    def reloaded(self) -> None:
        """Forget models that a changed configuration has taken over, or whose roots are gone."""
        roots = self._library.real_roots()
        for model, known in list(self._known.items()):
            named = self._catalog.find(public_name(model))
            if named is None or not named.is_adhoc or known.record.root not in roots:
                self._forget(model)

    def looked(self) -> None:
        """The disk was looked at: models that are neither there nor in memory are no longer listed."""
        for model, known in list(self._known.items()):
            is_gone = bool(known.record.files) and self._library.find(known.record.path) is None
            if is_gone and not self._models.is_in_memory(model) and not self._models.is_busy(model):
                self._forget(model)

    def removed(self, record: LibraryRecord) -> None:
        """Its files were deleted: it is asked for no more."""
        self.end([one for one in self._orders.values() if record.path == one.home or record.id == one.base_id])
        for model, known in list(self._known.items()):
            if known.record.path == record.path:
                self._forget(model)

    def id_for(self, record: LibraryRecord, model: Model) -> ModelId:
        """The record's id, which callers know, and what tells this configuration from others of it."""
        name = record.id
        if id_problem(name) is not None:
            # Not every file that the library does not know has a name that can be an id.
            name = f"found-{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"
        while not self.is_free(name, record):
            name = f"{name}+"
        told = model.model_dump_json(exclude={"ttl_s"}, exclude_defaults=True)
        return ModelId(inner_id(name, hashlib.sha256(os.fsencode(told)).hexdigest()))

    def is_free(self, name: str, record: LibraryRecord) -> bool:
        """Whether this record can have this name."""
        taken = self._catalog.find(name)
        if taken is None:
            return True
        return (
            taken.version is None
            and taken.is_adhoc
            and (taken.config.path == record.path or not self.is_current(taken))
        )
