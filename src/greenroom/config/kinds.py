"""Values that need more than a type: bounded numbers, names, ids, the address of a lease store.

Owns the bounds and the characters a name may have. The keys are in `schema.py`. Never connects to an address, and
never repeats any part of one in an error: a misplaced part may be a password.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Final, Self, TypeGuard
from urllib.parse import SplitResult, urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from greenroom.config.marks import Described
from greenroom.config.reader import Problem, Where, break_on

# One part of a path, without percent-encoding.
_ROUTE_PART = re.compile(r"\*{1,2}|[A-Za-z0-9._~!$&'()+,=:@-]*")


def _no_bool(value: Any) -> Any:
    """Refuse `parallel: true`, which pydantic would read as 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("number_wanted", "a number is wanted")
    return value


def _printable(name: str) -> str:
    """Refuse line breaks and invisible characters: names go into log lines."""
    if not name.isprintable():
        raise PydanticCustomError("name", "may not contain control or invisible characters")
    return name


def _without(problem: Callable[[str], str | None]) -> AfterValidator:
    """Refuses a text that has this problem."""

    def checked(text: str) -> str:
        if (why := problem(text)) is not None:
            raise PydanticCustomError("name", "{why}", {"why": why})
        return text

    return AfterValidator(checked)


def _route_pattern(pattern: str) -> str:
    """Refuse patterns that no path can match."""
    first, *parts = pattern.split("/")
    if first or not parts:
        raise PydanticCustomError("route", "a path that begins with / is wanted")
    for part in parts[:-1]:
        if part == "**" or not part:
            raise PydanticCustomError("route", "** may only be its last part, and no other part may be empty")
    for part in parts:
        if part in (".", "..") or not _ROUTE_PART.fullmatch(part):
            raise PydanticCustomError("route", "each part is *, or made of letters, digits and ._~!$&'()+,=:@-")
    return pattern


# Far beyond any use, and small enough for every clock and counter that takes them.
SECONDS_MAX = 31_536_000
MIB_MAX = 1_000_000_000
COUNT_MAX = 1_000_000_000

NotBool = BeforeValidator(_no_bool)
Port = Annotated[int, Field(ge=0, le=65535), NotBool]
EnginePort = Annotated[int, Field(ge=1, le=65535), NotBool]
Count = Annotated[int, Field(ge=1, le=COUNT_MAX), NotBool]
CountFromZero = Annotated[int, Field(ge=0, le=COUNT_MAX), NotBool]
Seconds = Annotated[float, Field(ge=0, le=SECONDS_MAX), NotBool]
SecondsAboveZero = Annotated[float, Field(gt=0, le=SECONDS_MAX), NotBool]
# One look costs a millisecond or two; looking less often than every five seconds is too late.
LookSeconds = Annotated[float, Field(ge=0.1, le=5), NotBool]
# A shorter lease would be lost by one slow answer of the store.
LeaseSeconds = Annotated[float, Field(ge=1, le=3_600), NotBool]
LiftSeconds = Annotated[float, Field(ge=0.001, le=SECONDS_MAX), NotBool]
# A hundredth to all of the time.
AwayShare = Annotated[float, Field(ge=0.01, le=1), NotBool]
# Patterns of texts. What each asks for is told in words by `mistakes.py`.
HEADER_NAME = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$"
HEX_64 = r"^[0-9a-f]{64}$"
NO_CONTROLS = r"^[^\x00-\x1f\x7f]+$"
REMOTE_NAME = r"^[a-z0-9][a-z0-9_-]{0,31}$"
VARIABLE_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"
# From a thousandth to a thousand times the share of a tenant without a weight.
TenantWeight = Annotated[float, Field(ge=0.001, le=1_000), NotBool]
Mib = Annotated[int, Field(ge=0, le=MIB_MAX), NotBool]
MibPerSecond = Annotated[float, Field(gt=0, le=MIB_MAX), NotBool]
MibAboveZero = Annotated[int, Field(ge=1, le=MIB_MAX), NotBool]
NAME_CHARS_MAX = 256
Label = Annotated[str, StringConstraints(min_length=1, max_length=NAME_CHARS_MAX), AfterValidator(_printable)]


def name_problem(name: str) -> str | None:
    """Why this text cannot be such a name, in a file or in a header; None if it can."""
    if not 0 < len(name) <= NAME_CHARS_MAX:
        return f"must have 1 to {NAME_CHARS_MAX} characters"
    if not name.isprintable():
        return "may not contain control or invisible characters"
    # `" lab"` would be a second `lab`, without its limits. No other space prints.
    if name != name.strip():
        return "may not begin or end with a space"
    return None


# Of tenants, keys, signers and whatever else is looked up by its name.
Name = Annotated[str, StringConstraints(min_length=1, max_length=NAME_CHARS_MAX), _without(name_problem)]
ID_CHARS_MAX = 256

# These words follow /models/ in the management API, so no id may begin with one of them as its first segment.
RESERVED_IDS = frozenset({"load", "unload", "loaded", "stats", "inventory", "download"})

# These words follow /models/{id}/ there: an id that ends in one could be read as a shorter id and an action.
RESERVED_ENDINGS = frozenset({"load", "unload", "logs", "sleep", "prepare", "pin", "update", "rollback", "versions"})


def id_problem(name: str) -> str | None:
    """Why this text cannot be an id; None if it can."""
    segments = name.split("/")
    if not name:
        return "an id may not be empty"
    if len(name) > ID_CHARS_MAX:
        return f"an id has at most {ID_CHARS_MAX} characters, this one has {len(name):,}"
    if not name.isprintable():
        return "an id may not contain control or invisible characters"
    if name != name.strip():
        return "an id may not begin or end with a space"
    if name in RESERVED_IDS or name in RESERVED_ENDINGS:
        return f"{name} is a word of the management API and cannot be an id"
    if segments[0] in RESERVED_IDS:
        return f"an id may not begin with {segments[0]}/: that is a word of the management API"
    if not all(segments):
        return "an id may not begin or end with / nor contain //"
    if "." in segments or ".." in segments:
        return "an id may not contain the path segments . or .."
    if segments[-1] in RESERVED_ENDINGS or segments[-2:] == ["logs", "stream"]:
        return f"an id may not end in /{segments[-1]}: that is an order of the management API"
    return None


def clashes(models: Iterable[tuple[str, Sequence[str]]]) -> Iterator[Problem]:
    """Aliases that are also an id, or appear twice. Takes ids with their aliases."""
    named = list(models)
    taken: dict[str, str] = {name: "is already a model's id" for name, _ in named}
    for name, aliases in named:
        for position, alias in enumerate(aliases):
            where: Where = ("models", name, "aliases", position)
            if alias in taken:
                yield Problem(where, f"{alias} {taken[alias]}")
            else:
                taken[alias] = f"is already an alias of {name}"


ModelId = Annotated[
    str,
    _without(id_problem),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": ID_CHARS_MAX}),
]
RoutePattern = Annotated[str, AfterValidator(_route_pattern)]


def _host_name(said: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,253}", said):
        raise ValueError("a host is named alone, such as pictures.example.org: no scheme, port, path or *")
    return said.lower()


HostName = Annotated[
    str, AfterValidator(_host_name), WithJsonSchema({"type": "string", "pattern": "^[A-Za-z0-9._-]{1,253}$"})
]
HeaderName = Annotated[str, StringConstraints(pattern=HEADER_NAME)]


def words(command: str | tuple[str, ...]) -> tuple[str, ...]:
    """The program and its arguments. Raises ValueError if a quote is left open.

    A list is taken as it is. In a text, lines that begin with # are comments and a line ending in \\ continues on
    the next, so that a long command can span several lines. Fill placeholders after this, not before: then no value
    can add words.
    """
    if not isinstance(command, str):
        return command
    lines = [line for line in command.splitlines() if not line.lstrip().startswith("#")]
    return tuple(shlex.split("\n".join(lines).replace("\\\n", " ")))


def unsplittable(command: str | tuple[str, ...]) -> str | None:
    """Why this is no command; None if it is one."""
    try:
        split = words(command)
    except ValueError as error:
        return f"cannot be split into words: {str(error).lower()}"
    return None if split and split[0] else "is empty"


def can_be_run(program: str, cwd: str | None, path: str | None) -> bool:
    """True if a start in this folder, with this PATH, will find the program, or if only the start can tell."""
    if "${" in program:
        return True
    if "/" not in program:
        return shutil.which(program, path=path) is not None
    # A relative path starts at `cwd`, or at the working directory of the gateway, which is not known here.
    if not os.path.isabs(program) and cwd is None:
        return True
    whole = os.path.join(cwd or "/", program)
    return os.path.isfile(whole) and os.access(whole, os.X_OK)


# --- addresses by which callers reach us ----------------------------------------------------------------------------

ANY: Final = "*"
_LABEL: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_PATH: Final = re.compile(r"(/[A-Za-z0-9._~-]+)*/?")
URL_CHARS_MAX: Final = 1024


def _refusal(why: str) -> PydanticCustomError:
    return PydanticCustomError("address", "{why}", {"why": why})


def _host_problem(host: str) -> str | None:
    """Why no Host header can have this name or address; None if one can. An IPv6 address may be in brackets."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") and ":" in host else host
    try:
        if "%" not in bare and ipaddress.ip_address(bare).is_unspecified:
            return "is every address, not one that callers name"
    except ValueError:
        labels = host.removesuffix(".").split(".")
        if labels[-1].isascii() and labels[-1].isdigit():
            return "is no address of a host: browsers take a name that ends in a number for an IPv4 address"
        if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
            return "is no name or address of a host (letters, digits, - and .; other letters as xn--…)"
    return "names a network interface" if "%" in bare else None


def _allowed_host(said: str) -> str:
    if said == ANY:
        return said
    if ANY in said:
        raise _refusal('"*" alone allows every host; as part of a name it means nothing here: list each name')
    if "/" in said or (said.count(":") == 1 and said.rpartition(":")[2].isdigit()):
        raise _refusal("a host is named alone, such as models.example.org: no scheme, port or path")
    if why := _host_problem(said):
        raise _refusal(f"{why}, such as models.example.org")
    return said


def _authority_problem(authority: str) -> str | None:
    """What is wrong with HOST or HOST:PORT of a URL; None if nothing is."""
    if "@" in authority:
        return "may hold no name or password"
    host, colon, port = authority.rpartition(":")
    # The last colon may be inside of an IPv6 address.
    if not colon or port.endswith("]"):
        host, port = authority, ""
    elif not (port.isascii() and port.isdigit() and 1 <= int(port[:6]) <= 65_535):
        return "has a port that is no whole number from 1 to 65535"
    if ":" in host and not host.startswith("["):
        return "needs [ ] around an IPv6 address"
    return _host_problem(host)


def _public_url(said: str) -> str:
    scheme, _, rest = said.partition("://")
    authority, slash, path = rest.partition("/")
    if len(said) > URL_CHARS_MAX or scheme not in ("http", "https") or not rest:
        raise _refusal("is http:// or https:// and the host by which callers reach this server")
    if ANY in authority:
        raise _refusal("is one address: it may hold no *")
    if why := _authority_problem(authority.partition("?")[0].partition("#")[0]):
        raise _refusal(f"its host {why}" if why.startswith(("is", "names")) else why)
    if not _PATH.fullmatch(slash + path) or {".", ".."} & set(path.split("/")) or set("?#") & set(authority):
        raise _refusal("its path has plain parts alone (letters, digits, . _ ~ -): no //, . or .., query, # or %")
    return said


def _allowed_origin(said: str) -> str:
    if said in (ANY, "null"):
        return said
    scheme, separator, authority = said.removesuffix("/").partition("://")
    if not separator or not _SCHEME.fullmatch(scheme) or set("/?#") & set(authority):
        raise _refusal("an origin is a scheme and a host, such as https://chat.example.org: no path")
    if ANY in authority:
        raise _refusal('"*" alone allows every origin; as part of one it means nothing here: list each')
    if why := _authority_problem(authority):
        raise _refusal(f"its host {why}" if why.startswith(("is", "names")) else why)
    return said


AllowedHost = Annotated[str, AfterValidator(_allowed_host)]
AllowedOrigin = Annotated[str, AfterValidator(_allowed_origin)]
# Nothing that would end a URL it is put before.
PublicUrl = Annotated[
    str,
    AfterValidator(_public_url),
    WithJsonSchema(
        {
            "type": "string",
            "maxLength": URL_CHARS_MAX,
            "pattern": r"^https?://[A-Za-z0-9._\[\]:-]+(/[A-Za-z0-9._~-]+)*/?$",
        }
    ),
]


class Section(Described):
    """A part of the file. Unknown keys are refused: a typo must not silently become a default."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _obeys_rules(self) -> Self:
        break_on(self._problems())
        return self

    def _problems(self) -> Iterator[Problem]:
        """What is wrong between its keys."""
        yield from ()


def is_section(kind: object) -> TypeGuard[type[Section]]:
    return isinstance(kind, type) and issubclass(kind, Section)


STORE_SCHEMES: Final = ("redis://", "rediss://", "unix://")
_BRACKETS: Final = "needs [ ] around an IPv6 address, and nothing else in them, as in redis://[::1]:6379"
_PORT: Final = "has a port that is no whole number from 1 to 65535"
_PASSWORD: Final = "has an @ behind its host: in a name or password write / as %2F, ? as %3F, # as %23 and @ as %40"
_NO_HOST: Final = "names no host, as in redis://localhost:6379/0"
_NO_SOCKET: Final = "names no socket by its path, as in unix:///run/redis.sock"
_DATABASE: Final = "has a database that is no number, as in redis://localhost:6379/0"
_SPACE: Final = "has a space in it: write %20"
# An @ is valid in the value of an option. Anywhere else behind a ? it ends an unescaped password.
_OPTION: Final = re.compile(r"[A-Za-z_]+=")


def store_address_problem(url: str) -> str | None:
    """What is wrong with the address of a lease store, as the rest of a sentence; None if it is valid."""
    if not url.startswith(STORE_SCHEMES):
        return "must begin with redis://, rediss:// or unix://"
    if any(letter.isspace() for letter in url):
        return _SPACE
    try:
        parts = urlsplit(url)
    except ValueError:
        return _BRACKETS if "[" in url or "]" in url else "has a host with characters that no host's name has"
    if any("@" in option and not _OPTION.match(option) for option in parts.query.split("&")):
        return _PASSWORD
    return _of_socket(parts) if parts.scheme == "unix" else _of_host(parts)


def _of_socket(parts: SplitResult) -> str | None:
    # Only a name and password may stand before the path; the client would show anything else.
    return None if parts.path.strip("/") and not parts.netloc.rpartition("@")[2] else _NO_SOCKET


def _of_host(parts: SplitResult) -> str | None:
    if "@" in parts.path + parts.fragment:
        return _PASSWORD
    try:
        # The client treats port 0 as not given.
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        has_port = False
    if has_port and parts.hostname:
        # The client uses the first database where it cannot read the number.
        return None if re.fullmatch(r"/?|/[0-9]{1,9}", parts.path) else _DATABASE
    if "@" in parts.query:
        return _PASSWORD
    if has_port:
        return _NO_HOST
    host = parts.netloc.rpartition("@")[2]
    return _BRACKETS if host.count(":") > 1 and "[" not in host else _PORT


StoreAddress = Annotated[str, _without(store_address_problem)]
