"""Why memory was not granted, in a sentence with numbers."""

from __future__ import annotations

from collections.abc import Mapping

from greenroom.errors import LeaseDenied, LeaseTaken
from greenroom.leases.records import HOST, LeaseAsk
from greenroom.leases.shared.stored import Reply

RETRY_AFTER_S = 5.0
TAKEN = "taken"
_WHY = {
    "grace": "the lease store is new or has lost its data; those who held leases come first for a moment",
    "line": "others wait for these GPUs and come first",
    "full": "the lease store holds as many leases as it may",
    "memory": "so much is not free",
}


def taken(id: str, whose: str) -> LeaseTaken:
    """The id names another lease than the one that is asked for."""
    return LeaseTaken(f"The lease {id} is {whose}; choose another id.", param="id")


def refusal(name: str, wanted: str, reply: Reply, beside: Mapping[str, object], hint: str = "") -> LeaseDenied:
    message = f"{name} needs {wanted}: {_WHY.get(reply.denied or '', 'refused')}. {_room(reply)}{hint}"
    numbers = {"free_mib": reply.free, "usable_mib": reply.usable, "why": reply.denied}
    return LeaseDenied(message, retry_after_s=RETRY_AFTER_S, beside={**beside, **numbers})


def program_refusal(ask: LeaseAsk, reply: Reply) -> LeaseDenied:
    """For who asked by memory and a number of GPUs; one that waited in vain for what cannot be is told so."""
    if reply.denied == TAKEN:
        return taken(ask.id, "another holder's, or was asked for with another amount or other GPUs")
    wanted = f"{ask.mib:,} MiB on {ask.gpus} GPU{'s' if ask.gpus > 1 else ''}"
    most, hint = _most(ask, reply), ""
    if reply.usable and most < ask.mib:
        hint = f" Waiting does not help: if everybody left there would be {most:,} MiB on each at most."
    return refusal(ask.name, wanted, reply, {"needed_mib": ask.mib, "gpus": ask.gpus}, hint)


def _most(ask: LeaseAsk, reply: Reply) -> int:
    """What so many GPUs could give each if nobody held anything. Strangers that use them now may go."""
    allowed = [mib for device, mib in reply.usable.items() if device != HOST]
    if ask.devices:
        allowed = [mib for device, mib in reply.usable.items() if device in ask.devices]
    return sorted(allowed, reverse=True)[ask.gpus - 1] if ask.gpus <= len(allowed) else 0


def _room(reply: Reply) -> str:
    if not reply.usable:
        return "No GPUs are known to the store yet: a gateway has to run on this host, or name them."
    parts = (f"{device} {reply.free[device]:,} of {reply.usable[device]:,} MiB" for device in sorted(reply.usable))
    return f"Free: {', '.join(parts)}."
