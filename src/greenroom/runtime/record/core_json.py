"""Events and effects of the core as JSON and back, exactly: floats to the last bit, enums, tuples, order of mappings.

Owns the form. Every record and enum says its own name, so that new words of the core need nothing here. Never decides
what is written down: `recording.py` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from greenroom.core import effects, events, model
from greenroom.core.policy import coresidency

# The key under which a value that is not plain JSON says what it is. No field of a record begins with an underscore.
_KIND = "_"
_MAP, _SET = "map", "set"


def _named(module: object) -> dict[str, type[Any]]:
    """The records and enums that can be reached by name in this module."""
    found = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    return {name: kind for name, kind in found.items() if is_dataclass(kind) or issubclass(kind, Enum)}


_TYPES: Mapping[str, type[Any]] = {**_named(model), **_named(coresidency), **_named(effects), **_named(events)}


def encode(value: object) -> str:
    """One line of JSON."""
    return json.dumps(_plain(value), separators=(",", ":"))


def decode(said: Any) -> Any:
    """What was encoded, from its JSON as it was read. Raises ValueError for anything else."""
    try:
        return _made(said)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a record of the core: {error!r}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, Enum):
        return {_KIND: type(value).__name__, "is": value.value}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {_KIND: _MAP, "of": [[_plain(key), _plain(one)] for key, one in value.items()]}
    if isinstance(value, frozenset):
        return {_KIND: _SET, "of": [_plain(one) for one in sorted(value)]}
    said = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return {_KIND: type(value).__name__, **said}


def _made(said: Any) -> Any:
    if isinstance(said, list):
        return tuple(_made(one) for one in said)
    if not isinstance(said, dict):
        return said
    kind = said.pop(_KIND)
    if kind == _MAP:
        return {_made(key): _made(one) for key, one in said["of"]}
    if kind == _SET:
        return frozenset(_made(one) for one in said["of"])
    made = _TYPES[kind]
    return made(said["is"]) if issubclass(made, Enum) else made(**{name: _made(one) for name, one in said.items()})
