"""What a reload changes: two configurations compared, key by key. Never applies anything. What a changed key means is
marked at its field (`marks.Reload`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from operator import itemgetter

from greenroom.config.kinds import Section
from greenroom.config.marks import NEW_SLOT, RESTART, Reload, reload_of
from greenroom.config.schema import Config
from greenroom.config.sections.model import Model
from greenroom.errors import ConfigError

# Keys of a model: those that need a new slot, and those that count the next time they are read.
NEW_SLOT_KEYS = frozenset(key for key, field in Model.model_fields.items() if reload_of(field) is NEW_SLOT)
LABEL_KEYS = Model.model_fields.keys() - NEW_SLOT_KEYS
# `macros` are expanded before anything is compared; `models` are compared one by one.
COMPARED_ELSEWHERE = frozenset({"macros", "models"})


@dataclass(frozen=True, slots=True)
class Changes:
    """Model ids and dotted keys, sorted. A model is in at most one of the first four."""

    added: tuple[str, ...]
    # These need a new slot: the old one drains.
    changed: tuple[str, ...]
    # Only labels changed: the running engine keeps running.
    relabelled: tuple[str, ...]
    removed: tuple[str, ...]
    # Keys outside models that are applied while running, and those that are not.
    at_once: tuple[str, ...]
    needs_restart: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        models = self.added or self.changed or self.relabelled or self.removed
        return not (models or self.at_once or self.needs_restart)


def diff(old: Config, new: Config) -> Changes:
    both = sorted(old.models.keys() & new.models.keys())
    pairs = {name: (old.models[name], new.models[name]) for name in both}
    changed = tuple(name for name in both if _differs(*pairs[name], NEW_SLOT_KEYS) or _moved(old, new, name))
    relabelled = tuple(name for name in both if name not in changed and _differs(*pairs[name], LABEL_KEYS))
    keys = sorted(_changed_keys(old, new), key=itemgetter(0))
    return Changes(
        added=tuple(sorted(new.models.keys() - old.models.keys())),
        changed=changed,
        relabelled=relabelled,
        removed=tuple(sorted(old.models.keys() - new.models.keys())),
        at_once=tuple(key for key, what in keys if what is not RESTART),
        needs_restart=tuple(key for key, what in keys if what is RESTART),
    )


def refuse_restart(changes: Changes) -> None:
    """Raise ConfigError if a changed key needs a restart. A reload applies everything or nothing."""
    if changes.needs_restart:
        keys = ", ".join(changes.needs_restart)
        raise ConfigError(f"only a restart can change {keys}. Nothing was changed: restart, or put the old values back")


def _differs(old: Model, new: Model, keys: AbstractSet[str]) -> bool:
    return any(not _same(getattr(old, key), getattr(new, key)) for key in keys)


def _moved(old: Config, new: Config, name: str) -> bool:
    """True for a remote model whose provider has another address, key, time limit or cost now, or that has another name
    there: a slot counts by the cost of one name.
    """
    before, after = old.models[name], new.models[name]
    if after.remote is None:
        return False
    return old.remotes.get(after.remote) != new.remotes[after.remote] or before.use_model_name != after.use_model_name


def _same(old: object, new: object) -> bool:
    """Equal as JSON too: Python treats 1, 1.0 and True as equal, an engine does not. Most are the same default."""
    if old is new:
        return True
    return old == new and json.dumps(old, sort_keys=True, default=repr) == json.dumps(new, sort_keys=True, default=repr)


def _changed_keys(old: Config, new: Config) -> Iterator[tuple[str, Reload]]:
    for name, field in Config.model_fields.items():
        before, after = getattr(old, name), getattr(new, name)
        if name in COMPARED_ELSEWHERE:
            continue
        if isinstance(before, Section):
            for key, inner in type(before).model_fields.items():
                if not _same_in_order(getattr(before, key), getattr(after, key)):
                    yield f"{name}.{key}", reload_of(inner, field)
        elif not _same_in_order(before, after):
            yield name, reload_of(field)


def _same_in_order(old: object, new: object) -> bool:
    """Equal in the order of keys too: of two sets in scheduler.company with equal cost, the first wins."""
    return old == new and repr(old) == repr(new)
