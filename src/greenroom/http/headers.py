"""Which headers pass between clients and engines, and the heads that we write to both.

Owns the two lists: client headers reach an engine only by name (allow-list), engine headers reach a client unless they
belong to the hop between the engine and us. Never touches bodies.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

from greenroom.errors import GatewayBug

Headers = list[tuple[bytes, bytes]]

# Everything else a client sends stays here: keys, cookies, encodings we would have to undo, names of other hops.
REQUEST_ALLOWED: Final = frozenset((b"accept", b"content-type"))
# A WebSocket handshake also needs these.
UPGRADE_ALLOWED: Final = frozenset(
    (b"sec-websocket-extensions", b"sec-websocket-key", b"sec-websocket-protocol", b"sec-websocket-version")
)
# Never forwarded, even if configured: we write them ourselves, or they would break the framing.
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
    """The head of a request to an engine. `headers` are the client's; those named in `ours` are replaced.

    Raises GatewayBug for values that would break the head.
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

    `defaults` are added where the engine sends no header of that name.
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
        # Names listed in Connection belong to that hop too.
        kept = [header for header in kept if header[0] not in ours]
    kept += extra
    if defaults:
        said = [name for name, _ in kept]
        kept += [header for header in defaults if header[0] not in said]
    return kept


# --- heads of answers to clients ---

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"
CLOSE: Final = b"connection: close\r\n"
KEEP_ALIVE: Final = b"connection: keep-alive\r\n"
CHUNKED: Final = b"transfer-encoding: chunked\r\n"

# Always HTTP/1.1: it is our version, not the client's.
_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode("ascii") for status in HTTPStatus
}
_NAME: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# Names found to be tokens once are not looked at again. Bounded, because engines choose names too.
_known_names: Final[set[bytes]] = set()
_KNOWN_NAMES_MAX: Final = 512


def render_head(status: int, headers: Headers, framing: bytes, date: bytes) -> bytes:
    """The whole head; `framing` and `date` are finished lines. Raises GatewayBug for a header that breaks its line."""
    block = b"".join([b"%b: %b\r\n" % (name, value) for name, value in headers])
    # One look at all lines instead of one at each value: without our own line ends there must be none left.
    if len(block.translate(None, b"\r\n\0")) + 2 * len(headers) != len(block):
        raise GatewayBug("A response header holds a line break or NUL.")
    for name, _ in headers:
        if name not in _known_names:
            _learn_name(name)
    return b"%b%b%b%b\r\n" % (_STATUS_LINES.get(status) or _odd_status_line(status), block, framing, date)


def _odd_status_line(status: int) -> bytes:
    if not 100 <= status <= 999:
        raise GatewayBug(f"{status} is not an HTTP status.")
    return b"HTTP/1.1 %d Unknown\r\n" % status


def date_line(now: float) -> bytes:
    return f"date: {formatdate(now, usegmt=True)}\r\n".encode("ascii")


def _learn_name(name: bytes) -> None:
    if _NAME.fullmatch(name) is None:
        raise GatewayBug(f"{name!r} is not a header name.")
    if len(_known_names) < _KNOWN_NAMES_MAX:
        _known_names.add(name)
