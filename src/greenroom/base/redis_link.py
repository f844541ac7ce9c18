"""A client of a Redis or Valkey that gateways share, and its faults in words.

Owns how long one waits for such a store, and that an address whose options cannot be used is refused before anything
connects. Imports its client: only what is imported where a store is configured may import this.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from redis import asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from greenroom.errors import ConfigError

# For a connection, and for an answer.
ANSWER_MAX_S: Final = 1.0
# Further calls wait for a connection as long as for an answer.
CONNECTIONS_MAX: Final = 16
# What it is said to do if another program uses one of our keys for something else.
HOLDS_SOMETHING_ELSE: Final = (
    "holds something else under a key of Greenroom; remove it, or use another of its databases"
)


def shown(url: str) -> str:
    """The address without name, password and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def connected(url: str, name: str, *, repeats: int = 1, decode_responses: bool = False) -> aioredis.Redis:
    """A client that connects on first use. Raises ConfigError, which begins with `name`, for unknown options.

    A call whose connection is lost is made so often again: an idle one may have died unnoticed.
    """
    try:
        pool = aioredis.BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS_MAX,
            timeout=ANSWER_MAX_S,
            socket_connect_timeout=ANSWER_MAX_S,
            socket_timeout=ANSWER_MAX_S,
            retry=Retry(NoBackoff(), repeats, supported_errors=(RedisConnectionError,)),
            decode_responses=decode_responses,
        )
        # Made and never opened: this alone checks the names of the options.
        pool.connection_class(**pool.connection_kwargs)
    except (TypeError, ValueError, RedisError):
        # Scheme, host and port were checked before; only the options are left.
        raise ConfigError(f"{name} {shown(url)} has an option behind ? that is not known or read") from None
    return aioredis.Redis.from_pool(pool)


def store_fault(error: Exception) -> str:
    """What a store that cannot be used does. Its own words are not passed on: they may quote what was sent."""
    is_other = "WRONGTYPE" in str(error).replace(":", " ").split()
    return HOLDS_SOMETHING_ELSE if is_other else f"does not answer ({type(error).__name__})"
