"""API keys: which caller presents one, what that caller may do, and the tenant and priority that it may name.

Owns the digests of the keys. Never keeps, shows or logs a key itself. How long a check takes depends neither on how
much of a key is right nor on how many there are. Also owns the rules for names of tenants and for priorities that
callers send, and how many tenants are kept apart. Counts nothing: queues, limits and metrics do, by these names.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Final

from greenroom.access.key_file import FileKey
from greenroom.config.kinds import name_problem
from greenroom.config.schema import PRIORITY_NAMES, RateLimits
from greenroom.config.sections.keys import ApiKey, ModelScope, digest_of
from greenroom.core.model import NO_TENANT, TenantId
from greenroom.errors import BadRequest, InvalidKey, KeyExpired, KeyRevoked

# Keys made by `greenroom key new` have 46 characters; a longer key than this is refused.
KEY_BYTES_MAX: Final = 1_024
_NEW_KEY_BYTES: Final = 32
# Lower goes first: high is 0, normal 1, low 2.
PRIORITY_MIN, PRIORITY_MAX = -100, 100

# A copy costs half as much as another look for the algorithm.
_SHA256: Final = hashlib.sha256()


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
    def may_list(self) -> bool:
        """False for callers that nothing tells apart: each knows the ids of what it ordered, and no others."""
        return self.admin or self.tenant is not None

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
# What callers may do without a key where operations are signed and others reach the address: nothing without a token.
BY_TOKENS: Final = Caller(
    name=ANYONE.name,
    tenant=None,
    priority_max=PRIORITY_MIN,
    admin=False,
    verbs=frozenset(
        (Permission.LOAD, Permission.FLUSH, Permission.DOWNLOAD, Permission.DELETE, Permission.RELOAD),
    ),
)


class Keys:
    """`is_required`: a key is needed even if there is none, as with a key file that is empty. `unkeyed` is the caller
    where none is needed."""

    def __init__(
        self,
        api_keys: Iterable[ApiKey] = (),
        *,
        is_required: bool = False,
        unkeyed: Caller = ANYONE,
        wall: Callable[[], float] = time.time,
    ) -> None:
        # Found by digest: how long that takes tells nothing of a key, because no one can choose its digest.
        by_digest = {bytes.fromhex(digest_of(key)): key for key in api_keys}
        self._revoked = {digest: key.name for digest, key in by_digest.items() if is_revoked(key)}
        self._callers = {digest: caller_of(key) for digest, key in by_digest.items() if digest not in self._revoked}
        self._names = {caller.name: caller for caller in self._callers.values()}
        self.tenants: frozenset[str | None] = frozenset(caller.tenant for caller in self._callers.values())
        self.enabled = is_required or bool(by_digest)
        self._unkeyed = unkeyed
        self._wall = wall

    def __iter__(self) -> Iterator[Caller]:
        """The holders of all keys that are not revoked."""
        return iter(self._callers.values())

    def check(self, presented: bytes | None) -> Caller:
        """The caller that presents this key; if no keys are needed, the one without. Raises InvalidKey, KeyExpired and
        KeyRevoked."""
        if not self.enabled:
            return self._unkeyed
        if not presented:
            raise InvalidKey("No API key was given. Send it as Authorization: Bearer KEY, or as x-api-key: KEY.")
        hashed = _SHA256.copy()
        hashed.update(presented[:KEY_BYTES_MAX])
        digest = hashed.digest()
        found = self._callers.get(digest)
        if found is None or len(presented) > KEY_BYTES_MAX:
            if digest in self._revoked:
                raise KeyRevoked(f"The API key {self._revoked[digest]} was revoked. Ask the operator for a new one.")
            raise InvalidKey("The API key is not one of this server's.")
        if found.expires_at is not None:
            self._expect_valid(found)
        return found

    def named(self, name: str) -> Caller | None:
        """The caller that holds the key of this name; if no keys are needed, the one without by its own name. Raises
        KeyExpired."""
        if not self.enabled:
            return self._unkeyed if name == self._unkeyed.name else None
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
    if authorization is not None and authorization[:7].lower() == b"bearer " and (key := authorization[7:].strip()):
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


# --- tenants and priorities -----------------------------------------------------------------------------------------

# Bounds everything that is kept per tenant.
LIVE_MAX: Final = 10_000
# A tenant without a request for this long makes room for others.
IDLE_S: Final = 600.0
# Tenants beyond LIVE_MAX share this name.
OTHER: Final = TenantId("other")

_INTEGER: Final = re.compile(r"-?[0-9]{1,3}")


class Tenants:
    def __init__(
        self, live_max: int = LIVE_MAX, *, idle_s: float = IDLE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._live_max = live_max
        # False: names that callers send are ignored.
        self.are_named = True
        self._idle_s = idle_s
        self._clock = clock
        # When each name was last used, the longest idle first.
        self._used_at: OrderedDict[bytes, float] = OrderedDict()
        self._names: dict[bytes, TenantId] = {}

    def __len__(self) -> int:
        return len(self._names)

    def name(self, raw: bytes | None) -> TenantId:
        """The tenant that a caller names (X-Tenant-ID). Raises BadRequest if the name is not allowed."""
        if not raw or not self.are_named:
            return NO_TENANT
        name = self._names.get(raw)
        if name is None:
            return self._meet(raw)
        self._used_at[raw] = self._clock()
        self._used_at.move_to_end(raw)
        return name

    def _meet(self, raw: bytes) -> TenantId:
        name = _checked(raw)
        now = self._clock()
        self._forget_idle(now - self._idle_s)
        if len(self._names) >= self._live_max:
            return OTHER
        self._names[raw] = name
        self._used_at[raw] = now
        return name

    def _forget_idle(self, since: float) -> None:
        """Amortised O(1): each name is added once and forgotten once."""
        while self._used_at:
            oldest = next(iter(self._used_at))
            if self._used_at[oldest] > since:
                return
            del self._used_at[oldest], self._names[oldest]


def parse_priority(raw: object, *, param: str = "x_priority") -> int:
    """high, normal, low or a whole number, from a header or a body; lower goes first. Raises BadRequest."""
    if isinstance(raw, int) and not isinstance(raw, bool):
        return _in_range(raw, param)
    text = raw.decode("latin-1") if isinstance(raw, bytes) else raw
    if not isinstance(text, str):
        raise bad_priority(param)
    word = text.strip().lower()
    if word in PRIORITY_NAMES:
        return PRIORITY_NAMES[word]
    if _INTEGER.fullmatch(word) is None:
        raise bad_priority(param)
    return _in_range(int(word), param)


def cap(priority: int, priority_max: int) -> int:
    """The priority asked for, or the best that its caller may have."""
    return max(priority, priority_max)


def _checked(raw: bytes) -> TenantId:
    """What the configuration takes as a tenant's name, as UTF-8."""
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        raise BadRequest("A tenant's name must be UTF-8.", param="X-Tenant-ID") from None
    why = name_problem(name)
    if why is not None:
        raise BadRequest(f"A tenant's name {why}.", param="X-Tenant-ID")
    return TenantId(name)


def _in_range(priority: int, param: str) -> int:
    if not PRIORITY_MIN <= priority <= PRIORITY_MAX:
        raise bad_priority(param)
    return priority


def bad_priority(param: str) -> BadRequest:
    """The error for every kind of wrong priority."""
    return BadRequest(
        f"{param} is high, normal, low or a whole number from {PRIORITY_MIN} to {PRIORITY_MAX}; lower goes first.",
        param=param,
    )
