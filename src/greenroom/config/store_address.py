"""The address of a shared lease store: what is wrong with one.

Owns the rule alone, which the configuration and those who open a store share. Never connects, and never repeats any of
an address: what stands in the wrong place may be a password.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import SplitResult, urlsplit

SCHEMES: Final = ("redis://", "rediss://", "unix://")
_BRACKETS: Final = "needs [ ] around an IPv6 address, and nothing else in them, as in redis://[::1]:6379"
_PORT: Final = "has a port that is no whole number from 1 to 65535"
_PASSWORD: Final = "has an @ behind its host: in a name or password write / as %2F, ? as %3F, # as %23 and @ as %40"


def problem(url: str) -> str | None:
    """What is wrong with this address, as the rest of a sentence; None if it can be one."""
    if not url.startswith(SCHEMES):
        return "must begin with redis://, rediss:// or unix://"
    try:
        parts = urlsplit(url)
    except ValueError:
        return _BRACKETS if "[" in url or "]" in url else "has a host with characters that no host's name has"
    # A socket has a path, and what stands before that is not looked at.
    return None if parts.scheme == "unix" else _of_host(parts)


def _of_host(parts: SplitResult) -> str | None:
    if "@" in parts.path + parts.fragment:
        return _PASSWORD
    try:
        # The client would take 0 for a port that was not given.
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        has_port = False
    if has_port:
        return None
    if "@" in parts.query:
        return _PASSWORD
    host = parts.netloc.rpartition("@")[2]
    return _BRACKETS if host.count(":") > 1 and "[" not in host else _PORT
