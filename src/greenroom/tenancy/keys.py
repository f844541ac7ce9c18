"""API keys: which caller presents one, and what that caller may do.

Owns the digests of the keys. Never keeps, shows or logs a key itself. How long a check takes depends neither on how
much of a key is right nor on how many there are.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Final

from greenroom.config.schema import PRIORITY_NAMES, RateLimits
from greenroom.config.sections.keys import ApiKey, ModelScope, digest_of
from greenroom.core.model import TenantId
from greenroom.errors import InvalidKey, KeyExpired, KeyRevoked
from greenroom.tenancy.key_file import FileKey
from greenroom.tenancy.tenants import PRIORITY_MIN

# Keys made by `greenroom key new` have 46 characters; a longer key than this is refused.
KEY_BYTES_MAX: Final = 1_024
_NEW_KEY_BYTES: Final = 32

_sha256: Final = hashlib.sha256


class Permission(Enum):
    """What a request requires of its caller's key."""

    ASK = "ask"
    LEASE = "lease"
    READ = "read"
    LOAD = "load"
    FLUSH = "flush"
    DOWNLOAD = "download"
    DELETE = "delete"
    RELOAD = "reload"
    REMOTE = "remote"
    # What no other word is for.
    MANAGE = "manage"


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request. `tenant` is None where callers may name their own."""

    name: str
    """The id of the key, of the configuration or of a key file: unique among all, and never of another key later.
    Limits, jobs and usage go by it. `anyone` without keys, empty for a stranger."""
    tenant: TenantId | None
    priority_max: int
    """The best priority it may ask for: a number, lower is better."""
    admin: bool
    leases: bool = False
    limits: RateLimits | None = None
    """What its requests may use, besides what its tenant may."""
    verbs: frozenset[Permission] = frozenset()
    models: ModelScope | None = None
    """The models it may know of; None: all."""
    routes: tuple[str, ...] | None = None
    """Patterns of the paths it may call; None: all."""
    expires_at: float | None = None
    """Unix time."""

    def may(self, permission: Permission) -> bool:
        if permission is Permission.ASK or self.admin:
            return True
        return permission in self.verbs or (permission is Permission.LEASE and self.leases)

    @property
    def may_ask_remote(self) -> bool:
        """True if it may ask providers for models that no configuration names."""
        return self.admin or Permission.REMOTE in self.verbs

    def sees(self, model: str) -> bool:
        """False if this model must look as if it did not exist."""
        return self.models is None or self.models.allows(model)


# A caller without a key, on the paths that need none.
STRANGER: Final = Caller(name="", tenant=TenantId(""), priority_max=PRIORITY_MIN, admin=False, models=ModelScope(()))
# Without keys, every caller that can reach the address is trusted.
ANYONE: Final = Caller(name="anyone", tenant=None, priority_max=PRIORITY_MIN, admin=True)


class Keys:
    """`is_required`: a key is needed even if there is none, as with a key file that is empty."""

    def __init__(
        self, api_keys: Iterable[ApiKey] = (), *, is_required: bool = False, wall: Callable[[], float] = time.time
    ) -> None:
        # Found by digest: how long that takes tells nothing of a key, because no one can choose its digest.
        by_digest = {bytes.fromhex(digest_of(key)): key for key in api_keys}
        self._revoked = {digest: key.name for digest, key in by_digest.items() if is_revoked(key)}
        self._callers = {digest: caller_of(key) for digest, key in by_digest.items() if digest not in self._revoked}
        self._names = {caller.name: caller for caller in self._callers.values()}
        self.tenants: frozenset[str | None] = frozenset(caller.tenant for caller in self._callers.values())
        self.enabled = is_required or bool(by_digest)
        self._wall = wall

    def __iter__(self) -> Iterator[Caller]:
        """The holders of all keys that are not revoked."""
        return iter(self._callers.values())

    def check(self, presented: bytes | None) -> Caller:
        """The caller that presents this key; ANYONE if no keys are needed.

        Raises InvalidKey, KeyExpired and KeyRevoked.
        """
        if not self.enabled:
            return ANYONE
        if not presented:
            raise InvalidKey("No API key was given. Send it as Authorization: Bearer KEY, or as x-api-key: KEY.")
        digest = _sha256(presented[:KEY_BYTES_MAX]).digest()
        found = self._callers.get(digest)
        if found is None or len(presented) > KEY_BYTES_MAX:
            if digest in self._revoked:
                raise KeyRevoked(f"The API key {self._revoked[digest]} was revoked. Ask the operator for a new one.")
            raise InvalidKey("The API key is not one of this server's.")
        if found.expires_at is not None:
            self._expect_valid(found)
        return found

    def named(self, name: str) -> Caller | None:
        """The caller that holds the key of this name; ANYONE by its own name if no keys are needed.

        Raises KeyExpired.
        """
        if not self.enabled:
            return ANYONE if name == ANYONE.name else None
        found = self._names.get(name)
        if found is not None:
            self._expect_valid(found)
        return found

    def _expect_valid(self, caller: Caller) -> None:
        if caller.expires_at is not None and self._wall() >= caller.expires_at:
            when = datetime.fromtimestamp(caller.expires_at, UTC).isoformat(timespec="seconds")
            raise KeyExpired(f"The API key {caller.name} expired at {when}. Ask the operator for a new one.")


def presented_key(authorization: bytes | None, x_api_key: bytes | None) -> bytes | None:
    """The key a request carries in one of these headers: `Authorization: Bearer KEY`, else `x-api-key: KEY`."""
    if authorization is not None:
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() == b"bearer" and (key := key.strip()):
            return key
    return x_api_key and x_api_key.strip()


def new_key() -> tuple[str, str]:
    """A fresh key, and its SHA-256 in hex for the configuration."""
    key = "gr-" + secrets.token_urlsafe(_NEW_KEY_BYTES)
    return key, hashlib.sha256(key.encode("ascii")).hexdigest()


def is_revoked(key: ApiKey) -> bool:
    return isinstance(key, FileKey) and key.revoked is not None


def caller_of(key: ApiKey) -> Caller:
    """What the holder of this key may do."""
    return Caller(
        name=key.name,
        tenant=TenantId(key.tenant or key.name),
        priority_max=PRIORITY_NAMES[key.priority_max],
        admin=key.admin,
        leases=key.leases,
        limits=key.limits,
        verbs=frozenset(Permission(verb.value) for verb in key.verbs),
        models=None if key.models is None else ModelScope(key.models),
        routes=key.routes,
        expires_at=None if key.expires is None else key.expires.timestamp(),
    )
