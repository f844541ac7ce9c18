"""Orders to fetch a model: what callers write, checked, as one record; and where it is to lie.

Owns which names, addresses and patterns are taken. A URL of the hub becomes the id of its repository, with revision and
file; another URL must be of a host that the operator has listed. A destination lies below a root, wherever links lead.
"""

from __future__ import annotations

import glob
import os
import re
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from greenroom.config.hub import whisper_repository
from greenroom.errors import BadRequest, shown
from greenroom.library.folders import HUB_PREFIX
from greenroom.library.roots import PATH_CHARS_MAX, Roots, is_below

DEFAULT_ENDPOINT: Final = "https://huggingface.co"
# Addresses that people copy, whatever endpoint is used instead.
HUB_HOSTS: Final = ("huggingface.co", "www.huggingface.co", "hf.co")
PATTERNS_MAX: Final = 32
PATTERN_CHARS_MAX: Final = 256
URL_CHARS_MAX: Final = 4_096
# The hub's own rule: two names, neither with `--` or `..` in it nor with a dot or dash at an end.
_NAME: Final = r"(?![.-])(?!.*(?:--|\.\.))[A-Za-z0-9._-]{1,96}(?<![.-])"
_REPO: Final = re.compile(rf"{_NAME.replace('.*', '[^/]*')}(?:/{_NAME})?")
_QUANTIZATION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_REVISION: Final = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9_./+-]{0,199}(?<![/.])")
_NOT_MODELS: Final = ("datasets", "spaces", "docs", "api", "models", "papers", "collections")
_PORTS: Final = {"http": 80, "https": 443}
_ESCAPE: Final = re.compile(r"%([0-9A-Fa-f]{2})")
_UNRESERVED: Final = frozenset(f"{string.ascii_letters}{string.digits}-._~")
_VIEWS: Final = ("tree", "resolve", "blob", "raw")


@dataclass(frozen=True, slots=True)
class DownloadOrder:
    """`repo` is an id of the hub; without one, `url` is a file of another host. `destination` is as it was written."""

    repo: str | None = None
    revision: str | None = None
    url: str | None = None
    quantization: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    destination: str | None = None
    exact_name: bool = False
    """A repository that the hub has by another name is not fetched: what was permitted is this one."""

    @property
    def name(self) -> str:
        """What is fetched, for people. Queries of addresses may hold secrets and are left out."""
        return self.repo or (self.url or "").partition("?")[0]


@dataclass(frozen=True, slots=True)
class OrderRules:
    """`hosts` are those that the operator has listed, `endpoint` is the hub's address. With `exact_names` no repository
    is fetched by a name that it had before."""

    hosts: Collection[str] = ()
    endpoint: str = DEFAULT_ENDPOINT
    exact_names: bool = False

    @classmethod
    def of(cls, hosts: Collection[str], environ: Mapping[str, str], *, exact_names: bool = False) -> OrderRules:
        return cls(hosts, environ.get("HF_ENDPOINT", "").rstrip("/") or DEFAULT_ENDPOINT, exact_names)


def read_order(
    rules: OrderRules,
    *,
    model: str | None = None,
    url: str | None = None,
    revision: str | None = None,
    quantization: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    destination: str | None = None,
) -> DownloadOrder:
    """Raises BadRequest, which names the field. `model` may be a URL too."""
    if (model is None) == (url is None):
        raise BadRequest("Say which `model` to fetch (an id of the hub), or which `url`.", param="model")
    if model is not None and "://" in model:
        model, url = None, model
    order = _of_id(model) if model is not None else _of_url(url or "", rules)
    if revision is not None:
        order = replace(order, revision=_matching(_REVISION, revision, "revision"))
    if quantization is not None:
        order = replace(order, quantization=_matching(_QUANTIZATION, quantization, "quantization"))
    if order.repo is None and (order.revision or order.quantization or include or exclude):
        raise BadRequest("A URL of another host names one file: there is nothing to choose from.", param="url")
    order = replace(
        order,
        include=(*order.include, *_patterns(include, "include")),
        exclude=_patterns(exclude, "exclude"),
        destination=None if destination is None else _destination(destination),
        exact_name=rules.exact_names,
    )
    expect_listed(order, rules)
    return order


def expect_listed(order: DownloadOrder, rules: OrderRules) -> None:
    """Raises BadRequest if its URL is of a host that is not listed (any more)."""
    if order.url is None:
        return
    parts = urlsplit(order.url)
    if not {parts.netloc.lower(), parts.hostname} & {host.lower().removesuffix(":443") for host in rules.hosts}:
        raise BadRequest(
            f"{shown(parts.netloc)} is neither the hub nor among `library.hosts`: nothing is fetched from there.",
            param="url",
        )
    if parts.scheme != "https" and not (parts.scheme == "http" and rules.endpoint.startswith("http://")):
        raise BadRequest("A `url` begins with https://.", param="url")


# --- names and addresses ----------------------------------------------------------------------------------------------


def _of_id(model: str) -> DownloadOrder:
    """`org/name`, as the library names models `org/name:QUANTIZATION` and `org/name@REVISION`, or a size of Whisper."""
    model = whisper_repository(model) or model
    rest, _, quantization = model.partition(":")
    repo, _, revision = rest.partition("@")
    is_named = bool(_REPO.fullmatch(repo))
    if not (is_named and (bool(_REVISION.fullmatch(revision)) or "@" not in rest)) or not (
        ":" not in model or _QUANTIZATION.fullmatch(quantization)
    ):
        raise BadRequest(
            f"{shown(model)} is no model of the hub: one is org/name, org/name:QUANTIZATION or org/name@REVISION.",
            param="model",
        )
    return DownloadOrder(repo=repo, revision=revision or None, quantization=quantization or None)


def _of_url(url: str, rules: OrderRules) -> DownloadOrder:
    if len(url) > URL_CHARS_MAX or not url.isascii() or not url.isprintable() or " " in url:
        raise BadRequest(f"{shown(url)} is no address.", param="url")
    try:
        parts = urlsplit(url)
        place, hub = _place_of(parts), _place_of(urlsplit(rules.endpoint))
    except ValueError:
        raise BadRequest(f"{shown(url)} is no address.", param="url") from None
    if "@" in parts.netloc:
        raise BadRequest("A `url` holds no name and password.", param="url")
    if parts.scheme not in ("http", "https") or not place:
        raise BadRequest(f"{shown(url)} is no address of a file; it begins with https://.", param="url")
    names = [unquote(part) for part in parts.path.split("/")]
    if place in (*HUB_HOSTS, hub):
        return _of_hub(url, [name for name in names if name])
    if "." in names or ".." in names:
        raise BadRequest(f"{shown(url)} is no address in its shortest form.", param="url")
    path = _ESCAPE.sub(_unescaped, parts.path)
    return DownloadOrder(url=urlunsplit((parts.scheme, place, path, parts.query, "")))


def _place_of(parts: SplitResult) -> str:
    """The host, with the port unless that is the scheme's own. Raises ValueError."""
    host, port = (parts.hostname or "").rstrip("."), parts.port
    host = f"[{host}]" if ":" in host else host
    return host if port is None or port == _PORTS.get(parts.scheme) else f"{host}:{port}"


def _unescaped(escape: re.Match[str]) -> str:
    """The character itself, if it means the same: so one file has one address."""
    character = chr(int(escape[1], 16))
    return character if character in _UNRESERVED else escape[0].upper()


def _of_hub(url: str, parts: list[str]) -> DownloadOrder:
    """`/org/name`, `/org/name/tree/REV[/folder]`, `/org/name/resolve/REV/file`; old models have no org."""
    at = next((number for number, part in enumerate(parts[1:3], 1) if part in _VIEWS), None)
    repo = "/".join(parts[:at] if at else parts)
    if not parts or parts[0] in _NOT_MODELS or not _REPO.fullmatch(repo):
        raise BadRequest(f"{shown(url)} is not the page of a model or of one of its files.", param="url")
    if at is None:
        return DownloadOrder(repo=repo)
    view, rest = parts[at], parts[at + 1 :]
    # The only names of revisions with slashes that the hub has by itself.
    size = 3 if rest[:1] == ["refs"] else 1
    revision, path = "/".join(rest[:size]) or "main", "/".join(rest[size:])
    if "." in path.split("/") or ".." in path.split("/"):
        raise BadRequest(f"{shown(url)} is not the page of a model or of one of its files.", param="url")
    chosen = glob.escape(path) + ("/*" if view == "tree" else "")
    return DownloadOrder(repo=repo, revision=_matching(_REVISION, revision, "url"), include=(chosen,) if path else ())


def _matching(pattern: re.Pattern[str], said: str, param: str) -> str:
    if not pattern.fullmatch(said):
        raise BadRequest(f"{shown(said)} is no {param}.", param=param)
    return said


def _patterns(said: Sequence[str], param: str) -> tuple[str, ...]:
    if len(said) > PATTERNS_MAX:
        raise BadRequest(f"There may be {PATTERNS_MAX} patterns.", param=param)
    for pattern in said:
        if not pattern or len(pattern) > PATTERN_CHARS_MAX or not pattern.isprintable():
            raise BadRequest(f"{shown(pattern)} is no pattern of file names.", param=param)
    return tuple(said)


# --- places -----------------------------------------------------------------------------------------------------------


def _destination(said: str) -> str:
    if not said or len(said) > PATH_CHARS_MAX or not said.isprintable():
        raise BadRequest(f"{shown(said)} is no folder.", param="destination")
    return said


@dataclass(frozen=True, slots=True)
class FetchPlace:
    """The hub's cache, or a plain folder and the root that it must stay below."""

    cache: str | None = None
    folder: str | None = None
    root: str | None = None

    @property
    def path(self) -> str:
        return self.cache or self.folder or ""


def place_of(order: DownloadOrder, roots: Roots, cache: str | None) -> FetchPlace:
    """Where this order puts its files. Raises BadRequest. Blocks: links are followed."""
    if not roots.folders:
        raise BadRequest(
            "There is no folder for models: set library.roots or MODEL_BASE_PATH, or start with `--models DIR`.",
            param="destination",
        )
    if order.destination is None and order.repo is not None:
        # What lies outside of the roots would never be found.
        is_root = cache is not None and roots.holds(os.path.realpath(cache))
        return FetchPlace(cache=cache if is_root else roots.folders[0])
    folder = os.path.join(roots.folders[0], os.path.expanduser(order.destination or ""))
    real = os.path.realpath(folder)
    root = next((root for root in roots.real() if is_below(real, root)), None)
    if root is None:
        raise BadRequest(
            f"{shown(order.destination or folder)} lies below none of the folders for models.", param="destination"
        )
    if any(name.startswith((".", HUB_PREFIX)) for name in real.removeprefix(root).split("/")):
        raise BadRequest(
            f"{shown(order.destination or folder)} is hidden, or in the hub's cache: no model is looked for there.",
            param="destination",
        )
    return FetchPlace(folder=real, root=root)
