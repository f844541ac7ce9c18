"""What a request says about a model that no configuration names: how it is run, and how long it stays.

Owns these fields. They are read, and left out of what the engine is sent, where models can be asked for by path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, Final

import msgspec

from greenroom.config.kinds import COUNT_MAX, SECONDS_MAX
from greenroom.errors import BadRequest
from greenroom.runtime.adhoc_model import NO_OPTIONS, ModelOptions, check_backend
from greenroom.serving.body.peek import Fields

# None of them has much to say, and all callers wait while they are read.
BYTES_MAX: Final = 64 * 1024
_DEVICES: Final = ("cuda", "cpu")


def _backend(said: object) -> str:
    if not isinstance(said, str):
        raise BadRequest("backend is a string.", param="backend")
    return check_backend(said)


def _device(said: object) -> str:
    if said not in _DEVICES:
        raise BadRequest(f"device is {' or '.join(_DEVICES)}.", param="device")
    return str(said)


def _layers(said: object) -> int:
    if isinstance(said, str) and said.removeprefix("-").isdecimal():
        said = int(said[:12])
    if isinstance(said, bool) or not isinstance(said, int) or not -1 <= said <= COUNT_MAX:
        raise BadRequest("n_gpu_layers is a whole number from -1 (all).", param="n_gpu_layers")
    return said


def _share(said: object) -> float:
    share = _number(said)
    if share is None or not 0.0 < share <= 1.0:
        raise BadRequest("gpu_memory_utilization is a number above 0, at most 1.", param="gpu_memory_utilization")
    return share


def _ttl_s(said: object) -> float:
    seconds = _number(said)
    if seconds is None or not 0.0 <= seconds <= SECONDS_MAX:
        raise BadRequest("ttl is a number of seconds; 0 = never unloaded for being idle.", param="ttl")
    return seconds


def _number(said: object) -> float | None:
    if isinstance(said, bool) or not isinstance(said, int | float | str):
        return None
    try:
        number = float(said)
    except (ValueError, OverflowError):
        return None
    return number if isfinite(number) else None


_READ: Final[Mapping[str, tuple[str, Callable[[object], Any]]]] = {
    "backend": ("backend", _backend),
    "device": ("device", _device),
    "n_gpu_layers": ("n_gpu_layers", _layers),
    "gpu_memory_utilization": ("gpu_memory_utilization", _share),
    "ttl": ("ttl_s", _ttl_s),
}
FIELDS: Final = frozenset(_READ)


def of_json(fields: Fields) -> ModelOptions:
    """Raises BadRequest, which names the field that is wrong."""
    if FIELDS.isdisjoint(fields):
        return NO_OPTIONS
    return _options({name: _decoded(name, fields) for name in FIELDS if name in fields})


def of_form(fields: Mapping[str, str]) -> ModelOptions:
    """The same for a form, whose fields are text."""
    return NO_OPTIONS if FIELDS.isdisjoint(fields) else _options({name: fields[name] for name in FIELDS & set(fields)})


def _options(said: Mapping[str, object]) -> ModelOptions:
    read = {name: make(said[field]) for field, (name, make) in _READ.items() if said.get(field) is not None}
    return ModelOptions(**read)


def _decoded(name: str, fields: Fields) -> object:
    try:
        if len(fields[name]) > BYTES_MAX:
            raise msgspec.DecodeError
        return msgspec.json.decode(fields[name])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadRequest(f"{name} is not valid.", param=name) from None
