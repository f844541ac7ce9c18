"""What a browser must hear before a page of an allowed origin may use an answer.

Owns the words only. Which origins are allowed is decided by `http/hosts.py`, before this is asked.
"""

from __future__ import annotations

from greenroom.http.head import Head, Headers

# What a page may read of an answer besides its body.
EXPOSED = b"x-request-id, x-queue-wait-ms, retry-after"
# A preflight need not be asked again for this long.
REMEMBER_S = 600


def answer_headers(origin: bytes) -> Headers:
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", EXPOSED),
        (b"vary", b"origin"),
    ]


def is_preflight(head: Head) -> bool:
    """A browser's question, without credentials, whether the request it wants to send is welcome."""
    return head.method == b"OPTIONS" and head.get(b"access-control-request-method") is not None


def preflight_headers(head: Head) -> Headers:
    """Whatever it wants to send: the request itself is then checked like every other."""
    headers: Headers = [
        (b"access-control-allow-methods", b"GET, HEAD, POST, PUT, PATCH, DELETE"),
        (b"access-control-max-age", b"%d" % REMEMBER_S),
    ]
    if wanted := head.get(b"access-control-request-headers"):
        headers.append((b"access-control-allow-headers", wanted))
    if head.get(b"access-control-request-private-network") == b"true":
        # Asked by browsers that keep pages of the internet from private addresses. This page's origin is allowed.
        headers.append((b"access-control-allow-private-network", b"true"))
    return headers
