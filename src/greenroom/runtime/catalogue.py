"""Models by name: the configuration of each, its engine, and its spec for the scheduler.

Owns ids, aliases and revisions. A model gets a new revision when its process would differ; slots of the old revision
keep the old entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from greenroom.config.diff import Changes
from greenroom.config.limits import ttl_s_of
from greenroom.config.schema import PRIORITY_NAMES, Config, Model, StayWarm
from greenroom.core.model import DeviceId, ModelId, ModelSpec, Need
from greenroom.engines.base import Engine, EngineFacts
from greenroom.engines.registry import engine_for, facts_of
from greenroom.runtime.memory.needs import Needs, Subject


@dataclass(frozen=True, slots=True)
class Entry:
    """One revision of a model."""

    id: ModelId
    config: Model
    engine: Engine
    spec: ModelSpec
    facts: EngineFacts


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
    """`needs` tells the memory of each model; it reads headers of files when a configuration is loaded."""

    def __init__(self, needs: Needs | None = None) -> None:
        self.needs = needs or Needs()
        self._entries: Mapping[ModelId, Entry] = {}
        self._names: dict[str, Entry] = {}
        # Revisions only grow, also after a removal, so that an old slot is never taken for a new one.
        self._revisions: dict[ModelId, int] = {}
        self._shared = SharedSettings(fits_memory=True, stay_warm=StayWarm())
        # Translates names of devices into the scheduler's ids.
        self.device_of: Callable[[str], DeviceId] = DeviceId

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def fits_memory(self) -> bool:
        """Whether models must fit into memory together."""
        return self._shared.fits_memory

    def find(self, name: str) -> Entry | None:
        """The model with this id or alias."""
        return self._names.get(name)

    def is_known(self, name: str) -> bool:
        return name in self._names

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
        names = {ModelId(name): model for name, model in config.models.items()}
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
        for name, model in config.models.items():
            model_id = ModelId(name)
            old = self._entries.get(model_id)
            if shared == before and old is not None and name not in touched:
                fresh[model_id] = old
                continue
            is_new = old is None or name in changes.changed
            revision = self._revisions.get(model_id, 0) + (1 if is_new else 0)
            fresh[model_id] = self._entry(model_id, revision, model, shared)
        return Draft(fresh, shared)

    def take(self, draft: Draft) -> tuple[ModelSpec, ...]:
        """Apply this draft. Returns the new specs."""
        fresh, self._shared = draft.entries, draft.shared
        new = tuple(entry.spec for model_id, entry in fresh.items() if self._entries.get(model_id) is not entry)
        self._replace(fresh)
        return new

    def _entry(self, model_id: ModelId, revision: int, model: Model, shared: SharedSettings) -> Entry:
        engine, facts = engine_for(model), facts_of(model)
        subject = Subject(model_id, model, engine)
        # With `fit_memory: false` models take no room.
        need, asleep = Need(), Need() if facts.can_sleep else None
        if shared.fits_memory:
            need, asleep = self.needs.need_of(subject)[0], self.needs.asleep_of(subject)
        spec = ModelSpec(
            id=model_id,
            revision=revision,
            need=need,
            need_asleep=asleep,
            # Two names may mean one device.
            devices=tuple(dict.fromkeys(self.device_of(device) for device in model.devices)),
            can_split=facts.can_split is not None,
            sizes_itself=facts.sizes_itself,
            concurrency=engine.concurrency(model),
            priority=priority_number(model.priority),
            ttl_s=ttl_s_of(model, shared.stay_warm),
            grace_s=model.grace_s,
            pinned=model.pinned,
            preload=model.preload,
        )
        return Entry(model_id, model, engine, spec, facts)

    def _replace(self, entries: Mapping[ModelId, Entry]) -> None:
        self._entries = entries
        self._names = {name: entry for entry in entries.values() for name in (entry.id, *entry.config.aliases)}
        for entry in entries.values():
            self._revisions[entry.id] = entry.spec.revision


def priority_number(priority: str | int) -> int:
    """Lower goes first: high 0, normal 1, low 2; other numbers as they are."""
    return priority if isinstance(priority, int) else PRIORITY_NAMES[priority]
