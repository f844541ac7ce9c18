"""Which store leases are asked of: a gateway by http(s)://, a Redis by redis(s):// or unix://.

Owns the environment variables. Never connects. In Redis the GPUs of this machine are under its own name, unless
GREENROOM_HOST has another.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from greenroom.errors import BadRequest
from greenroom.leases.http_store import HttpStore
from greenroom.leases.records import LeaseStore

LEASES_NAME: Final = "GREENROOM_LEASES"
URL_NAME: Final = "GREENROOM_URL"
HOST_NAME: Final = "GREENROOM_HOST"
KEY_NAME: Final = "GREENROOM_API_KEY"
DEFAULT_URL: Final = "http://127.0.0.1:8210"


def store_url(url: str | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """Where leases are asked for: what was said, else GREENROOM_LEASES, else GREENROOM_URL, else this machine."""
    said = url or environ.get(LEASES_NAME) or environ.get(URL_NAME) or DEFAULT_URL
    return said if "://" in said else f"http://{said}"


def open_store(url: str | None = None, key: str | None = None, environ: Mapping[str, str] = os.environ) -> LeaseStore:
    """The store at this address. Raises BadRequest for one that cannot be, or whose client is not installed."""
    whole = store_url(url, environ)
    if whole.startswith(("http://", "https://")):
        return HttpStore(whole, key or environ.get(KEY_NAME) or None)
    if whole.startswith(("redis://", "rediss://", "unix://")):
        return _redis_store(whole, environ.get(HOST_NAME) or os.uname().nodename)
    raise BadRequest(f"{whole.partition('://')[0]}:// is no kind of lease store; it is http, https, redis or rediss.")


def _redis_store(url: str, host: str) -> LeaseStore:
    try:
        from greenroom.leases.shared.redis_store import RedisStore
    except ImportError:
        raise BadRequest("Leases in Redis need its client: pip install 'greenroom[redis]'.") from None
    return RedisStore(url, host)
