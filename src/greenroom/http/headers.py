"""Which headers pass between clients and engines, and the heads of requests to engines.

Owns the two lists: client headers reach an engine only by name (allow-list), engine headers reach a client unless they
belong to the hop between the engine and us. Never touches bodies.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from greenroom.errors import GatewayBug
from greenroom.http.head import Headers

# Everything else a client sends stays here: keys, cookies, encodings we would have to undo, names of other hops.
REQUEST_ALLOWED: Final = frozenset((b"accept", b"content-type"))
# What a WebSocket handshake needs besides.
UPGRADE_ALLOWED: Final = frozenset(
    (b"sec-websocket-extensions", b"sec-websocket-key", b"sec-websocket-protocol", b"sec-websocket-version")
)
# Names that configuration cannot let through either: we write them ourselves, or they would confuse the framing.
NEVER_FORWARDED: Final = frozenset(
    (
        b"accept-encoding",
        b"authorization",
        b"connection",
        b"content-length",
        b"cookie",
        b"expect",
        b"host",
        b"keep-alive",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-request-id",
    )
)
_HOP_BY_HOP: Final = frozenset(
    (
        b"connection",
        b"content-length",
        b"date",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-connection",
        b"server",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_TARGET: Final = re.compile(rb"/[!-~]*")
_BREAK: Final = re.compile(rb"[\r\n\0]")
_WITH_BODY: Final = frozenset((b"POST", b"PUT", b"PATCH"))


def build_request(
    method: bytes,
    target: bytes,
    headers: Headers,
    *,
    host: bytes,
    length: int,
    request_id: bytes,
    allowed: Collection[bytes] = REQUEST_ALLOWED,
    upgrade: bytes | None = None,
    ours: Headers | None = None,
) -> bytes:
    """The head of a request to an engine. `headers` are the client's, of which none passes that is named in `ours`.

    Raises GatewayBug if it would not be one head.
    """
    if _TARGET.fullmatch(target) is None:
        raise GatewayBug("The target of a request to an engine must be a path of printable characters.")
    if _BREAK.search(host + request_id) is not None:
        raise GatewayBug("A header of a request to an engine holds a line break or NUL.")
    head = b"%b %b HTTP/1.1\r\nhost: %b\r\nx-request-id: %b\r\n" % (method, target, host, request_id)
    if length or method in _WITH_BODY:
        head += b"content-length: %d\r\n" % length
    if upgrade is not None:
        head += b"connection: upgrade\r\nupgrade: %b\r\n" % upgrade
        allowed = UPGRADE_ALLOWED.union(allowed)
    if ours:
        for name, value in ours:
            if _BREAK.search(value) is not None:
                raise GatewayBug("A header of a request to an engine holds a line break or NUL.")
            head += b"%b: %b\r\n" % (name, value)
        allowed = frozenset(allowed).difference(name for name, _ in ours)
    # The client's values came through the parser, which lets no line break pass.
    for name, value in headers:
        if name in allowed and name not in NEVER_FORWARDED and not name.startswith(b"x-forwarded"):
            head += b"%b: %b\r\n" % (name, value)
    return head + b"\r\n"


def response_headers(headers: Headers, extra: Headers, defaults: Headers | None = None) -> Headers:
    """The engine's headers that may pass to the client, then ours. Ours replace the engine's of the same name.

    `defaults` are told where the engine says nothing of the kind.
    """
    kept: Headers = []
    ours = [name for name, _ in extra]
    for header in headers:
        name = header[0]
        if name in _HOP_BY_HOP:
            if name == b"connection" and header[1].lower() not in (b"close", b"keep-alive"):
                ours += [token.strip().lower() for token in header[1].split(b",")]
        elif name not in ours and not name.startswith(b"access-control-"):
            kept.append(header)
    if len(ours) > len(extra):
        # Names listed in Connection belong to that hop too, wherever they stood.
        kept = [header for header in kept if header[0] not in ours]
    kept += extra
    if defaults:
        said = [name for name, _ in kept]
        kept += [header for header in defaults if header[0] not in said]
    return kept
