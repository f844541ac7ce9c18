"""The tenant that a request is counted for, and the priority it may have.

Owns the rules for tenant names and priorities that callers send, and how many tenants are kept apart. Counts nothing:
queues, limits and metrics do, by the names given here.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from greenroom.config.schema import PRIORITY_NAMES
from greenroom.core.model import NO_TENANT, TenantId
from greenroom.errors import BadRequest

# Bounds everything that is kept per tenant.
LIVE_MAX: Final = 10_000
# A tenant without a request for this long makes room for others.
IDLE_S: Final = 600.0
NAME_CHARS_MAX: Final = 128
# Tenants beyond LIVE_MAX share this name.
OTHER: Final = TenantId("other")

# Lower goes first: high is 0, normal 1, low 2.
PRIORITY_MIN, PRIORITY_MAX = -100, 100

_NAME: Final = re.compile(rb"[ -~]+")
_INTEGER: Final = re.compile(r"-?[0-9]{1,3}")


class Tenants:
    def __init__(
        self, live_max: int = LIVE_MAX, *, idle_s: float = IDLE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._live_max = live_max
        # False: names that callers send are ignored.
        self.are_named = True
        self._idle_s = idle_s
        self._clock = clock
        # When each name was last used, the longest idle first.
        self._used_at: OrderedDict[bytes, float] = OrderedDict()
        self._names: dict[bytes, TenantId] = {}

    def __len__(self) -> int:
        return len(self._names)

    def name(self, raw: bytes | None) -> TenantId:
        """The tenant that a caller names (X-Tenant-ID). Raises BadRequest if the name is not allowed."""
        if not raw or not self.are_named:
            return NO_TENANT
        name = self._names.get(raw)
        if name is None:
            return self._meet(raw)
        self._used_at[raw] = self._clock()
        self._used_at.move_to_end(raw)
        return name

    def _meet(self, raw: bytes) -> TenantId:
        name = _checked(raw)
        now = self._clock()
        self._forget_idle(now - self._idle_s)
        if len(self._names) >= self._live_max:
            return OTHER
        self._names[raw] = name
        self._used_at[raw] = now
        return name

    def _forget_idle(self, since: float) -> None:
        """Amortised O(1): each name is added once and forgotten once."""
        while self._used_at:
            oldest = next(iter(self._used_at))
            if self._used_at[oldest] > since:
                return
            del self._used_at[oldest], self._names[oldest]


def parse_priority(raw: object, *, param: str = "x_priority") -> int:
    """high, normal, low or a whole number, from a header or a body; lower goes first. Raises BadRequest."""
    if isinstance(raw, int) and not isinstance(raw, bool):
        return _in_range(raw, param)
    text = raw.decode("latin-1") if isinstance(raw, bytes) else raw
    if not isinstance(text, str):
        raise bad_priority(param)
    word = text.strip().lower()
    if word in PRIORITY_NAMES:
        return PRIORITY_NAMES[word]
    if _INTEGER.fullmatch(word) is None:
        raise bad_priority(param)
    return _in_range(int(word), param)


def cap(priority: int, priority_max: int) -> int:
    """The priority asked for, or the best that its caller may have."""
    return max(priority, priority_max)


def _checked(raw: bytes) -> TenantId:
    if len(raw) > NAME_CHARS_MAX:
        raise BadRequest(f"A tenant's name has at most {NAME_CHARS_MAX} characters.", param="X-Tenant-ID")
    if _NAME.fullmatch(raw) is None:
        raise BadRequest("A tenant's name is made of printable ASCII characters.", param="X-Tenant-ID")
    return TenantId(raw.decode("ascii"))


def _in_range(priority: int, param: str) -> int:
    if not PRIORITY_MIN <= priority <= PRIORITY_MAX:
        raise bad_priority(param)
    return priority


def bad_priority(param: str) -> BadRequest:
    """The error for every kind of wrong priority."""
    return BadRequest(
        f"{param} is high, normal, low or a whole number from {PRIORITY_MIN} to {PRIORITY_MAX}; lower goes first.",
        param=param,
    )
