"""How long a lease of an earlier run lasts, and what must be written down while it is held to know that.

Pure. Nobody could be heard while the gateway was away, so a lease that is entered again has a grace besides the time
that was left of it; but not a whole TTL, or the lease of a program that ended elsewhere would outlast every restart.
What is written down of renewals may be as old as that grace, so that nobody loses time by what was not written.
"""

from __future__ import annotations

from typing import Final

from greenroom.leases.journal import Kept

# Half its TTL: who renews every third of it, as our clients do, is heard of well within.
GRACE_SHARE: Final = 0.5
# Clients ask again every second while the gateway is away, and the fastest machine takes some to be back.
GRACE_MIN_S: Final = 10.0


def restart_grace_s(ttl_s: float) -> float:
    return max(GRACE_MIN_S, ttl_s * GRACE_SHARE)


def lasts_s(kept: Kept, wall_s: float) -> float:
    """From the start of this run until it is lost, if its holder is not heard of. A clock that jumped costs nobody more
    than the time that was left."""
    if kept.heard_at is None:
        return kept.ttl_s
    left_s = max(0.0, kept.heard_at + kept.ttl_s - wall_s)
    return min(kept.ttl_s, left_s + restart_grace_s(kept.ttl_s))


def is_to_be_written(ttl_s: float, since_s: float) -> bool:
    """Whether a renewal is, so long after the last that was. Where the grace is a whole TTL none has to be."""
    grace_s = restart_grace_s(ttl_s)
    return grace_s < ttl_s and since_s >= grace_s
