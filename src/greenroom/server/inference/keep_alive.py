"""`keep_alive`: how long its model shall stay after a request, as callers write it.

Owns what may be said: seconds as a number or text, and times like "5m", "1h30m" or "300ms". 0 lets the model leave as
soon as it is idle; anything below 0 keeps it until its memory is needed, which is said as `FOR_EVER` here.
"""

from __future__ import annotations

import math
import re
from typing import Final

from greenroom.config.kinds import SECONDS_MAX
from greenroom.errors import BadRequest

# The names under which it is sent: as others call it, and as a word to us, which wins where both are there.
PLAIN: Final = "keep_alive"
OURS: Final = "x_keep_alive_s"
FIELDS: Final = frozenset((PLAIN, OURS))
FOR_EVER: Final = -1.0

# Far more than anybody needs to write a time.
_CHARS_MAX: Final = 64
_NUMBER: Final = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_UNITS_S: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART: Final = re.compile(rf"({_NUMBER})(ns|us|µs|μs|ms|s|m|h)")
_SECONDS: Final = re.compile(_NUMBER)
_WHOLE: Final = re.compile(rf"(?:{_PART.pattern})+")


def keep_alive_s(said: float | str, *, param: str) -> float:
    """Seconds, or FOR_EVER. Raises BadRequest, which names the field."""
    seconds = _seconds_of_text(said) if isinstance(said, str) else float(said)
    if not math.isfinite(seconds):
        raise wrong(param)
    return FOR_EVER if seconds < 0 else min(seconds, SECONDS_MAX)


def wrong(param: str) -> BadRequest:
    """Whatever is wrong with it is told in these words."""
    return BadRequest(
        f'{param} is a number of seconds or a time such as "5m" or "1h30m"; 0 leaves when idle, -1 stays.', param=param
    )


def capped(seconds: float | None, most_s: float | None) -> float | None:
    """What the caller gets of it under the operator's bound."""
    if seconds is None or most_s is None:
        return seconds
    return most_s if seconds == FOR_EVER else min(seconds, most_s)


def _seconds_of_text(said: str) -> float:
    text = said.strip()
    if len(text) > _CHARS_MAX:
        return math.nan
    size = text[1:] if text[:1] in ("+", "-") else text
    sign = -1.0 if text[:1] == "-" else 1.0
    if _SECONDS.fullmatch(size):
        return sign * float(size)
    if not _WHOLE.fullmatch(size):
        return math.nan
    return sign * sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(size))
