"""Canonical JSON after RFC 8785, for the kinds of values that tokens and their bodies hold.

Owns the one form whose bytes are signed and hashed: no spaces, keys sorted by their UTF-16 code units, strings escaped
as in ECMAScript. Fractions and numbers beyond 2^53 - 1 are refused, because writers differ in how they print them.
`read` refuses what two readers could read differently: repeated keys, NaN, bytes that are no UTF-8.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

# The largest whole number that every JSON reader keeps exactly.
NUMBER_MAX: Final = 2**53 - 1
DEPTH_MAX: Final = 32


class NotCanonical(ValueError):
    """The value or the text has no canonical form."""


def canonical(value: Any) -> bytes:
    """The canonical form. Raises NotCanonical."""
    try:
        return _text(value, DEPTH_MAX).encode("utf-8")
    except UnicodeEncodeError:
        raise NotCanonical("it holds half of a surrogate pair") from None


def sha256_of(value: Any) -> str:
    """The SHA-256 of the canonical form, in hex. Raises NotCanonical."""
    return hashlib.sha256(canonical(value)).hexdigest()


def read(data: bytes) -> Any:
    """The value of a JSON text. Raises NotCanonical for what is no JSON, or could be read in two ways."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except NotCanonical:
        raise
    except (ValueError, RecursionError):
        raise NotCanonical("it is not JSON") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise NotCanonical("a key is there twice")
    return found


def _no_constant(word: str) -> Any:
    raise NotCanonical(f"{word} is no JSON")


def _text(value: Any, depth: int) -> str:
    if depth == 0:
        raise NotCanonical(f"it is nested more than {DEPTH_MAX} deep")
    if value is None or isinstance(value, bool | str):
        # Python escapes the same characters in the same way as ECMAScript.
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int):
        if abs(value) > NUMBER_MAX:
            raise NotCanonical("a number is beyond 2^53 - 1")
        return str(value)
    if isinstance(value, float):
        raise NotCanonical("a number is no whole number")
    if isinstance(value, list | tuple):
        return f"[{','.join(_text(one, depth - 1) for one in value)}]"
    if isinstance(value, dict):
        members = (f"{_text(key, depth)}:{_text(value[key], depth - 1)}" for key in _sorted(value))
        return f"{{{','.join(members)}}}"
    raise NotCanonical(f"a {type(value).__name__} is no JSON")


def _sorted(value: dict[Any, Any]) -> list[str]:
    if not all(isinstance(key, str) for key in value):
        raise NotCanonical("a key is no text")
    return sorted(value, key=lambda key: key.encode("utf-16-be"))
