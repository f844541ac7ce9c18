"""Decoding of large JSON objects that stops at a number of keys.

Apart from `peek.py` because the compiled build cannot hold a subclass of `str`. Small bodies never come here.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw


class TooManyKeys(Exception):
    """The object has more keys than allowed."""


class _Key(str):
    """A type of its own, so that the making of each key can be counted."""

    __slots__ = ()


def decode_counting(body: bytes, keys_max: int) -> dict[str, Raw]:
    """Millions of keys would take seconds and gigabytes: raises TooManyKeys at the first that is too many."""
    count = 0

    def make_key(_: type, name: str) -> _Key:
        nonlocal count
        count += 1
        if count > keys_max:
            raise TooManyKeys
        return _Key(name)

    decoded = msgspec.json.Decoder(dict[_Key, Raw], dec_hook=make_key).decode(body)
    return {str(name): raw for name, raw in decoded.items()}
