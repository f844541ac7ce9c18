"""Checks the address of a shared lease store.

Owns the rule alone, which the configuration and the lease store share. Never connects, and never repeats any part of
an address: a misplaced part may be a password.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import SplitResult, urlsplit

SCHEMES: Final = ("redis://", "rediss://", "unix://")
_BRACKETS: Final = "needs [ ] around an IPv6 address, and nothing else in them, as in redis://[::1]:6379"
_PORT: Final = "has a port that is no whole number from 1 to 65535"
_PASSWORD: Final = "has an @ behind its host: in a name or password write / as %2F, ? as %3F, # as %23 and @ as %40"
_NO_HOST: Final = "names no host, as in redis://localhost:6379/0"
_NO_SOCKET: Final = "names no socket by its path, as in unix:///run/redis.sock"
_DATABASE: Final = "has a database that is no number, as in redis://localhost:6379/0"
_SPACE: Final = "has a space in it: write %20"
# An @ is valid in the value of an option. Anywhere else behind a ? it ends an unescaped password.
_OPTION: Final = re.compile(r"[A-Za-z_]+=")


def problem(url: str) -> str | None:
    """What is wrong with this address, as the rest of a sentence; None if it is valid."""
    if not url.startswith(SCHEMES):
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
