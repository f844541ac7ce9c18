"""Why memory was not granted, in a sentence with numbers."""

from __future__ import annotations

from collections.abc import Mapping

from greenroom.errors import LeaseDenied
from greenroom.memory.leases.stored import Reply

RETRY_AFTER_S = 5.0
_WHY = {
    "grace": "the lease store is new or has lost its data; those who held leases come first for a moment",
    "line": "others wait for these GPUs and come first",
    "full": "the lease store holds as many leases as it may",
    "memory": "so much is not free",
}


def refusal(name: str, wanted: str, reply: Reply, beside: Mapping[str, object]) -> LeaseDenied:
    message = f"{name} needs {wanted}: {_WHY.get(reply.denied or '', 'refused')}. {_room(reply)}"
    numbers = {"free_mib": reply.free, "usable_mib": reply.usable, "why": reply.denied}
    return LeaseDenied(message, retry_after_s=RETRY_AFTER_S, beside={**beside, **numbers})


def _room(reply: Reply) -> str:
    if not reply.usable:
        return "No GPUs are known to the store yet: a gateway has to run on this host, or name them."
    parts = (f"{device} {reply.free[device]:,} of {reply.usable[device]:,} MiB" for device in sorted(reply.usable))
    return f"Free: {', '.join(parts)}."
