"""Which Host and Origin headers this server answers to, and which pages may use it.

Owns the guard against DNS rebinding: a web page can make a browser send requests to a loopback address under a name of
its own, but then Host (and Origin) carry that name. Owns what is said to pages that name no Origin, too. Never
authenticates anyone.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Final

from greenroom.errors import HostNotAllowed

ANY: Final = "*"
_LOOPBACK_NAMES: Final = frozenset(("localhost", "ip6-localhost", "ip6-loopback"))
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~%-]+)(?::[0-9]{1,5})?")
# Pairs that were found allowed are remembered. Bounded, because clients choose them.
_REMEMBERED_MAX: Final = 256


class HostRule:
    """Allows loopback, the addresses we listen on and the names given; any port. `*` allows everything.

    When we listen on every address (0.0.0.0 or ::) any literal address is allowed: rebinding needs a name.
    """

    __slots__ = ("_any_address", "_any_host", "_any_origin", "_hosts", "_origins", "_remembered")

    def __init__(self, hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        names = {host.strip().lower() for host in hosts}
        self._any_host = ANY in names
        self._hosts = frozenset(_canonical(name) for name in names if name != ANY)
        self._any_address = bool(self._hosts & {"0.0.0.0", "::"})
        self._origins = frozenset(origin.strip().lower().rstrip("/") for origin in origins)
        self._any_origin = ANY in self._origins
        self._remembered: set[tuple[bytes | None, bytes | None]] = set()

    def check(self, host: bytes | None, origin: bytes | None) -> None:
        """Raises HostNotAllowed. A request without a Host (HTTP/1.0) comes from no browser and is allowed."""
        pair = (host, origin)
        if pair in self._remembered:
            return
        name = _host_name(host)
        if host is not None and not self._allows_host(name):
            raise HostNotAllowed(
                f"This server does not answer for the host {_shown(host)}. Add it to server.allowed_hosts if it should."
            )
        if origin is not None and not self._allows_origin(origin, name):
            raise HostNotAllowed(
                f"Pages from {_shown(origin)} may not call this server. Add it to server.allowed_origins if they may."
            )
        if len(self._remembered) < _REMEMBERED_MAX:
            self._remembered.add(pair)

    def refuse_page(self) -> None:
        """For a page of another origin that does not name it. Raises HostNotAllowed, unless every page is allowed."""
        if not self._any_origin:
            raise HostNotAllowed(
                "Pages of other sites may not have a browser ask this server. If one may, add its origin to "
                "server.allowed_origins and let it ask with CORS: fetch, or the attribute crossorigin."
            )

    def check_referer(self, host: bytes | None, referer: bytes) -> None:
        """For a browser that says of a page only its address. Raises HostNotAllowed."""
        scheme, _, rest = referer.partition(b"://")
        if not self._allows_origin(scheme + b"://" + rest.partition(b"/")[0], _host_name(host)):
            self.refuse_page()

    def _allows_host(self, name: str) -> bool:
        if self._any_host or name in self._hosts or _is_loopback(name):
            return True
        return self._any_address and _is_address(name)

    def _allows_origin(self, origin: bytes, host_name: str) -> bool:
        text = origin.decode("latin-1").lower().rstrip("/")
        if self._any_origin or text in self._origins:
            return True
        scheme, _, authority = text.partition("://")
        if scheme not in ("http", "https"):
            return False
        name = _host_name(authority.encode("latin-1"))
        return bool(name) and (name == host_name or _is_loopback(name))


def _host_name(host: bytes | None) -> str:
    """The name or address of HOST or HOST:PORT in its canonical form; empty if it is neither."""
    match = _HOST.fullmatch((host or b"").decode("latin-1"))
    return _canonical(match.group(1).lower()) if match else ""


def _canonical(name: str) -> str:
    bare = name.removeprefix("[").removesuffix("]")
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        return bare.removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    if name in _LOOPBACK_NAMES or name.endswith(".localhost"):
        return True
    return _is_address(name) and ipaddress.ip_address(name).is_loopback


def _shown(value: bytes) -> str:
    return value[:100].decode("ascii", "backslashreplace")
