"""Errors of the shared store: outages of Redis, and refusals by its scripts, as errors of ours.

Owns the translation of redis-py's exceptions, the address without its password, and the messages of refused leases with
their numbers. Never raises: callers raise what it returns.
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
# Errors by class. The first match counts, so special classes come first.
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
# Errors by the code with which they begin, or which they contain if a script failed.
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
    """The address without name, password and options. It was checked when the store was opened."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def translated(error: Exception, url: str) -> GreenroomError:
    """The error to raise instead. The text of Redis' error is not passed on: it may quote what was sent."""
    where = shown(url)
    for kind, meaning in _BY_CLASS:
        if isinstance(error, kind):
            return _down(where, meaning)
    # An error inside a script has the script's name before or after the code.
    words = str(error).replace(":", " ").replace("-", " ").split()
    for word, meaning in _BY_WORD:
        if word in words:
            return _down(where, meaning)
    return GatewayBug(f"the lease store at {where} refused a script: {' '.join(words[:12])}")


def _down(where: str, meaning: str) -> StoreDown:
    return StoreDown(f"the lease store at {where} {meaning}", retry_after_s=OUTAGE_RETRY_AFTER_S)


@contextmanager
def cancels_heard() -> Iterator[None]:
    """Raise CancelledError at the end if this task was cancelled inside, even if the block swallowed it."""
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
    """The error for a program's request. It says so if no wait could have helped."""
    if reply.denied == TAKEN:
        return taken(ask.id, "another holder's, or was asked for with another amount or other GPUs")
    wanted = f"{ask.mib:,} MiB on {ask.gpus} GPU{'s' if ask.gpus > 1 else ''}"
    most, hint = _most(ask, reply), ""
    if reply.usable and most < ask.mib:
        hint = f" Waiting does not help: without any other lease there would be {most:,} MiB on each at most."
    return refusal(ask.name, wanted, reply, {"needed_mib": ask.mib, "gpus": ask.gpus}, hint)


def _most(ask: LeaseAsk, reply: Reply) -> int:
    """MiB that each of so many GPUs could give if no lease was held. Strangers that use them now may end."""
    allowed = [mib for device, mib in reply.usable.items() if device != HOST]
    if ask.devices:
        allowed = [mib for device, mib in reply.usable.items() if device in ask.devices]
    return sorted(allowed, reverse=True)[ask.gpus - 1] if ask.gpus <= len(allowed) else 0


def _room(reply: Reply) -> str:
    if not reply.usable:
        return "No GPUs are known to the store yet: a gateway has to run on this host, or name them."
    parts = (f"{device} {reply.free[device]:,} of {reply.usable[device]:,} MiB" for device in sorted(reply.usable))
    return f"Free: {', '.join(parts)}."
