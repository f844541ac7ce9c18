"""Heads of responses as bytes.

Owns how a status line and headers are written, and the check that no value can end its line early: model ids and other
input of callers reach headers. Never decides what a response says.
"""

from __future__ import annotations

import re
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

from greenroom.errors import GatewayBug
from greenroom.http.head import Headers

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
_known_names: set[bytes] = set()
_KNOWN_NAMES_MAX: Final = 512


def render_head(status: int, headers: Headers, framing: bytes, date: bytes) -> bytes:
    """The whole head; `framing` and `date` are finished lines. Raises GatewayBug for a header that breaks its line."""
    block = b"".join([b"%b: %b\r\n" % header for header in headers])
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
