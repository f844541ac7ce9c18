"""The store that several gateways share, as the configuration names it. Connects to nothing yet."""

from __future__ import annotations

import os

from greenroom.config.schema import Config
from greenroom.errors import ConfigError
from greenroom.leases.shared.store import SharedStore


def open_store(config: Config, url: str) -> SharedStore:
    """Raises ConfigError where the client of such a store is not installed."""
    try:
        # Only where it is used: it takes a while to import.
        from greenroom.leases.shared.redis_store import RedisStore
    except ImportError as error:
        raise ConfigError("leases.store needs the client of Redis: pip install 'greenroom[redis]'.") from error
    return RedisStore(url, config.leases.host or os.uname().nodename, ttl_s=config.leases.ttl_s)
