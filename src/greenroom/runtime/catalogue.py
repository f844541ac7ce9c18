"""Models by name: the configuration of each, its engine, and its spec for the scheduler. Owns ids, aliases and
revisions. A model gets a new revision when its process would differ; slots of the old revision keep the old entry."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from greenroom.base.names import public_name
from greenroom.config.diff import Changes
from greenroom.config.limits import ttl_s_of
from greenroom.config.schema import PRIORITY_NAMES, Config, Model, StayWarm
from greenroom.core.model import DeviceId, ModelId, ModelSpec, Need
from greenroom.engines.base import Engine, EngineFacts
from greenroom.engines.registry import engine_for, facts_of, split_keys, spread
from greenroom.library.facts import quantization_of
from greenroom.library.records import Version
from greenroom.library.roots import is_below
from greenroom.runtime.memory.needs import Needs, Subject


@dataclass(frozen=True, slots=True)
class Entry:
    """One revision of a model."""

    id: ModelId
    config: Model
    engine: Engine
    spec: ModelSpec
    facts: EngineFacts
    base_id: str
    """Its id without the options of requests: what the `models` of keys are compared with, and what is counted by."""
    # No configuration names it: it was asked for by path or hub id (`resolver.py`).
    is_adhoc: bool = False
    asked_as: str = ""
    """The name by which it was ordered to be loaded, if it was and that order stands."""
    real_path: str = ""
    """Its path without links; empty if it has none."""
    # It serves one tenant of this model (`known_models.py`).
    instance_of: ModelId | None = None
    tenant: str | None = None

    # Which weights it serves, if it is under version control.
    version: Version | None = None
    public_id: ModelId = field(init=False)
    """The id by which callers know it, and by which its requests are counted."""
    engine_name: str = field(init=False)
    """The name by which its engine knows it. llama.cpp would read several in one with a comma."""

    isolation: str | None = field(init=False)
    """How its tenants are kept apart: `isolate_tenants`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "isolation", self.config.isolate_tenants)
        public_id = ModelId(public_name(self.instance_of or self.spec.version_of or self.id))
        object.__setattr__(self, "public_id", public_id)
        object.__setattr__(self, "engine_name", public_id.replace(",", "_"))

    def shown_id(self, *, to_operator: bool) -> str:
        """Its id in lists: the name that it was ordered by. Only operators are shown paths."""
        is_hidden = not self.asked_as or (self.asked_as.startswith("/") and not to_operator)
        return public_name(self.id) if is_hidden else self.asked_as


@dataclass(frozen=True, slots=True)
class SharedSettings:
    """Settings for all models that go into each entry."""

    fits_memory: bool
    stay_warm: StayWarm

    @staticmethod
    def of(config: Config) -> SharedSettings:
        return SharedSettings(config.scheduler.fit_memory, config.stay_warm)


@dataclass(frozen=True, slots=True)
class Draft:
    """A configuration that was read and is not applied yet."""

    entries: Mapping[ModelId, Entry]
    shared: SharedSettings


class Catalog:
    def __init__(
        self,
        needs: Needs | None = None,
        device_of: Callable[[str], DeviceId] = DeviceId,
        version_of: Callable[[str], Version | None] = lambda name: None,
    ) -> None:
        """`needs` tells the memory of each model; it reads headers of files when a configuration is loaded. `device_of`
        translates names of devices into the scheduler's ids. `version_of` gives the version that a model serves; None
        for one that has none yet, and for models that are not under version control."""
        self.needs = needs or Needs()
        self._device_of = device_of
        self._version_of = version_of
        self._entries: Mapping[ModelId, Entry] = {}
        self._names: dict[str, Entry] = {}
        # Which configuration each name of an ad-hoc model means: the one that was asked for last.
        self._current: dict[str, ModelId] = {}
        # The configured models whose limits hold for ad-hoc ones: those of the same files.
        self._limited_as: dict[ModelId, ModelId] = {}
        # Revisions only grow, also after a removal, so that an old slot is never taken for a new one: `_last` is the
        # highest of models that were removed.
        self._revisions: dict[ModelId, int] = {}
        self._last = 0
        self._shared = SharedSettings(fits_memory=True, stay_warm=StayWarm())

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def fits_memory(self) -> bool:
        """Whether models must fit into memory together."""
        return self._shared.fits_memory

    def find(self, name: str) -> Entry | None:
        """The model with this id, alias or name; of an ad-hoc one, the configuration that was asked for last."""
        return self._names.get(name)

    @property
    def shown(self) -> Iterator[Entry]:
        """One entry for each name that callers know."""
        return (entry for entry in self if entry.id == public_name(entry.id) or self.find(entry.public_id) is entry)

    def configurations(self, model: ModelId) -> list[ModelId]:
        """All that the name of this model may mean; of a configured one just itself."""
        name = public_name(model)
        return [model] if name == model else [one.id for one in self if one.id != name == public_name(one.id)]

    def mean(self, entry: Entry, name: str) -> None:
        """This configuration of an ad-hoc model was asked for by this name."""
        for one in (entry.public_id, entry.asked_as, name if name in self._current else ""):
            if one and self._current.get(one) != entry.id:
                self._current[one] = entry.id
                if (known := self._names.get(one)) is None or known.is_adhoc:
                    self._names[one] = entry

    def limited_as(self, entry: Entry) -> ModelId:
        """The model whose limits hold for it: its own, or those of the configured one that has the same files."""
        return self._limited_as.get(entry.id, entry.id) if entry.is_adhoc else entry.id

    def is_known(self, name: str) -> bool:
        return name in self._names

    def is_adhoc(self, name: str) -> bool:
        """True if no configuration names this model."""
        entry = self._names.get(name)
        return entry is not None and entry.is_adhoc

    def engine_of(self, model: ModelId) -> str:
        """The name of its engine. A reload may have removed the model meanwhile."""
        entry = self._entries.get(model)
        return "an engine" if entry is None else entry.engine.name

    def revision(self, model: ModelId, revision: int) -> Entry | None:
        """The current entry if it has this revision, else None."""
        entry = self._entries.get(model)
        return entry if entry is not None and entry.spec.revision == revision else None

    def fill(self, config: Config) -> tuple[ModelSpec, ...]:
        """Load the first configuration. Returns all specs."""
        self._shared = shared = SharedSettings.of(config)
        names = {ModelId(name): model for name, model in self._with_weights(config)}
        self._replace({model_id: self._entry(model_id, 1, model, shared) for model_id, model in names.items()})
        return tuple(entry.spec for entry in self)

    def change(self, config: Config, changes: Changes) -> tuple[ModelSpec, ...]:
        """Load a later configuration: only what changed gets a new entry. Returns the new specs."""
        return self.take(self.draft(config, changes))

    def draft(self, config: Config, changes: Changes) -> Draft:
        """Read a later configuration without applying it. Reads files, so it may block and fail."""
        fresh: dict[ModelId, Entry] = {}
        shared, before = SharedSettings.of(config), self._shared
        touched = {*changes.changed, *changes.relabelled}
        # Ad-hoc models stay, unless the configuration now has a model of that id.
        adhoc: dict[str, Entry] = {entry.id: entry for entry in self if entry.is_adhoc}
        wanted = {name: entry.config for name, entry in adhoc.items()}
        for name, model in (wanted | dict(self._with_weights(config))).items():
            model_id = ModelId(name)
            old = self._entries.get(model_id)
            is_adhoc = name not in config.models
            if old is not None and old.is_adhoc != is_adhoc:
                old = None
            if shared == before and old is not None and name not in touched:
                fresh[model_id] = old
                continue
            is_new = old is None or name in changes.changed or old.config.path != model.path
            revision = self._revisions.get(model_id, self._last) + (1 if is_new else 0)
            made = self._entry(model_id, revision, model, shared)
            fresh[model_id] = _as_before(made, adhoc[name]) if is_adhoc else made
        return Draft(fresh, shared)

    def take(self, draft: Draft) -> tuple[ModelSpec, ...]:
        """Apply this draft. Returns the new specs."""
        # One that came while the draft was made stays.
        late = {entry.id: entry for entry in self if entry.is_adhoc and entry.id not in draft.entries}
        # One that left or changed meanwhile is what it is now.
        kept = {model: now for model, entry in draft.entries.items() if (now := self._unless_newer(entry)) is not None}
        fresh, self._shared = {**late, **kept}, draft.shared
        fresh |= self._instances(fresh)
        new = tuple(entry.spec for model_id, entry in fresh.items() if self._entries.get(model_id) is not entry)
        self._replace(fresh)
        return new

    def _unless_newer(self, drafted: Entry) -> Entry | None:
        now = self._entries.get(drafted.id)
        if not drafted.is_adhoc or (now is not None and now.spec.revision == drafted.spec.revision):
            return drafted
        return now

    def pin(self, model: ModelId, pinned: bool) -> ModelSpec | None:
        """Keep it where it is, or no longer, until its configuration changes. Returns its new spec, if there is one."""
        entry = self._entries.get(model)
        if entry is None:
            return None
        spec = replace(entry.spec, pinned=pinned)
        self._replace({**self._entries, model: replace(entry, spec=spec)})
        return spec

    # --- versions -----------------------------------------------------------------------------------------------------

    def _with_weights(self, config: Config) -> Iterator[tuple[str, Model]]:
        """The configured models, with the weights that each serves. Those without a version yet are left out."""
        for name, model in config.models.items():
            version = self._version_of(name) if model.versions is not None else None
            if version is not None:
                yield name, model.model_copy(update={"path": version.path})
            elif model.versions is None or model.path is not None:
                yield name, model

    def coming(self, name: str, model: Model, version: Version) -> Entry:
        """A new version of this model, not added yet. Reads files, so it may block and fail."""
        coming_id = ModelId(f"{name}@{version.number}")
        while self.is_known(coming_id):
            coming_id = ModelId(f"{coming_id}+")
        hidden = {"path": version.path, "aliases": (), "unlisted": True, "pinned": False, "preload": False}
        made = self.adhoc_entry(coming_id, model.model_copy(update=hidden), name)
        return replace(made, version=version, spec=replace(made.spec, version_of=ModelId(name), exclusive=""))

    def promote(self, coming: Entry, model: Model, version: Version) -> Entry:
        """The coming version takes the name of its model, in one step. Returns the model's new entry."""
        name = coming.spec.version_of
        assert name is not None
        config = model.model_copy(update={"path": version.path})
        spec = replace(
            coming.spec,
            id=name,
            revision=self._revisions.get(name, self._last) + 1,
            pinned=model.pinned,
            preload=model.preload,
            exclusive=coming.real_path if model.exclusive else "",
            version_of=None,
        )
        entry = replace(coming, id=name, config=config, spec=spec, is_adhoc=False)
        self.needs.renamed(coming, entry)
        self._replace({**{one.id: one for one in self if one.id != coming.id}, name: entry})
        return entry

    # --- models that no configuration names ---------------------------------------------------------------------------

    def adhoc_entry(self, model_id: ModelId, model: Model, base_id: str) -> Entry:
        """A new entry that is not added yet. Reads files, so it may block and fail."""
        revision = self._revisions.get(model_id, self._last) + 1
        return replace(self._entry(model_id, revision, model, self._shared), base_id=base_id, is_adhoc=True)

    def add(self, entry: Entry) -> None:
        """Add an ad-hoc model, or replace it."""
        assert entry.is_adhoc
        self._replace({**self._entries, entry.id: entry})

    def remove(self, model: ModelId) -> None:
        """Remove an ad-hoc model, or an instance."""
        self._replace({name: entry for name, entry in self._entries.items() if name != model})

    # --- models that are there once for each tenant -------------------------------------------------------------------

    def add_instance(self, base: Entry, model_id: ModelId, tenant: str) -> Entry:
        """Add an instance of a model for this tenant, or replace it."""
        entry = _instance(base, model_id, tenant)
        self._replace({**self._entries, model_id: entry})
        return entry

    def _instances(self, fresh: Mapping[ModelId, Entry]) -> dict[ModelId, Entry]:
        """The instances of models that still have some, made anew where the model was."""
        found = {}
        for entry in self:
            base = None if entry.instance_of is None else fresh.get(entry.instance_of)
            if base is not None and base.config.isolate_tenants == "process":
                is_same = base is self._entries.get(base.id)
                found[entry.id] = entry if is_same else _instance(base, entry.id, entry.tenant or "")
        return found

    def _entry(self, model_id: ModelId, revision: int, model: Model, shared: SharedSettings) -> Entry:
        entry = self._entry_on(model_id, revision, model, shared)
        if not self._fits_no_gpu(entry) or (other := spread(model)) is None:
            return entry
        return self._entry_on(model_id, revision, other, shared)

    def _fits_no_gpu(self, entry: Entry) -> bool:
        """True if there are several GPUs, its engine can use only one of them, and none is large enough."""
        spec, usable = entry.spec, self.needs.usable_mib
        sizes = [mib for gpu, mib in usable.items() if not spec.devices or gpu in spec.devices]
        return not spec.can_split and len(sizes) > 1 and spec.need.gpu_mib > max(sizes)

    def _entry_on(self, model_id: ModelId, revision: int, model: Model, shared: SharedSettings) -> Entry:
        engine, facts = engine_for(model), self._facts(model)
        real_path = os.path.realpath(model.path) if model.path else ""
        subject = Subject(model_id, model, engine)
        # With `fit_memory: false` models take no room, and remote ones never do.
        need, asleep = Need(), Need() if facts.can_sleep else None
        if shared.fits_memory and not facts.is_remote:
            need, asleep = self.needs.need_of(subject)[0], self.needs.asleep_of(subject) if facts.can_sleep else None
        spec = ModelSpec(
            id=model_id,
            revision=revision,
            need=need,
            need_asleep=asleep,
            # Two names may mean one device.
            devices=tuple(dict.fromkeys(self._device_of(device) for device in model.devices)),
            **split_keys(facts),
            sizes_itself=facts.sizes_itself,
            concurrency=engine.concurrency(model),
            # Lower goes first.
            priority=PRIORITY_NAMES[model.priority] if isinstance(model.priority, str) else model.priority,
            ttl_s=ttl_s_of(model, shared.stay_warm),
            grace_s=model.grace_s,
            pinned=model.pinned or facts.is_remote,
            preload=model.preload or facts.is_remote,
            exclusive=real_path if model.exclusive else "",
            is_remote=facts.is_remote,
        )
        version = None if model.versions is None else self._version_of(model_id)
        return Entry(model_id, model, engine, spec, facts, base_id=str(model_id), real_path=real_path, version=version)

    def _facts(self, model: Model) -> EngineFacts:
        """The facts of its engine on this machine."""
        facts = replace(facts_of(model), quantization=quantization_of(model))
        is_on_host = model.is_host_only or not self.needs.gpus
        return replace(facts, can_sleep=False) if facts.sleeps_off_gpu_only and is_on_host else facts

    def _replace(self, entries: Mapping[ModelId, Entry]) -> None:
        self._entries = entries
        self._current = {name: model for name, model in self._current.items() if model in entries}
        inner = (entry for entry in entries.values() if entry.id != public_name(entry.id))
        self._names = {str(entry.public_id): entry for entry in inner}
        self._names |= {name: entries[model] for name, model in self._current.items()}
        self._names |= {name: entry for entry in entries.values() for name in (entry.id, *entry.config.aliases)}
        limited = [
            entry for entry in entries.values() if entry.real_path and not entry.is_adhoc and entry.config.limits
        ]
        self._limited_as = {
            entry.id: same.id
            for entry in entries.values()
            if entry.is_adhoc and (same := _of_same_files(entry, limited)) is not None
        }
        gone = (revision for model, revision in self._revisions.items() if model not in entries)
        self._last = max(self._last, *gone, 0)
        self._revisions = {entry.id: entry.spec.revision for entry in entries.values()}


def _of_same_files(entry: Entry, others: Iterable[Entry]) -> Entry | None:
    """The first of the others with the same path, or a path below this one or above it: a folder and a file in it."""
    path = entry.real_path
    return next((one for one in others if is_below(path, one.real_path) or is_below(one.real_path, path)), None)


def _instance(base: Entry, model_id: ModelId, tenant: str) -> Entry:
    """Loaded when it is asked for, also where the model itself is pinned."""
    name = f"{base.config.name or base.id} for {tenant}"
    own = {"aliases": (), "unlisted": True, "pinned": False, "preload": False, "name": name}
    # A worker of its own, where the engine would share one.
    config = base.config.model_copy(update={**own, "isolate": True} if base.engine.hosted else own)
    spec = replace(base.spec, id=model_id, pinned=False, preload=False)
    return replace(base, id=model_id, config=config, spec=spec, instance_of=base.id, tenant=tenant)


def _as_before(made: Entry, old: Entry) -> Entry:
    """An ad-hoc model or a coming version, made anew."""
    spec = (
        made.spec if old.spec.version_of is None else replace(made.spec, version_of=old.spec.version_of, exclusive="")
    )
    as_before = replace(made, base_id=old.base_id, asked_as=old.asked_as, is_adhoc=True)
    return replace(as_before, version=old.version, spec=spec)
