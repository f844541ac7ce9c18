"""Reads fields of a JSON body: each is absent, or of the right type and in its range, or refused by name.

Owns how wrong input is told. A field that is null counts as absent, as in the OpenAI API. Never knows an endpoint.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from .refusals import Refused

Body = Mapping[str, Any]

# Things in one body, by the commas that part them. Python reads JSON without handing over, so that every stream of this
# process waits meanwhile: so many are read in less than a second, and are more tokens than any one request needs.
ELEMENTS_MAX = 2**20
# Only an escaped half of a pair can make text that is no Unicode; bodies without one need no second look.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request. Raises Refused for anything else."""
    if raw.count(b",") > ELEMENTS_MAX:
        raise Refused(f"The body holds more than {ELEMENTS_MAX:,} elements. Send fewer at a time.")
    try:
        body = json.loads(raw, parse_constant=_no_constant)
        if _SURROGATE.search(raw):
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeError:
        raise Refused("The body holds text that is not Unicode.") from None
    except (ValueError, RecursionError) as error:
        raise Refused(f"The body is not JSON: {error or type(error).__name__}.") from None
    if not isinstance(body, dict):
        raise Refused("The body must be a JSON object.")
    return body


def number(body: Body, name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(name, "a number", value)
    # Compared before it is made a float: an integer may be too large for one.
    if not low <= value <= high or not math.isfinite(value):
        raise Refused(f"{name} must be between {low:g} and {high:g}.", param=name)
    return float(value)


def integer(body: Body, name: str, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(name, "a whole number", value)
    if not low <= value <= high:
        raise Refused(f"{name} must be between {low} and {high}.", param=name)
    return int(value)


def boolean(body: Body, name: str, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        refuse(name, "true or false", value)
    return bool(value)


def mapping(body: Body, name: str) -> dict[str, Any] | None:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        refuse(name, "an object", value)
    return value


def refuse(name: str, wanted: str, value: object) -> NoReturn:
    raise Refused(f"{name} must be {wanted}, not {kind_of(value)}.", param=name)


def kind_of(value: object) -> str:
    """What a JSON value is, in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
