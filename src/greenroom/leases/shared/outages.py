"""What Redis' errors mean to us, said without the password that an address may hold.

Owns the translation of redis-py's exceptions, and the address as it may be shown. Never raises anything itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import redis.exceptions as redis_errors

from greenroom.errors import GatewayBug, GreenroomError, StoreDown

RETRY_AFTER_S = 1.0
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
    return StoreDown(f"the lease store at {where} {meaning}", retry_after_s=RETRY_AFTER_S)


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
