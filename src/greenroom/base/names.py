"""Ids of models that only this process knows: one name, and which of its configurations is meant.

Owns the mark that tells the two apart. It cannot be typed, so no name of a file or configuration has it.
"""

from __future__ import annotations

import re
from typing import Final

_MARK: Final = "\x1f"
_MARKED: Final = re.compile(f"{_MARK}[0-9a-f]{{8}}")


def inner_id(name: str, digest: str) -> str:
    """The id of one configuration of this name. `digest` is in hexadecimal digits; the first eight count."""
    return f"{name}{_MARK}{digest[:8]}"


def public_name(text: str) -> str:
    """The name that callers know of this id; in a whole text, of every id that it names."""
    return _MARKED.sub("", text) if _MARK in text else text
