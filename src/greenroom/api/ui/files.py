"""Serves the dashboard: a few static files, which are built from `ui/` and lie in `assets/` beside this file.

They hold no data, so they need no key: what the page shows it fetches from the API, with the user's key. Read and
compressed at the first request; a gateway that is never looked at holds none of it.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from greenroom.http.exchange import Exchange
from greenroom.http.headers import Headers
from greenroom.http.request import Head

ASSETS: Final = Path(__file__).parent / "assets"
PAGE: Final = b"/ui/"
_INDEX: Final = "index.html"
_KINDS: Final = {
    "index.html": b"text/html; charset=utf-8",
    "app.js": b"text/javascript; charset=utf-8",
    "app.css": b"text/css; charset=utf-8",
    "icon.svg": b"image/svg+xml",
    "licences.txt": b"text/plain; charset=utf-8",
}
_NAMES: Final = {PAGE: _INDEX} | {PAGE + name.encode(): name for name in _KINDS}
# These lead to the page: a browser that opens the gateway's address, and the page without its slash.
_ROOT: Final = b"/"
_BARE: Final = PAGE.rstrip(b"/")
_READING: Final = (b"GET", b"HEAD")
_ZERO: Final = re.compile(rb"q=0(\.0*)?")
# Nothing inline, nothing from elsewhere. Pictures and sounds of the playground are blobs of the page itself.
POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    b"media-src blob:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_GUARDS: Final[Headers] = [
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    # Asked for again each time, and answered 304 unless a new version is installed.
    (b"cache-control", b"no-cache"),
]


@dataclass(frozen=True, slots=True)
class _UiFile:
    kind: bytes
    plain: bytes
    packed: bytes
    tag: bytes
    packed_tag: bytes


def serves(head: Head) -> bool:
    """True for requests that the dashboard answers. No other spelling of a path is one of them."""
    if head.path == _ROOT:
        return head.method in _READING and _is_browser(head)
    return head.method in _READING and (head.path in _NAMES or head.path == _BARE)


def respond(exchange: Exchange) -> None:
    """Answer a request that `serves` is true for."""
    head = exchange.head
    name = _NAMES.get(head.path)
    if name is None:
        # Relative: a proxy may serve the gateway below a path of its own.
        exchange.respond(302, [*_GUARDS, (b"location", b"ui/"), (b"vary", b"accept")], b"")
        return
    file = _read(name)
    is_packed = _takes_gzip(head.get(b"accept-encoding") or b"")
    tag = file.packed_tag if is_packed else file.tag
    headers: Headers = [*_GUARDS, (b"etag", tag), (b"vary", b"accept-encoding")]
    if tag in (head.get(b"if-none-match") or b""):
        exchange.respond(304, headers, b"")
        return
    headers.append((b"content-type", file.kind))
    if is_packed:
        exchange.respond(200, [*headers, (b"content-encoding", b"gzip")], file.packed)
    else:
        exchange.respond(200, headers, file.plain)


def _is_browser(head: Head) -> bool:
    return b"text/html" in (head.get(b"accept") or b"")


def _takes_gzip(accepted: bytes) -> bool:
    """True if Accept-Encoding names gzip, and not with a weight of zero."""
    for one in accepted.lower().split(b","):
        name, _, weight = one.replace(b" ", b"").replace(b"\t", b"").partition(b";")
        if name == b"gzip":
            return _ZERO.fullmatch(weight) is None
    return False


@cache
def _read(name: str) -> _UiFile:
    plain = (ASSETS / name).read_bytes()
    mark = hashlib.sha256(plain).hexdigest()[:16].encode()
    return _UiFile(_KINDS[name], plain, gzip.compress(plain, 9, mtime=0), b'"%b"' % mark, b'"%b-gzip"' % mark)
