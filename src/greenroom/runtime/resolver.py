"""One way from a name to a model: a configured id or alias, a path below a root, or a hub id that is on disk.

Owns the models that no configuration names, the ad-hoc ones: which are remembered, under which names and with which
options. A path that is asked for with other options is another model. The disk is looked at in threads.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

from greenroom.config.kinds import id_problem
from greenroom.config.limits import ttl_s_of
from greenroom.config.schema import Config, Model
from greenroom.core.events import ConfigChanged, Learned
from greenroom.core.model import ModelId
from greenroom.core.view import SchedulerView
from greenroom.errors import BadRequest, ModelNotFound, NoVersion, PathNotFound, TooManyModels, shown
from greenroom.library.library import Library
from greenroom.library.quantization import choose
from greenroom.library.records import ENGINE_OF_KIND, BrokenModel, LibraryRecord, ModelKind, Source
from greenroom.library.roots import is_below
from greenroom.runtime.adhoc_model import BACKENDS, NO_OPTIONS, ModelOptions, model_of
from greenroom.runtime.catalogue import Catalog, Entry
from greenroom.runtime.detached import run_detached
from greenroom.runtime.remote.names import RemoteNames
from greenroom.runtime.tenant_models import TenantModels
from greenroom.telemetry.logs import get_logger

_log = get_logger("models")

# Names of ad-hoc models are remembered, so that most requests need no look at the disk.
NAMES_PER_MODEL: Final = 16
# Looks at the disk at the same time, and how long one may take.
LOOKS_MAX: Final = 8
LOOK_MAX_S: Final = 30.0
RETRY_AFTER_S: Final = 5.0
# Looks for one request, where models leave as soon as they are found.
TRIES_MAX: Final = 4


class Asker(Protocol):
    """For whom a model is looked up. Hashable."""

    @property
    def tenant(self) -> str | None: ...

    @property
    def may_ask_remote(self) -> bool: ...

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


class Unresolved(Exception):
    """A name that is not known without a look at the disk."""

    def __init__(self, name: str, options: ModelOptions, asker: Asker) -> None:
        super().__init__(name)
        self.name = name
        self.options = options
        self.asker = asker


@dataclass(slots=True)
class _Adhoc:
    record: LibraryRecord
    tenant: str | None
    """Of the last request for it."""
    used: int = 0


class Resolver:
    def __init__(
        self,
        catalog: Catalog,
        library: Library,
        config: Callable[[], Config],
        view: Callable[[], SchedulerView],
        post: Callable[[ConfigChanged], None],
        clock: Callable[[], float],
        recall: Callable[[Iterable[ModelId]], Mapping[ModelId, Learned]] = lambda _: {},
        forgotten: Callable[[], None] = lambda: None,
    ) -> None:
        """`forgotten` is called when a model has left, so that what others keep of it can go too."""
        self._catalog = catalog
        self._library = library
        self._config = config
        self._view = view
        self._post = post
        self._clock = clock
        self._recall = recall
        self._forgotten = forgotten
        self._adhoc: dict[ModelId, _Adhoc] = {}
        self._names: dict[tuple[str, ModelOptions], ModelId] = {}
        self._looks = asyncio.Semaphore(LOOKS_MAX)
        self._under_way: dict[tuple[str, ModelOptions, Asker], asyncio.Task[Entry]] = {}
        self._uses = 0
        self.instances = TenantModels(catalog, view, post, clock, forgotten)
        self.remote_names = RemoteNames(catalog, lambda: config().remotes, view, post, clock, forgotten)
        # True if requests may name models that are not configured, and say how to run them.
        self.takes_options = bool(library.roots)

    # --- asking -------------------------------------------------------------------------------------------------------

    @property
    def unasked(self) -> Iterator[LibraryRecord]:
        """Models on disk that are neither configured nor known yet."""
        known = {entry.config.path for entry in self._catalog}
        return (record for record in self._library.records if record.path not in known)

    def on_disk(self, name: str) -> LibraryRecord | None:
        """The model of this id or hub id, as far as the library knows it."""
        return self._library.find(name) if not name.startswith("/") else None

    def find(self, name: str, options: ModelOptions = NO_OPTIONS, asker: Asker = OPERATOR) -> Entry:
        """The model of this name. Raises Unresolved if only the disk can tell, and ModelNotFound.

        One that the asker does not see takes the way of an unknown one, so that neither words nor time tell it apart.
        """
        entry = self._catalog.find(name)
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
        about = replace(options, ttl_s=None)
        if entry is None or about != NO_OPTIONS:
            known = self._names.get((name, about))
            entry = None if known is None else self._catalog.find(known)
        if entry is None or not asker.sees(entry.base_id) or not self._is_current(entry):
            raise Unresolved(name, options, asker)
        return self._used(entry, options, asker)

    def _expect_version(self, name: str, asker: Asker) -> None:
        """Raises NoVersion for a configured model that has none yet."""
        if self._catalog.is_known(name):
            return
        models = self._config().models.items()
        if any(asker.sees(one) for one, model in models if name == one or name in model.aliases):
            raise NoVersion(
                f"{name} has no version yet; GET /status?model={name} says why.", retry_after_s=RETRY_AFTER_S
            )

    async def named(self, name: str, options: ModelOptions = NO_OPTIONS, asker: Asker = OPERATOR) -> Entry:
        """The same, after a look at the disk if need be. Raises ModelNotFound, PathNotFound, BadRequest."""
        for _ in range(TRIES_MAX):
            try:
                return self.find(name, options, asker)
            except Unresolved:
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
            if options.quantization is not None:
                seen = [one for one in self._library.records if asker.sees(one.id)]
                record, dtype = choose(record, options.quantization, seen)
            model = model_of(
                record,
                options,
                dtype,
                usable_mib=self._catalog.needs.usable_mib,
                exclusive=self._config().library.exclusive,
                vllm=self._config().vllm,
            )
            entry = None
            while entry is None:
                model_id = self._id(record, options, dtype)
                entry = self._known(model_id) or await self._added(name, record, model_id, model, asker)
        self._remember(name, options, entry)
        return self._used(entry, options, asker)

    async def _added(
        self, name: str, record: LibraryRecord, model_id: ModelId, model: Model, asker: Asker
    ) -> Entry | None:
        """The new model; None if another one, perhaps a configured one, took its id meanwhile."""
        try:
            async with asyncio.timeout(LOOK_MAX_S):
                entry = await run_detached(
                    lambda: self._catalog.adhoc_entry(model_id, model, record.id), f"look at {model_id}"
                )
        except TimeoutError:
            raise _not_found(name, "The folders of models do not answer.") from None
        if record.root not in self._library.real_roots():
            raise _not_found(name, "Its root was removed from the configuration.")
        if not self._is_free(model_id, record):
            return None
        # Another request may have named it otherwise and come first.
        if (known := self._known(model_id)) is not None:
            return known
        self._expect_room(model_id, asker.tenant)
        self._adhoc[entry.id] = _Adhoc(record, asker.tenant)
        self._catalog.add(entry)
        self._post(ConfigChanged(self._clock(), models=(entry.spec,), learned=self._recall((entry.id,)) or None))
        _log.info("model found", model=entry.id, path=record.path, engine=entry.engine.name)
        return entry

    def _known(self, model: ModelId) -> Entry | None:
        """The ad-hoc model of this id, if its files are still what they were."""
        entry = self._catalog.find(model)
        return entry if entry is not None and entry.is_adhoc and self._is_current(entry) else None

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
        if record is None and options.backend is None:
            _expect_whole(path, library.problems)
        return record or _unknown(path, library.real_roots(), options)

    # --- the models that are remembered -------------------------------------------------------------------------------

    def _is_current(self, entry: Entry) -> bool:
        """False if its files are not what they were when its memory was estimated, or its id now means others."""
        known = self._adhoc.get(entry.id)
        if known is None:
            return False
        record, seen = known.record, self._library.find(known.record.path)
        if not record.files:
            # The library did not know it.
            return seen is None
        named = self._library.find(record.id)
        if seen is None and named is None:
            # Its root or its files are gone. What is in memory serves on.
            return bool(self._view().slots_of(entry.id))
        return seen is not None and seen.files == record.files and named is not None and named.path == record.path

    def _used(self, entry: Entry, options: ModelOptions, asker: Asker) -> Entry:
        known = self._adhoc[entry.id]
        self._uses += 1
        known.used, known.tenant = self._uses, asker.tenant
        self._library.used(known.record)
        if options.ttl_s is None or entry.config.ttl_s == options.ttl_s:
            return entry
        # The last request that says it counts. The running process stays.
        model = entry.config.model_copy(update={"ttl_s": options.ttl_s})
        spec = replace(entry.spec, ttl_s=ttl_s_of(model, self._config().stay_warm))
        entry = replace(entry, config=model, spec=spec)
        self._catalog.add(entry)
        self._post(ConfigChanged(self._clock(), models=(spec,)))
        return entry

    def _remember(self, name: str, options: ModelOptions, entry: Entry) -> None:
        key = (name, replace(options, ttl_s=None))
        self._names.pop(key, None)
        self._names[key] = entry.id
        while len(self._names) > NAMES_PER_MODEL * self._config().library.adhoc_models_max:
            del self._names[next(iter(self._names))]

    def _expect_room(self, coming: ModelId, tenant: str | None) -> None:
        """One model makes room for one more. Raises TooManyModels if those that could are all in use."""
        most = self._config().library.adhoc_models_max
        while len(self._adhoc) >= most and coming not in self._adhoc:
            leaving = self._least_missed(tenant)
            if leaving is None:
                count = "One model" if most == 1 else f"{most:,} models"
                raise TooManyModels(
                    f"{count} outside of the configuration may be in use at once (library.adhoc_models_max).",
                    retry_after_s=RETRY_AFTER_S,
                )
            self._forget(leaving)

    def _least_missed(self, tenant: str | None) -> ModelId | None:
        """Of the tenant that has most, the newcomer's counted with it, the idle model that was not used for longest.

        No tenant's models leave for one that has more than it.
        """
        counts = Counter(known.tenant for known in self._adhoc.values())
        counts[tenant] += 1
        idle = [
            (-counts[known.tenant], known.used, model)
            for model, known in self._adhoc.items()
            if counts[known.tenant] >= counts[tenant] and not self._is_busy(model)
        ]
        return min(idle)[2] if idle else None

    def _is_busy(self, model: ModelId) -> bool:
        view = self._view()
        return view.is_waited_for(model) or any(slot.in_flight or slot.move for slot in view.slots_of(model))

    def _forget(self, model: ModelId) -> None:
        del self._adhoc[model]
        self._names = {key: known for key, known in self._names.items() if known != model}
        entry = self._catalog.find(model)
        if entry is not None and entry.is_adhoc:
            self._catalog.remove(model)
            self._post(ConfigChanged(self._clock(), removed=(model,)))
            self._forgotten()

    def reloaded(self) -> None:
        """Forget models that a changed configuration has taken over, or whose roots are gone."""
        self.instances.reloaded()
        self.remote_names.reloaded()
        roots = self._library.real_roots()
        self.takes_options = bool(self._library.roots)
        for model, known in list(self._adhoc.items()):
            entry = self._catalog.find(model)
            if entry is None or not entry.is_adhoc or known.record.root not in roots:
                self._forget(model)

    def looked(self) -> None:
        """The disk was looked at: models that are neither there nor in memory are no longer listed."""
        for model, known in list(self._adhoc.items()):
            is_gone = bool(known.record.files) and self._library.find(known.record.path) is None
            if is_gone and not self._view().slots_of(model) and not self._is_busy(model):
                self._forget(model)

    def removed(self, record: LibraryRecord) -> None:
        """Its files were deleted: it is asked for no more."""
        for model, known in list(self._adhoc.items()):
            if known.record.path == record.path:
                self._forget(model)

    # --- what it is ---------------------------------------------------------------------------------------------------

    def _id(self, record: LibraryRecord, options: ModelOptions, dtype: str | None) -> ModelId:
        """The record's id, and what makes it differ from the same model without options."""
        parts = [options.backend] if options.backend not in (None, ENGINE_OF_KIND[record.kind]) else []
        parts += ["cpu"] if options.device == "cpu" else []
        if options.n_gpu_layers is not None:
            parts.append(f"layers={options.n_gpu_layers}")
        if options.gpu_memory_utilization is not None:
            parts.append(f"gpu={options.gpu_memory_utilization:g}")
        parts += [] if options.ctx_size is None else [f"ctx={options.ctx_size}"]
        parts += [] if options.budget_mib is None else [f"mib={options.budget_mib}"]
        parts += [] if dtype is None else [dtype]
        plain = ModelId(record.id)
        if not parts and id_problem(plain) is None and self._is_free(plain, record):
            return plain
        model_id = ModelId(f"{record.id}+{','.join(part for part in parts if part) or 'found'}")
        if id_problem(model_id) is not None:
            # Not every file that the library does not know has a name that can be an id.
            model_id = ModelId(f"found-{hashlib.sha256(os.fsencode(model_id)).hexdigest()[:16]}")
        while not self._is_free(model_id, record):
            model_id = ModelId(f"{model_id}+")
        return model_id

    def _is_free(self, model_id: ModelId, record: LibraryRecord) -> bool:
        taken = self._catalog.find(model_id)
        if taken is None:
            return True
        return (
            taken.version is None
            and taken.is_adhoc
            and (taken.config.path == record.path or not self._is_current(taken))
        )


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
    """What is at this path is no model that the library knows. The engine that is named may know it."""
    if options.backend is None:
        raise BadRequest(
            f"Field 'backend' is required: the files at this path do not tell it. It is {BACKENDS}.", param="backend"
        )
    kind = next((kind for kind, engine in ENGINE_OF_KIND.items() if engine == options.backend), ModelKind.SAFETENSORS)
    root = max((root for root in roots if is_below(path, root)), key=len, default="/")
    return LibraryRecord(os.path.relpath(path, root), path, root, kind, Source(), ())
