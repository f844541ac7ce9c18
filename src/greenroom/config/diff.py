"""What a reload changes: two configurations compared, key by key.

Owns the comparison; what a change means is said by the tables in `fields.py`. Never applies anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from greenroom.config.fields import AT_ONCE_KEYS, COMPARED_ELSEWHERE, LABEL_KEYS, NEW_SLOT_KEYS, RESTART_KEYS
from greenroom.config.schema import Config, Model, Section
from greenroom.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Changes:
    """Model ids and dotted keys, sorted. A model is in at most one of the first four."""

    added: tuple[str, ...]
    # These need a new slot: the old one drains.
    changed: tuple[str, ...]
    # These only read differently: the running engine keeps running.
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
    changed = tuple(name for name in both if _differs(*pairs[name], NEW_SLOT_KEYS))
    relabelled = tuple(name for name in both if name not in changed and _differs(*pairs[name], LABEL_KEYS))
    keys = sorted(_changed_keys(old, new))
    return Changes(
        added=tuple(sorted(new.models.keys() - old.models.keys())),
        changed=changed,
        relabelled=relabelled,
        removed=tuple(sorted(old.models.keys() - new.models.keys())),
        at_once=tuple(key for key in keys if key in AT_ONCE_KEYS),
        needs_restart=tuple(key for key in keys if key in RESTART_KEYS),
    )


def refuse_restart(changes: Changes) -> None:
    """Raise ConfigError if something changed that only a restart can apply. A reload is whole or nothing."""
    if changes.needs_restart:
        keys = ", ".join(changes.needs_restart)
        raise ConfigError(f"only a restart can change {keys}. Nothing was changed: restart, or put the old values back")


def _differs(old: Model, new: Model, keys: frozenset[str]) -> bool:
    return any(not _same(getattr(old, key), getattr(new, key)) for key in keys)


def _same(old: object, new: object) -> bool:
    """Equal also when written down: Python takes 1, 1.0 and true for equal, an engine does not."""
    return old == new and json.dumps(old, sort_keys=True, default=repr) == json.dumps(new, sort_keys=True, default=repr)


def _changed_keys(old: Config, new: Config) -> Iterator[str]:
    for name in Config.model_fields:
        before, after = getattr(old, name), getattr(new, name)
        if name in COMPARED_ELSEWHERE:
            continue
        if isinstance(before, Section):
            for key in type(before).model_fields:
                if not _same_in_order(getattr(before, key), getattr(after, key)):
                    yield f"{name}.{key}"
        elif not _same_in_order(before, after):
            yield name


def _same_in_order(old: object, new: object) -> bool:
    """Equal also in the order of keys: of two sets in scheduler.company that cost the same the first one counts."""
    return old == new and repr(old) == repr(new)
