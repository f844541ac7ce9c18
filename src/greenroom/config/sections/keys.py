"""The options of one API key: whose it is, what it may ask, order and see, and until when; and the limits of what a
tenant, a key or a model may use, some of which DEFAULT_RATE_LIMIT and TENANT_RATE_LIMIT_<tenant> set.

The same words stand in the configuration (`server.api_keys`) and in a key file (`server.key_file`).
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

from greenroom.config.kinds import HEX_64, ID_CHARS_MAX, NO_CONTROLS, Count, Name, RoutePattern, Section, StoreAddress
from greenroom.config.reader import Problem

# Tenants that are not named go by the limits of this one.
DEFAULT_TENANT: Final = "default"
_RATE: Final = re.compile(r"\s*([0-9]{1,10})\s*(req)?\s*(/\s*min)?\s*", re.IGNORECASE)


class RateLimits(Section):
    """What may be used. A request that exceeds it is answered 429 rate_limit_exceeded; no limit where none is given."""

    requests_per_minute: Count | None = None
    """Requests to models per minute, jobs included."""
    tokens_per_minute: Count | None = None
    """Tokens of prompts and answers per minute. max_tokens is reserved, and settled with what was really used."""
    concurrent_max: Count | None = None
    """Requests that wait or are answered at the same time."""


class TenantLimits(RateLimits):
    """What a tenant may use, over all of its keys."""

    queue_depth_max: Count | None = None
    """Its requests that may wait at once, one more is answered 503 queue_full; scheduler.queue_depth_max when not
    given."""


class LimitStore(Section):
    """Where requests and tokens are counted."""

    store: StoreAddress | None = None
    """redis://…, rediss://… or unix://… to count together with other gateways; leases.store when not given, else each
    gateway counts for itself."""


Tenants = dict[Name, TenantLimits]


def requests_per_minute(text: str) -> int:
    """`100req/min`, or `100`, as variables of the environment have it. Raises ValueError."""
    if match := _RATE.fullmatch(text):
        return int(match.group(1))
    raise ValueError(f"a number of requests per minute is wanted, as in 100req/min, not {text[:40]!r}")


PATTERNS_MAX: Final = 100


class Verb(StrEnum):
    """What a key may do beyond asking models. `admin` is all of this, and what has no word of its own."""

    READ = "read"
    """See status, events, requests, decisions, GPUs, logs and the words of engines, of all models and tenants."""
    LOAD = "load"
    """Load, unload, prepare and send models to sleep."""
    FLUSH = "flush"
    """Empty prefix caches, of all tenants."""
    DOWNLOAD = "download"
    """Fetch models to disk."""
    DELETE = "delete"
    """Delete models from disk."""
    RELOAD = "reload"
    """Have the configuration read again."""
    REMOTE = "remote"
    """Ask providers in `remotes` for models by name, such as claude:sonnet, which costs money."""


# These concern every model, which a key with `models` must not even know of.
_OF_ALL_MODELS: Final = frozenset((Verb.READ, Verb.FLUSH, Verb.DOWNLOAD, Verb.DELETE, Verb.RELOAD))


def _in_utc(moment: datetime) -> datetime:
    try:
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except OverflowError:
        raise ValueError("in UTC it lies before the year 1 or after the year 9999") from None


def _no_number(value: object) -> object:
    """A date without its hyphens would be taken for seconds since 1970, and so would true."""
    if isinstance(value, bool):
        raise ValueError(f"a date is wanted, such as 2027-01-31, not {str(value).lower()}")
    if isinstance(value, int | float) or (isinstance(value, str) and value.strip().isdigit()):
        raise ValueError("is a number; a date is written with hyphens, as in 2027-01-31")
    return value


ModelPattern = Annotated[str, StringConstraints(min_length=1, max_length=ID_CHARS_MAX, pattern=NO_CONTROLS)]
Moment = Annotated[datetime, BeforeValidator(_no_number), AfterValidator(_in_utc)]


class ModelScope:
    """The ids that fit one of some patterns. `*` stands for any characters, slashes too; all others for themselves.

    Of those within another scope, where one is given.
    """

    __slots__ = ("_fits", "patterns", "within")

    def __init__(self, patterns: Iterable[str], within: "ModelScope | None" = None) -> None:
        self.patterns = tuple(patterns)
        self.within = within
        # Compiled when it is first needed: a key file has thousands of keys, of which few are in use.
        self._fits: re.Pattern[str] | None = None

    def allows(self, model: str) -> bool:
        if self._fits is None:
            parts = (".*".join(re.escape(part) for part in pattern.split("*")) for pattern in self.patterns)
            self._fits = re.compile("|".join(parts), re.DOTALL)
        return self._fits.fullmatch(model) is not None and (self.within is None or self.within.allows(model))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelScope) and (self.patterns, self.within) == (other.patterns, other.within)

    def __hash__(self) -> int:
        return hash((self.patterns, self.within))


class ApiKey(Section):
    """One key that callers present as `Authorization: Bearer …` or `x-api-key: …`."""

    name: Name
    """Who holds this key; shown in logs and status instead of the key."""
    key: Annotated[str | None, Field(repr=False)] = None
    """The key itself, best given as `${env.NAME}`; it is hashed when read and never kept. Give this or sha256."""
    sha256: Annotated[str, StringConstraints(pattern=HEX_64)] | None = None
    """The key's SHA-256 in hex, so that the file holds no secret (`greenroom key new` makes a key and prints both)."""
    tenant: Name | None = None
    """The tenant its requests belong to; the key's name when not given."""
    priority_max: Literal["high", "normal", "low"] = "high"
    """The best priority its requests may ask for; anything better is lowered to this."""
    models: Annotated[tuple[ModelPattern, ...], Field(max_length=PATTERNS_MAX)] | None = None
    """The ids of models it may ask, `*` for any characters; all when not given. Others look to it as if they did not
    exist."""
    routes: Annotated[tuple[RoutePattern, ...], Field(max_length=PATTERNS_MAX)] | None = None
    """The paths it may call, such as /v1/chat/completions; `*` for one part, `**` for the rest; all when not given."""
    verbs: tuple[Verb, ...] = ()
    """What it may do beyond asking models; see docs/access.md."""
    admin: bool = False
    """Whether it may manage the gateway (load, unload, logs, reload, all of /upstream) and sees engine output."""
    leases: bool = False
    """Whether it may take leases, which can evict models; a key with admin may anyway."""
    expires: Moment | None = None
    """When it stops being accepted, such as 2027-01-31 or 2027-01-31T18:00:00+01:00; UTC when no zone is given."""

    limits: RateLimits | None = None
    """What its requests may use, besides what its tenant may."""

    def _problems(self) -> Iterator[Problem]:
        if (self.key is None) == (self.sha256 is None):
            yield Problem((), f"give exactly one of key and sha256 for {self.name}")
        if self.key is not None and (
            not self.key or not self.key.isascii() or any(c <= " " or c == "\x7f" for c in self.key)
        ):
            # Such a key cannot be sent in a header, or is no secret.
            yield Problem(("key",), "must be visible ASCII characters without spaces, at least one")
        if self.models is None:
            return
        of_all = ["admin"] if self.admin else [verb.value for verb in self.verbs if verb in _OF_ALL_MODELS]
        # A lease may evict any model.
        of_all += ["leases"] if self.leases else []
        if of_all:
            yield Problem(("models",), f"cannot be had beside {', '.join(of_all)}, which concerns every model")


def equal_api_keys(keys: Sequence[ApiKey]) -> Iterator[Problem]:
    """Keys with the same name or the same secret: which key's limits count would be undefined."""
    name_of: dict[str, str] = {}
    names_seen: set[str] = set()
    for position, key in enumerate(keys):
        digest = digest_of(key)
        if key.name in names_seen:
            yield Problem((position, "name"), f"{key.name} names another key already")
        if digest in name_of:
            yield Problem((position,), f"is the same key as {name_of[digest]}")
        names_seen.add(key.name)
        name_of.setdefault(digest, key.name)


def digest_of(key: ApiKey) -> str:
    """The key's SHA-256 in hex."""
    return key.sha256 or hashlib.sha256((key.key or "").encode()).hexdigest()
