"""What a tenant, a key or a model may use: requests and tokens per minute, requests at once, places in the queue.

Owns these keys; TENANT_RATE_LIMIT_<tenant> and DEFAULT_RATE_LIMIT in the environment set some of them. Counts nothing:
`access/limits.py` does.
"""

import re
from typing import Final

from greenroom.config.kinds import Count, Name, Section, StoreAddress

# Tenants that are not named go by the limits of this one.
DEFAULT_TENANT: Final = "default"
_RATE: Final = re.compile(r"\s*([0-9]{1,10})\s*(req)?\s*(/\s*min)?\s*", re.IGNORECASE)


class RateLimits(Section):
    """What may be used. A request that exceeds it is answered 429 rate_limit_exceeded; no limit where none is given."""

    requests_per_minute: Count | None = None
    """Requests to models per minute, jobs included."""
    tokens_per_minute: Count | None = None
    """Tokens of prompts and answers per minute. max_tokens is reserved, and settled with what was really used."""
    concurrent_max: Count | None = None
    """Requests that wait or are answered at the same time."""


class TenantLimits(RateLimits):
    """What a tenant may use, over all of its keys."""

    queue_depth_max: Count | None = None
    """Its requests that may wait at once, one more is answered 503 queue_full; scheduler.queue_depth_max when not
    given."""


class LimitStore(Section):
    """Where requests and tokens are counted."""

    store: StoreAddress | None = None
    """redis://…, rediss://… or unix://… to count together with other gateways; leases.store when not given, else each
    gateway counts for itself."""


Tenants = dict[Name, TenantLimits]


def requests_per_minute(text: str) -> int:
    """`100req/min`, or `100`, as variables of the environment have it. Raises ValueError."""
    if match := _RATE.fullmatch(text):
        return int(match.group(1))
    raise ValueError(f"a number of requests per minute is wanted, as in 100req/min, not {text[:40]!r}")
