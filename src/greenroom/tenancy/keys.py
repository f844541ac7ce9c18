"""API keys: which caller presents one, and what that caller may do.

Owns the digests of the keys. Never keeps, shows or logs a key itself. A check takes the same time for every wrong key,
however much of it is right.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from greenroom.config.schema import PRIORITY_NAMES, ApiKey
from greenroom.core.model import TenantId
from greenroom.errors import InvalidKey
from greenroom.tenancy.tenants import PRIORITY_MIN

# Keys made by `greenroom key` have 46 characters; a longer key than this is refused.
KEY_BYTES_MAX: Final = 1_024
_NEW_KEY_BYTES: Final = 32

_sha256: Final = hashlib.sha256


class Permission(Enum):
    """What a request requires of its caller's key."""

    ASK = "ask"
    LEASE = "lease"
    MANAGE = "manage"


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request. `tenant` is None where callers may name their own."""

    name: str
    tenant: TenantId | None
    priority_max: int
    """The best priority it may ask for: a number, lower is better."""
    admin: bool
    leases: bool = False

    def may(self, permission: Permission) -> bool:
        if permission is Permission.ASK or self.admin:
            return True
        return permission is Permission.LEASE and self.leases


# Without keys, every caller that can reach the address is trusted.
ANYONE: Final = Caller(name="anyone", tenant=None, priority_max=PRIORITY_MIN, admin=True)


class Keys:
    def __init__(self, api_keys: Iterable[ApiKey] = ()) -> None:
        self._callers = tuple((_digest_of(key), _caller_of(key)) for key in api_keys)

    @property
    def enabled(self) -> bool:
        return bool(self._callers)

    def check(self, presented: bytes | None) -> Caller:
        """The caller that presents this key; ANYONE if no keys are configured. Raises InvalidKey."""
        if not self._callers:
            return ANYONE
        if not presented:
            raise InvalidKey("No API key was given. Send it as Authorization: Bearer KEY, or as x-api-key: KEY.")
        found = self._find(_sha256(presented[:KEY_BYTES_MAX]).digest())
        if found is None or len(presented) > KEY_BYTES_MAX:
            raise InvalidKey("The API key is not one of this server's.")
        return found

    def named(self, name: str) -> Caller | None:
        """The caller that holds the key of this name; ANYONE by its own name if no keys are configured."""
        if not self._callers:
            return ANYONE if name == ANYONE.name else None
        return next((caller for _, caller in self._callers if caller.name == name), None)

    def _find(self, digest: bytes) -> Caller | None:
        """Compares with all keys, also after a match, so that the time taken reveals nothing."""
        found: Caller | None = None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def presented_key(authorization: bytes | None, x_api_key: bytes | None) -> bytes | None:
    """The key a request carries in one of these headers: `Authorization: Bearer KEY`, else `x-api-key: KEY`."""
    if authorization is not None:
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() == b"bearer" and (key := key.strip()):
            return key
    return x_api_key


def new_key() -> tuple[str, str]:
    """A fresh key, and its SHA-256 in hex for the configuration."""
    key = "gr-" + secrets.token_urlsafe(_NEW_KEY_BYTES)
    return key, hashlib.sha256(key.encode("ascii")).hexdigest()


def _digest_of(key: ApiKey) -> bytes:
    if key.sha256 is not None:
        return bytes.fromhex(key.sha256)
    # The schema requires one of the two.
    assert key.key is not None
    return hashlib.sha256(key.key.encode("utf-8")).digest()


def _caller_of(key: ApiKey) -> Caller:
    tenant = TenantId(key.tenant or key.name)
    priority_max = PRIORITY_NAMES[key.priority_max]
    return Caller(name=key.name, tenant=tenant, priority_max=priority_max, admin=key.admin, leases=key.leases)
