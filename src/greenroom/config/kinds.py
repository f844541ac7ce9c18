"""Kinds of values that need more than a type: numbers within bounds, names, ids.

Owns the bounds and what a name may be made of. Never knows a key: `schema.py` does.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, WithJsonSchema
from pydantic_core import PydanticCustomError

from greenroom.config import names

# What stands between two slashes of a path whose bytes mean only themselves.
_ROUTE_PART = re.compile(r"\*{1,2}|[A-Za-z0-9._~!$&'()+,=:@-]*")


def _no_bool(value: Any) -> Any:
    """`parallel: true` is a mistake, not 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("number_wanted", "a number is wanted")
    return value


def _model_id(name: str) -> str:
    why = names.id_problem(name)
    if why is not None:
        raise PydanticCustomError("name", "{why}", {"why": why})
    return name


def _printable(name: str) -> str:
    """Names go into log lines, where a line break or an invisible character would mislead."""
    if not name.isprintable():
        raise PydanticCustomError("name", "may not contain control or invisible characters")
    return name


def _route_pattern(pattern: str) -> str:
    """A pattern that no path can fit is a mistake."""
    first, *parts = pattern.split("/")
    if first or not parts:
        raise PydanticCustomError("route", "a path that begins with / is wanted")
    for part in parts[:-1]:
        if part == "**" or not part:
            raise PydanticCustomError("route", "** may only be its last part, and no other part may be empty")
    for part in parts:
        if part in (".", "..") or not _ROUTE_PART.fullmatch(part):
            raise PydanticCustomError("route", "each part is *, or made of letters, digits and ._~!$&'()+,=:@-")
    return pattern


# Far beyond any use, and small enough for every clock and counter behind them.
SECONDS_MAX = 31_536_000
MIB_MAX = 1_000_000_000
COUNT_MAX = 1_000_000_000

NotBool = BeforeValidator(_no_bool)
Port = Annotated[int, Field(ge=0, le=65535), NotBool]
EnginePort = Annotated[int, Field(ge=1, le=65535), NotBool]
Count = Annotated[int, Field(ge=1, le=COUNT_MAX), NotBool]
CountFromZero = Annotated[int, Field(ge=0, le=COUNT_MAX), NotBool]
Seconds = Annotated[float, Field(ge=0, le=SECONDS_MAX), NotBool]
SecondsAboveZero = Annotated[float, Field(gt=0, le=SECONDS_MAX), NotBool]
# A look costs a millisecond or two; looking less often than every five seconds is looking too late.
LookSeconds = Annotated[float, Field(ge=0.1, le=5), NotBool]
# Shorter than a second would be lost by one slow answer of the store.
LeaseSeconds = Annotated[float, Field(ge=1, le=3_600), NotBool]
LiftSeconds = Annotated[float, Field(ge=0.001, le=SECONDS_MAX), NotBool]
# Each slot remembers that many times.
Overtakes = Annotated[int, Field(ge=0, le=10_000), NotBool]
FactorFromZero = Annotated[float, Field(ge=0, le=1_000), NotBool]
# As callers can send one in a header.
TenantName = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[ -~]+$")]
# From a thousandth to a thousand times the share of somebody who is not named.
TenantWeight = Annotated[float, Field(ge=0.001, le=1_000), NotBool]
Mib = Annotated[int, Field(ge=0, le=MIB_MAX), NotBool]
MibAboveZero = Annotated[int, Field(ge=1, le=MIB_MAX), NotBool]
Name = Annotated[str, StringConstraints(min_length=1, max_length=256), AfterValidator(_printable)]
ModelId = Annotated[
    str,
    AfterValidator(_model_id),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": names.ID_CHARS_MAX}),
]
RoutePattern = Annotated[str, AfterValidator(_route_pattern)]
HeaderName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")]
