"""One way from a name to a model: a configured id or alias, a path below a root, or a hub id that is on disk. Owns the
looks at the disk, which happen in threads. Models that no configuration names are remembered by `adhoc_model.py`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final

from greenroom.base.detached import run_detached
from greenroom.base.names import public_name
from greenroom.config.part import GatewayState
from greenroom.config.schema import Model
from greenroom.core.model import ModelId
from greenroom.errors import BadRequest, ModelNotFound, NoVersion, PathNotFound, TooManyModels, shown
from greenroom.library.library import Library
from greenroom.library.naming import choose
from greenroom.library.records import ENGINE_OF_KIND, BrokenModel, LibraryRecord, ModelKind, Source
from greenroom.library.roots import is_below
from greenroom.runtime.adhoc_model import (
    BACKENDS,
    NO_OPTIONS,
    RETRY_AFTER_S,
    AdhocModels,
    ModelOptions,
    model_of,
)
from greenroom.runtime.catalogue import Catalog, Entry
from greenroom.runtime.known_models import OPERATOR, Asker, KnownModels, RemoteNames, TenantModels
from greenroom.runtime.record.learned import LearnedTimes
from greenroom.telemetry.logs import get_logger

_log: Final = get_logger("models")

# Looks at the disk at the same time, and how long one may take.
LOOKS_MAX: Final = 8
LOOK_MAX_S: Final = 30.0
# Looks for one request, where models leave as soon as they are found.
TRIES_MAX: Final = 4


class NeedsDiskLookup(Exception):
    """A name that is not known without a look at the disk."""

    def __init__(self, name: str, options: ModelOptions, asker: Asker) -> None:
        super().__init__(name)
        self.name = name
        self.options = options
        self.asker = asker


class Resolver:
    def __init__(
        self,
        catalog: Catalog,
        library: Library,
        gateway: GatewayState,
        models: KnownModels,
        learned: LearnedTimes,
    ) -> None:
        self.catalog = catalog
        self._library = library
        self._gateway = gateway
        self._looks = asyncio.Semaphore(LOOKS_MAX)
        self._under_way: dict[tuple[str, ModelOptions, Asker], asyncio.Task[Entry]] = {}
        self.adhoc = AdhocModels(catalog, library, gateway, models, learned)
        self.instances = TenantModels(catalog, models)
        self.remote_names = RemoteNames(catalog, gateway, models)
        # True if requests may name models that are not configured, and say how to run them.
        self.takes_options = bool(library.roots)

    # --- asking -------------------------------------------------------------------------------------------------------

    @property
    def unasked(self) -> Iterator[LibraryRecord]:
        """Models on disk that are neither configured nor known yet."""
        known = {entry.config.path for entry in self.catalog}
        return (record for record in self._library.records if record.path not in known)

    def on_disk(self, name: str) -> LibraryRecord | None:
        """The model of this id or hub id, as far as the library has it."""
        return self._library.find(name) if not name.startswith("/") else None

    def is_seen(self, name: str, asker: Asker) -> bool:
        """True if a model of this name is configured, in use or on disk, and the asker sees it."""
        if (entry := self.catalog.find(name)) is not None:
            return asker.sees(entry.base_id)
        return (record := self.on_disk(name)) is not None and asker.sees(record.id)

    def find(self, name: str, options: ModelOptions = NO_OPTIONS, asker: Asker = OPERATOR) -> Entry:
        """The model of this name. Raises NeedsDiskLookup if only the disk can tell, and ModelNotFound. One that the
        asker does not see takes the way of an unknown one, so that neither words nor time tell it apart."""
        entry = self.catalog.find(name)
        if entry is not None and (entry.instance_of is not None or not asker.sees(entry.base_id)):
            entry = None
        if entry is not None and not entry.is_adhoc:
            if options is not NO_OPTIONS:
                _expect_no_order(entry, options)
            if self.takes_options and entry.config.path is not None:
                self._library.used_at(entry.config.path)
            return entry
        if (remote := self.remote_names.find(name, asker)) is not None:
            if options is not NO_OPTIONS:
                _expect_no_order(remote, options)
            return remote
        if entry is None:
            self._expect_version(name, asker)
        if not self.takes_options:
            raise ModelNotFound.named(name)
        entry = self.adhoc.named(name, options, asker)
        if entry is None or not asker.sees(entry.base_id) or not self.adhoc.is_current(entry):
            raise NeedsDiskLookup(name, options, asker)
        return self.adhoc.used(entry, name, options, asker.tenant)

    def _expect_version(self, name: str, asker: Asker) -> None:
        """Raises NoVersion for a configured model that has none yet."""
        if self.catalog.is_known(name):
            return
        models = self._gateway.config.models.items()
        if any(asker.sees(one) for one, model in models if name == one or name in model.aliases):
            raise NoVersion(
                f"{name} has no version yet; GET /status?model={name} says why.", retry_after_s=RETRY_AFTER_S
            )

    async def named(self, name: str, options: ModelOptions = NO_OPTIONS, asker: Asker = OPERATOR) -> Entry:
        """The same, after a look at the disk if need be. Raises ModelNotFound, PathNotFound, BadRequest."""
        for _ in range(TRIES_MAX):
            with suppress(NeedsDiskLookup):
                return self.find(name, options, asker)
            # When this returns, others may have made it leave already.
            await self._shared(name, options, asker)
        raise TooManyModels(
            "More models outside of the configuration are asked for at once than are remembered "
            "(library.adhoc_models_max).",
            retry_after_s=RETRY_AFTER_S,
        )

    async def _shared(self, name: str, options: ModelOptions, asker: Asker) -> Entry:
        """Requests of the same caller for the same model share one look."""
        key = (name, options, asker)
        task = self._under_way.get(key)
        if task is None:
            looking = self._look(name, options, asker)
            task = asyncio.get_running_loop().create_task(looking, name=f"look for {name[:64]}")
            self._under_way[key] = task
            task.add_done_callback(lambda _: self._under_way.pop(key, None))
        return await asyncio.shield(task)

    async def _look(self, name: str, options: ModelOptions, asker: Asker) -> Entry:
        async with self._looks:
            record, dtype = await self._located(name, options, asker), None
            home, order = record.path, self.adhoc.order_for(name, record.path, options, asker)
            wanted = options if order is None else options.over(order.options)
            if wanted.quantization is not None:
                seen = [one for one in self._library.records if asker.sees(one.id)]
                record, dtype = choose(record, wanted.quantization, seen)
            model = model_of(
                record,
                wanted,
                dtype,
                usable_mib=self.catalog.needs.usable_mib,
                exclusive=self._gateway.config.library.exclusive,
                vllm=self._gateway.config.vllm,
            )
            entry = None
            while entry is None:
                model_id = self.adhoc.id_for(record, model)
                entry = self.adhoc.find(model_id) or await self._added(name, record, model_id, model, asker)
        if self.adhoc.order_for(name, home, options, asker) is order:
            self.adhoc.remember(name, options, entry.id, home, is_completed=order is not None)
        return self.adhoc.used(entry, name, options, asker.tenant)

    async def _added(
        self, name: str, record: LibraryRecord, model_id: ModelId, model: Model, asker: Asker
    ) -> Entry | None:
        """The new model; None if another one, perhaps a configured one, took its id meanwhile."""
        try:
            async with asyncio.timeout(LOOK_MAX_S):
                entry = await run_detached(
                    lambda: self.catalog.adhoc_entry(model_id, model, record.id), f"look at {model_id}"
                )
        except TimeoutError:
            raise _not_found(name, "The folders of models do not answer.") from None
        if record.root not in self._library.real_roots():
            raise _not_found(name, "Its root was removed from the configuration.")
        if not self.adhoc.is_free(public_name(model_id), record):
            return None
        # Another request may have named it otherwise and come first.
        if (known := self.adhoc.find(model_id)) is not None:
            return known
        return self.adhoc.add(entry, record, asker.tenant)

    async def _located(self, name: str, options: ModelOptions, asker: Asker) -> LibraryRecord:
        """What is on disk by this name. An asker that sees some models only sees what the library has an id for."""
        library = self._library
        record = library.find(name)
        try:
            async with asyncio.timeout(LOOK_MAX_S):
                if record is None:
                    # An id of the hub is no path: it is known only after the first look.
                    await library.looked()
                    record = library.find(name)
                is_hidden = record is not None and not asker.sees(record.id)
                if record is not None and not is_hidden:
                    return record
                path = await run_detached(lambda: library.roots.locate(name), "look for a model")
                if is_hidden:
                    path = None
                elif path is not None:
                    # It may have come since the last look.
                    await library.refresh()
        except TimeoutError:
            raise _not_found(name, "The folders of models do not answer.") from None
        record = None if path is None else library.find(path)
        if path is None or not asker.sees("" if record is None else record.id):
            roots = ", ".join(library.roots.folders)
            raise _not_found(name, f"No model is configured by this name, and none is on disk below {roots}.")
        if record is not None:
            return record
        order = self.adhoc.order_for(name, path, options, asker)
        wanted = options if order is None else options.over(order.options)
        if wanted.backend is None:
            _expect_whole(path, library.problems)
        return _unknown(path, library.real_roots(), wanted)

    # --- orders -------------------------------------------------------------------------------------------------------

    def ordered(self, record: LibraryRecord) -> LibraryRecord:
        """What the order that stands for this model has chosen; else itself."""
        order = self.adhoc.order_at(record.path)
        return record if order is None else self._library.find(order.base_id) or record

    # --- changes ------------------------------------------------------------------------------------------------------

    def reloaded(self) -> None:
        """Forget models that a changed configuration has taken over, or whose roots are gone."""
        self.instances.reloaded()
        self.remote_names.reloaded()
        self.takes_options = bool(self._library.roots)
        self.adhoc.reloaded()


def _expect_no_order(entry: Entry, options: ModelOptions) -> None:
    """Raises BadRequest if an order says about a configured model what its configuration says."""
    if (options.quantization, options.ctx_size, options.budget_mib) != (None, None, None):
        raise BadRequest(
            f"{entry.id} is configured: its context length, memory and quantization are said in its configuration "
            "(ctx_size, gpu_memory_budget_mib, path, dtype). Load it without them.",
            param="modelId",
        )


def _not_found(name: str, tried: str) -> ModelNotFound | PathNotFound:
    if name.startswith(("/", "./", "../", "~")):
        return PathNotFound(f"Model path does not exist: {shown(name)}", param="model", details=tried)
    said = f"{ModelNotFound.named(name).message} `greenroom models` shows what is on disk."
    return ModelNotFound(said, param="model", details=tried)


def _expect_whole(path: str, problems: Iterable[BrokenModel]) -> None:
    """Raises BadRequest if this looks like a model and is damaged or incomplete."""
    if why := next((problem.why for problem in problems if problem.path == path), None):
        raise BadRequest("The files of this model are damaged or incomplete.", param="model", details=why)


def _unknown(path: str, roots: Iterable[str], options: ModelOptions) -> LibraryRecord:
    """What is at this path is no model of the library. The engine that is named may load it all the same."""
    if options.backend is None:
        raise BadRequest(
            f"Field 'backend' is required: the files at this path do not tell it. It is {BACKENDS}.", param="backend"
        )
    kind = next((kind for kind, engine in ENGINE_OF_KIND.items() if engine == options.backend), ModelKind.SAFETENSORS)
    root = max((root for root in roots if is_below(path, root)), key=len, default="/")
    return LibraryRecord(os.path.relpath(path, root), path, root, kind, Source(), ())
