"""Reads fields of a JSON body: each is absent, or of the right type and in its range, or refused by name. Owns the
error messages for wrong input. A null field counts as absent, as in the OpenAI API. Depends on no endpoint."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from .errors import ApiError

Body = Mapping[str, Any]

# Elements in one body, counted by their separators; those that cost Python more count twice. Python parses JSON without
# yielding, even in a thread, so every stream of this process waits meanwhile: a quarter of a second for this many. No
# request needs as many tokens.
ELEMENTS_MAX = 2**20
# Their length is bounded too: a number of thousands of digits is one element.
BARE_BYTES_MAX = 8 * 2**20
# Python refuses to convert longer numbers, because that takes long.
DIGITS_MAX = 4_000
NAME_CHARS_MAX = 64
# Only an escaped surrogate can make text that is not Unicode; bodies without one need no second look.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request. Raises ApiError for anything else."""
    if _is_too_much(raw) and _is_too_much(_outside_texts(raw)):
        raise ApiError(
            f"The body holds more than {ELEMENTS_MAX:,} elements, or {BARE_BYTES_MAX:,} bytes beside its texts. Send "
            "fewer at a time.",
            status=413,
            code="body_too_complex",
        )
    try:
        body = json.loads(raw, parse_constant=_no_constant)
        if _SURROGATE.search(raw):
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeError:
        raise ApiError("The body holds text that is not Unicode.") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ApiError(f"The body is not JSON: {error or type(error).__name__}.") from None
    except ValueError:
        raise _no_number(raw) from None
    if not isinstance(body, dict):
        raise ApiError("The body must be a JSON object.")
    return body


def _is_too_much(raw: bytes) -> bool:
    elements = raw.count(b",") + 2 * sum(map(raw.count, (b"[", b"{", b":")))
    return elements > ELEMENTS_MAX or len(raw) > BARE_BYTES_MAX


def _outside_texts(raw: bytes) -> bytes:
    """The body without its strings; the whole body if it has more strings than elements are allowed."""
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    return raw if plain.count(b'"') > 2 * ELEMENTS_MAX else b"".join(plain.split(b'"')[::2])


def number(body: Body, name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(name, "a number", value)
    # Compared before the conversion: an integer may be too large for a float.
    if not low <= value <= high or not math.isfinite(value):
        raise ApiError(f"{name} must be between {low:g} and {high:g}.", param=name)
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
        raise ApiError(f"{name} must be between {low} and {high}.", param=name)
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
    raise ApiError(f"{name} must be {wanted}, not {kind_of(value)}.", param=name)


def kind_of(value: object) -> str:
    """The type of a JSON value, in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _no_number(raw: bytes) -> ApiError:
    """The error for a number that JSON does not have or Python does not convert; names the field that holds it."""
    odd = object()

    def whole(digits: str) -> object:
        return int(digits) if len(digits) < DIGITS_MAX else odd

    try:
        body = json.loads(raw, parse_constant=lambda _: odd, parse_int=whole)
    except (ValueError, RecursionError) as error:
        return ApiError(f"The body is not JSON: {error or type(error).__name__}.")
    fields = body.items() if isinstance(body, dict) else ()
    name = next((name[:NAME_CHARS_MAX] for name, value in fields if _holds(value, odd)), None)
    return ApiError(
        f"{'The body' if name is None else name} holds what is no number of JSON: Infinity, NaN, or "
        f"more than {DIGITS_MAX:,} digits.",
        param=name,
    )


def _holds(value: object, odd: object) -> bool:
    """True if this object is somewhere in a JSON value."""
    unseen = [value]
    while unseen:
        one = unseen.pop()
        if one is odd:
            return True
        unseen.extend(one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
    return False
