"""What Redis' errors mean to us, said without the password that an address may hold.

Owns the translation of redis-py's exceptions, and the address as it may be shown. Never raises anything itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

import redis.exceptions as redis_errors

from greenroom.errors import GatewayBug, GreenroomError, LeaseDenied, StoreDown
from greenroom.leases.records import HOST, LeaseAsk, taken
from greenroom.leases.shared.stored import Reply

OUTAGE_RETRY_AFTER_S = 1.0
# Errors by their class; the first that matches counts, so the special ones come first.
_BY_CLASS: tuple[tuple[type[Exception], str], ...] = (
    (redis_errors.BusyLoadingError, "is still loading its data"),
    (redis_errors.AuthenticationError, "does not accept the name or the password"),
    (redis_errors.AuthorizationError, "does not accept the name or the password"),
    (redis_errors.NoPermissionError, "does not permit this user to run its scripts"),
    (redis_errors.ReadOnlyError, "is a replica and cannot be written to"),
    (redis_errors.OutOfMemoryError, "has used up its maxmemory"),
    (redis_errors.MaxConnectionsError, "has no connection left for us"),
    (redis_errors.TimeoutError, "does not answer in time"),
    (redis_errors.ConnectionError, "cannot be reached"),
    (OSError, "cannot be reached"),
)
# Refusals by the word that they begin with, or that stands in them where a script was refused.
_BY_WORD = (
    ("NOREPLICAS", "has too few replicas to write to"),
    ("NOAUTH", "wants a password"),
    ("WRONGPASS", "does not accept the name or the password"),
    ("NOPERM", "does not permit this user to run its scripts"),
    ("READONLY", "is a replica and cannot be written to"),
    ("LOADING", "is still loading its data"),
    ("MASTERDOWN", "is a replica that has lost its primary"),
    ("CLUSTERDOWN", "is a cluster that is down"),
    ("MOVED", "is a cluster; give the address of the node that holds this host's keys"),
    ("MISCONF", "cannot save to its disk and refuses to write"),
    ("OOM", "has used up its maxmemory"),
    ("BUSY", "is busy with a script that does not end"),
)


def shown(url: str) -> str:
    """The address without name, password and options. A store is only opened at one that can be taken apart."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def translated(error: Exception, url: str) -> GreenroomError:
    """What to raise instead. The text of Redis' error is not passed on: it may quote what was sent."""
    where = shown(url)
    for kind, meaning in _BY_CLASS:
        if isinstance(error, kind):
            return _down(where, meaning)
    # A refusal inside a script carries the script's name before or after the word.
    words = str(error).replace(":", " ").replace("-", " ").split()
    for word, meaning in _BY_WORD:
        if word in words:
            return _down(where, meaning)
    return GatewayBug(f"the lease store at {where} refused a script: {' '.join(words[:12])}")


def _down(where: str, meaning: str) -> StoreDown:
    return StoreDown(f"the lease store at {where} {meaning}", retry_after_s=OUTAGE_RETRY_AFTER_S)


@contextmanager
def cancels_heard() -> Iterator[None]:
    """Raise CancelledError at the end if this task was cancelled meanwhile, whatever became of it inside."""
    task = asyncio.current_task()
    assert task is not None, "only tasks can be cancelled"
    before = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


REFUSAL_RETRY_AFTER_S = 5.0
TAKEN = "taken"
_WHY = {
    "grace": "the lease store is new or has lost its data; those who held leases come first for a moment",
    "line": "others wait for these GPUs and come first",
    "full": "the lease store holds as many leases as it may",
    "memory": "so much is not free",
}


def refusal(name: str, wanted: str, reply: Reply, beside: Mapping[str, object], hint: str = "") -> LeaseDenied:
    message = f"{name} needs {wanted}: {_WHY.get(reply.denied or '', 'refused')}. {_room(reply)}{hint}"
    numbers = {"free_mib": reply.free, "usable_mib": reply.usable, "why": reply.denied}
    return LeaseDenied(message, retry_after_s=REFUSAL_RETRY_AFTER_S, beside={**beside, **numbers})


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
