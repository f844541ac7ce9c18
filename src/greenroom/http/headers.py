"""Which headers pass between clients and engines, and the heads that we write to both.

Owns the lists: client headers reach an engine, and engine headers a client, only by name. Never touches bodies.
"""

from __future__ import annotations

import re
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
# Headers of an engine's answer that reach a client. All others stay here: cookies, orders to browsers for our origin,
# names of the hop to the engine, and those by which we tell something ourselves.
ANSWER_ALLOWED: Final = frozenset(
    (
        # What describes the body. We write its length ourselves.
        b"content-disposition",
        b"content-encoding",
        b"content-language",
        b"content-range",
        b"content-type",
        # What clients go by.
        b"accept-ranges",
        b"allow",
        b"cache-control",
        b"etag",
        b"expires",
        b"last-modified",
        b"location",
        b"retry-after",
        b"vary",
        b"x-accel-buffering",
        # What engines tell of their work.
        b"x-audio-seconds",
        b"x-cache-hit",
        b"x-cache-tokens-reused",
        b"x-gpu-time-ms",
        b"x-pictures",
        # Pages below /upstream only bind themselves by these.
        b"content-security-policy",
        b"cross-origin-embedder-policy",
        b"cross-origin-opener-policy",
        b"cross-origin-resource-policy",
        b"permissions-policy",
        b"referrer-policy",
        b"x-content-type-options",
        b"x-frame-options",
    )
)
# The answer to a WebSocket handshake also has these.
UPGRADE_ANSWER_ALLOWED: Final = frozenset(
    (b"sec-websocket-accept", b"sec-websocket-extensions", b"sec-websocket-protocol")
)
# Headers of a provider's answer that describe its body. All others belong to the gateway's account there.
REMOTE_ANSWER_ALLOWED: Final = frozenset(
    (b"content-type", b"content-length", b"content-encoding", b"content-language", b"transfer-encoding")
)
_WITH_BODY: Final = frozenset((b"POST", b"PUT", b"PATCH"))


class Pattern:
    """What a value must be. Values found to be sound are remembered, so that the usual ones are matched only once.

    Bounded, because clients and engines choose them.
    """

    __slots__ = ("_pattern", "_sound")

    def __init__(self, pattern: bytes) -> None:
        self._pattern = re.compile(pattern)
        self._sound: set[bytes] = set()

    def fits(self, value: bytes) -> bool:
        if value in self._sound:
            return True
        if self._pattern.fullmatch(value) is None:
            return False
        if len(self._sound) < SOUND_MAX and len(value) <= SOUND_BYTES_MAX:
            self._sound.add(value)
        return True


class LowerCase(dict[bytes, bytes]):
    """Names in lower case, remembered as the values of a pattern are."""

    def __missing__(self, name: bytes) -> bytes:
        lower = name.lower()
        if len(self) < SOUND_MAX and len(name) <= SOUND_BYTES_MAX:
            self[name] = lower
        return lower


SOUND_MAX: Final = 512
SOUND_BYTES_MAX: Final = 128
_TARGET: Final = Pattern(rb"/[!-~]*")
HEADER_NAMES: Final = LowerCase()
_NAME: Final = Pattern(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def build_request(
    method: bytes,
    target: bytes,
    headers: Headers,
    *,
    host: bytes,
    length: int,
    request_id: bytes,
    allowed: frozenset[bytes] = REQUEST_ALLOWED,
    upgrade: bytes | None = None,
    ours: Headers | None = None,
) -> bytes:
    """The head of a request to an engine. `headers` are the client's; those named in `ours` are replaced.

    Raises GatewayBug for values that would break the head.
    """
    if not _TARGET.fits(target):
        raise GatewayBug("The target of a request to an engine must be a path of printable characters.")
    head = b"%b %b HTTP/1.1\r\nhost: %b\r\nx-request-id: %b\r\n" % (method, target, host, request_id)
    lines = 3
    if length or method in _WITH_BODY:
        head += b"content-length: %d\r\n" % length
        lines += 1
    if upgrade is not None:
        head += b"connection: upgrade\r\nupgrade: %b\r\n" % upgrade
        lines += 2
        allowed = UPGRADE_ALLOWED.union(allowed)
    if ours:
        for name, value in ours:
            head += b"%b: %b\r\n" % (name, value)
            lines += 1
        allowed = allowed.difference(name for name, _ in ours)
    for name, value in headers:
        if name in allowed and name not in NEVER_FORWARDED and not name.startswith(b"x-forwarded"):
            head += b"%b: %b\r\n" % (name, value)
            lines += 1
    _expect_lines(head, lines)
    return head + b"\r\n"


def _expect_lines(block: bytes, lines: int) -> None:
    """Raises GatewayBug if a value breaks its line. One look at all lines instead of one at each value."""
    if len(block.translate(None, b"\r\n\0")) + 2 * lines != len(block):
        raise GatewayBug("A header holds a line break or NUL.")


def response_headers(
    headers: Headers,
    extra: Headers,
    defaults: Headers | None = None,
    allowed: frozenset[bytes] = ANSWER_ALLOWED,
) -> Headers:
    """The engine's headers that may pass to the client, then ours. Ours replace the engine's of the same name.

    `defaults` are added where the engine sends no header of that name; of several of one name, the first.
    """
    kept: Headers = []
    for header in headers:
        if header[0] in allowed and not _has(extra, header[0]):
            kept.append(header)
    kept += extra
    if defaults is not None:
        for header in defaults:
            if not _has(kept, header[0]):
                kept.append(header)
    return kept


def _has(headers: Headers, wanted: bytes) -> bool:
    for name, _ in headers:  # noqa: SIM110 - compiled, the loop is cheaper than what it would make
        if name == wanted:
            return True
    return False


def length_of(headers: Headers) -> int | None:
    """The length that a head promises; None if it promises none."""
    length: int | None = None
    for name, value in headers:
        if name == b"content-length":
            length = int(value)
    return length


def is_short_json(headers: Headers, bytes_max: int) -> bool:
    """True for a JSON answer of at most this many bytes, as far as its head tells."""
    is_json = is_short = False
    for name, value in headers:
        if name == b"content-type":
            is_json = value[:16].lower() == b"application/json"
        elif name == b"content-length":
            is_short = int(value) <= bytes_max
        elif name == b"transfer-encoding":
            is_short = True
    return is_json and is_short


# --- heads of answers to clients ---

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
# The first lines of chunks of the usual sizes.
_CHUNK_SIZES: Final = [b"%x\r\n" % size for size in range(1024)]
CLOSE: Final = b"connection: close\r\n"
KEEP_ALIVE: Final = b"connection: keep-alive\r\n"
CHUNKED: Final = b"transfer-encoding: chunked\r\n"

# Always HTTP/1.1: it is our version, not the client's.
_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode("ascii") for status in HTTPStatus
}


def chunk(data: bytes) -> bytes:
    """One chunk of a body in chunked encoding. `data` is not empty."""
    length = len(data)
    size = _CHUNK_SIZES[length] if length < 1024 else b"%x\r\n" % length
    return b"%b%b\r\n" % (size, data)


def last_chunk(trailers: Headers) -> bytes:
    """The end of a body in chunked encoding. Their values are numbers of ours, which cannot break their lines."""
    return b"0\r\n%b\r\n" % b"".join([b"%b: %b\r\n" % (name, value) for name, value in trailers])


def render_head(status: int, headers: Headers, framing: bytes, date: bytes) -> bytes:
    """The whole head; `framing` and `date` are finished lines. Raises GatewayBug for a header that breaks its line."""
    block = b"".join([b"%b: %b\r\n" % (name, value) for name, value in headers])
    _expect_lines(block, len(headers))
    for name, _ in headers:
        if not _NAME.fits(name):
            raise GatewayBug(f"{name!r} is not a header name.")
    return b"%b%b%b%b\r\n" % (_STATUS_LINES.get(status) or _odd_status_line(status), block, framing, date)


def _odd_status_line(status: int) -> bytes:
    if not 100 <= status <= 999:
        raise GatewayBug(f"{status} is not an HTTP status.")
    return b"HTTP/1.1 %d Unknown\r\n" % status


def date_line(now: float) -> bytes:
    return f"date: {formatdate(now, usegmt=True)}\r\n".encode("ascii")
